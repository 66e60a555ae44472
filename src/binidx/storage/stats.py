"""Counters of reads: of each reader, of each store and cache of the process, and a report of them in one line.

    requests      requests to the store, retries and hedges included (local files: ranges)
    retries       of these, sent again after a failed or wrong response
    hedges        of these, sent beside a late request; the first response is used
    bytes_asked   bytes that the caller requested
    bytes_moved   bytes that the store sent: more through gaps and whole chunks, fewer through a cache
    seconds       waiting time, summed over objects, also of those that are read at the same time

    819,200 tokens in 4.10 s, waited 0.02 s (0.5%); 1,412 requests (2 retries, 1 hedge) moved 1.78 MB for 1.64 MB wanted
    (1.09x); chunk cache 12% hits; requests $0.00056 at list price, $689.45 for 1e+12 tokens

`usage` returns all counters as one flat table, name -> number, which processes can add, subtract and send.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from binidx.storage.interfaces import Range, RangeReader


@dataclass
class ReadStats:
    """Counters of one reader. Any thread may call `add`, and read the fields."""

    requests: int = 0
    bytes_asked: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    retries: int = 0
    hedges: int = 0

    def add(
        self,
        *,
        requests: int = 0,
        bytes_asked: int = 0,
        bytes_moved: int = 0,
        seconds: float = 0.0,
        retries: int = 0,
        hedges: int = 0,
    ) -> None:
        with _lock:
            for each in self._counted_in():
                each.requests += requests
                each.bytes_asked += bytes_asked
                each.bytes_moved += bytes_moved
                each.seconds += seconds
                each.retries += retries
                each.hedges += hedges

    def _counted_in(self) -> tuple[ReadStats, ...]:
        """Return all counters to which `add` adds: these, and sums."""
        return (self,)

    def __sub__(self, before: ReadStats) -> ReadStats:
        """Return the difference to earlier counters."""
        return ReadStats(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(ReadStats)))


class ObjectStats(ReadStats):
    """Counters of a reader that sends requests to a store; they also count in `total()`.

    Args:
        store: protocol, "file" for local files; the price of a request depends on it.
    """

    def __init__(self, store: str = "other") -> None:
        super().__init__()
        self.store = store
        with _lock:
            self._in_store = _stores.setdefault(store, ReadStats())

    def _counted_in(self) -> tuple[ReadStats, ...]:
        return self, self._in_store

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStats, (self.store,)  # another process counts from zero


class LayerStats(ReadStats):
    """Counters of a reader over another one; `requests` and `bytes_moved` are of its reads of that one."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # another process counts from zero

    def read(self, reader: RangeReader, ranges: Sequence[Range]) -> list[memoryview]:
        """Read ranges from the reader below, and count that; without ranges nothing is read."""
        if not ranges:
            return []
        began = time.perf_counter()
        answers = reader.read(ranges)
        self.add(requests=len(ranges), bytes_moved=sum(map(len, answers)), seconds=time.perf_counter() - began)
        return answers

    def _counted_in(self) -> tuple[ReadStats, ...]:
        return self, _layers


@dataclass
class CacheStats(LayerStats):
    """Counters of a cache.

    hits, misses    requested chunks that were cached, and that were not
    waits           of the misses: chunks that another read was fetching
    damaged         of the misses: cached chunks that differ from their checksums
    cache           kind of the cache: "memory" or "disk"
    """

    hits: int = 0
    misses: int = 0
    waits: int = 0
    damaged: int = 0
    cache: str = "memory"

    def count_chunks(self, *, hits: int = 0, misses: int = 0, waits: int = 0, damaged: int = 0) -> None:
        with _lock:
            for each in (self, _caches.setdefault(self.cache, CacheStats(cache=self.cache))):
                each.hits += hits
                each.misses += misses
                each.waits += waits
                each.damaged += damaged


def total() -> ReadStats:
    """Return the sum of all readers that send requests in this process; reads of caches do not count."""
    found = ReadStats()
    for each in by_store().values():
        found.add(**asdict(each))
    return found


def by_store() -> dict[str, ReadStats]:
    """Return the sums of each protocol."""
    with _lock:
        return {store: replace(each) for store, each in _stores.items()}


def in_layers() -> ReadStats:
    """Return the sums of all layers; `bytes_moved` minus `bytes_asked` are the bytes that layers added."""
    with _lock:
        return replace(_layers)


def by_cache() -> dict[str, CacheStats]:
    """Return the sums of each kind of cache; only its chunks are counted here."""
    with _lock:
        return {cache: replace(each) for cache, each in _caches.items()}


def _after_fork() -> None:
    # Another thread may have held the lock when the parent forked; it does not exist in the child.
    global _lock
    _lock = threading.Lock()


# One lock for all counters: a lock in each would have to be found and renewed after a fork.
_lock = threading.Lock()
_stores: dict[str, ReadStats] = {}
_caches: dict[str, CacheStats] = {}
_layers = ReadStats()


os.register_at_fork(after_in_child=_after_fork)


Usage = Mapping[str, float]
"""Counter -> value, such as "s3 requests": 12; the names are those of NAMES."""

DOLLARS_PER_REQUEST = {"s3": 0.0004 / 1_000, "gs": 0.004 / 10_000}
"""List price of a GET from standard storage; transfer within a region is free, between regions it is not counted.

S3 Standard, us-east-1: $0.0004 per 1,000 GET requests (aws.amazon.com/s3/pricing).
GCS Standard, one region: $0.004 per 10,000 class B operations (cloud.google.com/storage/pricing).
Both as known in November 2026; other regions cost up to half as much again.
"""

STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http", "file": "file"}
"""Protocol -> store in the table; all others are "other"."""

CACHES = {"memory": "chunk cache", "disk": "disk cache"}
"""Kind of cache -> name in the report."""

AGAIN = {"retries": "retry", "hedges": "hedge"}
SERVED = ("samples", "tokens", "seconds", "wait_seconds")
"""Counters of loaders: samples and tokens served, seconds since the first batch, seconds that the trainer waited."""

NAMES = [
    *(f"{store} {each.name}" for store in dict.fromkeys([*STORES.values(), "other"]) for each in fields(ReadStats)),
    *(f"{cache} {count}" for cache in CACHES for count in ("hits", "misses")),
    "layers added",
    *SERVED,
]


def declare_store(scheme: str, name: str, dollars_per_read: float) -> None:
    """Count the requests to a URL scheme under the name of its store; other schemes are counted as "other"."""
    STORES[scheme] = name
    if dollars_per_read:
        DOLLARS_PER_REQUEST[name] = dollars_per_read
    for each in fields(ReadStats):
        if (counter := f"{name} {each.name}") not in NAMES:
            NAMES.append(counter)
            _added.setdefault(counter, 0.0)


def usage() -> dict[str, float]:
    """Return all counters of this process, those of its loaders' workers included."""
    found = dict.fromkeys(NAMES, 0.0)
    for protocol, reads in by_store().items():
        for each in fields(ReadStats):
            found[f"{STORES.get(protocol, 'other')} {each.name}"] += getattr(reads, each.name)
    for cache, chunks in by_cache().items():
        found[f"{cache} hits"] += chunks.hits
        found[f"{cache} misses"] += chunks.misses
    layers = in_layers()
    found["layers added"] = layers.bytes_moved - layers.bytes_asked
    with _lock:
        return {name: count + _added[name] for name, count in found.items()}


def add_usage(counts: Usage) -> None:
    """Add counters of other processes, or of loaders, to those of this process."""
    with _lock:
        for name, count in counts.items():
            _added[name] += count


def since(before: Usage) -> dict[str, float]:
    """Return the difference to an earlier `usage`."""
    return {name: count - before[name] for name, count in usage().items()}


def report(run_tokens: float = 1e12) -> str:
    """Return a one-line report of all reads of this process.

    Args:
        run_tokens: tokens of the run for which the cost of the requests is extrapolated.

    Returns:
        Tokens, waiting time, requests, bytes, cache hits and cost; parts without a value are left out.

    Example:
        print(binidx.report())

    Source: ours.
    """
    return report_line(usage(), run_tokens)


def log_report(used: Usage) -> None:
    """Log the report of some counters to the logger "binidx" at INFO."""
    logging.getLogger("binidx").info("%s", report_line(used))


def report_line(used: Usage, run_tokens: float = 1e12) -> str:
    """Return a one-line report of some counters; parts without a value are left out."""
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
    """Return requests, moved bytes, and the bytes requested above all layers, some of which came from caches."""
    requests, moved = remote(used, "requests"), remote(used, "bytes_moved")
    if not requests:
        return f"{bytes_text(used['file bytes_asked'])} from local files" if used["file bytes_asked"] else ""
    again = ", ".join(counted(remote(used, name), one, name) for name, one in AGAIN.items() if remote(used, name))
    wanted = remote(used, "bytes_asked") - used["layers added"]
    sent = counted(requests, "request", "requests") + (f" ({again})" if again else "")
    ratio = f" ({moved / wanted:.2f}x)" if wanted > 0 else ""
    return f"{sent} moved {bytes_text(moved)} for {bytes_text(wanted)} wanted{ratio}"


def caches_parts(used: Usage) -> list[str]:
    """Return the hit rate of each cache."""
    chunks = {cache: used[f"{cache} hits"] + used[f"{cache} misses"] for cache in CACHES}
    return [f"{CACHES[cache]} {used[f'{cache} hits'] / count:.0%} hits" for cache, count in chunks.items() if count]


def cost_part(used: Usage, run_tokens: float) -> str:
    """Return the list price of the requests, and of a run of `run_tokens` tokens at the same rate."""
    dollars = dollars_of(used)
    if not dollars:
        return ""
    of_run = f", ${dollars / used['tokens'] * run_tokens:,.2f} for {run_tokens:.3g} tokens" if used["tokens"] else ""
    return f"requests ${dollars:.2g} at list price{of_run}"


def dollars_of(used: Usage) -> float:
    """Return the list price of the requests."""
    return sum(used[f"{store} requests"] * price for store, price in DOLLARS_PER_REQUEST.items())


def remote(used: Usage, count: str) -> float:
    """Return a counter summed over all stores except local files."""
    return sum(used[f"{store} {count}"] for store in {*STORES.values(), "other"} - {"file"})


def counted(count: float, one: str, many: str) -> str:
    return f"{count:,.0f} {one if count == 1 else many}"


def bytes_text(count: float) -> str:
    """Format bytes in decimal units, as stores bill them: 1.64 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


_added = dict.fromkeys(NAMES, 0.0)


os.register_at_fork(after_in_child=_after_fork)
