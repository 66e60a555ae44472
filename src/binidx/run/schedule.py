"""Samples of each step, with a batch size that may ramp up; and the samples of each split.

    rampup (start, increment, samples)   from `start` in equal stretches of `samples` by `increment` to the global size

    stages   step 0 .. of 16 | step 400 .. of 32 | step 700 .. of 48        few, so any step is one search away

Sizes of the splits, on which the names of Megatron's index caches depend:

    train   train_samples, or train_iters * global_batch_size
    valid   (train_iters // eval_interval + 1) * eval_iters * global_batch_size; None, one epoch, with full_validation
    test    eval_iters * global_batch_size

Source: Megatron Core, `num_microbatches_calculator`, evaluated before each step; Megatron-LM,
`get_train_valid_test_num_samples` and `update_train_iters`.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from binidx.errors import ConfigError
from binidx.lazy_values import cached_property

Rampup = tuple[int, int, int]
"""(start batch size, increment, number of samples over which the batch size grows)."""


@dataclass(frozen=True)
class BatchSizeStage:
    """Steps of one size, up to the next stage.

    Attributes:
        first_step: the first of these steps.
        first_sample: number of samples consumed before it, over all ranks.
        batch_size: number of samples of a step, over all ranks.
    """

    first_step: int
    first_sample: int
    batch_size: int


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of the steps of a run.

    Args:
        global_batch_size: number of samples of a step over all ranks, after the ramp.
        micro_batch_size: number of samples that a rank reads at a time.
        data_parallel_size: number of ranks that read different samples.
        rampup: (start batch size, increment, number of samples of the ramp); None for a constant size.
        decrease_batch_size_if_needed: round down a size that is no multiple of a micro-batch of every rank.
        consumed_samples: number of samples read before step 0, by any topology.

    Raises:
        ConfigError: sizes that do not divide, or a ramp that does not lead to the global size.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int = 1
    rampup: Rampup | None = None
    decrease_batch_size_if_needed: bool = False
    consumed_samples: int = 0

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.micro_batch_size, self.data_parallel_size) < 1:
            raise ConfigError(f"batch schedule: found {self}, needs sizes of at least 1")
        if self.consumed_samples < 0:
            raise ConfigError(f"consumed_samples: found {self.consumed_samples}, needs 0 or more")
        if self.rampup is not None:
            _check_rampup(self.rampup, self.global_batch_size)
        self.stages  # noqa: B018 - checks every size it meets

    @property
    def block(self) -> int:
        """Number of samples in one micro-batch of every rank."""
        return self.micro_batch_size * self.data_parallel_size

    def batch_size(self, consumed_samples: int) -> int:
        """Return the number of samples in the step that begins after `consumed_samples` samples.

        Raises:
            ConfigError: the step is no multiple of a micro-batch of every rank.
        """
        size = self._unchecked_size(consumed_samples)
        if size < self.block or size % self.block:
            raise ConfigError(
                f"batch size: {size} after {consumed_samples} samples, needs a multiple of {self.block}, "
                f"{self.micro_batch_size} on each of {self.data_parallel_size} ranks"
            )
        return size

    @cached_property
    def stages(self) -> list[BatchSizeStage]:
        """The stages of the run, each of one batch size."""
        grown = max(self.rampup[2] + 1 if self.rampup else 0, self.consumed_samples)
        stages = [BatchSizeStage(0, self.consumed_samples, self.batch_size(self.consumed_samples))]
        while stages[-1].batch_size != self.batch_size(grown):
            stages.append(self._next_stage(stages[-1], grown))
        return stages

    def samples_before(self, step: int) -> int:
        """Return the number of samples consumed before a step."""
        stage = self.stages[bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]
        return stage.first_sample + (step - stage.first_step) * stage.batch_size

    def step_of(self, sample: int) -> int:
        """Return the step that consumes the sample at position `sample` of the order of consumption."""
        stage = self.stages[bisect_right(self.stages, sample, key=lambda stage: stage.first_sample) - 1]
        return stage.first_step + (sample - stage.first_sample) // stage.batch_size

    def _unchecked_size(self, consumed_samples: int) -> int:
        size = self.global_batch_size
        if self.rampup is not None and consumed_samples <= self.rampup[2]:
            start, increment, samples = self.rampup
            samples_per_increment = samples / ((size - start) // increment)
            size = start + int(consumed_samples / samples_per_increment) * increment
        return size - size % self.block if self.decrease_batch_size_if_needed else size

    def _next_stage(self, stage: BatchSizeStage, grown: int) -> BatchSizeStage:
        """Return the stage after `stage`; the ramp is complete after `grown` samples."""
        first, size = stage.first_sample, stage.batch_size
        most = (grown - first) // size + 1
        steps = bisect_right(range(most + 1), size, key=lambda step: self._unchecked_size(first + step * size))
        consumed = first + steps * size
        return BatchSizeStage(stage.first_step + steps, consumed, self.batch_size(consumed))


MAX_INCREMENTS = 1_000_000


def check_steps(steps: range, num_steps: int | None, argument: str = "steps") -> None:
    """Raise IndexError unless these consecutive steps are steps of a run of `num_steps`; None is one without end.

    Args:
        steps: the steps, counted from the run's `consumed_samples`.
        num_steps: number of steps of the run; None: it has no end.
        argument: name of the option, for the error.
    """
    first, stop = steps.start, steps.stop
    if steps.step != 1 or not 0 <= first <= stop or (num_steps is not None and stop > num_steps):
        found = f"{first}" if stop in (first, first + 1) else f"{first} to {stop}"
        has = "no end" if num_steps is None else f"{num_steps} steps"
        raise IndexError(f"{argument}: found {found}, the run has {has}, counted from 0")


def _check_rampup(rampup: Rampup, global_batch_size: int) -> None:
    if len(rampup) != 3:
        raise ConfigError(f"rampup_batch_size: found {rampup}, needs (start, increment, samples)")
    start, increment, samples = rampup
    grows = global_batch_size - start
    if start < 1 or increment < 1 or samples < 1 or grows < increment or grows % increment:
        raise ConfigError(
            f"rampup_batch_size: found {rampup} to {global_batch_size}, needs a start of at least 1 that whole "
            f"increments lead on from, over at least 1 sample"
        )
    if grows // increment > MAX_INCREMENTS:
        raise ConfigError(
            f"rampup_batch_size: {grows // increment:,} increments (need {MAX_INCREMENTS:,} at most); give larger ones"
        )


def split_sizes(
    schedule: BatchSchedule,
    *,
    train_iters: int | None = None,
    train_samples: int | None = None,
    eval_interval: int = 1000,
    eval_iters: int = 100,
    full_validation: bool = False,
) -> list[int | None]:
    """Return the numbers of samples of train, valid and test.

    Args:
        schedule: sizes of the steps; its `consumed_samples` do not matter.
        train_iters, train_samples: length of the run; one of the two.
        eval_interval: number of steps from one evaluation to the next.
        eval_iters: number of batches of each evaluation.
        full_validation: evaluate all of valid; its number is then None.

    Raises:
        ConfigError: both or neither of the two lengths, or an invalid number.
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
    """Return the number of steps in a run of `num_samples` samples: those of the ramp, then whole steps.

    Args:
        schedule: sizes of the steps; its `consumed_samples` do not matter.
        num_samples: number of samples of the run.
    """
    steps, consumed = 0, 0
    if schedule.rampup is not None:
        start = replace(schedule, consumed_samples=0)
        last = min(schedule.rampup[2], num_samples)
        steps = bisect_right(range(last // start.block + 2), last, key=start.samples_before)
        consumed = start.samples_before(steps)
    return steps + max(0, num_samples - consumed) // schedule.global_batch_size
