"""The disk cache: what it gives, and what it asks of the reader below."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.faulty_object import FaultyObject
from helpers.versioned_objects import MarkedObject
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.memory import ChunkCache, ChunkStore
from binidx.storage.interfaces import Range, RangeReader
from binidx.testing import MemoryObject, check_range_reader

DATA = random.Random(1).randbytes(100_000)
small = partial(DiskCache, chunk_bytes=1000, block_bytes=8000)

ranges = st.tuples(st.integers(0, 100_000), st.integers(0, 20_000)).map(lambda each: (each[0], min(sum(each), 100_000)))


@pytest.mark.parametrize(
    ("chunk_bytes", "block_bytes"), [(64 << 10, None), (4096, 64 << 10), (1000, 3000), (701, 701), (1 << 20, None)]
)
def test_it_keeps_the_contract(tmp_path: Path, chunk_bytes: int, block_bytes: int | None) -> None:
    cached = partial(DiskCache, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "all"))
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "all"))  # from what is there
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "nothing", 0))
    check_range_reader(lambda data: cached(MarkedObject(data), tmp_path / "some", 70_000))


class Marked:
    """A reader with the mark of another one's content."""

    def __init__(self, reader: Any, data: bytes) -> None:
        self.reader, self.identity = reader, MarkedObject(data).identity
        self.uri, self.size, self.read = reader.uri, reader.size, reader.read

    def __reduce__(self) -> Any:
        return Marked, (self.reader, self.reader.read([(0, self.size)])[0].tobytes())


@pytest.mark.parametrize(
    "stack",
    [
        lambda data, d: ChunkCache(small(MarkedObject(data), d), chunk_bytes=999, store=ChunkStore(10_000)),
        lambda data, d: small(ChunkCache(MarkedObject(data), chunk_bytes=300), d),
        lambda data, d: small(small(MarkedObject(data), d / "one"), d / "two"),
        lambda data, d: FaultyObject(small(MarkedObject(data), d), [None]),
        lambda data, d: small(Marked(FaultyObject(MemoryObject(data), [None]), data), d),
    ],
    ids=["under chunks", "over chunks", "over itself", "under faulty", "over faulty"],
)
def test_stacks_keep_the_contract(tmp_path: Path, stack: Callable[[bytes, Path], RangeReader]) -> None:
    check_range_reader(lambda data: stack(data, tmp_path))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(ranges, max_size=6), max_size=5), st.sampled_from([None, 0, 9_000, 60_000]))
def test_any_reads_are_slices(tmp_path: Path, reads: list[list[Range]], limit: int | None) -> None:
    reader = small(MarkedObject(DATA), tmp_path / str(limit), limit)
    for asked in reads:
        assert [bytes(view) for view in reader.read(asked)] == [DATA[start:stop] for start, stop in asked]


def test_a_miss_fetches_whole_chunks_neighbours_together_and_only_once(tmp_path: Path) -> None:
    below = MarkedObject(DATA)
    reader = small(below, tmp_path)
    reader.read([(2100, 2200)])
    reader.read([(1100, 4200), (8005, 8006), (99_500, 100_000)])
    assert below.asked == [[(2000, 3000)], [(1000, 2000), (3000, 5000), (8000, 9000), (99_000, 100_000)]]
    assert (reader.stats.hits, reader.stats.misses) == (1, 6)
    for _ in range(3):
        reader.read([(2100, 2200), (1500, 4999)])
    assert len(below.asked) == 2
    assert (reader.stats.hits, reader.stats.misses) == (1 + 3 * 5, 6)
    assert (reader.stats.requests, reader.stats.bytes_moved) == (5, 6000)


def test_views_are_of_the_mapped_files_and_a_range_in_a_block_is_not_copied(tmp_path: Path) -> None:
    reader = small(MarkedObject(DATA), tmp_path)
    reader.read([(0, 100_000)])
    one, across = reader.read([(100, 7_900), (7_900, 8_100)])
    block = reader.cached.maps.blocks[0].data
    assert np.shares_memory(np.frombuffer(one, np.uint8), np.frombuffer(block, np.uint8))
    assert not np.shares_memory(np.frombuffer(across, np.uint8), np.frombuffer(block, np.uint8))
