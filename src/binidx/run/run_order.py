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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.served import list_parts
from binidx.errors import ConfigError, ObjectChangedError, redacted
from binidx.forks import cached_property
from binidx.format.tokens import index_of
from binidx.html_table import format_html_table
from binidx.loader.dataset_protocols import DatasetView
from binidx.order.blended_order import BlendedOrder
from binidx.order.order_protocols import Numbers, Order, Source
from binidx.order.reads import OrderReads, TokenReads
from binidx.order.sequences import SequenceRunsOrder
from binidx.order.source_order import SourceOrder, sorted_unique
from binidx.order.view import ViewOrder
from binidx.run.global_order import GlobalOrder, Reading, SampleReads
from binidx.run.joined_sources import JoinedSources, join_sources
from binidx.run.run_file import Run
from binidx.run.run_parts import PerProcess
from binidx.storage.ranges import cut

if TYPE_CHECKING:
    from binidx.format.arrow import pa


Docs = Literal["ends", "spans"] | None

STRETCH_POSITIONS = 1 << 18
"""Number of samples or sequences processed together: samples with their documents take 50 MiB."""


@dataclass(frozen=True)
class RunOrder:
    """The order of a run: the samples of its steps, and the steps of its documents.

    Args:
        order: spans of the tokens of each sample of the run's train split.
        reading: rank, step and slot of each read of a sample.
        given_config: options of the run; None: it is over packed files, which have none.
        description_hash: md5 of the text with which Megatron names the index of the split; "" if the identity of the
            reading has all on which the order depends, as that of packed files.
        run: the saved run whose order it is, which a worker of a job opens instead of unpickling its indices.

    Example:
        order = RunOrder.of(binidx.Run.load("run.json"))
        order.table(range(41_200, 41_201), rank=17)

    `packed.PackedRunOrder`, the order of a run over packed files, gives other answers where blocks stand for documents.

    Source: ours; indices as in Megatron Core, samplers as in Megatron-LM.
    """

    order: Order
    reading: Reading
    given_config: GPTDatasetConfig | None
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
        dataset = DatasetView.unwrap(dataset)
        for part in check_traceable(dataset, "order"):
            if isinstance(part.index_order, SequenceRunsOrder):
                raise ConfigError(f"order: found a {type(part).__name__}, needs GPT datasets or a blend of them")
        return cls(dataset.order, reading, dataset.config, _name_order(dataset.order, dataset.unique_description_hash))

    @classmethod
    def of(cls, run: Run, *, warns: bool = True) -> RunOrder:
        """Return the order of a saved run; its indices are loaded whole, or built.

        Args:
            run: the saved run.
            warns: whether a new order of the same data is a warning in the log.

        Returns:
            The order of the run's train split; of a run in phases, of the first.

        Raises:
            ConfigError: the run has no train split.
        """
        run = first_phase(run)
        if (train := run.build(warns=warns, planned=False)[0]) is None:
            raise ConfigError("run: has no train split to take samples from")
        return replace(cls.of_dataset(train, run.order_samples(len(train))), run=run)

    @classmethod
    def open(cls, run: Run, *, warns: bool = True) -> RunOrder:
        """Return the order of a saved run; of cached indices, only the ranges that a query needs are read.

        A step of a run over 300 million documents in a bucket is traced in some thousand small requests, the next time
        without any. `where`, and a view, read whole index arrays, some megabytes at a time. An index that is not cached
        is built as for training; those of packed documents, and of views that rebuild one, are opened whole.

        Args:
            run: the saved run.
            warns: whether a new order of the same data is a warning in the log.

        Returns:
            The order of its train split; of a run in phases, of the first.

        Raises:
            ConfigError: the run has no train split.
        """
        run = first_phase(run)
        builder = run.builder(warns=warns)
        if not (train := builder.requests().get(Split.train)):
            raise ConfigError("run: has no train split to take samples from")
        order = below = builder.opener(access="ranges").open(train[0])
        while isinstance(below, ViewOrder):
            below = below.inner
        if not isinstance(below, BlendedOrder | SourceOrder):
            return cls.of(run, warns=warns)  # an order of the user's own, whose index is not known
        name = below.description_hash if isinstance(below, BlendedOrder) else train[0].sources[0].description_hash()
        return cls(order, run.order_samples(len(order)), run.config, _name_order(order, name), run)

    def per_process(self) -> PerProcess[RunOrder]:
        """Return the order for the parts of a job; other processes open the saved run, if it is that of one."""
        if self.run is None:
            return PerProcess(self)
        run = replace(self.run, directory=self.run.directory or os.getcwd())
        return PerProcess(self, functools.partial(_open_again, run, self.reading, self.fingerprint))

    @cached_property
    def reads(self) -> OrderReads:
        """The tokens that its samples read."""
        return OrderReads(self.order)

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
    def config(self) -> GPTDatasetConfig:
        """Options of the run.

        Raises:
            ConfigError: a run over packed files, which has none.
        """
        if self.given_config is None:
            raise ConfigError("run: is over packed files, needs one over .bin and .idx")
        return self.given_config

    @cached_property
    def list_sources(self) -> NDArray[np.int16]:
        """Source of each sample, shape (number of samples,)."""
        return self.reads.list_sources()

    def count_inputs(self, samples: Numbers) -> Numbers:
        """Return the number of input tokens of each sample, without pads."""
        return self.reads.count_inputs(samples, self.list_sources[samples])

    def count_reads(self, spans: Iterable[tuple[int, int]]) -> Numbers:
        """Return the samples of each source at some positions, and their input tokens; shape (2, number of sources).

        Args:
            spans: positions (first, stop). Blocks of packed files of which no source is known are not counted.
        """
        counts = np.zeros((2, len(self.sources)), np.int64)
        for stretch in (stretch for span in spans for stretch in cut(span, STRETCH_POSITIONS)):
            samples = self.samples_counted(np.arange(*stretch))
            own, inputs = self.list_sources[samples], self.count_inputs(samples)
            counts += [np.bincount(own, each, len(counts[0])).astype(np.int64) for each in (None, inputs)]
        return counts

    def samples_counted(self, positions: Numbers) -> Numbers:
        """Return the samples at some positions that have a source."""
        return self.reading.samples_at(positions)

    @property
    def is_packed(self) -> bool:
        """True if the run is over packed files."""
        return self.given_config is None

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Options of the stores of the sources."""
        return self.config.storage_options

    def _repr_html_(self) -> str | None:
        if self.is_packed:  # shown as text
            return None
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
    def stage_ends(self) -> Numbers:
        """The sample before which each stage of the blend ends, of those that a view leaves; none without stages."""
        ends = np.cumsum([stage.num_samples for stage in (self.run and self.run.stages) or ()], dtype=np.int64)
        return np.searchsorted(self.order.kept, ends) if isinstance(self.order, ViewOrder) else ends

    @property
    def stage_starts(self) -> list[int]:
        """The step with which each stage of the blend begins that begins within this run."""
        within = range(self.reading.schedule.consumed_samples + 1, len(self.order))
        return [self.reading.schedule.step_of(end) for end in self.stage_ends.tolist() if end in within]

    @property
    def pass_steps(self) -> int:
        """First step after one pass over the samples; one step at least."""
        return max(self.reading.schedule.step_of(len(self.order)), self.first_step + 1)

    @property
    def consumed_samples(self) -> int:
        """Number of samples that were read before the first step."""
        return self.reading.schedule.consumed_samples

    def select_sources(self, name: str | None = None) -> Mapping[str, Source]:
        """Return the sources by their prefix: the one with a prefix, or all; of packed files also those of a set.

        Raises:
            ConfigError: there is no such source, or the datasets of files are not known.
        """
        return self.joined.select(name)

    def samples_named(self, name: str) -> Numbers:
        """Return the samples that are the block FILE:BLOCK of packed files; none if `name` is no such name."""
        return np.empty(0, np.int64)

    def orders(self, steps: range) -> Iterator[tuple[RunOrder, range]]:
        """Yield this order and these steps, as a `RunHistory` does for each of its runs."""
        yield self, steps

    def trace(self, steps: range, rank: int | None = None) -> tuple[SampleReads, TokenReads]:
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

    def contents(self, samples: Numbers) -> TokenReads:
        """Return the tokens that samples of the train split read; of a stored block, whole pieces of its documents."""
        return self.reads.trace(samples)

    def label(self, sample: int, source: int = 0, epoch: int = 0) -> dict[str, Any]:
        """Return the columns of a row that name a sample: its source and epoch; of packed files its block."""
        return {"source": self.sources[source].name, "epoch": epoch}

    def list_unknown(self) -> Sequence[str]:
        """Return a message about each group of packed files whose dataset, and so whose documents, are not known."""
        return []

    def count_unknown(self, stop: int) -> Iterable[tuple[str, int, int, int]]:
        """Return the blocks of each set of packed files whose dataset is not known.

        Args:
            stop: position before which reads are counted.

        Returns:
            Name of the set, number of its blocks, number of their reads, and number of input tokens of a block.
        """
        return []

    def sources_of(self, samples: Numbers) -> Numbers:
        """Return the source of each sample; -1 if it is not known."""
        return self.order.locate(samples)[0]

    def where(
        self, source: int, documents: Sequence[int] | Numbers, stop_step: int, *, earlier: bool | None = True
    ) -> tuple[SampleReads, TokenReads]:
        """Return all reads, in the steps before `stop_step`, of samples with a token of one of these documents.

        Args:
            source: number of the source in `prefixes`.
            documents: numbers of documents in that source.
            stop_step: first step that is not searched.
            earlier: also search the samples consumed before step 0 of a resumed run, in the order of this run; None: if
                it knows them. Their step, rank and slot depend on earlier batch sizes and ranks, and are -1.

        Returns:
            The reads, n rows, and the contents of their n samples.

        Raises:
            IndexError: there is no such source or document.
            ConfigError: `earlier` for a resumed "cyclic" run, whose earlier samples depend on earlier ranks, too.
        """
        readings = self.reads_of(self.reads.find(source, documents), stop_step, earlier=earlier)
        return readings, self.contents(readings.sample)

    def reads_of(self, samples: Numbers, stop_step: int, *, earlier: bool | None = True) -> SampleReads:
        """Return all reads of some samples, ascending, in the steps before `stop_step`.

        Args:
            samples: numbers of samples of the train split, ascending, shape (n,).
            stop_step, earlier: as in `where`.

        Raises:
            ConfigError: as `where`.
        """
        consumed = self.reading.schedule.consumed_samples
        earlier = self.reading.knows_earlier if earlier is None else earlier
        if earlier and consumed and not self.reading.knows_earlier:
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
        from binidx.run.read_table import to_table

        reads = self.readings(steps, rank)
        texts = self.read(reads.sample) if tokens else None
        schedule = self.reading.schedule
        of_rows = schedule.trains(reads.step) if trained or schedule.skipped_steps else None
        trace = {"ends": self.reads.trace_documents, "spans": self.reads.trace, None: self.reads.trace_origins}[docs]
        return to_table(reads, trace(reads.sample), self.prefixes, texts, of_rows)

    def read(self, samples: Numbers) -> list[NDArray[Any]] | NDArray[Any]:
        """Read the tokens of samples by one vectored read.

        Args:
            samples: numbers of samples of the train split, shape (n,).

        Returns:
            The stored tokens of each sample: S + 1, fewer if a sample is truncated; of packed files, one row a block.

        Raises:
            StorageError: the tokens cannot be read.
        """
        return [text.astype(self.token_dtype) for text in self.reads.read_text(samples)]

    @property
    def token_dtype(self) -> np.dtype[Any]:
        """A dtype that holds the tokens of all sources."""
        return np.result_type(*(source.dataset.dtype for source in self.sources))

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything on which the order depends, and of the data that it orders, 32 hex digits."""
        depends = self.reading.identity
        if self.description_hash:
            data = [source.dataset.identity for source in self.sources]
            depends = {"dataset": self.description_hash, "data": data, "reading": depends}
        return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


