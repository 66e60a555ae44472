"""One stretch of a staged blend, and how it is drawn: see `staged`.

The sources of a staged blend, in rounds, and where in them lies what a stage draws: see `staged`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import count_samples
from binidx.dataset.builder import WHOLE, sizes_per_dataset
from binidx.dataset.config import Blend, BlendedMegatronDatasetConfig, Split, check_blend, normalize, split_indices
from binidx.dataset.megatron_dataset import MegatronDataset
from binidx.errors import BlendError, ConfigError
from binidx.index.blend import BlendIndex, build_blend_index
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.build_context import BuildContext


@dataclass(frozen=True)
class Stage:
    """One stretch of a staged blend.

    Args:
        blend: prefixes and weights; of a single prefix they may be None, as in the run that was begun so.
        num_samples: samples that it serves before the next one begins.
        planned_samples: of the run that this stage was begun as, if that was longer: its order is then that run's. By
            default num_samples.

    Raises:
        ConfigError: no weights, or numbers that cannot be.
    """

    blend: Blend
    num_samples: int
    planned_samples: int | None = None

    def __post_init__(self) -> None:
        check_blend("stage", self.blend)
        if self.blend[1] is None and len(self.blend[0]) > 1:
            raise ConfigError(f"stage of {list(self.blend[0])}: found no weights, needs one per prefix")
        if len(set(self.blend[0])) < len(self.blend[0]):
            raise ConfigError(f"stage of {list(self.blend[0])}: a prefix stands there twice, needs each once")
        if self.num_samples < 1 or self.planned < self.num_samples:
            raise ConfigError(
                f"stage: found {self.num_samples} samples of {self.planned} planned, needs 1 to all of them"
            )

    @property
    def planned(self) -> int:
        return self.num_samples if self.planned_samples is None else self.planned_samples

    @property
    def shares(self) -> list[float]:
        return normalize(list(self.blend[1] or [1.0]))

    @contextlib.contextmanager
    def drawn(self, writer: ArrayWriter, threads: int = 1) -> Iterator[BlendIndex]:
        """For each sample that was planned the prefix, and how many of that prefix came before it in this stage."""
        # Megatron's BlendedDataset normalises what its builder has normalised; both roundings decide ties.
        size = sum(ceil(self.planned * share) for share in self.shares)
        with writer.scratch(size, np.int16) as chosen, writer.scratch(size, np.int64) as numbers:
            build_blend_index(normalize(self.shares), size, num_threads=threads, out=(chosen, numbers))
            yield chosen[: self.planned], numbers[: self.planned]

    def count(self, writer: ArrayWriter, threads: int = 1) -> NDArray[np.int64]:
        """How many of each prefix are planned, and how many of these are served; shape (2, num_prefixes)."""
        with self.drawn(writer, threads) as (chosen, _):
            each = [count_samples(chosen[:size], len(self.shares)) for size in (self.planned, self.num_samples)]
        return np.array(each, np.int64)


@dataclass(frozen=True)
class Seam:
    """Where a stage begins, and what of each source was served before it.

    Attributes:
        sample: number of its first sample in the run.
        served: samples of each source before it.
        available: samples of the source's rounds, all stages together.
    """

    sample: int
    served: Mapping[str, int]
    available: Mapping[str, int]


@dataclass(frozen=True)
class SourcePosition:
    """Where what a stage draws lies.

    Args:
        before: samples of each prefix that were served before the stage, shape (num_prefixes,).
        rounds, ends: of each prefix its datasets, and the samples up to the end of each.
    """

    before: NDArray[np.int64]
    rounds: Sequence[NDArray[np.int16]]
    ends: Sequence[NDArray[np.int64]]

    def rows(
        self, chosen: NDArray[np.int16], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """The dataset of each sample, and which of its samples it is."""
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
    """The rounds of all sources, built as stages need them."""

    def __init__(self, cls: type[MegatronDataset], config: BlendedMegatronDatasetConfig, split: Split) -> None:
        self._cls, self._config, self._split = cls, config, split
        self._rounds: dict[str, list[int]] = {}  # prefix -> numbers in datasets
        self._served: dict[str, int] = {}
        self.datasets: list[MegatronDataset] = []

    def seams_of(
        self, stages: Sequence[Stage], counts: Sequence[NDArray[np.int64]], context: BuildContext
    ) -> list[Seam]:
        """Where each stage begins; `counts` are those of `Stage.count`."""
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
            stage.blend[0], self._asked(stage), *counts.tolist(), strict=True
        ):
            before = self._served.get(prefix, 0)
            # As the stage was planned: a round that is asked for less may have another order.
            self._provide(prefix, before + planned, num_samples, context)
            self._served[prefix] = before + served

    def place_of(self, stage: Stage, seam: Seam) -> SourcePosition:
        prefixes = stage.blend[0]
        ends = [np.cumsum(self._lengths(prefix)) for prefix in prefixes]
        rounds = [np.array(self._rounds[prefix], np.int16) for prefix in prefixes]
        return SourcePosition(np.array([seam.served.get(prefix, 0) for prefix in prefixes], np.int64), rounds, ends)

    def _asked(self, stage: Stage) -> list[int | None]:
        """Samples that the builder asks of each prefix for a run of this blend; of a prefix that is alone no more."""
        if len(stage.shares) == 1 and (stage.blend[1] is None or self._config.blend_per_split):
            return [stage.planned]
        surplus = self._config.mid_level_dataset_surplus
        asked = sizes_per_dataset(len(stage.shares), stage.shares, [], [stage.planned], surplus)
        return [num_samples for [num_samples] in asked]

    def _provide(self, prefix: str, needed: int, num_samples: int | None, context: BuildContext) -> None:
        """Rounds of a source until it has so many samples; the first is as large as a run of this stage would ask."""
        if prefix not in self._rounds:
            self._add_round(prefix, num_samples, context)
        while (have := sum(self._lengths(prefix))) < needed:
            self._add_round(prefix, needed - have, context)

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
