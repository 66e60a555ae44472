"""Stages of a staged blend, and the datasets of their sources: see `staged_blend`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import samples_per_dataset
from binidx.dataset.config import Blend, BlendedMegatronDatasetConfig, Split, check_blend, normalize, split_indices
from binidx.dataset.megatron_dataset import MegatronDataset
from binidx.dataset.required_indices import WHOLE, sizes_per_dataset
from binidx.errors import BlendError, ConfigError
from binidx.index.blend import BlendIndex, build_blend_index
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import BuildContext


@dataclass(frozen=True)
class Stage:
    """One stage of a `StagedBlendedDataset`.

    Args:
        blend: prefixes and weights; weights may be None for a single prefix.
        num_samples: number of samples before the next stage begins.
        planned_samples: size of the run as which this stage was started, if that was larger: its order is then that
            run's. By default num_samples.

    Raises:
        ConfigError: weights are missing, a prefix repeats, or a number is out of range.

    Example:
        >>> binidx.Stage((["s3://corpus/en", "s3://corpus/code"], [0.7, 0.3]), num_samples=1_000_000)

    Source: ours.
    """

    blend: Blend
    num_samples: int
    planned_samples: int | None = None

    def __post_init__(self) -> None:
        check_blend("stage", self.blend)
        if self.blend[1] is None and len(self.blend[0]) > 1:
            raise ConfigError(f"stage of {list(self.blend[0])}: found no weights, need one per prefix")
        if len(set(self.blend[0])) < len(self.blend[0]):
            raise ConfigError(f"stage of {list(self.blend[0])}: a prefix repeats; give each once")
        if self.num_samples < 1 or self.planned < self.num_samples:
            raise ConfigError(f"stage: num_samples is {self.num_samples}, need 1 to {self.planned} (planned_samples)")

    @property
    def planned(self) -> int:
        return self.num_samples if self.planned_samples is None else self.planned_samples

    @property
    def shares(self) -> list[float]:
        return normalize(list(self.blend[1] or [1.0]))

    @contextlib.contextmanager
    def drawn(self, writer: ArrayWriter, threads: int = 1) -> Iterator[BlendIndex]:
        """Draw all planned samples: yield the prefix of each, and the number of earlier samples of that prefix."""
        # Megatron normalises in the builder and again in BlendedDataset; both roundings decide ties.
        size = sum(ceil(self.planned * share) for share in self.shares)
        with writer.scratch(size, np.int16) as chosen, writer.scratch(size, np.int64) as numbers:
            build_blend_index(normalize(self.shares), size, num_threads=threads, out=(chosen, numbers))
            yield chosen[: self.planned], numbers[: self.planned]

    def count(self, writer: ArrayWriter, threads: int = 1) -> NDArray[np.int64]:
        """Return the numbers of planned and of served samples of each prefix, shape (2, num_prefixes)."""
        with self.drawn(writer, threads) as (chosen, _):
            each = [samples_per_dataset(chosen[:size], len(self.shares)) for size in (self.planned, self.num_samples)]
        return np.array(each, np.int64)


@dataclass(frozen=True)
class Seam:
    """Begin of a stage.

    Attributes:
        sample: number of its first sample in the run.
        served: samples of each source served before it.
        available: samples of the source's rounds, over all stages.
    """

    sample: int
    served: Mapping[str, int]
    available: Mapping[str, int]


@dataclass(frozen=True)
class SourcePosition:
    """Position in each source at which a stage begins.

    Args:
        before: samples of each prefix served before the stage, shape (num_prefixes,).
        rounds, ends: for each prefix the numbers of its datasets, and the cumulative number of samples to each end.
    """

    before: NDArray[np.int64]
    rounds: Sequence[NDArray[np.int16]]
    ends: Sequence[NDArray[np.int64]]

    def rows(
        self, chosen: NDArray[np.int16], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the dataset of each drawn sample, and its number in that dataset."""
        ids = np.array([rounds[0] for rounds in self.rounds], np.int16)[chosen]
        samples = self.before[chosen] + numbers
        for prefix, (rounds, ends) in enumerate(zip(self.rounds, self.ends, strict=True)):
            if len(rounds) > 1:
                mine = np.flatnonzero(chosen == prefix)
                which = np.searchsorted(ends, samples[mine], side="right")
                ids[mine] = rounds[which]
                samples[mine] -= np.concatenate([[0], ends])[which]
        return ids, samples


