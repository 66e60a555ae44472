"""binidx.native.RandomState against NumPy's: the same places, and the same state afterwards."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from binidx import native

SEEDS = [0, 1, 1234, 2**31 - 1, 2**31, 2**32 - 1]
# Around the block of 624 words, the batch of 2048 targets, and the masks.
LENGTHS = [0, 1, 2, 3, 4, 5, 623, 624, 625, 626, 1023, 1024, 1025, 2047, 2048, 2049, 2050, 4097, 65536, 65537]


def assert_same_state(ours: native.RandomState, theirs: np.random.RandomState) -> None:
    words, position = ours.state
    _, needed_words, needed_position, *_ = theirs.get_state(legacy=True)
    assert position == needed_position
    assert (words == needed_words).all()


def assert_same_shuffle(ours: native.RandomState, theirs: np.random.RandomState, length: int, dtype: str) -> None:
    found, needed = np.arange(length, dtype=dtype), np.arange(length, dtype=dtype)
    ours.shuffle(found)
    theirs.shuffle(needed)
    assert (found == needed).all()
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_shuffles_as_numpy_does(seed: int, dtype: str) -> None:
    for length in LENGTHS:
        assert_same_shuffle(native.RandomState(seed), np.random.RandomState(seed), length, dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64"])
def test_shuffles_a_million_as_numpy_does(dtype: str) -> None:
    assert_same_shuffle(native.RandomState(2**32 - 1), np.random.RandomState(2**32 - 1), 1_000_000, dtype)


def test_one_state_goes_on_from_shuffle_to_shuffle() -> None:
    rng = np.random.default_rng(0)
    for seed in rng.integers(0, 2**32, 300):
        ours, theirs = native.RandomState(int(seed)), np.random.RandomState(seed)
        assert_same_state(ours, theirs)
        for length in rng.integers(0, [3, 700, 3000, 3, 200]):
            assert_same_shuffle(ours, theirs, length, str(rng.choice(["int32", "uint32", "int64", "float64"])))


@pytest.mark.parametrize("first", [5, 700, 2**31 + 100, 2**32 - 1, 2**32 + 100, 2**33 + 100, 2**40, 2**53 - 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_targets_beyond_memory_are_numpys(first: int, seed: int) -> None:
    """RandomState.randint draws an int64 below 2**32, and above, by the very rule of shuffle."""
    count = min(first, 400)
    ours, theirs = native.RandomState(seed), np.random.RandomState(seed)
    needed = [theirs.randint(0, step + 1, dtype=np.int64) for step in range(first, first - count, -1)]
    assert ours.shuffle_targets(first, count).tolist() == needed
    assert_same_state(ours, theirs)


def test_targets_in_parts_are_those_of_the_whole() -> None:
    whole, parts = native.RandomState(3), native.RandomState(3)
    first, cuts = 2**32 + 700, [0, 1, 2, 600, 1000, 3000, 3001, 5000]
    found = [parts.shuffle_targets(first - a, b - a) for a, b in pairwise(cuts)]
    assert (np.concatenate(found) == whole.shuffle_targets(first, cuts[-1])).all()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_state_after_a_shuffle_of_more_than_2_32_items_is_numpys() -> None:
    length = 2**32 + 5000
    theirs, ours = np.random.RandomState(7), native.RandomState(7)
    theirs.shuffle(np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (length,), (0,)))
    step = length - 1
    while step:
        count = min(step, 1_000_000)
        ours.shuffle_targets(step, count)
        step -= count
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_refuses_a_seed_that_numpy_refuses(seed: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= seed < 2\\*\\*32"):
        native.RandomState(seed)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(4, np.int16), "1-D int16, needs 1-D numbers of 4 or 8 bytes"),
        (np.zeros(4, object), "1-D object"),
        (np.zeros((2, 2), np.int32), "2-D int32"),
        (np.zeros(8, np.int32)[::2], r"strides \(8,\), needs an aligned, contiguous array"),
        (np.zeros(18, np.uint8)[2:].view(np.int64), "aligned"),
    ],
)
def test_refuses_arrays_that_c_cannot_shuffle(array: np.ndarray, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        native.RandomState(0).shuffle(array)


def test_refuses_to_write_to_a_read_only_array() -> None:
    array = np.arange(10)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        native.RandomState(0).shuffle(array)
    assert (array == np.arange(10)).all()


def test_refuses_more_targets_than_there_are_steps() -> None:
    with pytest.raises(ValueError, match="needs at most 5"):
        native.RandomState(0).shuffle_targets(5, 6)
