"""Fetch of missing chunks into a cached object: each by one thread of one process of all that share the directory.

    started    chunks that no thread of this process is fetching; the others are waited for
    locked     of these, those that no other process is fetching; the others are waited for
    missing    of these, those that are still absent or damaged: read, checked, stored

No thread waits while it holds a lock. A chunk whose fetcher failed or died is fetched here; none is fetched into the
directory twice, also if it could not be written or was evicted at once. A fetcher that takes too long, such as a
stopped process, which keeps its locks, is not waited for: the caller reads the exact bytes then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from binidx.storage.cache.cached_object import CachedObject
from binidx.storage.cache.memory import Flight, runs_of
from binidx.storage.interfaces import Range
from binidx.storage.ranges import cut
from binidx.storage.steps import Call, Now, Steps

FIRST_PAUSE, LONGEST_PAUSE, WORK_SHARE = 0.001, 0.02, 20
"""Shortest and longest pause of a thread that waits for chunks, in seconds; and the least ratio of a pause to the CPU
time of the look before it: of a large file, each of 8 waiting ranks looks at thousands of chunks."""


@dataclass(frozen=True)
class FetchSizes:
    """Bytes that a thread fetches at once, and holds in memory until they are written; and those of one request."""

    at_once: int
    request: int


class ChunkSource(Protocol):
    """Store of an object, and clock of a thread: `disk_cache.StoredChunks`, or simulated ones.

    Attributes:
        read: returns the bytes of ranges.
        check: raises if the stored object is not the opened one any more.
        wait: waits for a fetch of another thread, at most for some seconds, or until this thread is cancelled.
        cpu_seconds: returns the CPU time of this thread.
        add: adds to the counters of reads.
    """

    def read(self, ranges: Sequence[Range]) -> list[memoryview]: ...
    def check(self) -> None: ...
    def wait(self, flight: Flight[int, None], seconds: float) -> object: ...
    def cpu_seconds(self) -> float: ...
    def add(self, **counts: float) -> None: ...


class ChunkFetcher:
    """Fetches chunks of one object into the directory.

    Attributes:
        wait_seconds: time to wait for chunks that another process fetches: all of it, or the least one after a wait
            that failed, until one succeeds.
    """

    def __init__(
        self, cached: CachedObject, source: ChunkSource, sizes: FetchSizes, wait_seconds: tuple[float, float]
    ) -> None:
        self.cached, self._source = cached, source
        self.at_once = max(1, sizes.at_once // cached.content.chunk_bytes)
        self._in_request = max(1, sizes.request // cached.content.chunk_bytes)
        self._most_seconds, self._least_seconds = wait_seconds
        self.wait_seconds = self._most_seconds

    def fetch(self, missing: Sequence[int]) -> Steps[None]:
        """Fetch sorted chunks, as far as there is room and other fetchers do not take too long."""
        waited, done = set[int](), set[int]()
        pause, place, deadline = FIRST_PAUSE, 0, math.inf
        worked = self._source.cpu_seconds()
        while missing:
            with self.cached.flights.started(missing[place : place + self.at_once]) as (ours, theirs):
                locked = yield from self._fetch_free(ours.keys)
            if locked is None:
                break
            place += self.at_once
            done |= {*locked}
            if locked:
                place, pause, deadline = 0, FIRST_PAUSE, math.inf
            elif place >= len(missing):
                waited |= {*missing}
                deadline = min(deadline, (yield Now()) + self.wait_seconds)
                least = WORK_SHARE * (self._source.cpu_seconds() - worked)
                pause = yield from self._wait([*theirs.values()], pause, least)
                place, worked = 0, self._source.cpu_seconds()
            before = len(missing)
            missing = [chunk for chunk in self.cached.check_chunks(missing) if chunk not in done]
            if len(missing) < before:
                self.wait_seconds, place = self._most_seconds, 0  # what follows may be none of those that are missing
            elif deadline < math.inf and (yield Now()) > deadline:
                self.wait_seconds = self._least_seconds
                break
        self._source.add(waits=len(waited))

    def _wait(self, theirs: Sequence[Flight[int, None]], pause: float, least: float) -> Steps[float]:
        """Wait for a thread of this process, or for a pause, as other processes show nothing; return the next pause."""
        if theirs:
            yield Call(self._source.wait, (theirs[0], max(LONGEST_PAUSE, least)))
            return FIRST_PAUSE
        yield Call(self._source.wait, (Flight[int, None](), max(pause, least)))
        return min(LONGEST_PAUSE, 1.5 * pause)

    def _fetch_free(self, chunks: Sequence[int]) -> Steps[list[int] | None]:
        """Fetch those of sorted chunks that no other process is fetching; return them, None if the quota is spent."""
        runs = yield Call(self.cached.files.lock_chunks, (chunks,))
        try:
            locked = [chunk for run in runs for chunk in range(*run)]
            return locked if (yield from self._fetch_missing(locked)) else None
        finally:
            yield Call(self.cached.files.unlock_chunks, (runs,))

    def _fetch_missing(self, chunks: Sequence[int]) -> Steps[bool]:
        """Fetch and write those of locked chunks that are missing; return False if the quota is spent.

        A chunk that cannot be written stays absent.
        """
        missing, damaged = self.cached.recheck(chunks)
        self._source.add(damaged=damaged)
        if not missing:
            return True
        content, quota = self.cached.content, self.cached.quota
        # In pieces of one request: longer ones would be put together, and so copied.
        runs = [part for run in runs_of(missing) for part in cut(run, self._in_request)]
        reservation = yield from quota.reserve(len(missing) * content.chunk_bytes)
        if reservation is None:
            return False
        try:
            answers = yield Call(self._source.read, ([content.range_of(*run) for run in runs],))
            yield Call(self._source.check)
            for (first, _), answer in zip(runs, answers, strict=True):
                yield from self.cached.store(first, answer, reservation)
        finally:
            yield from quota.end(reservation)
        return True
