"""One fetch at a time of each thing: who comes second waits, and fetches himself if the first came back without it.

    thread 1   claims a b      fetches a b ──────────► lands            a b
    thread 2   claims c        fetches c ──► lands, then waits for b ─► b c

A thread waits only when it holds no claim, so two that want each other's things cannot wait for each other.

An LRU of chunks in memory: a RangeReader over a RangeReader.

    asked      [70000, 70100) [190000, 200000)      of an object in chunks of 64 KiB
    chunks     1              2        3            2 is in the store
    read       [65536, 131072)        [196608, ...)  the others, neighbours in one range, all in one call

The chunks of all readers share one store with one budget in bytes, so that ten thousand shards do not keep ten thousand
caches. A chunk owns its bytes: a view of a larger answer would keep all of it alive and the budget would mean nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from binidx.errors import ConfigError
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.ranges import assemble, check_ranges
from binidx.storage.requests.cancellation import current_scope
from binidx.storage.stats import CacheStats

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Flight(Generic[Key, Value]):
    """Things that one thread fetches: `keys`. Others wait for `landed`."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._landed: Future[Mapping[Key, Value]] = Future()

    def land(self, found: Mapping[Key, Value]) -> None:
        """What there is to hand on; the first call counts."""
        if not self._landed.done():
            self._landed.set_result(found)

    def wait(self, seconds: float | None = None) -> Mapping[Key, Value]:
        """What landed; empty when it failed, or has not come in time.

        Raises:
            CancelledReadError: the waiting thread's scope was cancelled.
        """
        scope, woken = current_scope(), threading.Event()
        self._landed.add_done_callback(lambda _: woken.set())
        with scope.watched_by(woken.set) if scope else contextlib.nullcontext():
            woken.wait(seconds)
        if scope:
            scope.check()
        return self._landed.result() if self._landed.done() else {}


