"""Global order of a run: the rank, step and slot at which each sample is read, as arrays.

    position  0 1 2 3 4 5 6 7 8 9 ..    samples consumed before it, over all ranks
    rank      0 0 1 1 2 2 0 0 1 1 ..    micro-batches of 2 on 3 ranks
    step      0 0 0 0 0 0 0 0 0 0 ..    two micro-batches of each rank
    slot      0 1 0 1 0 1 2 3 2 3 ..    place among the samples of the rank's step

Rows are sorted by step, then rank, then slot, so the step of a rank is contiguous.

    steps ── readings ──► samples        `Reading`: GlobalOrder, packed.packed_run.PackedReading
          ◄─ served_at ──

`RunOrder` joins a reading with an order of samples, and answers every question about both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np

from binidx.errors import ConfigError
from binidx.loader.samplers import DataloaderType, permutation
from binidx.order.order_protocols import Numbers
from binidx.order.source_order import sorted_unique
from binidx.run.schedule import BatchSchedule, check_steps


class SampleReads(NamedTuple):
    """Reads of samples: step, rank, slot, position and sample number of each; columns of equal length, int64."""

    step: Numbers
    rank: Numbers
    slot: Numbers
    position: Numbers
    sample: Numbers

    def at(self, rows: Any) -> SampleReads:
        """Return some of the reads, by numbers, a slice or a mask."""
        return SampleReads(*(column[rows] for column in self))

    @staticmethod
    def joined(parts: Iterable[SampleReads]) -> SampleReads:
        """Return the reads of all parts."""
        return SampleReads(*map(np.concatenate, zip(*parts, strict=True)))


class Reading(Protocol):
    """Reads of samples: rank, step and slot of each."""

    @property
    def schedule(self) -> BatchSchedule:
        """Sizes of the steps, and the number of ranks."""

    @property
    def dataloader_type(self) -> str:
        """Name of the rule by which loaders draw samples."""

    @property
    def knows_earlier(self) -> bool:
        """True if the order has the samples that were read before the first step."""

    @property
    def identity(self) -> Any:
        """The values on which the reads depend, as JSON."""

    @property
    def end(self) -> int | None:
        """The position at which the run ends; None if it starts over."""

    def num_steps(self) -> int | None:
        """Return the first step after the run; None if it has no end."""

    def readings(self, steps: range, rank: int | None = None) -> SampleReads:
        """Return the reads of some steps, of one rank or all, sorted by step, rank and slot."""

    def served_at(self, samples: Numbers, stop: int) -> SampleReads:
        """Return all reads of some samples at positions before `stop`, in the order of the steps."""

    def samples_at(self, position: Numbers) -> Numbers:
        """Return the sample at each position."""

    def count_passes(self, num_epochs: int, stop_step: int) -> int:
        """Return the number of passes over a source that have begun before a step, or more.

        Args:
            num_epochs: that of the order.
            stop_step: the step.
        """


@dataclass(frozen=True)
class GlobalOrder:
    """The samples that the loaders of all ranks read, in order.

    Args:
        schedule: sizes of the steps.
        num_samples: number of samples of the dataset.
        dataloader_type, data_sharding: as in `build_pretraining_data_loader`.

    Source: the samplers of Megatron-LM, for all ranks at once. Where a "cyclic" dataset without data_sharding does not
    divide by its step, the surplus batches that its first ranks get at the end of an epoch are no steps and left out.
    """

    schedule: BatchSchedule
    num_samples: int
    dataloader_type: DataloaderType = "single"
    data_sharding: bool = True

    def __post_init__(self) -> None:
        if self.num_samples < self.schedule.block:
            raise ConfigError(f"order: {self.num_samples} samples, one micro-batch a rank needs {self.schedule.block}")
        if self.dataloader_type == "cyclic" and self._consumed % self._active % self.schedule.block:
            raise ConfigError(
                f"consumed_samples: {self._consumed} is {self._consumed % self._active} into its epoch, "
                f"needs a multiple of {self.schedule.block}"
            )

    @property
    def _consumed(self) -> int:
        return self.schedule.consumed_samples

    @property
    def end(self) -> int | None:
        """The position at which the run ends; None if its loaders are cyclic and start over."""
        if self.dataloader_type == "cyclic":
            return self.schedule.end
        left = max(self.num_samples - self._consumed, 0)
        end = self._consumed + left // self.schedule.block * self.schedule.block
        return end if self.schedule.end is None else min(end, self.schedule.end)

    def num_steps(self) -> int | None:
        """Return the first step after the run: the number of its steps, unless it begins with a later one than step 0;
        None if its loaders are cyclic and start over.
        """
        return None if self.end is None else self.schedule.step_of(self.end)

    @property
    def knows_earlier(self) -> bool:
        """True if samples before `consumed_samples` are known; those of cyclic runs depend on earlier ranks."""
        return self.dataloader_type == "single"

    def count_passes(self, num_epochs: int, stop_step: int) -> int:
        """Return `num_epochs`, the passes that the order has."""
        return num_epochs

    @property
    def identity(self) -> dict[str, Any]:
        """The values on which the order of the reads depends."""
        return {name: getattr(self, name) for name in vars(self)} | {"schedule": self.schedule.identity}

    def readings(self, steps: range, rank: int | None = None) -> SampleReads:
        """Return the reads of consecutive whole steps, of one rank or all.

        Args:
            steps: steps, counted from the run's `consumed_samples`.
            rank: a data parallel rank; None for all.

        Raises:
            IndexError: the run has no such step, or does not fill it.
        """
        check_steps(steps, self.num_steps(), first_step=self.schedule.first_step)
        runs = [*self._runs(steps)] or [(steps, self.schedule.block)]
        parts = [self._rows(part, size, rank) for part, size in runs]
        return SampleReads.joined(parts)

    def served_at(self, samples: Numbers, stop: int) -> SampleReads:
        """Return the reads of samples at positions below `stop`; a sample that is read twice has two rows, in order.

        Cost: one pass over an epoch's order for each epoch when cyclic, otherwise none.

        Args:
            samples: numbers of samples, shape (n,), in any order.
            stop: first position that is not searched.
        """
        positions = self._positions_of(sorted_unique(samples), stop if self.end is None else min(stop, self.end))
        return self._described(np.sort(positions[positions >= self._consumed]))

    def _runs(self, steps: range) -> Iterator[tuple[range, int]]:
        """Yield ranges of steps of one size, each with the size in samples."""
        stages = self.schedule.stages
        for stage, after in zip_longest(stages, stages[1:]):
            stop = steps.stop if after is None else min(after.first_step, steps.stop)
            if part := range(max(stage.first_step, steps.start), stop):
                yield part, stage.batch_size

    def _rows(self, steps: range, size: int, rank: int | None) -> SampleReads:
        ranks = np.arange(self.schedule.data_parallel_size) if rank is None else np.array([rank])
        slots = np.arange(size // self.schedule.data_parallel_size)
        batch, place = np.divmod(slots, self.schedule.micro_batch_size)
        in_step = ranks[:, None] * self.schedule.micro_batch_size + batch * self.schedule.block + place
        first = self.schedule.samples_before(steps.start) + np.arange(len(steps)) * size
        position = (first[:, None, None] + in_step).reshape(-1)
        step = np.repeat(np.arange(steps.start, steps.stop), in_step.size)
        rank_of = np.tile(np.repeat(ranks, len(slots)), len(steps))
        slot = np.tile(slots, len(ranks) * len(steps))
        return SampleReads(step, rank_of, slot, position, self.samples_at(position))

    def samples_at(self, position: Numbers) -> Numbers:
        """Return the sample at each position, in the shape of `position`."""
        if self.dataloader_type == "single":
            return position
        epoch, offset = np.divmod(position, self._active)
        samples = np.empty_like(position)
        for number in np.unique(epoch).tolist():
            in_epoch = epoch == number
            samples[in_epoch] = self._of_epoch(number, offset[in_epoch])
        return samples

    @property
    def _active(self) -> int:
        """Number of samples served in a cyclic epoch: as many whole micro-batches of all ranks as there are."""
        return self.num_samples // self.schedule.block * self.schedule.block

    def _of_epoch(self, epoch: int, offset: Numbers) -> Numbers:
        """Return the samples at the positions `into` of an epoch of the cyclic sampler."""
        micro, ranks = self.schedule.micro_batch_size, self.schedule.data_parallel_size
        batch, place = np.divmod(offset, self.schedule.block)
        rank, slot = np.divmod(place, micro)
        drawn = batch * micro + slot
        if self.data_sharding:
            share = self._active // ranks
            samples: Numbers = permutation(share, epoch)[drawn] + rank * share
        else:
            samples = permutation(self.num_samples // micro * micro, epoch)[rank + ranks * drawn]
        return samples

    def _positions_of(self, samples: Numbers, stop: int) -> Numbers:
        if self.dataloader_type == "single":
            return samples[samples < stop]
        parts = []
        for epoch in range(-(-stop // self._active)):
            offset = np.flatnonzero(np.isin(self._of_epoch(epoch, np.arange(self._active)), samples))
            parts.append(offset + epoch * self._active)
        positions = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return positions[positions < stop]

    def _described(self, position: Numbers) -> SampleReads:
        """Return the reads at these positions: their step, rank, slot and sample."""
        step = np.array([self.schedule.step_of(number) for number in position.tolist()], np.int64)
        start = np.array([self.schedule.samples_before(number) for number in step.tolist()], np.int64)
        batch, place = np.divmod(position - start, self.schedule.block)
        rank, slot = np.divmod(place, self.schedule.micro_batch_size)
        slot += batch * self.schedule.micro_batch_size
        return SampleReads(step, rank, slot, position, self.samples_at(position))
