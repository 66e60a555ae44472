"""The cache of chunks: what it asks of the reader below, what it keeps, and how much memory that takes."""

from __future__ import annotations

import gc
import pickle
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.faulty_object import FaultyObject
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import CancelledReadError
from binidx.storage.cache.memory import STORE, ChunkCache, ChunkStore, ForwardCache, chunks_of, runs_of
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.requests.cancellation import Scope, cancellable
from binidx.testing import MemoryObject, ended_well, forked

DATA = bytes(range(250)) * 4

ranges = st.tuples(st.integers(0, 1000), st.integers(0, 300)).map(lambda each: (each[0], min(sum(each), 1000)))


def cached(data: bytes = DATA, *, chunk_bytes: int = 100, budget: int = 1 << 20) -> tuple[ChunkCache, MemoryObject]:
    below = MemoryObject(data)
    return ChunkCache(below, chunk_bytes=chunk_bytes, store=ChunkStore(budget)), below


@given(
    st.lists(st.lists(ranges, max_size=6), max_size=6),
    st.integers(1, 400),
    st.sampled_from([0, 150, 1_000, 10_000]),
)
def test_any_reads_are_slices_and_the_budget_holds(reads: list[list[Range]], chunk_bytes: int, budget: int) -> None:
    reader, _ = cached(chunk_bytes=chunk_bytes, budget=budget)
    for asked in reads:
        assert [bytes(view) for view in reader.read(asked)] == [DATA[start:stop] for start, stop in asked]
        assert reader.store.bytes == sum(map(len, reader.store._chunks.values())) <= budget


def test_a_miss_fetches_neighbours_together_and_only_what_is_missing() -> None:
    reader, below = cached()
    reader.read([(210, 220)])
    reader.read([(110, 420), (805, 806), (950, 1000)])
    assert below.asked == [[(200, 300)], [(100, 200), (300, 500), (800, 1000)]]
    assert (reader.stats.hits, reader.stats.misses) == (1, 1 + 5)


def test_the_last_chunk_is_short() -> None:
    reader, below = cached(DATA[:950])
    assert bytes(reader.read([(940, 950)])[0]) == DATA[940:950]
    assert below.asked == [[(900, 950)]]


def test_what_is_kept_is_not_asked_again() -> None:
    reader, below = cached()
    for _ in range(3):
        reader.read([(0, 1000), (5, 6)])
    assert below.asked == [[(0, 1000)]]
    assert (reader.stats.requests, reader.stats.bytes_moved, reader.stats.bytes_asked) == (1, 1000, 3003)


def test_the_least_recently_used_goes_first() -> None:
    reader, below = cached(budget=900, chunk_bytes=100)
    for chunk in range(9):
        reader.read([(100 * chunk, 100 * chunk + 1)])
    reader.read([(0, 1)])
    reader.read([(900, 901)])
    below.asked.clear()
    reader.read([(0, 1), (200, 201)])
    assert below.asked == []
    reader.read([(100, 101)])
    assert below.asked == [[(100, 200)]]


def test_views_stay_valid_when_their_chunk_is_thrown_out() -> None:
    reader, _ = cached(budget=800)
    (view,) = reader.read([(10, 20)])
    reader.store.budget = 0
    reader.store.put({})
    gc.collect()
    assert reader.store.bytes == 0
    assert bytes(view) == DATA[10:20]


def test_memory_is_bounded_by_the_budget_whatever_was_read() -> None:
    below = MemoryObject(bytes(64 << 20))
    reader = ChunkCache(below, chunk_bytes=4096, store=ChunkStore(1 << 20))
    tracemalloc.start()
    try:
        for start in range(0, below.size, 128 << 10):
            reader.read([(start, start + (128 << 10))])
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * (1 << 20) < held < 1.5 * (1 << 20)


def test_readers_share_a_budget_and_not_their_bytes() -> None:
    store = ChunkStore(10_000)
    one = ChunkCache(MemoryObject(b"1" * 500), chunk_bytes=100, store=store)
    two = ChunkCache(MemoryObject(b"2" * 500), chunk_bytes=100, store=store)
    assert bytes(one.read([(0, 5)])[0]) == b"11111"
    assert bytes(two.read([(0, 5)])[0]) == b"22222"
    assert store.bytes == 200


