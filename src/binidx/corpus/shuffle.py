"""Shuffle the documents of one dataset or several into one dataset.

    1  every .idx is read and checked
    2  documents, with the lengths and modes of their sequences, are distributed to buckets on a scratch disk
    3  bucket by bucket they are written in the new order: to the .bin, invisible, and the columns of the .idx
    4  the same for the rows of their lineage, if there are any: about 55 bytes of numbers each, and an id
    5  the sources are checked for changes; the old .idx is removed, lineage and .bin appear, the .idx last

Disk: the bytes of the tokens and about 30 bytes for each document, in a file without a name; and the target. Memory: as
the caller sets, for the whole process. A run that fails leaves nothing; after a kill there is neither a dataset nor
scratch data.

With workers steps 2 and 3 are stages of tasks, and the buckets are exchange objects (`exchange`) in TARGET-parts:

    documents    a range of documents of a source  ─►  the documents, grouped by ranges of keys
    buckets      the documents of a range of keys  ─►  sorted by key: a part of the target

The last call joins the parts inside the store where it can (`merge`), and removes the folder. Memory of a task: a
bucket of about 1 GiB, or the longest document. Scratch disk: the documents of a task, if they are more than 1 GiB, as
in shuffles of more than 128 GiB.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.exchange import (
    HELD_BYTES,
    PIECE_BYTES,
    TASK_BYTES,
    ExchangeTask,
    ExchangeWriter,
    document_tasks,
    exchange_file,
    list_blocks,
    read_bucket,
)
from binidx.corpus.lineage.lineage_transfer import LineageTransfer, shuffle_lineage
from binidx.corpus.merge import merge_tokens, merged_index
from binidx.corpus.random_numbers import shuffle_keys
from binidx.corpus.shuffle_buckets import Buckets, Column, Pieces, keyed_row, plan_shuffle, shuffle_order
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.whole_dataset import (
    CombinedCounts,
    DatasetOutput,
    DatasetTarget,
    Options,
    Prefix,
    SourceDatasets,
    WholeDataset,
)
from binidx.forks import cached_property
from binidx.format.document_blocks import DocumentBlock, batch_by_size
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Values, Workers
from binidx.jobs.progress import ProgressWatcher, SilentWatcher
from binidx.jobs.runner import check_stop
from binidx.jobs.stages import JobStage, finish_once, run_stages
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.ranges import cut

SHUFFLE_MEMORY_BYTES = 2 << 30

ALGORITHM = 2
"""Version of the exchange objects; increased if a task gives other bytes, so that older ones are not reused."""

BUCKET_BYTES = 1 << 30
"""Bytes of tokens in a bucket of workers, about."""

SEQUENCE = np.dtype([("length", "<i4"), ("mode", "i1")])
"""Record of a sequence; its mode is 0 in a dataset without modes."""

DOCUMENT = keyed_row(2)
"""Row of a document; its columns are its tokens, and the records of its sequences."""


@dataclass(frozen=True)
class ShuffleResult(CombinedCounts):
    """Result of a shuffle.

    Attributes:
        num_buckets: depends on `memory_bytes`, with workers on the size of the data.
        lineage: whether a lineage was written.
        parts_missing: tasks that other shards must make before the same call can go on; 0 if the target is complete.
    """

    num_buckets: int
    lineage: bool
    seconds: float
    parts_missing: int = 0


def shuffle_datasets(
    sources: Sequence[Prefix],
    target: Prefix,
    *,
    seed: int,
    memory_bytes: int = SHUFFLE_MEMORY_BYTES,
    scratch: str | None = None,
    lineage: bool = True,
    overwrite: bool = False,
    source_options: Options = None,
    target_options: Options = None,
    watch: ProgressWatcher | None = None,
    workers: Workers | None = None,
) -> ShuffleResult:
    """Write the documents of all sources as one dataset, in a random order.

    Args:
        seed: any integer; its low 64 bits and the number of documents determine the order.
        memory_bytes: memory of this process; it does not change the output.
        scratch: directory of the temporary file; None for the system's temporary directory.
        lineage: whether to carry the lineage over, if a source has one.
        overwrite: replace a dataset at the target. It stays until the new one is ready.
        workers: they make the parts of the target, in TARGET-parts; None: this process writes it at once. The tokens
            are the same; in a compressed `.bin` also the segments, unless they end with a part.

    Raises:
        ConfigError: too little memory; or as `merge_datasets`.
        FormatError, ObjectExistsError, ObjectChangedError: as `merge_datasets`.
        ObjectExistsError: also if TARGET-parts holds parts of another job.
        StorageError: the scratch disk is full.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    if workers is not None:
        workers.check_overwrite(overwrite)
    opened = SourceDatasets([Location.of(source, source_options) for source in sources])
    codec, multimodal = opened.check_compatible()
    opened.check_tokenizers()
    datasets = opened.datasets
    to_write = DatasetTarget.open(Location.of(target, target_options), codec, datasets, overwrite=overwrite)
    _, documents, sequences, _ = opened.counts()
    to_write.check_counts(sequences, documents, multimodal)
    for dataset in datasets:
        dataset.check_index(watch)
    token_bytes = sum(dataset.num_bytes for dataset in datasets)
    dtype, num_buckets = datasets[0].index.dtype, 0
    with contextlib.ExitStack() as stack:

        def result(lineage: bool, missing: int = 0) -> ShuffleResult:
            seconds = time.monotonic() - began
            return ShuffleResult(to_write.prefix.uri, *opened.counts(), num_buckets, lineage, seconds, missing)

        publish: Callable[..., object]
        if workers is None:
            plan = plan_shuffle(memory_bytes, token_bytes + sequences * SEQUENCE.itemsize, documents, 2)
            output, num_buckets = DatasetOutput(to_write, dtype, multimodal), plan.num_buckets
            stack.callback(output.close)
            _write_here(datasets, output, seed, Buckets(plan, DOCUMENT, scratch), watch)
            publish = output.publish
        else:
            counts = [(dataset.index.num_documents, dataset.num_bytes) for dataset in datasets]
            pinned = [PinnedDataset.of(dataset) for dataset in datasets]
            job = _ShuffleParts(to_write, pinned, counts, dtype.__name__, multimodal, seed, scratch)
            num_buckets = job.num_buckets
            if workers.shard is not None and to_write.is_complete and not job.folder.is_claimed():
                watch.say(f"{to_write.prefix}: finished by another shard; the same command without --shard compares it")
                return result(False)
            if missing := job.make(workers, watch):
                return result(False, missing)
            publish = functools.partial(job.finish, workers, watch)
        rows = LineageTransfer(datasets if lineage else [], [to_write])
        stack.callback(rows.close)
        rows.fill(watch, tables=shuffle_lineage(rows.tables(), rows.num_rows, seed, memory_bytes, scratch))
        publish(opened.check_unchanged, lambda: rows.replace(0))
        to_write.say_complete(watch)
        return result(bool(rows))


