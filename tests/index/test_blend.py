"""Blends against Megatron's helper, and against the rule in five lines of Python."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index.blend import build_blend_index, build_exhaustive_blend_index

x86 = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"),
    reason="elsewhere Megatron's helper may fuse the multiply and the add",
)


def greedy(weights: list[float], limits: list[int | None], size: int) -> tuple[list[int], list[int]]:
    """The rule: who is furthest behind, the first of equals. Python floats are rounded after every operation."""
    drawn, order = [0] * len(weights), []
    for sample in range(size):
        unspent = [d for d, limit in enumerate(limits) if limit is None or drawn[d] < limit]
        first = max(unspent, key=lambda d: (weights[d] * float(max(sample, 1)) - float(drawn[d]), -d))
        order.append((first, drawn[first]))
        drawn[first] += 1
    return [d for d, _ in order], [s for _, s in order]


def assert_same(found: tuple[np.ndarray, np.ndarray], needed: tuple[np.ndarray, np.ndarray]) -> None:
    assert (found[0].dtype, found[1].dtype) == (np.int16, np.int64)
    assert (found[0] == needed[0]).all()
    assert (found[1] == needed[1]).all()


def megatron_blend(weights: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    index, sample_index = np.zeros(size, np.int16), np.zeros(size, np.int64)
    megatron.helpers.build_blending_indices(index, sample_index, weights, len(weights), size, False)
    return index, sample_index


def megatron_exhaustive(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    index, sample_index = np.zeros(sizes.sum(), np.int16), np.zeros(sizes.sum(), np.int64)
    megatron.helpers.build_exhaustive_blending_indices(index, sample_index, sizes, len(sizes))
    return index, sample_index


def normalised(weights: np.ndarray) -> np.ndarray:
    """As often as Megatron does: in the config, and again in the blend."""
    weights = weights / np.sum(weights)
    return weights / np.sum(weights)


def random_weights(rng: np.random.Generator, kind: str, num: int) -> np.ndarray:
    kinds = {
        "random": lambda: rng.random(num) + 1e-6,
        "equal": lambda: np.ones(num),
        "small ratios, many ties": lambda: rng.integers(1, 6, num).astype(np.float64),
        "1e-9 apart": lambda: 1 + 1e-9 * rng.permutation(num),
        "zipf": lambda: 1 / np.arange(1, num + 1),
        "almost all in one": lambda: np.where(np.arange(num) == rng.integers(num), 1.0, 1e-7),
        "tiny": lambda: 10.0 ** rng.integers(-300, 0, num),
    }
    return kinds[kind]()


KINDS = ["random", "equal", "small ratios, many ties", "1e-9 apart", "zipf", "almost all in one", "tiny"]


@x86
@pytest.mark.parametrize("kind", KINDS)
def test_weighted_equals_megatrons(kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(300):
        num, size = int(rng.integers(1, rng.choice([3, 10, 80]))), int(rng.integers(0, 2000))
        weights = random_weights(rng, kind, num)
        for shares in (normalised(weights), weights):
            assert_same(build_blend_index(shares, size), megatron_blend(shares, size))


@x86
@pytest.mark.parametrize("num", [2, 500, 2**15 - 2])
def test_weighted_equals_megatrons_for_many_datasets(num: int) -> None:
    weights = normalised(np.random.default_rng(num).random(num) + 1e-6)
    assert_same(build_blend_index(weights, 1000), megatron_blend(weights, 1000))


@x86
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_long_blends_in_threads_equal_megatrons(kind: str, num_threads: int) -> None:
    """So long that each thread draws chunks, and replay repairs them."""
    rng = np.random.default_rng(num_threads)
    for num in (2, 7, 17, 33):
        weights, size = normalised(random_weights(rng, kind, num)), 200_001
        assert_same(build_blend_index(weights, size, num_threads=num_threads), megatron_blend(weights, size))


@x86
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_long_exhaustive_blends_in_threads_equal_megatrons(num_threads: int) -> None:
    rng = np.random.default_rng(num_threads)
    for num in (2, 7, 17, 33):
        sizes = 200_000 // num + rng.integers(1, 20_000 // num, num) * rng.integers(0, 2, num)
        assert_same(build_exhaustive_blend_index(sizes, num_threads=num_threads), megatron_exhaustive(sizes))


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_equals_the_rule(kind: str) -> None:
    rng = np.random.default_rng(8)
    for _ in range(20):
        weights, size = normalised(random_weights(rng, kind, int(rng.integers(1, 12)))), int(rng.integers(0, 200))
        assert_same(build_blend_index(weights, size), greedy(weights.tolist(), [None] * len(weights), size))


def test_ties_follow_from_both_roundings() -> None:
    """A fused multiply-add, which rounds once, changes rows of this blend."""
    weights = normalised(np.array([1.0, 2, 3, 5, 7]))
    assert_same(build_blend_index(weights, 20_000), greedy(weights.tolist(), [None] * 5, 20_000))


def test_every_prefix_is_close_to_its_shares() -> None:
    weights = normalised(np.array([5.0, 3, 1, 1]))
    index, _ = build_blend_index(weights, 3000)
    drawn = np.cumsum(index[:, None] == np.arange(4), axis=0)
    assert np.abs(drawn - weights * np.arange(1, 3001)[:, None]).max() < 2


def test_samples_of_each_dataset_are_counted_from_0() -> None:
    for index, sample_index in (build_blend_index([0.7, 0.2, 0.1], 500), build_exhaustive_blend_index([90, 7, 3])):
        for dataset in range(3):
            mine = sample_index[index == dataset]
            assert (mine == np.arange(len(mine))).all()


def test_one_dataset_gives_every_sample() -> None:
    for index, sample_index in (build_blend_index([1.0], 7), build_exhaustive_blend_index([7])):
        assert index.tolist() == [0] * 7
        assert sample_index.tolist() == [*range(7)]


def random_sizes(rng: np.random.Generator, least: int) -> np.ndarray:
    sizes = rng.integers(least, rng.choice([2, 5, 60, 700]), rng.integers(1, rng.choice([3, 10, 60])))
    if rng.random() < 0.2:
        sizes[:] = sizes[0]
    return sizes


@x86
def test_exhaustive_equals_megatrons() -> None:
    rng = np.random.default_rng(9)
    for _ in range(1500):
        sizes = random_sizes(rng, 1)
        assert_same(build_exhaustive_blend_index(sizes), megatron_exhaustive(sizes))


def test_exhaustive_equals_the_rule() -> None:
    rng = np.random.default_rng(10)
    for _ in range(100):
        sizes = random_sizes(rng, 0)[:10] // 5
        total = int(sizes.sum())
        weights = [int(size) / total if total else 0.0 for size in sizes]
        assert_same(build_exhaustive_blend_index(sizes), greedy(weights, sizes.tolist(), total))


@x86
def test_a_size_of_0_changes_nothing_for_the_others() -> None:
    """Megatron draws from such a dataset, never spends it, and writes past its arrays; so it is shown them without."""
    rng = np.random.default_rng(11)
    for _ in range(300):
        sizes = random_sizes(rng, 1)
        with_zeros = np.zeros(2 * len(sizes), np.int64)
        places = np.sort(rng.choice(2 * len(sizes), len(sizes), replace=False))
        with_zeros[places] = sizes
        index, sample_index = megatron_exhaustive(sizes)
        assert_same(build_exhaustive_blend_index(with_zeros), (places[index], sample_index))


def test_exhaustive_draws_each_sample_once() -> None:
    index, sample_index = build_exhaustive_blend_index([0, 5, 0, 9, 1])
    assert np.bincount(index, minlength=5).tolist() == [0, 5, 0, 9, 1]
    assert len({*zip(index.tolist(), sample_index.tolist(), strict=True)}) == 15


def test_zero_samples_are_an_empty_blend() -> None:
    for index, sample_index in (build_blend_index([0.5, 0.5], 0), build_exhaustive_blend_index([0, 0])):
        assert len(index) == len(sample_index) == 0


@pytest.mark.parametrize(
    ("weights", "size", "message"),
    [
        ([0.5, 0.0], 1, r"weights \[0.5, 0.0\], need each above 0 and finite"),
        ([0.5, -0.5], 1, "need each above 0"),
        ([0.5, np.nan], 1, "need each above 0 and finite"),
        ([np.inf], 1, "need each above 0 and finite"),
        ([], 1, r"datasets of shape \(0,\), need 1 to 32766"),
        ([[0.5, 0.5]], 1, r"shape \(1, 2\)"),
        ([1.0] * 32767, 1, r"shape \(32767,\)"),
        ([1.0], -1, "-1 samples, need 0 to"),
        ([1.0], 2**60, "samples, need 0 to"),
    ],
)
def test_invalid_weights_and_sizes_are_errors(weights: list[float], size: int, message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build_blend_index(weights, size)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [([3, -1], r"sizes \[3, -1\], need each 0 or more"), ([], r"shape \(0,\)"), ([2**52, 2**52], "samples, need 0")],
)
def test_invalid_exhaustive_sizes_are_errors(sizes: list[int], message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build_exhaustive_blend_index(sizes)