class SingleFlight(Generic[Key, Value]):
    """What the threads of a process are fetching. Make a new one after a fork: the fetchers are not in the child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claims: dict[Key, Flight[Key, Value]] = {}

    @contextlib.contextmanager
    def claimed(self, keys: Iterable[Key]) -> Iterator[tuple[Flight[Key, Value], dict[Key, Flight[Key, Value]]]]:
        """Those of the keys that nobody fetches, until the end of the block, and the claims that hold the others.

        Look once more whether what was claimed is there: it may have landed after the caller looked.
        """
        ours: Flight[Key, Value] = Flight()
        theirs: dict[Key, Flight[Key, Value]] = {}
        with self._lock:
            for key in keys:
                holder = self._claims.setdefault(key, ours)
                if holder is ours:
                    ours.keys.append(key)
                else:
                    theirs[key] = holder
        try:
            yield ours, theirs
        finally:
            with self._lock:
                for key in ours.keys:
                    del self._claims[key]
            ours.land({})


CHUNK_BYTES = 64 << 10
DEFAULT_BUDGET = 256 << 20

# More than this part of the budget would push out everything else and not be found again either.
PART_OF_BUDGET = 8
ChunkKey = tuple[int, int]
"""(reader, chunk)."""


class ChunkStore:
    """Chunks of any readers, least recently used out first, never more than `budget` bytes. Threads may share it.

    After a fork the child starts empty: the parent may have been changing it in another thread.
    """

    def __init__(self, budget: int = DEFAULT_BUDGET) -> None:
        self.budget = budget
        self._reset()
        _stores.add(self)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._chunks: OrderedDict[ChunkKey, bytes] = OrderedDict()
        self.flights: SingleFlight[ChunkKey, bytes] = SingleFlight()
        self.bytes = 0

    @property
    def largest(self) -> int:
        """Bytes of the most that is worth keeping at once."""
        return self.budget // PART_OF_BUDGET

    def set_budget(self, budget: int) -> None:
        """From now on at most so many bytes; 0 keeps nothing."""
        if budget < 0:
            raise ConfigError(f"chunk cache: budget of {budget} bytes, needed 0 or more")
        with self._lock:
            self.budget = budget
            self._evict()

    def get(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, bytes]:
        """Those of the chunks that are here; they are now the most recently used."""
        found = {}
        with self._lock:
            for key in keys:
                if (chunk := self._chunks.get(key)) is not None:
                    self._chunks.move_to_end(key)
                    found[key] = chunk
        return found

    def put(self, chunks: dict[ChunkKey, bytes]) -> None:
        with self._lock:
            for key, chunk in chunks.items():
                self.bytes += len(chunk) - len(self._chunks.pop(key, b""))
                self._chunks[key] = chunk
            self._evict()

    def _evict(self) -> None:
        while self.bytes > self.budget:
            _, chunk = self._chunks.popitem(last=False)
            self.bytes -= len(chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_the_store, ()) if self is STORE else (ChunkStore, (self.budget,))


class ChunkCache:
    """A reader whose chunks are kept. Same bytes as the reader below, in fewer and larger reads.

    Args:
        reader: whatever is read from; its own `read` coalesces further and runs its requests at the same time.
        chunk_bytes: unit of reading and keeping, at least 1.
        store: where the chunks are kept; by default the one of the process.

    A range within a chunk is a view of it, and stays valid when the chunk is thrown out. Of threads that miss the same
    chunk at once one fetches it. A range larger than an eighth of the budget is read exactly and not kept.
    """

    def __init__(self, reader: RangeReader, *, chunk_bytes: int = CHUNK_BYTES, store: ChunkStore | None = None) -> None:
        if chunk_bytes < 1:
            raise ConfigError(f"{reader.uri}: chunks of {chunk_bytes} bytes, needed 1 or more")
        self.reader = reader
        self.uri, self.size = reader.uri, reader.size
        self.chunk_bytes = chunk_bytes
        self.store = STORE if store is None else store
        self.stats = CacheStats()
        self._number = next(_numbers)

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.reader.identity

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        limit = self.store.largest
        large = [each for each in ranges if each[1] - each[0] > limit]
        small = [each for each in ranges if each[1] - each[0] <= limit]
        wanted = [(self._number, each) for each in chunks_of(small, self.chunk_bytes)]
        chunks = self.store.get(wanted)
        self.stats.count_chunks(hits=len(chunks), misses=len(wanted) - len(chunks))
        self.stats.add(bytes_asked=sum(stop - start for start, stop in ranges))

        rest = iter(self._bring([each for each in wanted if each not in chunks], large, chunks))
        # A chunk alone is a run of one.
        places = [self._bytes_of((number, number + 1)) for _, number in wanted]
        views = iter(assemble(small, places, [chunks[each] for each in wanted]))
        return [next(rest) if stop - start > limit else next(views) for start, stop in ranges]

    def _bring(
        self, missing: Sequence[ChunkKey], large: Sequence[Range], chunks: dict[ChunkKey, bytes]
    ) -> list[memoryview]:
        """Fill `chunks` with those that miss; and the bytes of the large ranges, asked for in the same read."""
        with self.store.flights.claimed(missing) as (ours, theirs):
            chunks |= self.store.get(ours.keys)
            runs = runs_of([key[1] for key in ours.keys if key not in chunks])
            answers = self._fetch([*map(self._bytes_of, runs), *large])
            fetched = self._cut(runs, answers)
            self.store.put(fetched)
            ours.land(fetched)
        chunks |= fetched
        self.stats.count_chunks(waits=len(theirs))
        for claim in set(theirs.values()):
            landed = claim.wait()
            chunks |= {key: landed[key] for key, holder in theirs.items() if holder is claim and key in landed}
        if failed := [key for key in theirs if key not in chunks]:
            self._bring(failed, [], chunks)
        return answers[len(runs) :]

    def _fetch(self, requests: Sequence[Range]) -> list[memoryview]:
        began = time.perf_counter()
        answers = self.reader.read(requests) if requests else []
        self.stats.add(requests=len(requests), bytes_moved=sum(map(len, answers)), seconds=time.perf_counter() - began)
        return answers

    def _bytes_of(self, run: tuple[int, int]) -> Range:
        first, stop = run
        return first * self.chunk_bytes, min(stop * self.chunk_bytes, self.size)

    def _cut(self, runs: Sequence[tuple[int, int]], answers: Sequence[memoryview]) -> dict[ChunkKey, bytes]:
        """The chunks of each run, each with its own bytes."""
        size = self.chunk_bytes
        return {
            (self._number, chunk): bytes(answer[(chunk - first) * size : (chunk - first + 1) * size])
            for (first, stop), answer in zip(runs, answers, strict=False)
            for chunk in range(first, stop)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(ChunkCache, chunk_bytes=self.chunk_bytes, store=self.store), (self.reader,)

    def __repr__(self) -> str:
        return f"ChunkCache({self.reader!r})"


def chunks_of(ranges: Sequence[Range], chunk_bytes: int) -> list[int]:
    """The chunks that hold the ranges, each once, in order."""
    spans = (range(start // chunk_bytes, -(-stop // chunk_bytes)) for start, stop in ranges if start < stop)
    return sorted(set(itertools.chain.from_iterable(spans)))


def runs_of(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours together: [3, 4, 7] -> [(3, 5), (7, 8)]."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        first = runs.pop()[0] if runs and runs[-1][1] == chunk else chunk
        runs.append((first, chunk + 1))
    return runs


def _the_store() -> ChunkStore:
    return STORE


def _after_fork() -> None:
    for store in list(_stores):
        store._reset()


_numbers = itertools.count()
_stores: weakref.WeakSet[ChunkStore] = weakref.WeakSet()
STORE = ChunkStore()


os.register_at_fork(after_in_child=_after_fork)