def first_phase(run: Run) -> Run:
    """Return the first phase of a saved run; raise ConfigError unless it is one."""
    if not isinstance(run, Run):
        raise ConfigError(f"run: found {run!r}, needs a binidx.Run; binidx.Run.load opens its file")
    return run.phases[0]


def check_traceable(dataset: Any, purpose: str) -> Sequence[Any]:
    """Return the datasets of the sources of a dataset or blend, whose samples are the tokens that its order names.

    Args:
        dataset: the dataset.
        purpose: beginning of the message.

    Raises:
        ConfigError: methods of the user make the samples, or it is a stored run.
    """
    parts = list_parts(dataset)
    for part in parts or [dataset]:
        if not parts or part.reads_by_itself:
            way = "" if parts else "; in place of a stored run take Run.build(planned=False), or read_plan=False"
            raise ConfigError(f"{purpose}: found a {type(part).__name__}, needs GPT datasets or a blend of them{way}")
    return parts


def count_source(source: Source) -> tuple[int, int]:
    """Return the number of sequences in the split of a source, and of their tokens; those that repeat count once."""
    own, index = source.sequences, index_of(source.dataset)
    if isinstance(own, range):
        return len(own), index.tokens_of(own)
    own = sorted_unique(own)
    return len(own), int(index.sequence_lengths[own].sum(dtype=np.int64))


def _name_order(order: Order, name: str) -> str:
    """Return the name of an order of an index: that of the index, or one of its own if there are views."""
    if isinstance(order, ViewOrder) or (isinstance(order, BlendedOrder) and order.has_views):
        text = json.dumps([name, order.identity], sort_keys=True, default=str)
        return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return name


def _open_again(run: Run, reading: Reading, fingerprint: str) -> Any:
    """Return the order of a run in a worker of a job; raise ObjectChangedError if it is another one there."""
    return check_fingerprint(replace(RunOrder.of(run), reading=reading), fingerprint)


def check_fingerprint(opened: Any, fingerprint: str) -> Any:
    """Return what a worker of a job has opened; raise ObjectChangedError if its fingerprint is another one."""
    if opened.fingerprint != fingerprint:
        raise ObjectChangedError(
            "run: a worker opened other data or another order (replaced since, or another file under the same path); "
            "give the same command again"
        )
    return opened
