"""The order of a GPT run in both directions: the contents of a step, and the samples with tokens of a document.

    order = RunOrder.of(Run.load("run.json"))
    order.table(range(41_200, 41_201), rank=17)      the samples of a step, their documents and spans
    order.where(0, [12_345_678], stop_step=41_200)   every step, rank and slot that read a document

    documents ─► sequences ─► places in document_index ─► rows of sample_index ─► shuffle_index ─► the blend

Everything is arithmetic on the indices; tokens are read only on request. `where` makes one pass over each of
document_index, shuffle_index and the blend's two indices, STRETCH elements at a time: a second for 300 million
documents if they are mapped, and the cost of reading them otherwise.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.fill_in_middle import GPTFIMDatasetConfig
from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.megatron.megatron_dataset import MegatronDataset
from binidx.dataset.megatron.ordered_dataset import OrderedDataset, make_opener
from binidx.errors import ConfigError, ObjectChangedError, redacted
from binidx.format.tokens import index_of
from binidx.html_table import format_html_table
from binidx.index.cache.index_cache import BuildContext
from binidx.index.cache.index_files import digest
from binidx.jobs.parts import PerProcess
from binidx.order.blended_order import BlendedOrder, list_members
from binidx.order.gpt_order import GPTOrder
from binidx.order.order_protocols import ComposedOrder, Numbers, Order, Source
from binidx.order.ranged_order import LazyOrder
from binidx.order.requests import find_blend
from binidx.order.sequences import SequenceRunsOrder
from binidx.order.source_order import join_ranges, sorted_unique
from binidx.order.view import ViewOrder
from binidx.run.global_order import GlobalOrder, SampleReads
from binidx.run.provenance.contents import (
    Docs,
    SampleContents,
    SampleOrigins,
    read_text,
    trace_contents,
    trace_documents,
    trace_origins,
)
from binidx.run.provenance.joined_sources import JoinedSources, join_sources
from binidx.run.run_file import Run
from binidx.storage.threads import OPENS

if TYPE_CHECKING:
    from binidx.run.provenance.export import pa


def samples_with(order: Order, source: int, documents: Sequence[int] | Numbers) -> Numbers:
    """Return the numbers of the samples with a token of one of these documents of a source, ascending.

    Args:
        order: the order of the samples.
        source: number of the source in the order.
        documents: numbers of documents in that source.

    Raises:
        IndexError: there is no such source or document.
    """
    if not 0 <= source < len(order.sources):
        raise IndexError(f"source {source}: the run has {len(order.sources)}, counted from 0")
    return order.find(source, sequences_of(order.sources[source], sorted_unique(np.asarray(documents, np.int64))))


def sequences_of(source: Source, documents: Numbers) -> Numbers:
    """Return the numbers of the sequences of some documents, which are in ascending order.

    Args:
        source: the source.
        documents: numbers of documents, ascending, shape (n,).
    """
    bounds = index_of(source.dataset).document_indices
    count = len(bounds) - 1
    if len(documents) and not (documents[0] >= 0 and documents[-1] < count):
        wrong = documents[0] if documents[0] < 0 else documents[-1]
        raise IndexError(f"{source.name}: document {wrong}, it has {count}, counted from 0")
    return join_ranges(bounds[documents].astype(np.int64), bounds[documents + 1].astype(np.int64))


CONTENTS: Mapping[Docs, Callable[[Any, Numbers], SampleOrigins]] = {
    "ends": trace_documents,
    "spans": trace_contents,
    None: trace_origins,
}
"""`docs` of a table -> the function that computes its columns."""


@dataclass(frozen=True)
class RunOrder:
    """The order of a run: the samples of its steps, and the steps of its documents.

    Args:
        order: which tokens make each sample of the run's train split.
        reading: which rank reads which sample at which step.
        config: options of the run.
        description_hash: md5 of the text with which Megatron names the index of the split.
        run: the saved run whose order it is, which a worker of a job opens instead of unpickling its indices.

    Example:
        order = RunOrder.of(binidx.Run.load("run.json"))
        order.table(range(41_200, 41_201), rank=17)

    Source: ours; indices as in Megatron Core, samplers as in Megatron-LM.
    """

    order: Order
    reading: GlobalOrder
    config: GPTDatasetConfig
    description_hash: str
    run: Run | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of_dataset(cls, dataset: Any, reading: GlobalOrder) -> RunOrder:
        """Return the order of a dataset, and of the ranks that read it.

        Args:
            dataset: a GPT dataset or a blend of GPT datasets.
            reading: the global order of its samples.

        Returns:
            The order over all ranks.

        Raises:
            ConfigError: the samples are made by methods of the user, whose documents are not known.
        """
        parts = dataset.parts if isinstance(dataset, OrderedDataset) else [dataset]
        for part in parts:
            is_known = isinstance(part, MegatronDataset) and not part.reads_by_itself
            if not is_known or isinstance(part.index_order, SequenceRunsOrder):
                raise ConfigError(f"order: found a {type(part).__name__}, needs GPT datasets or a blend of them")
        name = dataset.unique_description_hash
        if isinstance(dataset.order, ViewOrder) or (
            isinstance(dataset.order, BlendedOrder) and dataset.order.has_views
        ):
            name = digest(json.dumps([name, dataset.order.identity], sort_keys=True, default=str))
        return cls(dataset.order, reading, dataset.config, name)

    @classmethod
    def of(cls, run: Run, *, warns: bool = True) -> RunOrder:
        """Return the order of a saved run; its indices are loaded whole, or built.

        Args:
            run: the saved run.
            warns: as in `BuildContext`.

        Returns:
            The order of the run's train split; of a run in phases, of the first.

        Raises:
            ConfigError: the run has no train split.
        """
        run = run.phases[0]
        return replace(cls.of_dataset(run.build(warns=warns)[0], run.reading_order), run=run)

    @classmethod
    def open(cls, run: Run, *, warns: bool = True) -> RunOrder:
        """Return the order of a saved run; of cached indices, only the ranges that a query needs are read.

        A step of a run over 300 million documents in a bucket is traced in some thousand small requests, the next time
        without any. `where` reads whole index arrays, some megabytes at a time. An index that is not cached is built as
        for training, and a run in stages is opened whole.

        Args:
            run: the saved run.
            warns: as in `BuildContext`.

        Returns:
            The order of its train split; of a run in phases, of the first.

        Raises:
            ConfigError: the run has no train split.
        """
        if not isinstance(run, Run):
            raise ConfigError(f"run: found {run!r}, needs a binidx.Run; binidx.Run.load opens its file")
        run = run.phases[0]
        if run.stages is not None or run.config.order is not None:
            return cls.of(run, warns=warns)
        if not (train := run.requests().get(Split.train)):
            raise ConfigError("run: has no train split to take samples from")
        opener = make_opener(run.config, access="ranges", context=BuildContext(warns=warns))
        order: Any = opener.open(train[0])
        named: Any = train[0]
        if (blend := find_blend(train[0])) is not None:
            named = blend if blend.weights is not None else blend.measured(OPENS.map(len, order.parts))
        reading = GlobalOrder(run.schedule, len(order), run.dataloader_type, run.data_sharding)
        return cls(order, reading, run.config, named.description_hash(), run)

    def per_process(self) -> PerProcess[RunOrder]:
        """Return the order for the parts of a job; other processes open the saved run, if it is that of one."""
        if self.run is None:
            return PerProcess(self)
        run = replace(self.run, directory=self.run.directory or os.getcwd())
        return PerProcess(self, functools.partial(_open_again, run, self.reading, self.fingerprint))

    @property
    def sources(self) -> Sequence[Source]:
        """The datasets of the samples, in their order."""
        return self.order.sources

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of the sources, in their order, as the file of the run has them."""
        return [source.name for source in self.sources]

    @property
    def joined(self) -> JoinedSources:
        """The sources by their names."""
        return join_sources([self.sources])

    @property
    def is_blended(self) -> bool:
        """True if samples are those of a blend, and have a `dataset_id`."""
        inner = self.order.inner if isinstance(self.order, ViewOrder) else self.order
        return isinstance(inner, BlendedOrder)

    @property
    def has_rounds(self) -> bool:
        """True if sources of one name are rounds of one source: in a run in stages."""
        return self.run is not None and self.run.stages is not None

    def count_inputs(self, samples: Numbers) -> Numbers:
        """Return the number of input tokens of each sample, without pads."""
        inputs: Numbers = self.input_lengths[self.list_sources[samples]]
        if all(isinstance(member, GPTOrder | LazyOrder) for member in list_members(self.order)):
            return inputs
        spans, bounds = self.order.spans(samples)
        return np.minimum(np.diff(np.concatenate([[0], np.cumsum(spans[:, 3])])[bounds]), inputs)

    @cached_property
    def list_sources(self) -> NDArray[np.int16]:
        """Source of each sample, shape (number of samples,)."""
        if isinstance(self.order, ComposedOrder):
            return self.order.list_sources()
        return np.broadcast_to(np.int16(0), len(self.order))

    @cached_property
    def input_lengths(self) -> Numbers:
        """Number of input tokens of a sample of each source; in stages of several lengths a source has one length."""
        if isinstance(self.order, BlendedOrder) and self.order.windows is not None:
            return np.array([cast(Any, member).parameters.sequence_length for member in self.order.members])
        return np.full(len(self.sources), self.sequence_length)

    @property
    def sequence_length(self) -> int:
        """Number of input tokens of a sample."""
        return self.config.sequence_length

    def input_length(self, source: int) -> int:
        """Return the number of input tokens of a sample of a source, as `input_lengths` has it.

        Raises:
            ConfigError: fill in the middle, of which the order does not say which tokens are inputs.
        """
        if isinstance(self.config, GPTFIMDatasetConfig):
            raise ConfigError("fim_rate: the order does not say which tokens are inputs; count those of loaded batches")
        return int(self.input_lengths[source])

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Options of the stores of the sources."""
        return self.config.storage_options

    def _repr_html_(self) -> str:
        schedule, steps = self.reading.schedule, self.num_steps()
        names = ("steps", "samples", "samples a step", "tokens a sample", "ranks", "order", "sources")
        order = f"{self.reading.dataloader_type}, seed {self.config.random_seed}"
        sizes = (len(self.order), schedule.global_batch_size, self.config.sequence_length, self.num_ranks)
        values = ("no end" if steps is None else steps, *sizes, order, ", ".join(map(redacted, self.prefixes[:3])))
        return format_html_table("RunOrder", [*zip(names, values, strict=True)])

    @property
    def num_ranks(self) -> int:
        """Number of data parallel ranks."""
        return self.reading.schedule.data_parallel_size

    @property
    def first_step(self) -> int:
        """The first step: 0, unless the run continues another one."""
        return self.reading.schedule.first_step

    def num_steps(self) -> int | None:
        """Count the steps of the run.

        Returns:
            The first step after the run, which is the number of its steps if they begin with step 0; None if its
            loaders start over.
        """
        return self.reading.num_steps()

    @property
    def stage_starts(self) -> list[int]:
        """The step with which each stage of the blend begins that begins within this run."""
        ends = np.cumsum([stage.num_samples for stage in (self.run and self.run.stages) or ()], dtype=np.int64)
        ends = np.searchsorted(self.order.kept, ends) if isinstance(self.order, ViewOrder) else ends
        within = range(self.reading.schedule.consumed_samples + 1, len(self.order))
        return [self.reading.schedule.step_of(end) for end in ends.tolist() if end in within]

    @property
    def pass_steps(self) -> int:
        """First step after one pass over the samples."""
        return self.reading.schedule.step_of(len(self.order))

    @property
    def knows_earlier(self) -> bool:
        """True if samples before `consumed_samples` are known; those of cyclic runs depend on earlier ranks."""
        return self.reading.dataloader_type == "single"

    def orders(self, steps: range) -> Iterator[tuple[RunOrder, range]]:
        """Yield this order and these steps, as a `RunHistory` does for each of its runs."""
        yield self, steps

    def num_rows(self, steps: range) -> int:
        """Count the rows of the table of some steps.

        Args:
            steps: steps; the first after the run's `consumed_samples` is `first_step`, 0 by default.

        Returns:
            The number of samples of these steps, over all ranks.
        """
        return self.reading.schedule.samples_before(steps.stop) - self.reading.schedule.samples_before(steps.start)

    def largest(self, steps: range) -> Mapping[str, int]:
        """Return bounds of the ranks, slots and epochs of some steps.

        Args:
            steps: the steps.

        Returns:
            Column -> a number that none of its values exceeds.
        """
        size = max(stage.batch_size for stage in self.reading.schedule.stages)
        return {"rank": self.num_ranks - 1, "slot": size // self.num_ranks - 1, "epoch": self.order.num_epochs - 1}

    def trace(self, steps: range, rank: int | None = None) -> tuple[SampleReads, SampleContents]:
        """Return the samples of some steps, of one rank or all, and their contents.

        Args:
            steps: steps; the first after the run's `consumed_samples` is `first_step`, 0 by default.
            rank: a data parallel rank; None for all.

        Returns:
            The reads, n rows, and the contents of their n samples.

        Raises:
            IndexError: a step is beyond the end of the run.
        """
        readings = self.readings(steps, rank)
        return readings, self.contents(readings.sample)

    def readings(self, steps: range, rank: int | None = None) -> SampleReads:
        """Return the reads of `trace` alone."""
        return self.reading.readings(steps, rank)

    def trained(self, steps: Numbers) -> NDArray[np.bool_]:
        """Return whether the samples of each step are trained; iterations to skip only read them."""
        return self.reading.trained(steps)

    def contents(self, samples: Numbers) -> SampleContents:
        """Return the contents of samples of the train split."""
        return trace_contents(self.order, samples)

    def sources_of(self, samples: Numbers) -> Numbers:
        """Return the source of each sample."""
        return self.order.locate(samples)[0]

    def label(self, contents: SampleContents, place: int) -> dict[str, Any]:
        """Return the columns of a row that name the source of a sample, and its epoch."""
        return {"source": self.sources[int(contents.source[place])].name, "epoch": int(contents.epoch[place])}

    def samples_with(self, source: int, documents: Sequence[int] | Numbers) -> Numbers:
        """Return the samples with a token of one of these documents of a source, ascending; as `where`."""
        return samples_with(self.order, source, documents)

    def where(
        self, source: int, documents: Sequence[int] | Numbers, stop_step: int, *, earlier: bool = True
    ) -> tuple[SampleReads, SampleContents]:
        """Return all reads, in the steps before `stop_step`, of samples with a token of one of these documents.

        Args:
            source: number of the source in `prefixes`.
            documents: numbers of documents in that source.
            stop_step: first step that is not searched.
            earlier: also search the samples consumed before step 0 of a resumed run, in the order of this run.
                Their step, rank and slot depend on earlier batch sizes and ranks, and are -1.

        Returns:
            The reads, n rows, and the contents of their n samples.

        Raises:
            IndexError: there is no such source or document.
            ConfigError: `earlier` for a resumed "cyclic" run, whose earlier samples depend on earlier ranks, too.
        """
        readings = self.reads_of(self.samples_with(source, documents), stop_step, earlier=earlier)
        return readings, self.contents(readings.sample)

    def reads_of(self, samples: Numbers, stop_step: int, *, earlier: bool = True) -> SampleReads:
        """Return all reads of some samples, ascending, in the steps before `stop_step`.

        Args:
            samples: numbers of samples of the train split, ascending, shape (n,).
            stop_step, earlier: as in `where`.

        Raises:
            ConfigError: as `where`.
        """
        consumed = self.reading.schedule.consumed_samples
        if earlier and consumed and self.reading.dataloader_type == "cyclic":
            raise ConfigError(
                f"run: the {consumed:,} samples before consumed_samples of a cyclic run depend on the "
                f"ranks and micro-batches that read them; search the run.json of each earlier part of the run, and the "
                f"rest of this one with earlier=False (--no-earlier)"
            )
        readings = self.reading.served_at(samples, self.reading.schedule.samples_before(stop_step))
        if earlier:
            past = samples[samples < consumed]
            unknown = np.full(len(past), -1)
            readings = SampleReads.joined([SampleReads(unknown, unknown, unknown, past, past), readings])
        return readings

    def table(
        self, steps: range, rank: int | None = None, *, docs: Docs = "ends", tokens: bool = False, trained: bool = True
    ) -> pa.Table:
        """Return the result of `trace` as an Arrow table; `run/provenance/export.py` has its columns.

        Args:
            steps: steps; the first after the run's `consumed_samples` is `first_step`, 0 by default.
            rank: a data parallel rank; None for all.
            docs: "ends" for the documents of each sample, and its start and stop in the first and the last of them;
                "spans" for each piece with its length, which takes five times as long; None for neither.
            tokens: include the stored tokens, with pads.
            trained: include whether each sample was trained; False: only of a run with iterations to skip.

        Returns:
            One row for each sample, sorted by step, rank and slot.

        Raises:
            IndexError: a step is beyond the end of the run.
            MissingDriverError: pyarrow is not installed.
        """
        from binidx.run.provenance.export import to_table

        readings = self.reading.readings(steps, rank)
        contents = CONTENTS[docs](self.order, readings.sample)
        of_rows = self.reading.trained(readings.step) if trained or self.reading.schedule.skipped_steps else None
        return to_table(readings, contents, self.prefixes, self.read(readings.sample) if tokens else None, of_rows)

    def read(self, samples: Numbers) -> list[NDArray[Any]]:
        """Read the tokens of samples by one vectored read.

        Args:
            samples: numbers of samples of the train split, shape (n,).

        Returns:
            The stored tokens of each sample: S + 1, fewer if a sample is truncated.

        Raises:
            StorageError: the tokens cannot be read.
        """
        return [text.astype(self.token_dtype) for text in read_text(self.order, samples)]

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """A dtype that holds the tokens of all sources."""
        return np.result_type(*(source.dataset.dtype for source in self.sources))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything on which the order depends, and of the data that it orders, 32 hex digits."""
        depends = {
            "dataset": self.description_hash,
            "data": [source.dataset.identity for source in self.sources],
            "reading": self.reading.identity,
        }
        return hashlib.blake2b(json.dumps(cast(Any, depends)).encode(), digest_size=16).hexdigest()


def _open_again(run: Run, reading: GlobalOrder, fingerprint: str) -> RunOrder:
    """Return the order of a run in a worker of a job; raise ObjectChangedError if it is another one there."""
    order = replace(RunOrder.of(run), reading=reading)
    if order.fingerprint != fingerprint:
        raise ObjectChangedError(
            "run: a worker opened other data or another order (replaced since, or another file under the same path); "
            "give the same command again"
        )
    return order