def test_a_failed_read_keeps_nothing_and_the_next_is_good() -> None:
    reader = ChunkCache(FaultyObject(MemoryObject(DATA), [OSError("gone")]), chunk_bytes=100, store=ChunkStore())
    with pytest.raises(OSError, match="gone"):
        reader.read([(0, 10)])
    assert reader.store.bytes == 0
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]


def test_threads_lose_no_count_and_no_byte_of_the_budget() -> None:
    reader, _ = cached(budget=900, chunk_bytes=10)

    def work(seed: int) -> int:
        places = range(seed, 990, 7)
        for place in places:
            assert bytes(reader.read([(place, place + 10)])[0]) == DATA[place : place + 10]
        return sum(len(chunks_of([(place, place + 10)], 10)) for place in places)

    with ThreadPoolExecutor(8) as pool:
        chunks = sum(pool.map(work, range(8)))
    assert reader.store.bytes == sum(map(len, reader.store._chunks.values())) <= 900
    assert reader.stats.hits + reader.stats.misses == chunks


class SlowObject(MemoryObject):
    """Each read waits until `go`; `inside` says that one has begun; then it may fail."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.inside, self.go = threading.Semaphore(0), threading.Event()
        self.faults: list[Exception] = []

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        fault = self.faults.pop() if self.faults else None
        self.inside.release()
        assert self.go.wait(600)
        if fault:
            raise fault
        return super().read(ranges)


def slowly(budget: int = 1 << 20) -> tuple[ChunkCache, SlowObject]:
    below = SlowObject(DATA)
    return ChunkCache(below, chunk_bytes=100, store=ChunkStore(budget)), below


def waiting(reader: ChunkCache, count: int) -> None:
    """Come back when so many chunks are waited for."""
    until(lambda: reader.stats.waits >= count)


def until(true: Callable[[], bool]) -> None:
    late = time.monotonic() + 300
    while not true():
        assert time.monotonic() < late
        time.sleep(0.005)


@pytest.mark.parametrize("budget", [0, 1 << 20])
def test_eight_threads_that_want_a_chunk_fetch_it_once(budget: int) -> None:
    reader, below = slowly(budget or 800)
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(reader.read, [(110, 120)]) for _ in range(8)]
        waiting(reader, 7)
        reader.store.budget = budget  # with 0 nothing is kept, and who waits gets it all the same
        below.go.set()
        assert all(bytes(each.result()[0]) == DATA[110:120] for each in reads)
    assert below.asked == [[(100, 200)]]
    assert (reader.stats.misses, reader.stats.waits, reader.stats.bytes_moved) == (8, 7, 100)


def test_reads_that_overlap_crosswise_ask_for_each_chunk_once_and_do_not_lock_up() -> None:
    reader, below = slowly()
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(reader.read, [(0, 300)])
        assert below.inside.acquire(timeout=300)
        two = pool.submit(reader.read, [(200, 500)])
        assert below.inside.acquire(timeout=300)
        below.go.set()
        assert bytes(one.result(300)[0]) == DATA[0:300]
        assert bytes(two.result(300)[0]) == DATA[200:500]
    assert sorted(below.asked) == [[(0, 300)], [(300, 500)]]


def test_many_overlapping_reads_at_once_end_and_fetch_nothing_twice() -> None:
    reader, below = cached(chunk_bytes=10)

    def work(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(60):
            starts = [choose.randrange(900) for _ in range(5)]
            found = reader.read([(start, start + 80) for start in starts])
            assert [bytes(view) for view in found] == [DATA[start : start + 80] for start in starts]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    fetched = [each for asked in below.asked for start, stop in asked for each in range(start // 10, -(-stop // 10))]
    assert len(fetched) == len(set(fetched))


def test_who_waits_for_a_fetch_that_fails_fetches_himself() -> None:
    reader, below = slowly()
    below.faults = [OSError("gone")]
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(reader.read, [(0, 10)])
        assert below.inside.acquire(timeout=300)
        others = [pool.submit(reader.read, [(0, 10)]) for _ in range(2)]
        waiting(reader, 2)
        below.go.set()
        with pytest.raises(OSError, match="gone"):
            first.result(300)
        assert [bytes(each.result(300)[0]) for each in others] == [DATA[:10]] * 2
    assert below.asked == [[(0, 100)]]


def test_who_waits_can_be_cancelled() -> None:
    reader, below = slowly()
    scope = Scope()

    def read_in_scope() -> None:
        with cancellable(scope):
            reader.read([(0, 10)])

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reader.read, [(0, 10)])
        assert below.inside.acquire(timeout=300)
        second = pool.submit(read_in_scope)
        waiting(reader, 1)
        scope.cancel()
        with pytest.raises(CancelledReadError):
            second.result(300)
        assert not first.done()
        below.go.set()
        assert bytes(first.result(300)[0]) == DATA[:10]


def test_a_fork_in_the_middle_of_a_fetch_does_not_wait_for_it() -> None:
    reader, below = slowly()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(reader.read, [(0, 10)])
        assert below.inside.acquire(timeout=300)
        child = forked(lambda: go_on(reader, below))
        assert ended_well(child)
        below.go.set()
        first.result(300)


def go_on(reader: ChunkCache, below: SlowObject) -> None:
    below.go = threading.Event()
    below.go.set()
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]


def test_a_fork_while_the_store_is_locked_does_not_hang_the_child() -> None:
    reader, _ = cached()
    reader.read([(0, 10)])
    with reader.store._lock:
        child = forked(lambda: check_in_child(reader))
    assert ended_well(child)
    assert reader.store.bytes == 100


def check_in_child(reader: ChunkCache) -> None:
    assert reader.store.bytes == 0
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]


def test_a_pickled_cache_finds_the_store_of_its_process_and_others_their_size() -> None:
    shared = pickle.loads(pickle.dumps(ChunkCache(MemoryObject(DATA))))
    assert shared.store is STORE
    own = pickle.loads(pickle.dumps(cached(chunk_bytes=7, budget=777)[0]))
    assert (own.store.budget, own.store.bytes, own.chunk_bytes) == (777, 0, 7)


def test_chunks_and_runs_by_hand() -> None:
    assert chunks_of([(0, 0), (350, 450), (99, 101), (400, 401)], 100) == [0, 1, 3, 4]
    assert runs_of([]) == []
    assert runs_of([3, 4, 7]) == [(3, 5), (7, 8)]


def forward(reader: RangeReader, scope: Scope | None = None) -> ForwardCache:
    return ForwardCache(reader, chunk_bytes=100, num_ahead=3, scope=scope)


def wait_for_chunks() -> None:
    for thread in threading.enumerate():
        if thread.name == "binidx-forward":
            thread.join()


def test_reads_that_go_forward_fetch_each_chunk_once_before_it_is_requested() -> None:
    below = MemoryObject(DATA)
    reader = forward(below)
    for start in range(0, 1000, 30):
        stop = min(start + 30, 1000)
        assert bytes(reader.read([(start, stop)])[0]) == DATA[start:stop]
        wait_for_chunks()
        if stop < 600:
            assert max(last for asked in below.asked for _, last in asked) >= 300 + stop
    first, *chunks = below.asked
    assert first == [(0, 30)]
    assert sorted(chunks) == [[(start, start + 100)] for start in range(0, 1000, 100)]


@given(st.lists(st.lists(ranges, max_size=4), max_size=8))
def test_reads_anywhere_are_slices_in_bounded_memory(reads: list[list[Range]]) -> None:
    reader = forward(MemoryObject(DATA))
    for asked in reads:
        assert [bytes(view) for view in reader.read(asked)] == [DATA[start:stop] for start, stop in asked]
        wait_for_chunks()
        assert reader.store.bytes <= 500


def test_a_failed_chunk_is_an_error_of_the_read_that_needs_it() -> None:
    reader = forward(FaultyObject(MemoryObject(DATA), [None, *[OSError("gone")] * 5]))
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]
    wait_for_chunks()
    with pytest.raises(OSError, match="gone"):
        reader.read([(110, 120)])
    assert bytes(reader.read([(110, 120)])[0]) == DATA[110:120]


def test_a_cancelled_scope_fetches_nothing_ahead() -> None:
    below, scope = MemoryObject(DATA), Scope()
    scope.cancel()
    forward(below, scope).read([(0, 10)])
    wait_for_chunks()
    assert below.asked == [[(0, 10)]]
