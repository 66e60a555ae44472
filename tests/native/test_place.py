"""Ranges of blocks that are mapped here and there, against the same rule in Python."""

from __future__ import annotations

import numpy as np
import pytest
from binidx._native import lib
from hypothesis import given
from hypothesis import strategies as st

from binidx.native.arguments import PlacedBlocks, items

SIZE, CHUNK, BLOCK = 95, 5, 20

ranges = st.lists(st.tuples(st.integers(-3, 100), st.integers(-3, 30)), max_size=5)


@given(st.lists(st.booleans(), min_size=19, max_size=19), st.lists(st.integers(0, 3), min_size=5, max_size=5), ranges)
def test_a_range_is_placed_if_all_of_it_is_here(
    good: list[bool], mapped: list[int], asked: list[tuple[int, int]]
) -> None:
    addresses = np.array([1000 * number if here else 0 for number, here in enumerate(mapped, 1)], np.int64)
    used = np.zeros(5, np.int64)
    blocks = PlacedBlocks(np.array(good, np.uint8), addresses, used, SIZE, CHUNK, BLOCK)
    wanted = [(start, start + count) for start, count in asked]
    mapping, places = blocks.taking(9, ask_ahead=False), np.empty((len(wanted), 2), np.int64)
    array = np.array(wanted, np.int64).reshape(-1, 2)
    count = lib.binidx_place_ranges(
        mapping.blocks, items(array, np.int64, 2), len(wanted), items(places, np.int64, 2, write=True)
    )

    def is_here(start: int, stop: int) -> bool:
        return 0 <= start <= stop <= SIZE and all(
            good[byte // CHUNK] and addresses[byte // BLOCK] and byte // BLOCK == start // BLOCK
            for byte in range(start, stop)
        )

    assert (count >= 0) == all(is_here(*each) for each in wanted)
    if count >= 0:
        assert (places[:, 1] - places[:, 0]).tolist() == [stop - start for start, stop in wanted]
        assert [place for place, (start, stop) in zip(places[:, 0], wanted, strict=True) if start < stop] == [
            addresses[start // BLOCK] + start % BLOCK for start, stop in wanted if start < stop
        ]
        assert count == sum(len({byte // CHUNK for byte in range(*each)}) for each in wanted)
        assert set(np.flatnonzero(used == 9)) == {start // BLOCK for start, stop in wanted if start < stop}


def test_arrays_that_do_not_fit_are_refused() -> None:
    good, blocks = np.ones(19, np.uint8), np.ones(5, np.int64)
    for arrays in ((good[:18], blocks, blocks), (good, blocks[:4], blocks), (good, blocks, blocks[:4])):
        with pytest.raises(ValueError, match="for 95 bytes"):
            PlacedBlocks(*arrays, SIZE, CHUNK, BLOCK)
