"""LRU cache of fixed-size chunks in memory, over a reader; and `SingleFlight`, which lets one thread fetch.

    read       [70000, 70100) [190000, 200000)      of an object in chunks of 64 KiB
    chunks     1              2        3            2 is cached
    fetch      [65536, 131072)        [196608, ...)  the others, neighbours in one range, all in one call

The chunks of all readers share one store with one budget in bytes, so ten thousand shards do not need ten thousand
budgets. A cached chunk owns its bytes: a view of a larger response would keep all of it in memory.

Single flight: of threads that miss the same chunk, one fetches it and the others wait; if that one fails, they fetch.

    thread 1   starts a b      fetches a b ──────────► lands            a b
    thread 2   starts c        fetches c ──► lands, then waits for b ─► b c

A thread waits only when it has no unfinished fetch, so two threads never wait for each other.

`ForwardCache` is for reads that go forward through an object: it fetches the next chunks before they are requested.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.ranges import assemble, check_ranges
from binidx.storage.requests.cancellation import Scope, cancellable, current_scope
from binidx.storage.stats import LayerStats

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Flight(Generic[Key, Value]):
    """Fetch by one thread, for which other threads may wait.

    Attributes:
        keys: keys that the thread fetches.
    """

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self._landed: Future[Mapping[Key, Value]] = Future()

    def land(self, values: Mapping[Key, Value]) -> None:
        """Publish the fetched values to waiting threads; only the first call counts."""
        if not self._landed.done():
            self._landed.set_result(values)

    def wait(self, seconds: float | None = None) -> Mapping[Key, Value]:
        """Wait for the fetch; return the fetched values, none if it failed or takes longer than `seconds`.

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
    """Registry of the fetches in progress (`Flight`) in a process: one thread fetches a key, the others wait.

    Create a new instance after a fork, since the fetching threads do not exist in the child.
    """

    def __init__(self) -> None:
        self._flights: dict[Key, Flight[Key, Value]] = {}

    @contextlib.contextmanager
    def started(self, keys: Iterable[Key]) -> Iterator[tuple[Flight[Key, Value], dict[Key, Flight[Key, Value]]]]:
        """Start a fetch of the keys that no thread is fetching; yield its flight, and the flights of the other keys.

        The caller must look in the cache again for the keys of its own flight: another thread may have added them.
        """
        ours: Flight[Key, Value] = Flight()
        theirs: dict[Key, Flight[Key, Value]] = {}
        try:
            for key in keys:
                holder = self._flights.setdefault(key, ours)  # one step: of two threads, one starts the fetch of a key
                if holder is ours:
                    ours.keys.append(key)
                else:
                    theirs[key] = holder
            yield ours, theirs
        finally:
            for key in ours.keys:
                del self._flights[key]
            ours.land({})


CHUNK_BYTES = 64 << 10
DEFAULT_BUDGET = 256 << 20

# A larger fraction of the budget would evict all other chunks, and be evicted before it is read again.
PART_OF_BUDGET = 8
ChunkKey = tuple[int, int]
"""(number of the reader, number of the chunk)."""


