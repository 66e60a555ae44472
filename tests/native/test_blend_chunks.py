"""Blends in chunks against the plain scan: every level, number of threads, length of chunk and kind of weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from binidx._native import lib

from binidx.native.arguments import LEVELS, items
from binidx.native.blend_index import MIN_ROWS, Blend, blend_exhaustive, blend_in_chunks, blend_weighted

Index = tuple[np.ndarray, np.ndarray]

EDGES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
KINDS = {
    "random": lambda rng, num: rng.random(num) + 1e-6,
    "equal": lambda rng, num: np.ones(num),
    "small ratios, many ties": lambda rng, num: rng.integers(1, 6, num).astype(np.float64),
    "1e-9 apart": lambda rng, num: 1 + 1e-9 * rng.permutation(num),
    "within 1e-9": lambda rng, num: 1 + 1e-9 * rng.random(num),
    "zipf": lambda rng, num: 1 / np.arange(1, num + 1),
    "almost all in one": lambda rng, num: np.where(np.arange(num) == rng.integers(num), 1.0, 1e-7),
    "tiny": lambda rng, num: 10.0 ** rng.integers(-300, 0, num),
}


def empty(size: int) -> Index:
    return np.full(size, -1, np.int16), np.full(size, -1, np.int64)


def plain_weighted(weights: np.ndarray, size: int) -> Index:
    """`native/blend_index.c`, the reference."""
    datasets, samples = empty(size)
    counts = np.empty(len(weights))
    pointers = [items(each, each.dtype, write=True) for each in (counts, datasets, samples)]
    lib.binidx_blend_weighted(items(weights, np.float64), len(weights), size, *pointers)
    return datasets, samples


def plain_exhaustive(sizes: np.ndarray) -> Index:
    datasets, samples = empty(total := int(sizes.sum()))
    scratch = np.empty(len(sizes)), np.empty(len(sizes)), np.empty(len(sizes), np.int16)
    pointers = [items(each, each.dtype, write=True) for each in (*scratch, datasets, samples)]
    lib.binidx_blend_exhaustive(items(sizes, np.int64), len(sizes), total, *pointers)
    return datasets, samples


def assert_same(found: Index, needed: Index) -> None:
    assert (found[0] == needed[0]).all()
    assert (found[1] == needed[1]).all()


def in_chunks(weights: np.ndarray, sizes: np.ndarray | None, size: int, level: int, chunk: int | None = None) -> Index:
    index = empty(size)
    blend_in_chunks(Blend(weights, sizes, *index, level), 1, chunk)
    return index


def random_blend(rng: np.random.Generator, kind: str, num: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights of sum 1, and sizes about in their proportion."""
    weights = KINDS[kind](rng, num)
    weights /= weights.sum()
    return weights, np.maximum(rng.integers(2), np.floor(weights * rows)).astype(np.int64)


