"""What reading cost, in one line for people: requests, bytes, caches, waiting, money.

    819,200 tokens in 4.10 s, waited 0.02 s (0.5%); 1,412 requests (2 retries, 1 hedge) moved 1.78 MB for 1.64 MB wanted
    (1.09x); chunk cache 12% hits; requests $0.00056 at list price, $689.45 for 1e+12 tokens

Counters are collected into one flat table, name -> number, which can be added, subtracted and shared between processes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import fields

from binidx.storage import stats
from binidx.storage.stats import ReadStats

Usage = Mapping[str, float]
"""Counter -> its value, such as "s3 requests": 12; names are those of NAMES."""

DOLLARS_PER_REQUEST = {"s3": 0.0004 / 1_000, "gs": 0.004 / 10_000}
"""Of a GET, for storage that is read often; transfer within a region is free and between regions is not counted here.

S3 Standard, us-east-1: $0.0004 per 1,000 GET requests (aws.amazon.com/s3/pricing).
GCS Standard, one region: $0.004 per 10,000 class B operations (cloud.google.com/storage/pricing).
Both as known in November 2026; other regions ask up to about a half more.
"""

STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http", "file": "file"}
"""Protocol -> the store it is counted under; all others are "other"."""

CACHES = {"memory": "chunk cache", "disk": "disk cache"}
"""Kind of cache -> its name in the line."""

AGAIN = {"retries": "retry", "hedges": "hedge"}
SERVED = ("samples", "tokens", "seconds", "wait_seconds")
"""What loaders count: what they gave, since when, and how much of that time the trainer waited for them."""

NAMES = [
    *(f"{store} {each.name}" for store in dict.fromkeys([*STORES.values(), "other"]) for each in fields(ReadStats)),
    *(f"{cache} {count}" for cache in CACHES for count in ("hits", "misses")),
    "layers added",
    *SERVED,
]


def usage() -> dict[str, float]:
    """All counters of this process so far, and what its loaders' workers told it."""
    found = dict.fromkeys(NAMES, 0.0)
    for protocol, reads in stats.by_store().items():
        for each in fields(ReadStats):
            found[f"{STORES.get(protocol, 'other')} {each.name}"] += getattr(reads, each.name)
    for cache, chunks in stats.by_cache().items():
        found[f"{cache} hits"] += chunks.hits
        found[f"{cache} misses"] += chunks.misses
    layers = stats.in_layers()
    found["layers added"] = layers.bytes_moved - layers.bytes_asked
    with _lock:
        return {name: count + _told[name] for name, count in found.items()}


def tell(counts: Usage) -> None:
    """Add to the counters of this process what no reader in it counts."""
    with _lock:
        for name, count in counts.items():
            _told[name] += count


def since(before: Usage) -> dict[str, float]:
    """What was counted after `before`."""
    return {name: count - before[name] for name, count in usage().items()}


def report(run_tokens: float = 1e12) -> str:
    """The line of this process so far.

    Args:
        run_tokens: of the run that the cost of the requests is stated for.
    """
    return report_line(usage(), run_tokens)


def log_report(used: Usage) -> None:
    """The line to the logger "binidx", at INFO."""
    logging.getLogger("binidx").info("%s", report_line(used))


def report_line(used: Usage, run_tokens: float = 1e12) -> str:
    """One line for people; parts without anything to say are left out."""
    parts = [served_part(used), reads_part(used), *caches_parts(used), cost_part(used, run_tokens)]
    return "; ".join(filter(None, parts)) or "nothing was read"


def served_part(used: Usage) -> str:
    if not used["samples"]:
        return ""
    what = "tokens" if used["tokens"] else "samples"
    share = used["wait_seconds"] / used["seconds"] if used["seconds"] else 0.0
    waited = f"waited {used['wait_seconds']:,.2f} s ({share:.1%})"
    return f"{used[what]:,.0f} {what} in {used['seconds']:,.2f} s, {waited}"


def reads_part(used: Usage) -> str:
    """Requests that went to stores, and what came for what was wanted above all layers: less than that from caches."""
    requests, moved = remote(used, "requests"), remote(used, "bytes_moved")
    if not requests:
        return f"{bytes_text(used['file bytes_asked'])} from local files" if used["file bytes_asked"] else ""
    again = ", ".join(counted(remote(used, name), one, name) for name, one in AGAIN.items() if remote(used, name))
    wanted = remote(used, "bytes_asked") - used["layers added"]
    sent = counted(requests, "request", "requests") + (f" ({again})" if again else "")
    ratio = f" ({moved / wanted:.2f}x)" if wanted > 0 else ""
    return f"{sent} moved {bytes_text(moved)} for {bytes_text(wanted)} wanted{ratio}"


def caches_parts(used: Usage) -> list[str]:
    """How much of what was asked of each cache was there."""
    chunks = {cache: used[f"{cache} hits"] + used[f"{cache} misses"] for cache in CACHES}
    return [f"{CACHES[cache]} {used[f'{cache} hits'] / count:.0%} hits" for cache, count in chunks.items() if count]


def cost_part(used: Usage, run_tokens: float) -> str:
    """What the requests cost at list price, and those of a run of so many tokens that goes on like this."""
    dollars = dollars_of(used)
    if not dollars:
        return ""
    of_run = f", ${dollars / used['tokens'] * run_tokens:,.2f} for {run_tokens:.3g} tokens" if used["tokens"] else ""
    return f"requests ${dollars:.2g} at list price{of_run}"


def dollars_of(used: Usage) -> float:
    """The list price of the requests."""
    return sum(used[f"{store} requests"] * price for store, price in DOLLARS_PER_REQUEST.items())


def remote(used: Usage, count: str) -> float:
    """A counter summed over the stores that are not files of this machine."""
    return sum(used[f"{store} {count}"] for store in {*STORES.values(), "other"} - {"file"})


def counted(count: float, one: str, many: str) -> str:
    return f"{count:,.0f} {one if count == 1 else many}"


def bytes_text(count: float) -> str:
    """Decimal units, as stores bill them: 1.64 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old one


_lock = threading.Lock()
_told = dict.fromkeys(NAMES, 0.0)
os.register_at_fork(after_in_child=_after_fork)
