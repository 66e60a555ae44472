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
    rows      (round, sample) of all samples, 10 bytes each, cached like those of a plain blend

The build draws each stage again, into an unnamed file, and writes and checks rows in blocks. With a `path_to_cache` a
rank needs a few MiB of memory for them; without one, 10 bytes a sample.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from binidx.errors import BlendError
from binidx.index.blend import BlendIndex, blend_arrays, build_blend_index, normalize, row_blocks, samples_per_dataset
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import Arrays, IndexName
from binidx.order.blended_order import BlendedOrder
from binidx.order.opener import Opener
from binidx.order.order_protocols import Order
from binidx.order.requests import BlendRequest, OpenBlend, Request, SourceRequest, open_blend
from binidx.storage.location import Location

COUNTS_NAME = "Stage"
"""Part of the names of cached counts."""

AT_ONCE = 1 << 18
"""Rows that are written and checked together: 40 bytes each."""

COUNTED_HERE = 1 << 22
"""Number of samples of a stage up to which its counts are not cached: they are drawn in 20 ms, faster than fetched."""

Change = Callable[[SourceRequest], Request]


@dataclass(frozen=True)
class BlendStage:
    """One stage of a blend.

    Args:
        prefixes: of the sources, as they are opened; each once.
        names: these prefixes, as the user wrote them.
        shares: share of each source; the sum is 1.
        requested: the least number of samples of the first round of each source, if it begins in this stage.
        num_samples: number of samples before the next stage begins.
        planned: number of samples for which the stage was planned; its order is that of so many samples.
    """

    prefixes: Sequence[str]
    names: Sequence[str]
    shares: list[float]
    requested: Sequence[int]
    num_samples: int
    planned: int

    @contextlib.contextmanager
    def drawn(self, writer: ArrayWriter, threads: int) -> Iterator[BlendIndex]:
        """Draw all planned samples: yield the source of each, and the number of samples of that source before it."""
        # Megatron normalises in the builder and again in BlendedDataset; both roundings decide ties.
        size = sum(ceil(self.planned * share) for share in self.shares)
        with writer.scratch(size, np.int16) as chosen, writer.scratch(size, np.int64) as numbers:
            build_blend_index(normalize(self.shares), size, num_threads=threads, out=(chosen, numbers))
            yield chosen[: self.planned], numbers[: self.planned]

    def count(self, writer: ArrayWriter, threads: int) -> NDArray[np.int64]:
        """Return the numbers of planned and of served samples of each source, shape (2, num_sources)."""
        with self.drawn(writer, threads) as (chosen, _):
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


@dataclass(frozen=True)
class StagedRequest(Request):
    """Blend in stages. Its `sources` are the first rounds of all prefixes; others follow from the numbers of samples.

    Args:
        stages: stages in their order.
        request_round: function of a prefix, the number of a round, and its least number of samples; returns the request
            of the round.
        split: name of the split.
        directory: folder of the index and of the counts; None: they are not cached.
        kind: recorded name of the class of the blend.
        open_round: function of the request of a round, and of the round's number; returns the request that is opened in
            its place, such as that of a dataset which keeps the order. By default the same request.
        open_index: as in `BlendRequest`.
        change: returns the request in the place of each source of a round: see `map_sources`.
    """

    stages: Sequence[BlendStage]
    request_round: Callable[[str, int, int], SourceRequest]
    split: str
    directory: Location | None = None
    kind: str = "StagedBlendedDataset"
    open_round: Callable[[SourceRequest, int], Request] = field(default=lambda source, _: source, repr=False)
    open_index: OpenBlend = field(default=open_blend, repr=False, compare=False)
    change: Change = field(default=lambda source: source, repr=False)

    @property
    def inner_requests(self) -> Sequence[Request]:
        first: dict[str, Request] = {}
        for stage in self.stages:
            for prefix, num_samples in zip(stage.prefixes, stage.requested, strict=True):
                first[prefix] = first.get(prefix) or self.request_round(prefix, 0, num_samples)
        return [request.map_sources(self.change) for request in first.values()]

    def map_sources(self, change: Change) -> StagedRequest:
        return replace(self, change=lambda source: self.change(source).map_sources(change))

    def open(self, opener: Opener) -> Order:
        """Return the order, whose `seams` are the starts of the stages, and whose `proof` describes them.

        Raises:
            BlendError: a source has no sample in this split.
        """
        requests, parts = list[Request](), list[Order]()
        rounds, served = dict[str, list[int]](), dict[str, int]()
        seams, first = list[Seam](), 0
        counts = [self._count(stage, opener).tolist() for stage in self.stages]
        for stage, stage_counts in zip(self.stages, counts, strict=True):
            seams.append(Seam(first, dict(served)))
            for prefix, missing, planned, serving in zip(stage.prefixes, stage.requested, *stage_counts, strict=True):
                numbers, before = rounds.setdefault(prefix, []), served.get(prefix, 0)
                # The planned number: a smaller round may have another order.
                while not numbers or (missing := before + planned - sum(len(parts[part]) for part in numbers)) > 0:
                    request = self.open_round(self.request_round(prefix, len(numbers), missing), len(numbers))
                    requests.append(request.map_sources(self.change))
                    parts.append(opener.open(requests[-1]))
                    if not len(parts[-1]):
                        raise BlendError(f"{prefix}: has no sample in the {self.split} split, round {len(numbers)}")
                    numbers.append(len(parts) - 1)
                served[prefix] = before + serving
            first += stage.num_samples
        values = [([*stage.names], stage.shares, stage.num_samples, stage.planned) for stage in self.stages]
        blend = StagedBlend(
            requests,
            self.stages[0].shares,
            first,
            self.split,
            self.directory,
            self.kind,
            more={"stages": values},
            fingerprint={"lengths": [*map(len, parts)]},
            stages=self.stages,
            seams=seams,
            rounds=rounds,
        )
        return self.open_index(blend, parts, opener)

    def _count(self, stage: BlendStage, opener: Opener) -> NDArray[np.int64]:
        """Return the result of `BlendStage.count`, cached for large stages."""
        if self.directory is None or stage.planned <= COUNTED_HERE:
            return stage.count(ArrayWriter(), opener.threads)

        def build(writer: ArrayWriter) -> None:
            with writer.array("counts", (2, len(stage.shares)), np.int64) as counts:
                counts[:] = stage.count(writer, opener.threads)

        fields = {"shares": stage.shares, "planned": stage.planned, "num_samples": stage.num_samples}
        identifiers = OrderedDict([("class", COUNTS_NAME), *fields.items()])
        name = IndexName.of(self.directory, COUNTS_NAME, self.split, identifiers)
        cache = IndexCache(name.files, context=opener.context)
        return cache.load_or_build(name.description, {}, ["counts"], build)["counts"]


