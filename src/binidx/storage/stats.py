"""Counters of reads: of each reader, of each store and cache of the process, and a report of them in one line.

    requests      requests to the store, retries and hedges included (local files: ranges)
    retries       of these, sent again after a failed or wrong response
    hedges        of these, sent beside a late request; the first response is used
    refused       of these, refused by the store because there are too many: 429 or 503
    bytes_asked   bytes that the caller requested
    bytes_moved   bytes that the store sent: more through gaps and whole chunks, fewer through a cache
    seconds       waiting time, summed over objects, also of those that are read at the same time

    819,200 tokens in 4.10 s, waited 0.02 s (0.5%); 1,412 requests (2 retries, 1 hedge) moved 1.78 MB for 1.64 MB wanted
    (1.09x); chunk cache 12% hits; requests $0.00056 at list price, $689.45 for 1e+12 tokens

`usage` returns all counters as one flat table, name -> number, which processes can add, subtract and send. Bytes that
are read before they are requested are no overhead: samples read ahead, and the rest of chunks that a cache keeps.

Slow steps are spans of OpenTelemetry, if the program has imported it:

    binidx.start          `build()` of a builder: opens the data, loads or builds the indices, compares the ranks
    binidx.index.build    one index, with its name; within binidx.start
    binidx.first_batch    the first batch of an iteration over a loader
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.store_protocols import Prices

Usage = Mapping[str, float]
"""Counter -> value, such as "remote requests": 12; the names are those of NAMES."""

REACHES = ("remote", "local")
"""Names under which requests are counted: those to stores, and to files of this machine."""

CACHES = {"memory": "chunk cache", "disk": "disk cache"}
"""Kind of cache -> name in the report."""

AGAIN = {"retries": "retry", "hedges": "hedge", "refused": "refused"}
"""Counter of requests that did not answer -> its singular in the report."""


@dataclass(slots=True)
class ReadStats:
    """Counters of one reader. Any thread may call `add`, and read the fields."""

    requests: int = 0
    bytes_asked: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    retries: int = 0
    hedges: int = 0
    refused: int = 0

    def add(self, **counts: float) -> None:
        """Add to the counters of these names, and to the sums of the process."""
        with _lock:
            self._increase(counts)
            self._add_to_usage(counts)

    def _increase(self, counts: Usage) -> None:
        for name, count in counts.items():
            setattr(self, name, getattr(self, name) + count)

    def _add_to_usage(self, counts: Usage) -> None:
        """Add to the sums of the process; the caller holds the lock."""

    def __sub__(self, before: ReadStats) -> ReadStats:
        """Return the difference to earlier counters."""
        return ReadStats(*(getattr(self, count.name) - getattr(before, count.name) for count in fields(ReadStats)))


class ObjectStats(ReadStats):
    """Counters of a reader that sends requests to a store; `total` and `usage` sum them.

    Args:
        prices: name and prices of the store.
    """

    def __init__(self, prices: Prices) -> None:
        super().__init__()
        self.prices = prices
        self._name = "local" if prices.store == "file" else "remote"

    def _add_to_usage(self, counts: Usage) -> None:
        _total._increase(counts)
        for name, count in counts.items():
            _usage[f"{self._name} {name}"] += count
        _usage["dollars"] += self.prices.dollars_per_read * counts.get("requests", 0)


@dataclass(slots=True)
class LayerStats(ReadStats):
    """Counters of a reader over another one; `requests` and `bytes_moved` count its reads of the reader below.

    hits, misses    requested chunks that were cached, and that were not
    waits           of the misses: chunks that another read was fetching
    damaged         of the misses: cached chunks that differ from their checksums
    cache           kind of the cache: "memory" or "disk"; "" for a reader without one
    """

    hits: int = 0
    misses: int = 0
    waits: int = 0
    damaged: int = 0
    cache: str = ""

    def read(self, reader: RangeReader, ranges: Sequence[Range]) -> list[memoryview]:
        """Read ranges from the reader below, and add this read to the counters; without ranges nothing is read."""
        if not ranges:
            return []
        began = time.perf_counter()
        answers = reader.read(ranges)
        self.add(requests=len(ranges), bytes_moved=sum(map(len, answers)), seconds=time.perf_counter() - began)
        return answers

    def _add_to_usage(self, counts: Usage) -> None:
        added = counts.get("bytes_moved", 0) - counts.get("bytes_asked", 0)
        _usage["layers added"] += added
        if self.cache:
            _usage["caches added"] += added
            _usage[f"{self.cache} hits"] += counts.get("hits", 0)
            _usage[f"{self.cache} misses"] += counts.get("misses", 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(LayerStats, cache=self.cache), ()  # another process counts from zero


NAMES = [
    *(f"{reach} {field.name}" for reach in REACHES for field in fields(ReadStats)),
    *(f"{cache} {count}" for cache in CACHES for count in ("hits", "misses")),
    "dollars",
    "layers added",
    "caches added",
    *("filled extents", "filled bytes"),
    *("samples", "samples_ahead", "tokens", "seconds", "wait_seconds"),
    *("throttled_seconds", "throttled_allowed", "throttled_served", "throttled_alone"),
]
"""Counters of a process. "dollars": list price of the requests. "layers added": bytes that layers moved beyond those
asked of them; "caches added": those of caches, which keep them. "filled ...": extents of the disk cache that were
fetched in the background, and their bytes. The last ones are of loaders: samples served, samples
read ahead and not served, tokens served, seconds since the first batch, seconds that the trainer waited.
"throttled_...": seconds in which requests waited for a rate that a store grants; in them, requests that the rate
allowed all processes of the node, and responses that these got; seconds in which the rate was not shared by them."""

# One lock for all counters: a lock in each would have to be found and renewed after a fork.
_lock = threading.RLock()  # a signal handler of the user, which runs within, may read the counters
_usage = dict.fromkeys(NAMES, 0.0)
_total = ReadStats()


def _after_fork() -> None:
    # Another thread may have held the lock when the parent forked; it does not exist in the child.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def total() -> ReadStats:
    """Return the sum of all readers that send requests in this process; reads of caches do not count."""
    with _lock:
        return replace(_total)


def usage() -> dict[str, float]:
    """Return all counters of this process, those of its loaders' workers included."""
    with _lock:
        return dict(_usage)