def _write_here(
    datasets: Sequence[WholeDataset], output: DatasetOutput, seed: int, buckets: Buckets, watch: ProgressWatcher
) -> None:
    """Write the documents of all datasets, in the new order, in this process."""
    token_bytes, first = sum(dataset.num_bytes for dataset in datasets), 0
    with contextlib.closing(buckets):
        watch.begin("into buckets", token_bytes, 0)
        for dataset in datasets:
            count = dataset.index.num_documents
            plain = dataset.source.open_plain(mmap=False)  # mapped pages would count as memory of this process
            _distribute(dataset, plain, range(count), seed, first, buckets, watch)
            first += count
        watch.begin("in order", token_bytes, 0)
        _append(output, buckets.sorted(), watch)


def _distribute(
    dataset: WholeDataset,
    plain: RangeReader,
    documents: range,
    seed: int,
    first: int,
    buckets: Buckets,
    watch: ProgressWatcher,
) -> None:
    """Distribute documents of a dataset to the buckets (pass 1).

    Args:
        first: number of the dataset's first document among those of all sources.
    """
    for block in dataset.index.documents(len(documents), documents.start):
        keys = shuffle_keys(seed, first + block.first, len(block))
        bounds = block.token_bounds() * dataset.index.dtype_size
        for low, high in batch_by_size(bounds, buckets.plan.round_bytes):
            check_stop()
            start, stop = bounds[[low, high]].tolist()
            sequences = _sequence_records(block, low, high)
            if stop - start > buckets.plan.round_bytes:
                pieces = (plain.read([part])[0] for part in cut((start, stop), PIECE_BYTES))
                buckets.add_one(keys[low:high], [pieces, [sequences[0].data]])
            else:
                data = np.frombuffer(plain.read([(start, stop)])[0], np.uint8)
                buckets.add(keys[low:high], [(data, bounds[low : high + 1] - start), sequences])
            watch.advance(stop - start)


