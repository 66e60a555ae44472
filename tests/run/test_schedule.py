"""Steps and samples against Megatron's own calculator, asked before every step."""

import random

import pytest
from helpers.oracle import megatron  # noqa: F401  (its import warns)

from binidx.errors import ConfigError
from binidx.run.schedule import BatchSchedule


def their_sizes(schedule: BatchSchedule, num_steps: int) -> list[int]:
    from megatron.core.num_microbatches_calculator import _build_num_microbatches_calculator

    calculator = _build_num_microbatches_calculator(
        1,
        list(schedule.rampup) if schedule.rampup else None,
        schedule.global_batch_size,
        schedule.micro_batch_size,
        schedule.data_parallel_size,
        schedule.decrease_batch_size_if_needed,
    )
    sizes: list[int] = []
    for _ in range(num_steps):
        calculator.update(sum(sizes), consistency_check=True)
        sizes.append(calculator.get() * schedule.block)
    return sizes


def random_schedule(choose: random.Random) -> BatchSchedule:
    micro, ranks = choose.randrange(1, 5), choose.randrange(1, 5)
    unit = 1 if (decrease := choose.random() < 0.4) else micro * ranks
    start = micro * ranks * choose.randrange(1, 4)
    increment = unit * choose.randrange(1, 5)
    rampup = (start, increment, choose.randrange(1, 5_000)) if choose.random() < 0.8 else None
    return BatchSchedule(start + increment * choose.randrange(1, 9), micro, ranks, rampup, decrease or rampup is None)


@pytest.mark.parametrize("seed", range(120))
def test_every_step_takes_what_megatron_takes(seed: int) -> None:
    schedule = random_schedule(random.Random(seed))
    consumed = 0
    for step, size in enumerate(their_sizes(schedule, 300)):
        assert (schedule.samples_before(step), schedule.batch_size(consumed)) == (consumed, size)
        assert {schedule.step_of(sample) for sample in (consumed, consumed + size - 1)} == {step}
        consumed += size


def test_a_step_far_on_is_found_at_once() -> None:
    schedule = BatchSchedule(2048, 8, 256, None)
    assert schedule.samples_before(82_998) == 82_998 * 2048
    assert schedule.step_of(10**12) == 10**12 // 2048


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 3, 1), "10 after 0 samples, needs a multiple of 3"),
        ((2, 3, 1, None, True), "0 after 0 samples"),
        ((16, 1, 1, (16, 4, 100)), "whole increments"),
        ((16, 1, 1, (10, 4, 100)), "whole increments"),
        ((16, 1, 1, (4, 4, 0)), "at least 1 sample"),
        ((16, 1, 1, (4, 4)), "needs .start, increment, samples."),
        ((32, 8, 1, (8, 4, 1000)), "12 after 166 samples|12 after 168 samples"),
        ((0, 1, 1), "at least 1"),
        ((2**40, 1, 1, (1, 1, 2**41)), "1,099,511,627,775 increments .need 1,000,000 at most"),
    ],
)
def test_what_does_not_divide_is_an_error(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSchedule(*arguments)
