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

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blend_arguments import Blend, parse_blend
from binidx.dataset.builder import WHOLE, check_listed_sources, context_argument, sizes_per_dataset
from binidx.dataset.config import BlendedMegatronDatasetConfig, Split, check_num_samples, normalize, split_indices
from binidx.dataset.megatron.blended import BlendedDataset, blend_arrays, row_blocks, samples_per_dataset
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.errors import BlendError, ConfigError
from binidx.index.blend import BlendIndex, build_blend_index
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import DEFAULT_CONTEXT, BuildContext, IndexCache
from binidx.index.cache.index_files import Arrays, IndexFiles, describe, digest
from binidx.order.blended_order import BlendedOrder
from binidx.storage.location import Location

COUNTS_NAME = "Stage"
"""Part of the names of cached counts."""

AT_ONCE = 1 << 18
"""Rows that are written and checked together: 40 bytes each."""

COUNTED_HERE = 1 << 22
"""Number of samples of a stage up to which its counts are not cached: they are drawn in 20 ms, faster than fetched."""


@dataclass(frozen=True)
class Stage:
    """One stage of a `StagedBlendedDataset`.

    Args:
        blend: prefixes and weights; weights may be None for a single prefix.
        num_samples: number of samples before the next stage begins.
        planned_samples: number of samples for which this stage was planned when it was started, if more than
            num_samples; the order is then that of so many samples. By default num_samples.

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
        object.__setattr__(self, "blend", parse_blend("stage", self.blend))
        if self.blend[1] is None and len(self.blend[0]) > 1:
            raise ConfigError(f"stage of {list(self.blend[0])}: found no weights, need one per prefix")
        if len(set(self.blend[0])) < len(self.blend[0]):
            raise ConfigError(f"stage of {list(self.blend[0])}: a prefix repeats; give each once")
        check_num_samples("stage: num_samples, planned_samples", self.planned)
        if self.num_samples < 1 or self.planned < self.num_samples:
            raise ConfigError(f"stage: num_samples is {self.num_samples}, need 1 to {self.planned} (planned_samples)")

    @property
    def planned(self) -> int:
        return self.num_samples if self.planned_samples is None else self.planned_samples

    @property
    def shares(self) -> list[float]:
        return normalize(list(self.blend[1] or [1.0]))

    @contextlib.contextmanager
    def _drawn(self, writer: ArrayWriter, threads: int = 1) -> Iterator[BlendIndex]:
        """Draw all planned samples: yield the prefix of each, and the number of samples of that prefix before it."""
        # Megatron normalises in the builder and again in BlendedDataset; both roundings decide ties.
        size = sum(ceil(self.planned * share) for share in self.shares)
        with writer.scratch(size, np.int16) as chosen, writer.scratch(size, np.int64) as numbers:
            build_blend_index(normalize(self.shares), size, num_threads=threads, out=(chosen, numbers))
            yield chosen[: self.planned], numbers[: self.planned]

    def _count(self, writer: ArrayWriter, threads: int = 1) -> NDArray[np.int64]:
        """Return the numbers of planned and of served samples of each prefix, shape (2, num_prefixes)."""
        with self._drawn(writer, threads) as (chosen, _):
            counts = [samples_per_dataset(chosen[:size], len(self.shares)) for size in (self.planned, self.num_samples)]
        return np.array(counts, np.int64)


@dataclass(frozen=True)
class Seam:
    """Start of a stage.

    Attributes:
        sample: number of the stage's first sample in the run.
        served: number of samples of each source served before the stage.
    """

    sample: int
    served: Mapping[str, int]


class StagedBlendedDataset(BlendedDataset):
    """Blend in stages: a `BlendedDataset` whose datasets are the rounds of its sources (passes over them).

    Args:
        cls: kind of dataset, such as `GPTDataset`.
        stages: stages in their order.
        config: options of the run; its own blend is ignored. With `blend_per_split` a source is served whole.
        split: split of the sources.
        context: options of the build of the indices.

    Attributes:
        seams: start of each stage; `proof` describes them.

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
        *,
        context: BuildContext = DEFAULT_CONTEXT,
    ) -> None:
        if not stages:
            raise ConfigError("stages: found none, need at least one")
        self.stages, self.config, self.split = tuple(stages), config, split
        check_listed_sources(config, {prefix for stage in stages for prefix in stage.blend[0]})
        self._cls, self.datasets = cls, []
        self._rounds: dict[str, list[int]] = {}  # prefix -> numbers in datasets
        self.seams = self._build_rounds([self._counts(stage, context) for stage in self.stages], context)
        self.size = sum(stage.num_samples for stage in self.stages)
        self.weights = self.stages[0].shares
        self._open(context)
        self.check()
        self.apply_order_option(is_whole=True)

    def _build_rounds(self, counts: Sequence[NDArray[np.int64]], context: BuildContext) -> list[Seam]:
        """Build the datasets of all rounds (passes over a source) that the stages need; return the start of each stage.

        Args:
            counts: for each stage, the numbers of planned and of served samples of each prefix, (2, num_prefixes).
            context: options of the build of the indices.
        """
        served: dict[str, int] = {}
        seams, first = [], 0
        for stage, stage_counts in zip(self.stages, counts, strict=True):
            seams.append(Seam(first, dict(served)))
            numbers = zip(stage.blend[0], self._requested_sizes(stage), *stage_counts.tolist(), strict=True)
            for prefix, num_samples, planned, serving in numbers:
                before = served.get(prefix, 0)
                # The planned number: a smaller round may have another order.
                self._extend(prefix, before + planned, num_samples, context)
                served[prefix] = before + serving
            first += stage.num_samples
        return seams

    def _locate(
        self, stage: Stage, seam: Seam, chosen: NDArray[np.int16], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the dataset of each drawn sample of a stage, and the sample's number in that dataset.

        Args:
            stage: the stage.
            seam: its start.
            chosen, numbers: prefix of each sample, and number of samples of that prefix before it in the stage.
        """
        prefixes = stage.blend[0]
        ids = np.array([self._rounds[prefix][0] for prefix in prefixes], np.int16)[chosen]
        samples = np.array([seam.served.get(prefix, 0) for prefix in prefixes], np.int64)[chosen] + numbers
        for number, prefix in enumerate(prefixes):
            if len(self._rounds[prefix]) > 1:
                rows = np.flatnonzero(chosen == number)
                ends = np.cumsum([0, *self._lengths(prefix)])
                which = np.searchsorted(ends[1:], samples[rows], side="right")
                ids[rows] = np.array(self._rounds[prefix], np.int16)[which]
                samples[rows] -= ends[which]
        return ids, samples

    def _requested_sizes(self, stage: Stage) -> list[int | None]:
        """Return the number of samples that the builder would request of each prefix in a run of this blend."""
        if len(stage.shares) == 1 and (stage.blend[1] is None or self.config.blend_per_split):
            return [stage.planned]
        surplus = self.config.mid_level_dataset_surplus
        requested = sizes_per_dataset(len(stage.shares), stage.shares, [stage.planned], surplus)
        return [num_samples for [num_samples] in requested]

    def _extend(self, prefix: str, needed: int, num_samples: int | None, context: BuildContext) -> None:
        """Add rounds (passes) to a source until it has `needed` samples; a first round gets `num_samples`."""
        if prefix not in self._rounds:
            self._add_round(prefix, num_samples, context)
        while (available := sum(self._lengths(prefix))) < needed:
            self._add_round(prefix, needed - available, context)

    def _add_round(self, prefix: str, num_samples: int | None, context: BuildContext) -> None:
        rounds = self._rounds.setdefault(prefix, [])
        config = replace(self.config, random_seed=self.config.random_seed + len(rounds)) if rounds else self.config
        low_level = self._cls.build_low_level_dataset(prefix, config)
        bookends = (config.split_matrix or [WHOLE] * len(Split))[self.split.value]
        if bookends is None:
            raise BlendError(f"{prefix}: has no {self.split.name} split in {config.split}")
        elements = split_indices(bookends, self._cls.numel_low_level_dataset(low_level))
        arguments = low_level, prefix, elements, num_samples, self.split, config
        dataset = self._cls(*arguments, **context_argument(self._cls, context))
        if not len(dataset):
            raise BlendError(f"{prefix}: has no sample in the {self.split.name} split, round {len(rounds)}")
        rounds.append(len(self.datasets))
        self.datasets.append(dataset)

    def _lengths(self, prefix: str) -> list[int]:
        return [len(self.datasets[number]) for number in self._rounds[prefix]]

    def _make_order(self, arrays: Arrays) -> BlendedOrder:
        parts = [dataset._served for dataset in self.datasets]
        return BlendedOrder(parts, arrays, self._order_fields(), proof=self.proof)

    def _order_fields(self) -> dict[str, Any]:
        prefixes = dict.fromkeys(self.config.as_written(dataset.dataset_path) for dataset in self.datasets)
        numbers = {prefix: number for number, prefix in enumerate(prefixes)}
        stages = [([numbers[prefix] for prefix in prefixes], *rest) for prefixes, *rest in self._stages]
        return {**super()._order_fields(), "stages": stages}

    def _identifiers(self) -> OrderedDict[str, Any]:
        return OrderedDict([*super()._identifiers().items(), ("stages", self._stages)])

    @property
    def _stages(self) -> list[Any]:
        written = self.config.as_written
        return [
            ([*map(written, stage.blend[0])], stage.shares, stage.num_samples, stage.planned) for stage in self.stages
        ]

    def _fingerprint(self) -> dict[str, Any]:
        """Return the lengths of the rounds, since a round begins where the one before it ends."""
        return {"lengths": [len(dataset) for dataset in self.datasets]}

    def _counts(self, stage: Stage, context: BuildContext) -> NDArray[np.int64]:
        """Return the result of `Stage._count`, cached for large stages."""
        threads = self.config.num_dataset_builder_threads
        if self.config.path_to_cache is None or stage.planned <= COUNTED_HERE:
            return stage._count(ArrayWriter(), threads)
        fields = {"shares": stage.shares, "planned": stage.planned, "num_samples": stage.num_samples}
        description = describe(OrderedDict([("class", COUNTS_NAME), *fields.items()]))
        name = f"{digest(description)}-{COUNTS_NAME}-{self.split.name}"

        def build(writer: ArrayWriter) -> None:
            with writer.array("counts", (2, len(stage.shares)), np.int64) as counts:
                counts[:] = stage._count(writer, threads)

        files = IndexFiles(Location(self.config.path_to_cache, self.config.storage_options), name)
        cache = IndexCache(files, context=context)
        return cache.load_or_build(description, {}, ["counts"], build)["counts"]

    def _build(self, writer: ArrayWriter) -> None:
        threads = self.config.num_dataset_builder_threads
        with blend_arrays(writer, self.weights, self.size) as (ids, samples):
            for stage, seam in zip(self.stages, self.seams, strict=True):
                with stage._drawn(writer, threads) as (chosen, numbers):
                    for rows in row_blocks(0, stage.num_samples, AT_ONCE):
                        target = slice(seam.sample + rows.start, seam.sample + rows.stop)
                        ids[target], samples[target] = self._locate(stage, seam, chosen[rows], numbers[rows])

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
        """Description of the checked stages: start of each stage, and the first sample of each source in it."""
        lines = []
        for number, (stage, seam) in enumerate(zip(self.stages, self.seams, strict=True)):
            lines.append(f"stage {number}: samples {seam.sample:,} to {seam.sample + stage.num_samples:,}")
            for prefix, share in zip(stage.blend[0], stage.shares, strict=True):
                served, available = seam.served.get(prefix, 0), sum(self._lengths(prefix))
                lines.append(f"  {share:6.1%}  {prefix}  from its sample {served:,} of {available:,}")
        rounds = len(self.datasets) - len({dataset.dataset_path for dataset in self.datasets})
        lines.append(
            f"checked: each of {self.size:,} samples is the next one of its source; none skipped, none twice"
            + (f"; {rounds} more rounds of exhausted sources" if rounds else "")
        )
        return "\n".join(lines)