def _append(
    output: DatasetOutput, documents: Iterable[tuple[NDArray[np.int64], list[Pieces]]], watch: ProgressWatcher
) -> None:
    """Append runs of sorted documents to the output (pass 2)."""
    for lengths, (tokens, sequences) in documents:
        check_stop()
        for piece in tokens:
            output.bin.write(piece)
        # Joined, as a piece of a column on disk may end within a record.
        records = np.frombuffer(b"".join(map(bytes, sequences)), SEQUENCE)
        modes = records["mode"] if output.columns.multimodal else None
        output.columns.add(records["length"], np.cumsum(lengths[:, 1] // SEQUENCE.itemsize), modes)
        watch.advance(int(lengths[:, 0].sum()))


def _sequence_records(block: DocumentBlock, low: int, high: int) -> Column:
    """Return the sequences of documents [low, high) of a block as a column of `SEQUENCE` records, a run a document."""
    bounds = block.bounds[low : high + 1] - block.bounds[0]
    records = np.zeros(bounds[-1] - bounds[0], SEQUENCE)
    records["length"] = block.lengths[bounds[0] : bounds[-1]]
    if block.modes is not None:
        records["mode"] = block.modes[bounds[0] : bounds[-1]]
    return records.view(np.uint8), (bounds - bounds[0]) * SEQUENCE.itemsize


@dataclass(frozen=True)
class _ShuffleParts:
    """Job of a shuffle by workers; its methods run in the workers.

    Args:
        counts: documents, and bytes of tokens, of each source.
        dtype: name of the dtype of the tokens.
    """

    target: DatasetTarget
    sources: Sequence[PinnedDataset]
    counts: Sequence[tuple[int, int]]
    dtype: str
    multimodal: bool
    seed: int
    scratch: str | None

    @cached_property
    def folder(self) -> JobFolder:
        """Folder of the parts, records and exchange objects."""
        identities = [source.identity for source in self.sources]
        identity = {"binidx_shuffle": ALGORITHM, "seed": self.seed, "codec": self.target.codec, "sources": identities}
        prefix = self.target.prefix
        return JobFolder(Location(f"{prefix.absolute}-parts", prefix.options), identity)

    @cached_property
    def num_buckets(self) -> int:
        """Number of parts."""
        return max(1, -(-sum(num_bytes for _, num_bytes in self.counts) // BUCKET_BYTES))

    def document_tasks(self) -> list[ExchangeTask]:
        """Return the tasks of the stage "documents"."""
        return document_tasks("documents", self.counts, max(HELD_BYTES, PIECE_BYTES * self.num_buckets))

    def bucket_tasks(self, written: dict[str, Values]) -> list[ExchangeTask]:
        """Return the tasks of the stage "buckets"."""
        blocks, size = list_blocks(written, self.num_buckets), sum(size for _, size in self.counts) // self.num_buckets
        return [ExchangeTask(f"bucket-{n:06}", size, blocks=each) for n, each in enumerate(blocks)]

    def make(self, workers: Workers, watch: ProgressWatcher) -> int:
        """Make the parts; return the number of tasks that other shards must make first."""
        stages = [
            JobStage("documents", self.write_documents, lambda _: self.document_tasks()),
            JobStage("buckets", self.write_bucket, self.bucket_tasks),
        ]
        remote = self.folder.location.local_path is None
        return run_stages(stages, self.folder, workers, watch, remote_data=remote, task_bytes=TASK_BYTES)[1]

    def finish(self, workers: Workers, watch: ProgressWatcher, *steps: Callable[[], object]) -> None:
        """Join the parts to the target, and remove them.

        Args:
            steps: called right before the tokens become visible.
        """
        tasks, firsts = self.bucket_tasks({}), self.document_tasks()

        def join() -> None:
            parts = SourceDatasets([self.folder.location / task.name for task in tasks])
            with merged_index(parts, watch) as columns:
                merge_tokens(parts, self.target, columns, lambda: [step() for step in steps], watch)

        # Another shard, which found all parts at the same time, may finish the job; parts may have come after its end.
        finish_once(join, lambda: workers.shard is not None and not self.folder.is_claimed(), attempts=1)
        objects = [exchange_file(self.folder.location, task.name) for task in firsts]
        outputs = [self._output(task) for task in tasks]
        objects += [file for output in outputs for file in (output.idx, output.bin)]
        self.folder.remove([*firsts, *tasks], objects)

    def write_documents(self, task: ExchangeTask) -> Values:
        """Write some documents, grouped by bucket."""
        pinned, first = self.sources[task.number], sum(count for count, _ in self.counts[: task.number])
        with contextlib.closing(ExchangeWriter(self.num_buckets, DOCUMENT, self.scratch)) as writer:
            _distribute(pinned.open(), pinned.reader(), task.rows, self.seed, first, writer, SilentWatcher())
            return writer.publish(exchange_file(self.folder.location, task.name))

    def write_bucket(self, task: ExchangeTask) -> Values:
        """Write the documents of a bucket, sorted, as a part of the target."""
        found = read_bucket(self.folder.location, task.blocks, DOCUMENT)
        output = DatasetOutput(self._output(task), np.dtype(self.dtype), self.multimodal)
        with contextlib.closing(output):
            _append(output, found.sorted(shuffle_order(found.rows["key"])), SilentWatcher())
            output.publish()
        return {}

    def _output(self, task: ExchangeTask) -> DatasetTarget:
        return DatasetTarget(self.folder.location / task.name, self.target.codec)
