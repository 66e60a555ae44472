"""binidx.native.permutations.RandomState against NumPy's: the same places, and the same state afterwards."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from binidx._native import lib

from binidx.native import permutations
from binidx.native.arguments import LEVELS, items

SEEDS = [0, 1, 1234, 2**31 - 1, 2**31, 2**32 - 1]
# Around the group of 48 words and the block of 624, the batch of 4096 targets, and the masks.
EDGES = [0, 1, 2, 3, 31, 32, 33, 48, 49, 50, 96, 97, 623, 624, 625, 4096, 4097, 4098, 8190, 8193, 12288, 12300]
LENGTHS = sorted({*EDGES, *(2**k + d for k in range(2, 17) for d in (-1, 0, 1))})
DTYPES = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ">i4", "float32", "float64"]
each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)


def assert_same_state(ours: permutations.RandomState, theirs: np.random.RandomState) -> None:
    words, position = ours.state
    _, needed_words, needed_position, *_ = theirs.get_state(legacy=True)
    assert position == needed_position
    assert (words == needed_words).all()


def shuffle_targets(rng: permutations.RandomState, first: int, count: int) -> np.ndarray:
    """The swap targets of steps first, first - 1, ... of a shuffle, without its array."""
    targets = np.empty(count, np.int64)
    lib.binidx_shuffle_targets(rng._rng, first, count, items(targets, np.int64, write=True))
    return targets


def numbers(length: int, dtype: str) -> np.ndarray:
    """0, 1, ..., from 0 again where the dtype ends."""
    return np.arange(length).astype(dtype)


def assert_same_shuffle(ours: permutations.RandomState, theirs: np.random.RandomState, length: int, dtype: str) -> None:
    found, needed = numbers(length, dtype), numbers(length, dtype)
    ours.shuffle(found)
    theirs.shuffle(needed)
    assert (found == needed).all()
    assert_same_state(ours, theirs)


@each_level
@pytest.mark.parametrize("seed", SEEDS)
def test_shuffles_as_numpy_does(seed: int, level: int) -> None:
    for length in LENGTHS:
        assert_same_shuffle(permutations.RandomState(seed, level=level), np.random.RandomState(seed), length, "int32")


@each_level
@pytest.mark.parametrize("dtype", DTYPES)
def test_shuffles_every_dtype_as_numpy_does(dtype: str, level: int) -> None:
    for length in EDGES:
        assert_same_shuffle(permutations.RandomState(9, level=level), np.random.RandomState(9), length, dtype)


@each_level
def test_shuffles_a_million_as_numpy_does(level: int) -> None:
    last = 2**32 - 1
    assert_same_shuffle(permutations.RandomState(last, level=level), np.random.RandomState(last), 1_000_000, "uint32")


def test_shuffles_items_that_are_not_aligned() -> None:
    found, needed = np.zeros(8 * 5000 + 3, np.uint8)[3:].view(np.int64), np.arange(5000)
    found[:] = needed
    permutations.RandomState(2).shuffle(found)
    np.random.RandomState(2).shuffle(needed)
    assert (found == needed).all()


@each_level
def test_one_state_goes_on_from_shuffle_to_shuffle(level: int) -> None:
    """1,500 random lengths, most of them begun within a block."""
    rng = np.random.default_rng(0)
    for seed in rng.integers(0, 2**32, 300):
        ours, theirs = permutations.RandomState(int(seed), level=level), np.random.RandomState(seed)
        assert_same_state(ours, theirs)
        for length in rng.integers(0, [3, 700, 3000, 3, 200]):
            assert_same_shuffle(ours, theirs, length, str(rng.choice(DTYPES)))


@each_level
def test_every_level_draws_what_the_plain_rule_does(level: int) -> None:
    """One word at a time, for thousands of short stretches of steps anywhere below 2**53."""
    rng, ours, theirs = (
        np.random.default_rng(1),
        permutations.RandomState(6, level=level),
        permutations.RandomState(6, level=0),
    )
    for bits in rng.integers(1, 53, 3000):
        first = int(rng.integers(1, 2**bits))
        count = min(first, int(rng.integers(0, rng.choice([4, 60, 700]))))
        one_by_one = [int(shuffle_targets(theirs, first - k, 1)[0]) for k in range(count)]
        assert shuffle_targets(ours, first, count).tolist() == one_by_one


@each_level
@pytest.mark.parametrize(
    "first", [5, 700, 2**31 + 100, 2**32 - 1, 2**32, 2**32 + 1, 2**32 + 100, 2**33 + 100, 2**40, 2**53 - 2]
)
def test_targets_beyond_memory_are_numpys(first: int, level: int) -> None:
    """RandomState.randint draws an int64 below 2**32, and above, by the very rule of shuffle."""
    count, seed = min(first, 700), first % 2**32
    ours, theirs = permutations.RandomState(seed, level=level), np.random.RandomState(seed)
    needed = [theirs.randint(0, step + 1, dtype=np.int64) for step in range(first, first - count, -1)]
    assert shuffle_targets(ours, first, count).tolist() == needed
    assert_same_state(ours, theirs)


def test_targets_in_parts_are_those_of_the_whole() -> None:
    whole, parts = permutations.RandomState(3), permutations.RandomState(3)
    first, cuts = 2**32 + 700, [0, 1, 2, 600, 1000, 3000, 3001, 5000]
    found = [shuffle_targets(parts, first - a, b - a) for a, b in pairwise(cuts)]
    assert (np.concatenate(found) == shuffle_targets(whole, first, cuts[-1])).all()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_state_after_a_shuffle_of_more_than_2_32_items_is_numpys() -> None:
    length = 2**32 + 5000
    theirs, ours = np.random.RandomState(7), permutations.RandomState(7)
    theirs.shuffle(np.lib.stride_tricks.as_strided(np.zeros(1, np.int8), (length,), (0,)))
    step = length - 1
    while step:
        count = min(step, 1_000_000)
        shuffle_targets(ours, step, count)
        step -= count
    assert_same_state(ours, theirs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_shuffles_more_than_2_32_items() -> None:
    """As NumPy would: its targets for the steps beyond 32 bits, which are few, and then a shuffle of 2**32 items."""
    found = np.zeros(2**32 + 5120, np.uint8)
    found.reshape(-1, 256)[:] = np.arange(256)
    needed, rest = found.copy(), permutations.RandomState(8)
    permutations.RandomState(8).shuffle(found)
    first = len(needed) - 1
    for step, target in zip(range(first, 2**32 - 1, -1), shuffle_targets(rest, first, 5120).tolist(), strict=True):
        needed[[step, target]] = needed[[target, step]]
    rest.shuffle(needed[: 2**32])
    assert (found == needed).all()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_refuses_a_seed_that_numpy_refuses(seed: int) -> None:
    with pytest.raises(ValueError, match="needs 0 <= seed < 2\\*\\*32"):
        permutations.RandomState(seed)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(4, np.complex64), "1-D complex64, needs 1-D numbers of 1, 2, 4 or 8 bytes"),
        (np.zeros(4, np.longdouble), "needs 1-D numbers of 1, 2, 4 or 8 bytes"),
        (np.zeros(4, object), "1-D object"),
        (np.zeros((2, 2), np.int32), "2-D int32"),
        (np.zeros(8, np.int32)[::2], r"strides \(8,\), needs a contiguous array"),
    ],
)
def test_refuses_arrays_that_c_cannot_shuffle(array: np.ndarray, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        permutations.RandomState(0).shuffle(array)


def test_refuses_to_write_to_a_read_only_array() -> None:
    array = np.arange(10)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        permutations.RandomState(0).shuffle(array)
    assert (array == np.arange(10)).all()