class Sources:
    """The datasets (rounds) of all sources, built as stages need them."""

    def __init__(self, cls: type[MegatronDataset], config: BlendedMegatronDatasetConfig, split: Split) -> None:
        self._cls, self._config, self._split = cls, config, split
        self._rounds: dict[str, list[int]] = {}  # prefix -> numbers in datasets
        self._served: dict[str, int] = {}
        self.datasets: list[MegatronDataset] = []

    def add_stages(
        self, stages: Sequence[Stage], counts: Sequence[NDArray[np.int64]], context: BuildContext
    ) -> list[Seam]:
        """Build the rounds that the stages need; return the begin of each stage. `counts`: from `Stage.count`."""
        available: dict[str, int] = {}
        seams, first = [], 0
        for stage, each in zip(stages, counts, strict=True):
            seams.append(Seam(first, dict(self._served), available))
            self._serve(stage, each, context)
            first += stage.num_samples
        available.update({prefix: sum(self._lengths(prefix)) for prefix in self._rounds})
        return seams

    def _serve(self, stage: Stage, counts: NDArray[np.int64], context: BuildContext) -> None:
        for prefix, num_samples, planned, served in zip(
            stage.blend[0], self._requested_sizes(stage), *counts.tolist(), strict=True
        ):
            before = self._served.get(prefix, 0)
            # The planned number: a smaller round may have another order.
            self._extend(prefix, before + planned, num_samples, context)
            self._served[prefix] = before + served

    def position(self, stage: Stage, seam: Seam) -> SourcePosition:
        prefixes = stage.blend[0]
        ends = [np.cumsum(self._lengths(prefix)) for prefix in prefixes]
        rounds = [np.array(self._rounds[prefix], np.int16) for prefix in prefixes]
        return SourcePosition(np.array([seam.served.get(prefix, 0) for prefix in prefixes], np.int64), rounds, ends)

    def _requested_sizes(self, stage: Stage) -> list[int | None]:
        """Return the number of samples that the builder would request of each prefix in a run of this blend."""
        if len(stage.shares) == 1 and (stage.blend[1] is None or self._config.blend_per_split):
            return [stage.planned]
        surplus = self._config.mid_level_dataset_surplus
        requested = sizes_per_dataset(len(stage.shares), stage.shares, [stage.planned], surplus)
        return [num_samples for [num_samples] in requested]

    def _extend(self, prefix: str, needed: int, num_samples: int | None, context: BuildContext) -> None:
        """Add rounds to a source until it has `needed` samples; the first has the size that a run of this stage has."""
        if prefix not in self._rounds:
            self._add_round(prefix, num_samples, context)
        while (available := sum(self._lengths(prefix))) < needed:
            self._add_round(prefix, needed - available, context)

    def _add_round(self, prefix: str, num_samples: int | None, context: BuildContext) -> None:
        rounds = self._rounds.setdefault(prefix, [])
        config = replace(self._config, random_seed=self._config.random_seed + len(rounds)) if rounds else self._config
        low_level = self._cls.build_low_level_dataset(prefix, config)
        bookends = (config.split_matrix or [WHOLE] * len(Split))[self._split.value]
        if bookends is None:
            raise BlendError(f"{prefix}: has no {self._split.name} split in {config.split}")
        elements = split_indices(bookends, self._cls.numel_low_level_dataset(low_level))
        arguments = low_level, prefix, elements, num_samples, self._split, config
        dataset = self._cls.built_with(context, *arguments)
        if not len(dataset):
            raise BlendError(f"{prefix}: has no sample in the {self._split.name} split, round {len(rounds)}")
        rounds.append(len(self.datasets))
        self.datasets.append(dataset)

    def _lengths(self, prefix: str) -> list[int]:
        return [len(self.datasets[number]) for number in self._rounds[prefix]]
