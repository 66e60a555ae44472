"""One stretch of a staged blend, and how it is drawn: see `staged`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import samples_of_each
from binidx.dataset.config import Blend, check_blend
from binidx.dataset.split import normalize
from binidx.errors import ConfigError
from binidx.index.blend import BlendIndex, build_blend_index
from binidx.index.building import Building


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
    def drawn(self, building: Building, threads: int = 1) -> Iterator[BlendIndex]:
        """For each sample that was planned the prefix, and how many of that prefix came before it in this stage."""
        # Megatron's BlendedDataset normalises what its builder has normalised; both roundings decide ties.
        size = sum(ceil(self.planned * share) for share in self.shares)
        with building.scratch(size, np.int16) as chosen, building.scratch(size, np.int64) as numbers:
            build_blend_index(normalize(self.shares), size, num_threads=threads, out=(chosen, numbers))
            yield chosen[: self.planned], numbers[: self.planned]

    def count(self, building: Building, threads: int = 1) -> NDArray[np.int64]:
        """How many of each prefix are planned, and how many of these are served; shape (2, num_prefixes)."""
        with self.drawn(building, threads) as (chosen, _):
            each = [samples_of_each(chosen[:size], len(self.shares)) for size in (self.planned, self.num_samples)]
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