class ChunkStore:
    """LRU store of chunks of any readers, at most `budget` bytes. Threads may share it.

    A forked child begins with an empty store, since another thread of the parent may have been changing it.
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
        """Bytes of the largest range that is cached."""
        return self.budget // PART_OF_BUDGET

    def get(self, keys: Iterable[ChunkKey]) -> dict[ChunkKey, bytes]:
        """Return the cached ones of these chunks, and mark them as most recently used."""
        cached = {}
        with self._lock:
            for key in keys:
                if (chunk := self._chunks.get(key)) is not None:
                    self._chunks.move_to_end(key)
                    cached[key] = chunk
        return cached

    def put(self, chunks: Mapping[ChunkKey, bytes]) -> None:
        """Add chunks, and evict the least recently used ones beyond the budget."""
        with self._lock:
            for key, chunk in chunks.items():
                self.bytes += len(chunk) - len(self._chunks.pop(key, b""))
                self._chunks[key] = chunk
            while self.bytes > self.budget:
                _, chunk = self._chunks.popitem(last=False)
                self.bytes -= len(chunk)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return "STORE" if self is STORE else (ChunkStore, (self.budget,))


class ChunkCache:
    """Reader that caches the chunks of another reader in memory.

    Args:
        reader: reader of the object; its `read` coalesces the missing chunks, and fetches them at the same time.
        chunk_bytes: unit of fetching and caching, at least 1.
        store: store of the chunks; by default STORE, which all readers of the process share.

    A range within a chunk is a view of it, and stays valid when the chunk is evicted. Of threads that miss the same
    chunk, one fetches it.
    """

    def __init__(self, reader: RangeReader, *, chunk_bytes: int = CHUNK_BYTES, store: ChunkStore | None = None) -> None:
        self.reader = reader
        self.uri, self.size, self.identity = reader.uri, reader.size, reader.identity
        self.chunk_bytes = chunk_bytes
        self.store = STORE if store is None else store
        self.stats = LayerStats(cache="memory")
        self._number = next(_numbers)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        wanted = [(self._number, chunk) for chunk in chunks_of(ranges, self.chunk_bytes)]
        chunks = self.store.get(wanted)
        bytes_asked = sum(stop - start for start, stop in ranges)
        self.stats.add(hits=len(chunks), misses=len(wanted) - len(chunks), bytes_asked=bytes_asked)
        self._fetch_missing([key for key in wanted if key not in chunks], chunks)
        places = [self._bytes_of((number, number + 1)) for _, number in wanted]
        return assemble(ranges, places, [chunks[key] for key in wanted])

    def _fetch_missing(self, missing: Sequence[ChunkKey], chunks: dict[ChunkKey, bytes]) -> None:
        """Add the missing chunks to `chunks`."""
        if not missing:
            return
        with self.store.flights.started(missing) as (ours, theirs):
            chunks |= self.store.get(ours.keys)
            runs = runs_of([key[1] for key in ours.keys if key not in chunks])
            fetched = self._cut(runs, self.stats.read(self.reader, [*map(self._bytes_of, runs)]))
            self.store.put(fetched)
            ours.land(fetched)
        chunks |= fetched
        self.stats.add(waits=len(theirs))
        for flight in set(theirs.values()):
            landed = flight.wait()
            chunks |= {key: landed[key] for key, holder in theirs.items() if holder is flight and key in landed}
        self._fetch_missing([key for key in theirs if key not in chunks], chunks)

    def _bytes_of(self, run: tuple[int, int]) -> Range:
        first, stop = run
        return first * self.chunk_bytes, min(stop * self.chunk_bytes, self.size)

    def _cut(self, runs: Sequence[tuple[int, int]], answers: Sequence[memoryview]) -> dict[ChunkKey, bytes]:
        """Split responses into chunks, each with its own bytes."""
        size = self.chunk_bytes
        return {
            (self._number, chunk): _own_bytes(answer[(chunk - first) * size : (chunk - first + 1) * size])
            for (first, stop), answer in zip(runs, answers, strict=True)
            for chunk in range(first, stop)
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(ChunkCache, chunk_bytes=self.chunk_bytes, store=self.store), (self.reader,)

    def __repr__(self) -> str:
        return f"ChunkCache({self.reader!r})"


class ForwardCache(ChunkCache):
    """Cache for reads that go forward through an object: the next chunks are fetched before they are requested.

    The first read sends exact ranges, so that it does not wait for a whole chunk. A read elsewhere restarts the chunks
    that are fetched ahead. Memory: `num_ahead` chunks and KEPT more, of which threads may still read.

    Args:
        chunk_bytes: those of a large request.
        num_ahead: number of chunks to fetch ahead, each in a daemon thread.
        scope: cancels the chunks in flight; None: nothing does.
    """

    KEPT = 2

    def __init__(self, reader: RangeReader, *, chunk_bytes: int, num_ahead: int, scope: Scope | None = None) -> None:
        store = ChunkStore((num_ahead + self.KEPT) * chunk_bytes)
        super().__init__(reader, chunk_bytes=chunk_bytes, store=store)
        self._num_ahead, self._scope, self._next = num_ahead, scope or Scope(), -1

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        views = self.reader.read(ranges) if self._next < 0 else super().read(ranges)
        if stop := max((stop for _, stop in ranges), default=0):
            self._fetch_ahead((stop - 1) // self.chunk_bytes)
        return views

    def _fetch_ahead(self, chunk: int) -> None:
        """Start to fetch the chunks after this one; threads may do this at the same time."""
        last = min(chunk + self._num_ahead, (self.size - 1) // self.chunk_bytes)
        first = self._next if chunk <= self._next <= last + 1 + self.KEPT else chunk
        self._next = max(first, last + 1)
        self.store.get([(self._number, number) for number in range(chunk, last + 1)])  # so those behind are evicted
        for number in range(first, last + 1):
            threading.Thread(target=self._fetch_one, args=(number,), name="binidx-forward", daemon=True).start()

    def _fetch_one(self, chunk: int) -> None:
        with contextlib.suppress(BaseException), cancellable(self._scope):  # the read that needs it fetches it again
            self._scope.check()
            self._fetch_missing([(self._number, chunk)], {})

    def __reduce__(self) -> tuple[Any, ...]:
        make = functools.partial(ForwardCache, chunk_bytes=self.chunk_bytes, num_ahead=self._num_ahead)
        return make, (self.reader,)


def _own_bytes(view: memoryview) -> bytes:
    """Return the bytes of a view: the object that it is of, if that has no others."""
    owner = view.obj
    return owner if isinstance(owner, bytes) and len(owner) == len(view) else bytes(view)


def chunks_of(ranges: Sequence[Range], chunk_bytes: int) -> list[int]:
    """Return the numbers of the chunks that hold the ranges, sorted, each once."""
    spans = (range(start // chunk_bytes, -(-stop // chunk_bytes)) for start, stop in ranges if start < stop)
    return sorted(set(itertools.chain.from_iterable(spans)))


def runs_of(chunks: Sequence[int]) -> list[tuple[int, int]]:
    """Group neighbouring numbers: [3, 4, 7] -> [(3, 5), (7, 8)]."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        first = runs.pop()[0] if runs and runs[-1][1] == chunk else chunk
        runs.append((first, chunk + 1))
    return runs


def _after_fork() -> None:
    for store in list(_stores):
        store._reset()


_numbers = itertools.count()
_stores: weakref.WeakSet[ChunkStore] = weakref.WeakSet()
STORE = ChunkStore()


os.register_at_fork(after_in_child=_after_fork)
