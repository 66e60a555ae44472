"""Block shuffle against a model that is a few list slices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import IndexBuildError
from binidx.index.block_shuffle import build_block_shuffle_index
from binidx.native import RandomState


def model(samples_per_epoch: list[int], block_samples: int, blocks_mixed: int, seed: int) -> list[int]:
    rng, served, first = np.random.RandomState(seed), [], 0
    for count in samples_per_epoch:
        numbers = list(range(first, first + count))
        blocks = [numbers[start : start + block_samples] for start in range(0, count, block_samples)]
        rng.shuffle(blocks)  # type: ignore[arg-type]
        for start in range(0, len(blocks), blocks_mixed):
            window = [number for block in blocks[start : start + blocks_mixed] for number in block]
            rng.shuffle(window)
            served += window
        first += count
    return served


@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=4),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_blocks_are_shuffled_and_then_the_samples_of_each_window(
    samples_per_epoch: list[int], block_samples: int, blocks_mixed: int, seed: int
) -> None:
    ours = build_block_shuffle_index(np.array(samples_per_epoch), block_samples, blocks_mixed, RandomState(seed))
    assert ours.tolist() == model(samples_per_epoch, block_samples, blocks_mixed, seed)


def test_an_epoch_does_not_depend_on_those_after_it() -> None:
    orders = [build_block_shuffle_index(np.array([50] * epochs), 8, 3, RandomState(7)) for epochs in (1, 2, 5)]
    assert orders[0].dtype == np.uint32
    assert (orders[0] == orders[2][:50]).all()
    assert (orders[1] == orders[2][:100]).all()


@pytest.mark.parametrize(("block_samples", "blocks_mixed"), [(0, 4), (4, 0), (-1, 4)])
def test_blocks_of_nothing_are_refused(block_samples: int, blocks_mixed: int) -> None:
    with pytest.raises(IndexBuildError, match="both need at least 1"):
        build_block_shuffle_index(np.array([10]), block_samples, blocks_mixed, RandomState(1))
