"""Arrays read by ranges against NumPy's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.storage.interfaces import Range
from binidx.storage.ranged_arrays import READ_BYTES, RangedArray


class Told:
    """Bytes that remember in how many turns, and in how many ranges, they were asked for."""

    uri = "memory"

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.turns, self.asked = memoryview(data), len(data), 0, 0

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        self.turns, self.asked = self.turns + 1, self.asked + len(ranges)
        return [self.data[start:stop] for start, stop in ranges]


def ranged(array: NDArray[Any], offset: int = 3) -> tuple[RangedArray, Told]:
    reader = Told(bytes(offset) + array.tobytes())
    return RangedArray(reader, offset, array.dtype, array.shape), reader


@given(rows=st.integers(1, 40), columns=st.sampled_from([(), (2,), (2, 3)]), data=st.data())
def test_rows_are_those_of_the_array(rows: int, columns: tuple[int, ...], data: st.DataObject) -> None:
    array = np.random.default_rng(rows).integers(0, 99, (rows, *columns)).astype(np.int32)
    found, _ = ranged(array)
    numbers = np.array(data.draw(st.lists(st.integers(0, rows - 1))), np.int64)
    assert (found[numbers] == array[numbers]).all()
    assert found[numbers].shape == array[numbers].shape
    if len(numbers):
        assert (found[numbers[0]] == array[numbers[0]]).all()
    first, last = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    assert (found[first:last] == array[first:last]).all()
    if columns:
        assert (found[numbers, 1] == array[numbers, 1]).all() if len(columns) == 1 else True
    assert (len(found), found.shape, found.dtype) == (rows, array.shape, array.dtype)


def test_neighbours_share_a_range_and_each_row_is_read_once() -> None:
    found, reader = ranged(np.arange(100))
    assert found[np.array([7, 50, 8, 7, 9])].tolist() == [7, 50, 8, 7, 9]
    assert (reader.turns, reader.asked) == (1, 2)


def test_what_leaves_the_array_is_an_error() -> None:
    found, _ = ranged(np.arange(10))
    for wanted in ([10], [-1], [0, 11]):
        with pytest.raises(IndexError, match=r"memory: rows .* it has 10"):
            found[np.array(wanted)]
    with pytest.raises(FormatError, match=r"memory: 13 bytes, int64 of shape .* needs 83"):
        RangedArray(Told(bytes(13)), 3, np.int64, (10,))


@given(
    values=st.lists(st.integers(-3, 3) | st.integers(-(2**40), 2**40), max_size=3000),
    wanted=st.lists(st.integers(-(2**41), 2**41)),
)
def test_a_search_finds_what_numpy_finds(values: list[int], wanted: list[int]) -> None:
    array = np.array(sorted(values), np.int64)
    needed = np.array([*wanted, *values[:20]], np.int64)
    found, _ = ranged(array)
    assert found.searchsorted(needed, side="right").tolist() == array.searchsorted(needed, side="right").tolist()


@pytest.mark.parametrize(("slope", "turns"), [("even", 4), ("heavy", 12), ("cliff", 24)])
def test_a_search_takes_few_turns(slope: str, turns: int) -> None:
    rng, count = np.random.default_rng(0), 1_000_000
    steps = {
        "even": lambda: rng.integers(1, 5, count),
        "heavy": lambda: rng.pareto(0.5, count).clip(0, 1e9).astype(np.int64),
        "cliff": lambda: np.where(np.arange(count) == count // 3, 1 << 50, 1),
    }
    array = np.cumsum(steps[slope]())
    found, reader = ranged(array, offset=0)
    wanted = rng.choice(array, 1000)
    assert (found.searchsorted(wanted, side="right") == array.searchsorted(wanted, side="right")).all()
    assert reader.turns <= turns
    assert reader.asked * READ_BYTES <= turns * 1000 * READ_BYTES
