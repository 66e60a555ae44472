"""Samples that Megatron's trainer asks of each split."""

from __future__ import annotations

import pytest

from binidx.errors import ConfigError
from binidx.run.schedule import BatchSchedule, split_sizes, steps_of_samples

PLAIN = BatchSchedule(32, 4, 4)


def test_sizes_by_steps() -> None:
    assert split_sizes(PLAIN, train_iters=500, eval_interval=100, eval_iters=10) == [16000, 6 * 10 * 32, 10 * 32]
    assert split_sizes(PLAIN, train_iters=99, eval_interval=100, eval_iters=0) == [99 * 32, 0, 0]


def test_sizes_by_samples_count_whole_steps() -> None:
    found = split_sizes(PLAIN, train_samples=16_031, eval_interval=500, eval_iters=1)
    assert found == [16_031, 2 * 32, 32]
    assert split_sizes(PLAIN, train_samples=15_999, eval_interval=500, eval_iters=1) == [15_999, 32, 32]


def test_full_validation_asks_for_an_epoch() -> None:
    assert split_sizes(PLAIN, train_iters=10, full_validation=True)[1] is None


@pytest.mark.parametrize("consumed", [0, 320])
@pytest.mark.parametrize("samples", [0, 15, 16, 500, 1000, 1001, 5000])
def test_steps_while_the_batch_grows_are_counted_one_by_one(samples: int, consumed: int) -> None:
    schedule = BatchSchedule(64, 4, 4, (16, 16, 1000), consumed_samples=consumed)
    # As Megatron-LM's update_train_iters goes.
    steps, served = 0, 0
    while served <= 1000 and served <= samples:
        served += schedule.batch_size(served)
        steps += 1
    steps += max(0, samples - served) // 64
    assert steps_of_samples(schedule, samples) == steps


def test_one_length_is_needed() -> None:
    for given in (
        {},
        {"train_iters": 1, "train_samples": 1},
        {"train_iters": -1},
        {"train_iters": 1, "eval_interval": 0},
    ):
        with pytest.raises(ConfigError, match=r"needs"):
            split_sizes(PLAIN, **given)
