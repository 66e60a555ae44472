"""Samples of each step, whose size may change during a run; and the samples of each split.

    rampup (start, increment, samples)   from `start` in equal stretches of `samples` by `increment` to the global size
    thresholds (first sample, size) ...  `--step-batch-size-schedule`: steps that begin at or after a threshold

    stages   step 0 .. of 16 | step 400 .. of 32 | step 700 .. of 48        few, so any step is one search away

Sizes of the splits, on which the names of Megatron's indices depend:

    train   train_samples, or train_iters * global_batch_size
    valid   (train_iters // eval_interval + 1) * eval_iters * global_batch_size; None, one epoch, with full_validation
    test    eval_iters * global_batch_size

Source: Megatron Core, `num_microbatches_calculator`, evaluated before each step; Megatron-LM,
`get_train_valid_test_num_samples`, `update_train_iters`, and the counters of `train`. Ramps are those of 0.16, as later
versions ignore them; thresholds those of main (d98e8a64).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.forks import cached_property

Rampup = tuple[int, int, int]
"""(start batch size, increment, number of samples over which the batch size grows)."""

Thresholds = tuple[tuple[int, int], ...]
"""(samples consumed, batch size of the steps from there on), ascending, from 0 samples on."""

SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_thresholds(schedule: str | Sequence[Sequence[int]], sequence_length: int) -> Thresholds:
    """Return the thresholds of a `--step-batch-size-schedule`.

    Args:
        schedule: Megatron's text "0:768 250B:1536", whose thresholds count tokens, or pairs (samples, batch size).
        sequence_length: tokens of a sample.

    Raises:
        ConfigError: malformed text, thresholds that do not ascend from 0, or a batch without samples.
    """
    subject = f"step_batch_size_schedule: found {schedule!r}"
    try:
        if isinstance(schedule, str):
            entries = [entry.split(":") for entry in schedule.replace(",", " ").split()]
            pairs = [(_parse_count(tokens) // sequence_length, _parse_count(size)) for tokens, size in entries]
        else:
            pairs = [(int(samples), int(size)) for samples, size in schedule]
    except (ValueError, OverflowError) as error:
        raise ConfigError(f'{subject} ({error}), needs "THRESHOLD:SIZE ..." in tokens, or pairs in samples') from None
    pairs.sort(key=lambda pair: pair[0])
    ascends = all(first < after for (first, _), (after, _) in pairwise(pairs))
    if not pairs or pairs[0][0] != 0 or not ascends or min(size for _, size in pairs) < 1:
        raise ConfigError(f"{subject}, needs thresholds that ascend from 0, and batches of at least 1; found {pairs}")
    return tuple(pairs)


def _parse_count(text: str) -> int:
    """Return a number such as 250B, as Megatron rounds it."""
    number = text.strip().upper()
    return int(float(number[:-1]) * int(SUFFIXES[number[-1]])) if number[-1:] in SUFFIXES else int(float(number))


@dataclass(frozen=True)
class BatchSizeStage:
    """Steps of one size, up to the next stage.

    Attributes:
        first_step: the first of these steps.
        first_sample: number of samples consumed before it, over all ranks.
        batch_size: number of samples of a step, over all ranks.
        requested: that number before it was rounded down to whole micro-batches of every rank.
    """

    first_step: int
    first_sample: int
    batch_size: int
    requested: int


@dataclass(frozen=True)
class BatchSchedule:
    """Sizes of the steps of a run.

    Args:
        global_batch_size: number of samples of a step over all ranks, after the ramp.
        micro_batch_size: number of samples that a rank reads at a time.
        data_parallel_size: number of ranks that read different samples.
        rampup: (start batch size, increment, number of samples of the ramp); None for a constant size.
        decrease_batch_size_if_needed: round down a size that is no multiple of a micro-batch of every rank.
        consumed_samples: number of samples read before the first step, by any topology.
        thresholds: sizes that change at numbers of samples; then without `rampup`, and `global_batch_size` has no
            effect. A size that no longer divides ends the steps: another number of ranks must resume there.
        earlier_samples: number of samples consumed from earlier datasets, which ramps and thresholds count, too.
        first_step: number of the step that follows `consumed_samples`.
        skipped_steps: steps whose samples are read and not trained, ascending.
        stop_step: first step after the run; None: the run ends with its samples.

    Raises:
        ConfigError: sizes that do not divide, or a ramp that does not lead to the global size.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int = 1
    rampup: Rampup | None = None
    decrease_batch_size_if_needed: bool = False
    consumed_samples: int = 0
    thresholds: Thresholds | None = None
    earlier_samples: int = 0
    first_step: int = 0
    skipped_steps: tuple[int, ...] = ()
    stop_step: int | None = None

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.micro_batch_size, self.data_parallel_size) < 1:
            raise ConfigError(f"batch schedule: found {self}, needs sizes of at least 1")
        if self.rampup is not None:
            _check_rampup(self.rampup, self.global_batch_size)
        if self.thresholds and (self.rampup or self.decrease_batch_size_if_needed):
            raise ConfigError("step_batch_size_schedule: needs no rampup_batch_size and decrease_batch_size_if_needed")
        self.stages  # noqa: B018 - checks every size it meets

    @property
    def block(self) -> int:
        """Number of samples in one micro-batch of every rank."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def identity(self) -> dict[str, Any]:
        """The fields on which the order depends; those that were added later only if they have an effect."""
        added = {"thresholds", "earlier_samples", "first_step", "skipped_steps", "stop_step"}
        unused = {option.name for option in fields(self) if getattr(self, option.name) == option.default}
        return {name: value for name, value in asdict(self).items() if name not in added & unused}

    def batch_size(self, consumed_samples: int) -> int:
        """Return the number of samples in the step that begins after `consumed_samples` samples.

        Raises:
            ConfigError: the step is no multiple of a micro-batch of every rank.
        """
        size = self._requested(consumed_samples)
        size -= size % self.block if self.decrease_batch_size_if_needed else 0
        if size < self.block or size % self.block:
            raise ConfigError(
                f"batch size: {size} after {consumed_samples} samples, needs a multiple of {self.block}, "
                f"{self.micro_batch_size} on each of {self.data_parallel_size} ranks"
            )
        return size

    @property
    def stages(self) -> list[BatchSizeStage]:
        """The stages of the run, each of one batch size."""
        return self._plan[0]

    @property
    def end(self) -> int | None:
        """The position at which the run ends in any case: before `stop_step`, or at a size that does not divide."""
        ends = [self._plan[1], None if self.stop_step is None else self.samples_before(self.stop_step)]
        return min((end for end in ends if end is not None), default=None)

    @property
    def blocked_by(self) -> int | None:
        """The size that does not divide, at which the steps end; None: all sizes divide."""
        return None if self._plan[1] is None else self._requested(self._plan[1])

    def samples_before(self, step: int) -> int:
        """Return the number of samples consumed before a step."""
        stage = self.stages[bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1]
        return stage.first_sample + (step - stage.first_step) * stage.batch_size

    def step_of(self, sample: int) -> int:
        """Return the step that consumes the sample at position `sample` of the order of consumption."""
        stage = self.stages[bisect_right(self.stages, sample, key=lambda stage: stage.first_sample) - 1]
        return stage.first_step + (sample - stage.first_sample) // stage.batch_size

    def trains(self, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the samples of each step are trained; those of iterations to skip are only read."""
        return ~np.isin(steps, self.skipped_steps)

    def skipped_before(self, step: int) -> int:
        """Return Megatron's `skipped_train_samples` before a step: those read by skipped steps, and rounded off others.

        Samples that `decrease_batch_size_if_needed` rounded off a step were not read: a later step reads them.
        """
        skipped = sum(self.samples_before(number + 1) - self.samples_before(number) for number in self._skips_to(step))
        starts = [*(stage.first_step for stage in self.stages), max(step, self.stages[-1].first_step)]
        for stage, (first, stop) in zip(self.stages, pairwise(starts), strict=True):
            read = max(0, min(stop, step) - first) - len([n for n in self._skips_to(step) if first <= n < stop])
            skipped += read * (stage.requested - stage.batch_size)
        return skipped

    def _skips_to(self, step: int) -> tuple[int, ...]:
        return self.skipped_steps[: bisect_left(self.skipped_steps, step)]

    @cached_property
    def _plan(self) -> tuple[list[BatchSizeStage], int | None]:
        """The stages, and the position at which the next size does not divide; None: there is none."""
        stages = [self._stage(self.first_step, self.consumed_samples)]
        while (steps := self._steps_to_change(stages[-1])) is not None:
            position = stages[-1].first_sample + steps * stages[-1].batch_size
            if self.thresholds and self._requested(position) % self.block:
                return stages, position
            stages.append(self._stage(stages[-1].first_step + steps, position))
        return stages, None

    def _stage(self, step: int, position: int) -> BatchSizeStage:
        return BatchSizeStage(step, position, self.batch_size(position), self._requested(position))

    def _steps_to_change(self, stage: BatchSizeStage) -> int | None:
        """Return the number of steps of a stage after which another size is requested; None: it stays."""
        total, size = stage.first_sample + self.earlier_samples, stage.batch_size
        if self.thresholds:
            change = next((threshold for threshold, _ in self.thresholds if threshold > total), None)
            return None if change is None else -(-(change - total) // size)
        if self.rampup is None or stage.requested == self.global_batch_size:
            return None
        most = (self.rampup[2] + 1 - total) // size + 1

        def requested(step: int) -> int:
            return self._requested(stage.first_sample + step * size)

        return bisect_right(range(most + 1), stage.requested, key=requested)

    def _requested(self, position: int) -> int:
        """Return the size of the step that begins at a position, before it is rounded."""
        total, size = position + self.earlier_samples, self.global_batch_size
        if self.thresholds:
            return self.thresholds[max(bisect_right(self.thresholds, total, key=lambda pair: pair[0]) - 1, 0)][1]
        if self.rampup is not None and total <= self.rampup[2]:
            start, increment, samples = self.rampup
            samples_per_increment = samples / ((size - start) // increment)
            size = start + int(total / samples_per_increment) * increment
        return size


@dataclass(frozen=True)
class Phase:
    """Steps of a run between two transitions, which have a dataset of their own.

    Attributes:
        first_step, stop_step: its iterations, counted from 0 over the whole run; None: it ends with its samples.
        num_samples: least number of samples of its train split.
        position: samples of that split that were consumed before `first_step`.
        total: samples of the run that were consumed before `first_step`.
    """

    first_step: int
    stop_step: int | None
    num_samples: int
    position: int
    total: int


def divide_phases(schedule: BatchSchedule, transitions: Sequence[int], num_samples: int) -> list[Phase]:
    """Return the phases of a run from a step on: the current one, and the later ones.

    A phase has the samples between two transitions, in iterations of the global batch size, and is read from its first
    sample on. A start within a phase continues after as many samples as its iterations have at that size, even if they
    were rounded down.

    Args:
        schedule: sizes of the steps.
        transitions: iterations after which the datasets are built anew.
        num_samples: number of train samples of the whole run.

    Raises:
        ConfigError: no phase has a sample after the schedule's first step.

    Source: Megatron-LM (main), `get_train_valid_test_num_samples` and `build_train_valid_test_data_loaders`.
    """
    size, first_step, stop_step = schedule.global_batch_size, schedule.first_step, schedule.stop_step
    bounds = sorted({0, *(step * size for step in transitions), num_samples})
    total, phases = schedule.consumed_samples + schedule.earlier_samples, list[Phase]()
    later = sorted(step for step in {*transitions} if step > first_step and (stop_step is None or step < stop_step))
    for step, after in zip([first_step, *later], [*later, stop_step], strict=True):
        if (number := bisect_right(bounds, step * size)) == len(bounds):
            break
        position = (step - max(before for before in (0, *transitions) if before <= step)) * size
        phases.append(Phase(step, after, bounds[number] - bounds[number - 1], position, total))
        if after is not None:
            steps = replace(schedule, first_step=step, consumed_samples=total, earlier_samples=0, stop_step=None)
            total = steps.samples_before(after)
    if not phases:
        raise ConfigError(
            f"phase_transition_iterations: found no samples after iteration {first_step:,} (the last phase ends after "
            f"{bounds[-1]:,}), needs more in sizes"
        )
    return phases


MAX_INCREMENTS = 1_000_000


def check_steps(steps: range, num_steps: int | None, argument: str = "steps", first_step: int = 0) -> None:
    """Raise IndexError unless these consecutive steps are steps of a run of `num_steps`; None is one without end.

    Args:
        steps: the steps.
        num_steps: number of steps of the run; None: it has no end.
        argument: name of the option, for the error.
        first_step: number of the run's first step.
    """
    first, stop = steps.start, steps.stop
    if steps.step != 1 or not first_step <= first <= stop or (num_steps is not None and stop > num_steps):
        found = f"{first}" if stop in (first, first + 1) else f"{first}:{stop}"
        found += ", needs the first step before the last;" if first > stop else ","
        has = "no end" if num_steps is None else f"{num_steps} steps"
        begins = f", and begins with step {first_step}" if first_step else ""
        raise IndexError(f"{argument}: found {found} the run has {has}, counted from 0{begins}")


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
    lengths = {"train_iters": train_iters or 0, "train_samples": train_samples or 0, "eval_iters": eval_iters}
    for name, number in {**lengths, "eval_interval": eval_interval}.items():
        if number < (least := int(name == "eval_interval")):
            raise ConfigError(f"{name}: found {number}, needs {least} or more")
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
    if schedule.thresholds is not None:  # the steps that a run of Megatron needs, whether they divide or not
        for (_, size), (change, _) in pairwise([*schedule.thresholds, (num_samples, 0)]):
            more = max(0, -(-(min(change, num_samples) - consumed) // size))
            steps, consumed = steps + more, consumed + more * size
        return steps
    if schedule.rampup is not None:
        start = replace(schedule, consumed_samples=0, earlier_samples=0, first_step=0, stop_step=None)
        last = min(schedule.rampup[2], num_samples)
        steps = bisect_right(range(last // start.block + 2), last, key=start.samples_before)
        consumed = start.samples_before(steps)
    return steps + max(0, num_samples - consumed) // schedule.global_batch_size
