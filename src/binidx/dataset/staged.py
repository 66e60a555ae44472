"""Blends that change at given samples: other weights, sources that join or leave, and nothing lost at the seams.

    sample          0            1,000,000              1,500,000
    stage           0 ..........|1 ....................|2 ...
    en   0.7        0 .. 699,999| 0.5   700,000 ..     |
    code 0.3        0 .. 299,999| 0.3   300,000 ..     | 0.5
    math            -           | 0.2   0 ..           | 0.5

Each source goes on where it was: stage 1 begins with sample 700,000 of `en`. A stage draws by the rule of Megatron's
blend, as if it were a run of its own. So the samples of stage 0 are those of the run without stages: one that trains
already can be given another stage.

When a source has served all of its samples, it begins another round: all of it again in an order of its own, of
random_seed + the number of the round. (To ask for more epochs of the first round would change the order of what was
served.) So a source repeats no sample of an epoch before it has served every one of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.builder import WHOLE, sizes_per_dataset
from binidx.dataset.config import Blend, BlendedMegatronDatasetConfig, check_blend
from binidx.dataset.megatron_dataset import MegatronDataset
from binidx.dataset.split import Split, normalize, split_indices
from binidx.errors import BlendError, ConfigError
from binidx.index.blend import build_blend_index


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

    def draw(self) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """For each sample that was planned the prefix, and how many of that prefix came before it in this stage."""
        # Megatron's BlendedDataset normalises what its builder has normalised; both roundings decide ties.
        size = sum(ceil(self.planned * share) for share in self.shares)
        chosen, numbers = build_blend_index(normalize(self.shares), size)
        return chosen[: self.planned], numbers[: self.planned]


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


class StagedBlendedDataset(BlendedDataset):
    """A blend in stages: a `BlendedDataset` whose datasets are the rounds of its sources.

    Args:
        cls: the kind of dataset, such as `GPTDataset`.
        stages: in their order.
        config: `random_seed`, `split` and so on; its own blend is not read. With `blend_per_split` a source is whole.
        split: which split of the sources.

    Attributes:
        seams: where each stage begins; `proof` says it in words.

    Raises:
        BlendError: a source has no sample in this split.

    Source: ours; the first stage's samples are Megatron Core's for `planned_samples`.
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        stages: Sequence[Stage],
        config: BlendedMegatronDatasetConfig,
        split: Split = Split.train,
    ) -> None:
        if not stages:
            raise ConfigError("stages: found none, needs at least one")
        self.stages, self.config, self.split = tuple(stages), config, split
        sources = _Sources(cls, config, split)
        rows = [*sources.rows_of(self.stages)]
        self.datasets = sources.datasets
        self.size = sum(stage.num_samples for stage in self.stages)
        self.weights = self.stages[0].shares
        self.dataset_index = np.concatenate([ids for ids, _ in rows])
        self.dataset_sample_index = np.concatenate([numbers for _, numbers in rows])
        self.seams = sources.seams
        self.unique_identifiers = self._identifiers()
        self.check()

    @property
    def order_identity(self) -> Any:
        numbers = {prefix: number for number, prefix in enumerate(dict.fromkeys(d.dataset_path for d in self.datasets))}
        stages = [([numbers[prefix] for prefix in prefixes], *rest) for prefixes, *rest in self._stages]
        return {**super().order_identity, "stages": stages}

    def _identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([*super()._identifiers().items(), ("stages", self._stages)])

    @property
    def _stages(self) -> list[Any]:
        return [(stage.blend[0], stage.shares, stage.num_samples, stage.planned) for stage in self.stages]

    def check(self) -> None:
        """Raise BlendError unless every dataset serves its samples 0, 1, 2, ... in turn: none skipped, none twice."""
        order = np.argsort(self.dataset_index, kind="stable")
        counts = np.bincount(self.dataset_index, minlength=len(self.datasets))
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        if (self.dataset_sample_index[order] != np.arange(len(order)) - starts).any():
            raise BlendError("stages: a source skips a sample or serves one twice; this is a fault of ours")
        if any(count > len(dataset) for count, dataset in zip(counts.tolist(), self.datasets, strict=True)):
            raise BlendError("stages: a source serves more samples than it has; this is a fault of ours")

    @cached_property
    def proof(self) -> str:
        """What was checked, for people: each seam, and where each source goes on."""
        lines = []
        for number, (stage, seam) in enumerate(zip(self.stages, self.seams, strict=True)):
            lines.append(f"stage {number}: samples {seam.sample:,} to {seam.sample + stage.num_samples:,}")
            for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
                served, of = seam.served.get(prefix, 0), seam.available[prefix]
                lines.append(f"  {share:6.1%}  {prefix}  from its sample {served:,} of {of:,}")
        rounds = len(self.datasets) - len({dataset.dataset_path for dataset in self.datasets})
        lines.append(
            f"checked: each of {self.size:,} samples is the next one of its source; none skipped, none twice"
            + (f"; {rounds} more rounds of sources that were spent" if rounds else "")
        )
        return "\n".join(lines)


