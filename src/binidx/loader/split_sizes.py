"""How many samples Megatron's trainer asks of each split, which the names of its index caches depend on.

    train   train_samples, or train_iters * global_batch_size
    valid   (train_iters // eval_interval + 1) * eval_iters * global_batch_size; None, one epoch, with full_validation
    test    eval_iters * global_batch_size

Source: Megatron-LM, `get_train_valid_test_num_samples` and `update_train_iters`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from binidx.errors import ConfigError
from binidx.loader.schedule import BatchSchedule


def split_sizes(
    schedule: BatchSchedule,
    *,
    train_iters: int | None = None,
    train_samples: int | None = None,
    eval_interval: int = 1000,
    eval_iters: int = 100,
    full_validation: bool = False,
) -> list[int | None]:
    """Samples of train, valid and test.

    Args:
        schedule: how large the steps are; where the run stands in it does not matter.
        train_iters, train_samples: how long the run is; one of the two.
        eval_interval: steps from one evaluation to the next.
        eval_iters: batches of each evaluation.

    Raises:
        ConfigError: both or none of the two, or a number that cannot be.
    """
    if (train_iters is None) == (train_samples is None):
        raise ConfigError(f"length: found train_iters {train_iters}, train_samples {train_samples}, needs one of them")
    if min(train_iters or 0, train_samples or 0, eval_iters) < 0 or eval_interval < 1:
        raise ConfigError(f"eval_interval: found {eval_interval}, needs at least 1, and the other numbers 0 or more")
    batch = schedule.global_batch_size
    if train_iters is None:
        samples = train_samples or 0
        iters = steps_of_samples(schedule, samples)
    else:
        samples, iters = train_iters * batch, train_iters
    valid = (iters // eval_interval + 1) * eval_iters * batch
    return [samples, None if full_validation else valid, eval_iters * batch]


def steps_of_samples(schedule: BatchSchedule, num_samples: int) -> int:
    """Steps of a run of so many samples, from its start: those while the batch grows, then whole ones."""
    steps, consumed = 0, 0
    if schedule.rampup is not None:
        start = replace(schedule, consumed_samples=0)
        last = min(schedule.rampup[2], num_samples)
        steps = bisect_right(range(last // start.block + 2), last, key=start.samples_before)
        consumed = start.samples_before(steps)
    return steps + max(0, num_samples - consumed) // schedule.global_batch_size
