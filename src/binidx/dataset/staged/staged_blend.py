"""Blend whose weights and sources change at given samples.

    sample          0            1,000,000              1,500,000
    stage           0 ..........|1 ....................|2 ...
    en   0.7        0 .. 699,999| 0.5   700,000 ..     |
    code 0.3        0 .. 299,999| 0.3   300,000 ..     | 0.5
    math            -           | 0.2   0 ..           | 0.5

Each source continues where the stage before left it: stage 1 begins with sample 700,000 of `en`. A stage draws like a
run of its own with Megatron's blend, so the samples of stage 0 are those of the run without stages, and a run that has
started can get another stage.

A source that has served all of its samples begins another round: all samples again, in the order of random_seed + the
number of the round. (More epochs in the first round would change the order of samples already served.) So no sample of
an epoch repeats before all of them were served.

    counts    planned and served samples of each source in each stage; they determine the rounds
    rows      (dataset, sample) of all samples, 10 bytes each, cached like those of a plain blend

The build draws each stage again, into an unnamed file, and writes and checks rows in blocks. With a `path_to_cache` a
rank needs a few MiB of memory for them; without one, 10 bytes a sample.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import BlendedDataset, row_blocks
from binidx.dataset.config import BlendedMegatronDatasetConfig, Split
from binidx.dataset.megatron_dataset import MegatronDataset, describe, digest
from binidx.dataset.staged.stages import Sources, Stage
from binidx.errors import BlendError, ConfigError
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import IndexCache

COUNTS_NAME = "Stage"
"""Part of the names of cached counts."""

AT_ONCE = 1 << 18
"""Rows that are written and checked together: 40 bytes each."""

COUNTED_HERE = 1 << 22
"""Samples of a stage below which counts are not cached: they are drawn in 20 ms, sooner than fetched."""


class StagedBlendedDataset(BlendedDataset):
    """Blend in stages: a `BlendedDataset` whose datasets are the rounds of its sources.

    Args:
        cls: kind of dataset, such as `GPTDataset`.
        stages: stages in their order.
        config: options of the run; its own blend is ignored. With `blend_per_split` a source is served whole.
        split: split of the sources.

    Attributes:
        seams: begin of each stage; `proof` describes them.

    Raises:
        BlendError: a source has no sample in this split.
        ConfigError: there are no stages.

    Example:
        >>> binidx.StagedBlendedDataset(binidx.GPTDataset, [
        ...     binidx.Stage((["en", "code"], [0.7, 0.3]), 1_000_000),
        ...     binidx.Stage((["en", "code", "math"], [0.5, 0.3, 0.2]), 500_000)], config)

    Source: ours; the first stage's samples are Megatron Core's for `planned_samples`.
    """

    RECORDED_NAME: ClassVar[str] = "StagedBlendedDataset"

    def __init__(
        self,
        cls: type[MegatronDataset],
        stages: Sequence[Stage],
        config: BlendedMegatronDatasetConfig,
        split: Split = Split.train,
    ) -> None:
        if not stages:
            raise ConfigError("stages: found none, need at least one")
        self.stages, self.config, self.split = tuple(stages), config, split
        self._sources = Sources(cls, config, split)
        counts = [self._counts(stage) for stage in self.stages]
        self.seams = self._sources.add_stages(self.stages, counts, self.build_context)
        self.datasets = self._sources.datasets
        self.size = sum(stage.num_samples for stage in self.stages)
        self.weights = self.stages[0].shares
        self.unique_identifiers = self._identifiers()
        self.dataset_index, self.dataset_sample_index = self._load_or_build()
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

    def _fingerprint(self) -> dict[str, Any]:
        """Return the lengths of the rounds: another round begins where one ends."""
        return {"lengths": [len(dataset) for dataset in self.datasets]}

    def _counts(self, stage: Stage) -> NDArray[np.int64]:
        """Return `Stage.count`, cached for large stages."""
        if self.config.path_to_cache is None or stage.planned <= COUNTED_HERE:
            return stage.count(ArrayWriter())
        fields = {"shares": stage.shares, "planned": stage.planned, "num_samples": stage.num_samples}
        description = describe(OrderedDict([("class", COUNTS_NAME), *fields.items()]))
        name = f"{digest(description)}-{COUNTS_NAME}-{self.split.name}"

        def build(writer: ArrayWriter) -> None:
            with writer.array("counts", (2, len(stage.shares)), np.int64) as counts:
                counts[:] = stage.count(writer)

        options = self.config.storage_options
        cache = IndexCache(self.config.path_to_cache, name, options, context=self.build_context)
        return cache.load_or_build(description, {}, ["counts"], build)["counts"]

    def _fill(self, writer: ArrayWriter, ids: NDArray[np.int16], samples: NDArray[np.int64]) -> None:
        for stage, seam in zip(self.stages, self.seams, strict=True):
            position = self._sources.position(stage, seam)
            with stage.drawn(writer) as (chosen, numbers):
                for rows in row_blocks(0, stage.num_samples, AT_ONCE):
                    target = slice(seam.sample + rows.start, seam.sample + rows.stop)
                    ids[target], samples[target] = position.rows(chosen[rows], numbers[rows])

    def check(self) -> None:
        """Raise BlendError unless every dataset serves its samples 0, 1, 2, ... in order, each once."""
        seen = np.zeros(len(self.datasets), np.int64)
        for rows in row_blocks(0, len(self.dataset_index), AT_ONCE):
            ids = self.dataset_index[rows]
            counts = np.bincount(ids, minlength=len(seen))
            expected = np.repeat(seen + counts - np.cumsum(counts), counts) + np.arange(len(ids))
            if (self.dataset_sample_index[rows][np.argsort(ids, kind="stable")] != expected).any():
                raise BlendError("stages: a source skips a sample or serves one twice; please report this bug")
            seen += counts
        if any(count > len(dataset) for count, dataset in zip(seen.tolist(), self.datasets, strict=True)):
            raise BlendError("stages: a source serves more samples than it has; please report this bug")

    @cached_property
    def proof(self) -> str:
        """Description of the checked stages: begin of each stage, and the first sample of each source in it."""
        lines = []
        for number, (stage, seam) in enumerate(zip(self.stages, self.seams, strict=True)):
            lines.append(f"stage {number}: samples {seam.sample:,} to {seam.sample + stage.num_samples:,}")
            for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
                served, of = seam.served.get(prefix, 0), seam.available[prefix]
                lines.append(f"  {share:6.1%}  {prefix}  from its sample {served:,} of {of:,}")
        rounds = len(self.datasets) - len({dataset.dataset_path for dataset in self.datasets})
        lines.append(
            f"checked: each of {self.size:,} samples is the next one of its source; none skipped, none twice"
            + (f"; {rounds} more rounds of exhausted sources" if rounds else "")
        )
        return "\n".join(lines)