class _Sources:
    """The rounds of all sources, built as stages need them."""

    def __init__(self, cls: type[MegatronDataset], config: BlendedMegatronDatasetConfig, split: Split) -> None:
        self._cls, self._config, self._split = cls, config, split
        self._rounds: dict[str, list[int]] = {}  # prefix -> numbers in datasets
        self._served: dict[str, int] = {}
        self.datasets: list[MegatronDataset] = []
        self.seams: list[Seam] = []

    def rows_of(self, stages: Sequence[Stage]) -> Iterator[tuple[NDArray[np.int16], NDArray[np.int64]]]:
        """dataset_index and dataset_sample_index of each stage."""
        available: dict[str, int] = {}
        first = 0
        for stage in stages:
            self.seams.append(Seam(first, dict(self._served), available))
            yield self._rows(stage)
            first += stage.num_samples
        available.update({prefix: sum(self._lengths(prefix)) for prefix in self._rounds})

    def _rows(self, stage: Stage) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        chosen, numbers = stage.draw()
        planned = np.bincount(chosen, minlength=len(stage.shares)).tolist()
        chosen, numbers = chosen[: stage.num_samples], numbers[: stage.num_samples]
        ids, samples = np.empty_like(chosen), np.empty_like(numbers)
        for place, (prefix, num_samples) in enumerate(zip(stage.blend[0], self._asked(stage), strict=True)):
            mine = np.flatnonzero(chosen == place)
            before = self._served.get(prefix, 0)
            # As the stage was planned: a round that is asked for less may have another order.
            self._provide(prefix, before + planned[place], num_samples)
            served = before + numbers[mine]
            self._served[prefix] = before + len(mine)
            ends = np.cumsum(self._lengths(prefix))
            which = np.searchsorted(ends, served, side="right")
            ids[mine] = np.array(self._rounds[prefix], np.int16)[which]
            samples[mine] = served - np.concatenate([[0], ends])[which]
        return ids, samples

    def _asked(self, stage: Stage) -> list[int | None]:
        """Samples that the builder asks of each prefix for a run of this blend; of a prefix that is alone no more."""
        if len(stage.shares) == 1 and (stage.blend[1] is None or self._config.blend_per_split):
            return [stage.planned]
        surplus = self._config.mid_level_dataset_surplus
        asked = sizes_per_dataset(len(stage.shares), stage.shares, [], [stage.planned], surplus)
        return [num_samples for [num_samples] in asked]

    def _provide(self, prefix: str, needed: int, num_samples: int | None) -> None:
        """Rounds of a source until it has so many samples; the first is as large as a run of this stage would ask."""
        if prefix not in self._rounds:
            self._add_round(prefix, num_samples)
        while (have := sum(self._lengths(prefix))) < needed:
            self._add_round(prefix, needed - have)

    def _add_round(self, prefix: str, num_samples: int | None) -> None:
        rounds = self._rounds.setdefault(prefix, [])
        config = replace(self._config, random_seed=self._config.random_seed + len(rounds)) if rounds else self._config
        low_level = self._cls.build_low_level_dataset(prefix, config)
        bookends = (config.split_matrix or [WHOLE] * len(Split))[self._split.value]
        if bookends is None:
            raise BlendError(f"{prefix}: has no {self._split.name} split in {config.split}")
        elements = split_indices(bookends, self._cls.numel_low_level_dataset(low_level))
        dataset = self._cls(low_level, prefix, elements, num_samples, self._split, config)
        if not len(dataset):
            raise BlendError(f"{prefix}: has no sample in the {self._split.name} split, round {len(rounds)}")
        rounds.append(len(self.datasets))
        self.datasets.append(dataset)

    def _lengths(self, prefix: str) -> list[int]:
        return [len(self.datasets[number]) for number in self._rounds[prefix]]
