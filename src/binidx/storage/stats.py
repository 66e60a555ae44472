"""Counters of reads: of each reader, and of all stores and caches of the process (`usage_report` reports them).

    requests      requests to the store, retries and hedges included (local files: ranges)
    retries       of these, sent again after a failed or wrong response
    hedges        of these, sent beside a late request; the first response is used
    refused       of these, refused by the store because there are too many: 429 or 503
    bytes_asked   bytes that the caller requested
    bytes_moved   bytes that the store sent: more through gaps and whole chunks, fewer through a cache
    seconds       waiting time, summed over objects, also of those that are read at the same time

`usage` returns all counters as one flat table, name -> number, which processes can add, subtract and send. Bytes that
are read before they are requested are no overhead: samples read ahead, and the rest of chunks that a cache keeps.

The table also has histograms of seconds, which `find_histograms` takes from it:

    request         answered requests to a store for at most 256 KiB, and lists and HEADs; one histogram a bucket
    large_request   those for more
    local_read      reads of local files that waited for the disk
    cache_read      of a cache directory: checks of chunks, and reads that waited for the disk
    cache_write     writes of chunks
    next            the trainer's waits for a batch

Slow steps are spans of OpenTelemetry, if the program has imported it:

    binidx.start          `build()` of a builder: opens the data, loads or builds the indices, compares the ranks
    binidx.index.build    one index, with its name; within binidx.start
    binidx.first_batch    the first batch of an iteration over a loader
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from itertools import accumulate
from math import inf
from typing import Any

from binidx.errors import redacted
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.store_protocols import Prices

Usage = Mapping[str, float]
"""Counter -> value, such as "remote requests": 12; the names are those of NAMES, and of histograms."""

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
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)
            self._add_to_usage(counts)

    def _add_to_usage(self, counts: Usage) -> None:
        """Add to the sums of the process; the caller holds the lock."""


class ObjectStats(ReadStats):
    """Counters of a reader that sends requests to a store; `usage` sums them.

    Args:
        prices: name and prices of the store.
    """

    def __init__(self, prices: Prices) -> None:
        super().__init__()
        self.prices = prices
        self._name = "local" if prices.store == "file" else "remote"

    def _add_to_usage(self, counts: Usage) -> None:
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
    *("dollars", "layers added", "caches added"),
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

_lock: AbstractContextManager[object]


def _renew_lock() -> None:
    """Renew the one lock of all counters: a thread that held it does not exist in a forked child."""
    global _lock
    _lock = threading.RLock()  # a signal handler of the user, which runs within, may read the counters


_renew_lock()
os.register_at_fork(after_in_child=_renew_lock)
_usage = dict.fromkeys(NAMES, 0.0)

BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, inf)
"""Largest seconds that each counter of a histogram counts."""

MOST_BUCKETS = 4
"""Buckets that have histograms of their own in a process; those of all others are "other": each is 13 time series."""

SMALL_REQUEST = 256 << 10
"""Most bytes of a request that takes the latency of its store; others take the time of their bytes."""

_histograms = dict[tuple[str, str], list[str]]()


def open_histogram(kind: str, bucket: str = "") -> list[str]:
    """Return the names of the counters of a histogram: of each bound, and the sums of seconds and bytes."""
    if (names := _histograms.get((kind, bucket))) is None:
        with _lock:
            is_full = sum(name == kind for name, _ in _histograms) >= MOST_BUCKETS
            label = "other" if bucket and is_full else redacted(bucket).replace(" ", "%20")
            names = [f"{kind} {label} {end}" for end in (*BOUNDS, "seconds", "bytes")]
            _usage.update({name: _usage.get(name, 0.0) for name in names})
            _histograms[kind, bucket] = names
    return names


def open_requests(bucket: str) -> None:
    """Open the histograms of requests to a bucket, before workers are made: the trainer adds counts that it has."""
    for kind in ("request", "large_request"):
        open_histogram(kind, bucket)


def note_request(bucket: str, seconds: float, num_bytes: float) -> None:
    """Count an answered request."""
    kind = "request" if num_bytes <= SMALL_REQUEST else "large_request"
    note_seconds(kind, seconds, num_bytes, bucket)


def note_seconds(kind: str, seconds: float, num_bytes: float = 0, bucket: str = "") -> None:
    """Count a wait in a histogram: 0.6 us."""
    names = _histograms.get((kind, bucket)) or open_histogram(kind, bucket)
    with _lock:
        _usage[names[bisect_left(BOUNDS, seconds)]] += 1
        _usage[names[-2]] += seconds
        _usage[names[-1]] += num_bytes


class DiskTimer:
    """Timer of a long read or write of a disk: counted each second, so that a slow disk shows before the end.

    Args:
        kind: of the histogram.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._bytes, self._began = kind, 0, time.perf_counter()

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read or written."""
        self._bytes += num_bytes
        if time.perf_counter() - self._began >= 1:
            self.end()

    def end(self) -> None:
        """Count the time since the last call."""
        began, self._began = self._began, time.perf_counter()
        note_seconds(self._kind, self._began - began, self._bytes)
        self._bytes = 0


@dataclass(frozen=True)
class Histogram:
    """Histogram of seconds.

    Attributes:
        counts: waits of at most as many seconds as each of BOUNDS.
        seconds, bytes: sums.
    """

    counts: Sequence[float]
    seconds: float
    bytes: float

    @property
    def count(self) -> float:
        return self.counts[-1]


Histograms = Mapping[tuple[str, str], Histogram]
"""Kind and bucket -> histogram; the bucket is "" if the kind has none."""


def find_histograms(used: Usage) -> Histograms:
    """Return the histograms in some counters of `usage`."""
    columns = dict[tuple[str, str], dict[str, float]]()
    for name, count in used.items():
        if len(parts := name.split(" ")) == 3:
            columns.setdefault((parts[0], parts[1]), {})[parts[2]] = count
    return {
        key: Histogram([*accumulate(ends[str(bound)] for bound in BOUNDS)], ends["seconds"], ends["bytes"])
        for key, ends in columns.items()
    }


for _kind in ("local_read", "cache_read", "cache_write", "next"):
    open_histogram(_kind)


def usage() -> dict[str, float]:
    """Return all counters of this process, those of its loaders' workers that read ahead included."""
    with _lock:
        return dict(_usage)


def add_usage(counts: Usage) -> None:
    """Add counters of other processes, or of loaders, to those of this process."""
    with _lock:
        for name, count in counts.items():
            _usage[name] = _usage.get(name, 0.0) + count


def usage_since(before: Usage) -> dict[str, float]:
    """Return the difference to an earlier `usage`."""
    return {name: count - before.get(name, 0.0) for name, count in usage().items()}


def count_fetches() -> float:
    """Return a number that grows with each read of this process from a store or a disk, beyond caches in memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with _lock:
        counted = sum(_usage[name] for name in ("remote requests", "memory misses", "disk misses"))
    return counted + used.ru_majflt + used.ru_inblock


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
