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

    counts    of each stage, how many of each source it planned and serves: which rounds there are
    rows      (dataset, sample) of all stages, 10 bytes a sample: mapped from the cache, as those of a plain blend

Who builds them draws each stage anew, in a file without a name, and both are made and checked in blocks. So with a
`path_to_cache` a rank has no anonymous memory for them but some MiB; without one, 10 bytes a sample.
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
"""In the names of cached counts."""

AT_ONCE = 1 << 18
"""Rows that are made and checked together: some 40 bytes each."""

COUNTED_HERE = 1 << 22
"""Samples of a stage that are drawn sooner than their counts are fetched: 20 ms."""


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

    RECORDED_NAME: ClassVar[str] = "StagedBlendedDataset"

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
        self._sources = Sources(cls, config, split)
        counts = [self._counts(stage) for stage in self.stages]
        self.seams = self._sources.seams_of(self.stages, counts, self.build_context)
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
        """Where a source ends another round begins."""
        return {"lengths": [len(dataset) for dataset in self.datasets]}

    def _counts(self, stage: Stage) -> NDArray[np.int64]:
        """`Stage.count`, cached where it is worth it."""
        threads = self.config.num_dataset_builder_threads
        if self.config.path_to_cache is None or stage.planned <= COUNTED_HERE:
            return stage.count(ArrayWriter(), threads)
        asked = {"shares": stage.shares, "planned": stage.planned, "num_samples": stage.num_samples}
        description = describe(OrderedDict([("class", COUNTS_NAME), *asked.items()]))
        name = f"{digest(description)}-{COUNTS_NAME}-{self.split.name}"

        def build(writer: ArrayWriter) -> None:
            with writer.array("counts", (2, len(stage.shares)), np.int64) as counts:
                counts[:] = stage.count(writer, threads)

        options = self.config.storage_options
        cache = IndexCache(self.config.path_to_cache, name, options, context=self.build_context)
        return cache.load_or_build(description, {}, ["counts"], build)["counts"]

    def _build(self, writer: ArrayWriter) -> None:
        size = sum(stage.num_samples for stage in self.stages)
        with (
            writer.array("dataset_index", (size,), np.int16) as ids,
            writer.array("dataset_sample_index", (size,), np.int64) as samples,
        ):
            for stage, seam in zip(self.stages, self.seams, strict=True):
                place = self._sources.place_of(stage, seam)
                with stage.drawn(writer, self.config.num_dataset_builder_threads) as (chosen, numbers):
                    for rows in row_blocks(0, stage.num_samples, AT_ONCE):
                        here = slice(seam.sample + rows.start, seam.sample + rows.stop)
                        ids[here], samples[here] = place.rows(chosen[rows], numbers[rows])

    def check(self) -> None:
        """Raise BlendError unless every dataset serves its samples 0, 1, 2, ... in turn: none skipped, none twice."""
        seen = np.zeros(len(self.datasets), np.int64)
        for rows in row_blocks(0, len(self.dataset_index), AT_ONCE):
            ids = self.dataset_index[rows]
            counts = np.bincount(ids, minlength=len(seen))
            due = np.repeat(seen + counts - np.cumsum(counts), counts) + np.arange(len(ids))
            if (self.dataset_sample_index[rows][np.argsort(ids, kind="stable")] != due).any():
                raise BlendError("stages: a source skips a sample or serves one twice; this is a fault of ours")
            seen += counts
        if any(count > len(dataset) for count, dataset in zip(seen.tolist(), self.datasets, strict=True)):
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