def add_usage(counts: Usage) -> None:
    """Add counters of other processes, or of loaders, to those of this process."""
    with _lock:
        for name, count in counts.items():
            _usage[name] += count


def usage_since(before: Usage) -> dict[str, float]:
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
    """Return a one-line report of some counters; parts without a value are left out.

    Args:
        used: counters of `usage`.
        run_tokens: tokens of the run for which the cost of the requests is extrapolated.
    """
    parts = [part(used) for part in (served_part, reads_part, throttled_part, filled_part)]
    parts += [*caches_parts(used), cost_part(used, run_tokens)]
    return "; ".join(filter(None, parts)) or "nothing was read"


def served_part(used: Usage) -> str:
    if not used["samples"]:
        return ""
    what = "tokens" if used["tokens"] else "samples"
    share = used["wait_seconds"] / used["seconds"] if used["seconds"] else 0.0
    waited = f"waited {used['wait_seconds']:,.2f} s ({share:.1%})"
    ahead = f", {used['samples_ahead']:,.0f} samples read ahead" if used["samples_ahead"] > 0 else ""
    return f"{used[what]:,.0f} {what} in {used['seconds']:,.2f} s, {waited}{ahead}"


def reads_part(used: Usage) -> str:
    """Return requests, moved bytes, and bytes requested of the topmost readers, some of which came from caches.

    The ratio is overhead: gaps between ranges and repeated requests, but not the rest of chunks that a cache keeps.
    """
    requests, moved = used["remote requests"], used["remote bytes_moved"]
    if not requests:
        return f"{bytes_text(used['local bytes_asked'])} from local files" if used["local bytes_asked"] else ""
    repeated = {name: used[f"remote {name}"] for name in AGAIN}
    again = ", ".join(counted(count, AGAIN[name], name) for name, count in repeated.items() if count)
    wanted = used["remote bytes_asked"] - used["layers added"]
    sent = counted(requests, "request", "requests") + (f" ({again})" if again else "")
    kept = max(0.0, used["caches added"])
    ratio = f" ({moved / (wanted + kept):.2f}x)" if wanted > 0 else ""
    cached = f" and {bytes_text(kept)} more cached" if kept else ""
    return f"{sent} moved {bytes_text(moved)} for {bytes_text(wanted)} wanted{cached}{ratio}"


def throttled_part(used: Usage) -> str:
    """Return for how long the store throttled this process, and the rates of the node in that time."""
    seconds = used["throttled_seconds"]
    if not seconds:
        return ""
    served, allowed = used["throttled_served"] / seconds, used["throttled_allowed"] / seconds
    alone = " (each process by itself)" if used["throttled_alone"] else ""
    return f"throttled {seconds:,.1f} s at {served:,.0f} requests/s of {allowed:,.0f} sent{alone}"