def check_blend(rng: np.random.Generator, kind: str, num: int, rows: int) -> None:
    """Weighted and exhaustive at every level, in chunks of some random length."""
    weights, sizes = random_blend(rng, kind, num, rows)
    weighted, exhaustive = plain_weighted(weights, rows), plain_exhaustive(sizes)
    total = len(exhaustive[0])
    for level in LEVELS:
        lanes = lib.binidx_blend_lanes(level)
        assert_same(in_chunks(weights, None, rows, level, int(rng.integers(rows // lanes + 2))), weighted)
        shares = sizes / max(total, 1)
        assert_same(in_chunks(shares, sizes, total, level, int(rng.integers(total // lanes + 2))), exhaustive)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_equal_the_plain_scan(kind: str) -> None:
    rng = np.random.default_rng(list(KINDS).index(kind))
    for _ in range(5):
        for num in EDGES:
            check_blend(rng, kind, num, int(rng.integers(0, rng.choice([3, 100, 3000]))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num", [512, 2048])
def test_chunks_of_many_datasets_equal_the_plain_scan(kind: str, num: int) -> None:
    check_blend(np.random.default_rng(num), kind, num, 20_000)


def test_as_many_datasets_as_there_may_be() -> None:
    check_blend(np.random.default_rng(0), "random", 2**15 - 2, 500)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num", [2, 9, 40, 200])
def test_every_row_around_the_ends_of_chunks(level: int, num: int) -> None:
    weights, _ = random_blend(np.random.default_rng(num), "random", num, 0)
    lanes = lib.binidx_blend_lanes(level)
    for chunk in (1, 2, 63, 64, 65):
        for size in (chunk * lanes - 1, chunk * lanes, chunk * lanes + 1):
            assert_same(in_chunks(weights, None, size, level, chunk), plain_weighted(weights, size))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("num", [1, 3, 16, 64])
def test_any_number_of_threads_gives_the_same_rows(level: int, num: int) -> None:
    """Long enough for chunks in every thread, by the length that is chosen."""
    weights, sizes = random_blend(np.random.default_rng(num), "random", num, rows := 5 * 16 * MIN_ROWS + 1)
    weighted, exhaustive = plain_weighted(weights, rows), plain_exhaustive(sizes)
    for threads in (1, 2, 3, 5):
        counts = blend_weighted(weights, *(found := empty(rows)), num_threads=threads, level=level)
        assert_same(found, weighted)
        assert counts.tolist() == np.bincount(weighted[0], minlength=num).tolist()
        blend_exhaustive(sizes, *(found := empty(len(exhaustive[0]))), num_threads=threads, level=level)
        assert_same(found, exhaustive)


@pytest.mark.parametrize("num", [128, 129, 300])
@pytest.mark.parametrize("share", [1.0, 1 / 3, 5.0, 2.0**70])
def test_equal_weights_are_drawn_in_turn(num: int, share: float) -> None:
    """Of any sum; at the greatest a count more is lost in rounding, and the first dataset gives all."""
    for size in (0, 1, num - 1, num, num + 1, 7 * num + 5):
        weights = np.full(num, share / num)
        counts = blend_weighted(weights, *(found := empty(size)))
        assert_same(found, plain_weighted(weights, size))
        assert counts.tolist() == np.bincount(found[0], minlength=num).tolist()


def test_equal_sizes_are_drawn_in_turn() -> None:
    for num, each in ((129, 1), (200, 0), (300, 9)):
        blend_exhaustive(sizes := np.full(num, each), *(found := empty(num * each)))
        assert_same(found, plain_exhaustive(sizes))


@pytest.mark.parametrize("total", [1e-300, 0.5, 1 + 1e-6, 3.0, 1e308])
def test_weights_of_any_sum(total: float) -> None:
    for num in (2, 20, 150):
        weights, size = random_blend(np.random.default_rng(num), "random", num, 0)[0] * total, 60_000
        blend_weighted(weights, *(found := empty(size)))
        assert_same(found, plain_weighted(weights, size))


def test_two_builds_at_once_give_the_same_bytes() -> None:
    def build(seed: int) -> bytes:
        weights, sizes = random_blend(np.random.default_rng(seed), "random", 40, 70_000)
        found = [empty(100_000), empty(int(sizes.sum()))]
        blend_weighted(weights, *found[0], num_threads=2)
        blend_exhaustive(sizes, *found[1], num_threads=2)
        return b"".join(array.tobytes() for index in found for array in index)

    needed = [build(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(build, [*range(4)] * 3)) == needed * 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_wrong_guess_costs_time_and_no_row(level: int) -> None:
    rng = np.random.default_rng(1)
    for num in (2, 8, 20, 300):
        weights, _ = random_blend(rng, "random", num, 0)
        found = empty(3000)
        blend = Blend(weights, None, *found, level)
        guess = np.pad(rng.integers(0, 50, num), (0, blend.width - num), constant_values=0).astype(np.float64)
        guess[num:] = np.inf
        blend.draw(0, 3000 // blend.lanes, np.tile(guess, (blend.lanes, 1)))
        blend.replay(0, 3000, blend.counts_at(0), None)
        assert_same(found, plain_weighted(weights, 3000))


def test_a_good_guess_is_repaired_within_a_few_rows() -> None:
    """What makes chunks pay: otherwise replay would draw every row again."""
    rng = np.random.default_rng(2)
    for num in (2, 8, 64, 300):
        weights, _ = random_blend(rng, "random", num, 0)
        found = empty(40_000)
        blend = Blend(weights, None, *found, None)
        blend.draw(20_000, 20_000 // blend.lanes, np.stack([blend.counts_at(20_000)] * blend.lanes))
        true = blend.counts_at(0)
        blend.replay(0, 20_000, true, None)
        assert blend.replay(20_000, 40_000, true, blend.counts_at(20_000)) < 20 * num


def test_calls_out_of_bounds_are_errors() -> None:
    blend = Blend(np.full(3, 1 / 3), None, *empty(100), None)
    with pytest.raises(ValueError, match="rows from 0, 100 a chunk"):
        blend.draw(0, 100, np.zeros((blend.lanes, blend.width)))
    with pytest.raises(ValueError, match="rows from -1"):
        blend.draw(-1, 1, np.zeros((blend.lanes, blend.width)))
    with pytest.raises(ValueError, match="counts, rows from 0"):
        blend.draw(0, 1, np.zeros((blend.lanes, 3)))
    with pytest.raises(ValueError, match="rows 0 to 101 of 100"):
        blend.replay(0, 101, np.zeros(blend.width), None)
    with pytest.raises(ValueError, match="3 counts"):
        blend.replay(0, 1, np.zeros(3), None)
