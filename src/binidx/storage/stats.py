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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
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

# One lock for all counters: a lock in each would have to be found and renewed after a fork.
_lock = threading.RLock()  # a signal handler of the user, which runs within, may read the counters
_usage = dict.fromkeys(NAMES, 0.0)


def _after_fork() -> None:
    # Another thread may have held the lock when the parent forked; it does not exist in the child.
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


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