def filled_part(used: Usage) -> str:
    """Return the extents and bytes that filled the disk cache in the background."""
    extents = counted(used["filled extents"], "extent", "extents")
    return f"filled {extents}, {bytes_text(used['filled bytes'])}" if used["filled extents"] else ""


def caches_parts(used: Usage) -> list[str]:
    """Return the hit rate of each cache."""
    chunks = {cache: used[f"{cache} hits"] + used[f"{cache} misses"] for cache in CACHES}
    return [f"{CACHES[cache]} {used[f'{cache} hits'] / count:.0%} hits" for cache, count in chunks.items() if count]


def count_fetches() -> float:
    """Return a number that grows with each read of this process from a store or a disk, beyond caches in memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with _lock:
        counted = sum(_usage[name] for name in ("remote requests", "memory misses", "disk misses"))
    return counted + used.ru_majflt + used.ru_inblock


def cost_part(used: Usage, run_tokens: float) -> str:
    """Return the list price of the requests, and of a run of `run_tokens` tokens at the same rate."""
    dollars = used["dollars"]
    if not dollars:
        return ""
    of_run = ""
    if used["tokens"]:
        read = used["tokens"] * (1 + max(0.0, used["samples_ahead"]) / used["samples"])
        of_run = f", ${dollars / read * run_tokens:,.2f} for {run_tokens:.3g} tokens"
    return f"requests ${dollars:.2g} at list price{of_run}"


def counted(count: float, one: str, many: str) -> str:
    return f"{count:,.0f} {one if count == 1 else many}"


def bytes_text(count: float) -> str:
    """Format bytes in decimal units, as stores bill them: 1.64 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def sum_usage(used: Usage) -> dict[str, float]:
    """Return the counters of a process that dashboards show, by names without blanks; see `metrics`."""
    loaders = {name: used[name] for name in ("samples", "tokens", "samples_ahead", "seconds", "wait_seconds")}
    stores = {name: used[f"remote {name}"] for name in ("requests", *AGAIN, "bytes_moved")}
    caches = {f"{cache}_{count}": used[f"{cache} {count}"] for cache in CACHES for count in ("hits", "misses")}
    filled = {f"filled_{count}": used[f"filled {count}"] for count in ("extents", "bytes")}
    throttled = {name: used[name] for name in ("throttled_seconds", "throttled_allowed", "throttled_served")}
    wanted = max(0.0, used["remote bytes_asked"] - used["layers added"])
    sizes = {"bytes_wanted": wanted, "bytes_local": used["local bytes_asked"]}
    return {**loaders, **stores, **sizes, **caches, **filled, **throttled, "dollars": used["dollars"]}


def rates(sums: Usage) -> dict[str, float]:
    """Return the ratios of the counters of `sum_usage`; 0 where nothing happened."""

    def ratio(part: float, whole: float) -> float:
        return part / whole if whole else 0.0

    found = {cache: sums[f"{cache}_hits"] for cache in CACHES}
    hits = {f"{cache}_hit_rate": ratio(count, count + sums[f"{cache}_misses"]) for cache, count in found.items()}
    speed = ratio(sums["tokens"], sums["seconds"])
    limit, goodput = (ratio(sums[f"throttled_{name}"], sums["throttled_seconds"]) for name in ("allowed", "served"))
    throttled = {"request_limit": limit, "goodput": goodput}
    return {"tokens_per_second": speed, "wait_share": ratio(sums["wait_seconds"], sums["seconds"]), **hits, **throttled}


@contextlib.contextmanager
def span(name: str, parent: Any = None, **attributes: str) -> Iterator[Any]:
    """Record the time of the block, and an exception that ends it, as a span.

    A program that sets a TracerProvider has imported the API, so no other program pays for its import.

    Args:
        name: of the span.
        parent: what the block of the parent span yielded, if that is one of another thread.
        attributes: of the span; no URI, as it may hold secrets.

    Yields:
        The context of the span, as `parent` of others; None without OpenTelemetry.
    """
    trace, context = (sys.modules.get(f"opentelemetry.{module}") for module in ("trace", "context"))
    if trace is None or context is None:
        yield None
        return
    with trace.get_tracer("binidx").start_as_current_span(name, parent, attributes=attributes):
        yield context.get_current()