@dataclass(frozen=True, kw_only=True)
class StagedBlend(BlendRequest):
    """Blend in stages whose rounds are known: its parts are the rounds, its weights those of the first stage.

    Args:
        stages, seams: stages in their order, and the start of each.
        rounds: numbers of the rounds of each prefix among the parts.
    """

    stages: Sequence[BlendStage]
    seams: Sequence[Seam]
    rounds: Mapping[str, Sequence[int]]

    def order_of(self, parts: Sequence[Order], arrays: Arrays) -> BlendedOrder:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(source.name for source in self.sources))}
        stages = [([numbers[name] for name in names], *rest) for names, *rest in self.more["stages"]]
        fields = {**super().order_of(parts, arrays).fields, "stages": stages}
        return BlendedOrder(parts, arrays, fields, proof=self._describe(), seams=self.seams)

    def _lengths(self, prefix: str) -> list[int]:
        return [self.fingerprint["lengths"][part] for part in self.rounds[prefix]]

    def build(self, writer: ArrayWriter, threads: int) -> None:
        with blend_arrays(writer, self.shares, self.size) as (ids, samples):
            for stage, seam in zip(self.stages, self.seams, strict=True):
                with stage.drawn(writer, threads) as (chosen, numbers):
                    for rows in row_blocks(0, stage.num_samples, AT_ONCE):
                        target = slice(seam.sample + rows.start, seam.sample + rows.stop)
                        ids[target], samples[target] = self._locate(stage, seam, chosen[rows], numbers[rows])

    def _locate(
        self, stage: BlendStage, seam: Seam, chosen: NDArray[np.int16], numbers: NDArray[np.int64]
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the round of each drawn sample of a stage, and the sample's number in that round.

        Args:
            stage: the stage.
            seam: its start.
            chosen, numbers: source of each sample, and number of samples of that source before it in the stage.
        """
        ids = np.array([self.rounds[prefix][0] for prefix in stage.prefixes], np.int16)[chosen]
        samples = np.array([seam.served.get(prefix, 0) for prefix in stage.prefixes], np.int64)[chosen] + numbers
        for number, prefix in enumerate(stage.prefixes):
            if len(self.rounds[prefix]) > 1:
                rows = np.flatnonzero(chosen == number)
                ends = np.cumsum([0, *self._lengths(prefix)])
                which = np.searchsorted(ends[1:], samples[rows], side="right")
                ids[rows] = np.array(self.rounds[prefix], np.int16)[which]
                samples[rows] -= ends[which]
        return ids, samples

    def check_rows(self, order: BlendedOrder) -> None:
        """Raise BlendError unless every round serves its samples 0, 1, 2, ... in order, each once."""
        seen = np.zeros(len(order.parts), np.int64)
        for rows in row_blocks(0, len(order), AT_ONCE):
            ids = order.dataset_index[rows]
            counts = np.bincount(ids, minlength=len(seen))
            expected = np.repeat(seen + counts - np.cumsum(counts), counts) + np.arange(len(ids))
            if (order.dataset_sample_index[rows][np.argsort(ids, kind="stable")] != expected).any():
                raise BlendError("stages: a source skips a sample or serves one twice; please report this bug")
            seen += counts
        if any(count > len(part) for count, part in zip(seen.tolist(), order.parts, strict=True)):
            raise BlendError("stages: a source serves more samples than it has; please report this bug")

    def _describe(self) -> str:
        """Return a description of the checked stages: the start of each, and the first sample of each source in it."""
        lines = []
        for number, (stage, seam) in enumerate(zip(self.stages, self.seams, strict=True)):
            lines.append(f"stage {number}: samples {seam.sample:,} to {seam.sample + stage.num_samples:,}")
            for prefix, share in zip(stage.prefixes, stage.shares, strict=True):
                served, available = seam.served.get(prefix, 0), sum(self._lengths(prefix))
                lines.append(f"  {share:6.1%}  {prefix}  from its sample {served:,} of {available:,}")
        more = len(self.parts) - len(self.rounds)
        lines.append(
            f"checked: each of {self.size:,} samples is the next one of its source; none skipped, none twice"
            + (f"; {more} more rounds of exhausted sources" if more else "")
        )
        return "\n".join(lines)
