"""Shuffle documents by workers, into the parts of a dataset.

Two stages of tasks, with exchange objects (`exchange`) between them, in TARGET-parts:

    documents    a range of documents of a source  ─►  the documents, grouped by ranges of keys
    buckets      the documents of a range of keys  ─►  sorted by key: a part of the target

The last call joins the parts inside the store where it can (`merge`), and removes the folder. The order is that of
`shuffle_buckets`, with any workers.

Memory of a task: a bucket of about 1 GiB, or the longest document. Scratch disk: the documents of a task, if they are
more than 1 GiB, as in shuffles of more than 128 GiB.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.exchange import (
    BLOCK_BYTES,
    MEMORY_BYTES,
    ROUND_BYTES,
    TASK_BYTES,
    ExchangeTask,
    ExchangeWriter,
    exchange_file,
    list_blocks,
    place_pieces,
    read_bucket,
)
from binidx.corpus.merge import merge_tokens, merged_index
from binidx.corpus.shuffle_buckets import Column, assign_buckets, shuffle_keys, shuffle_order
from binidx.corpus.token_parts import PinnedDataset
from binidx.corpus.whole_dataset import DatasetOutput, DatasetTarget, SourceDatasets
from binidx.format.idx_blocks import DocumentBlock, batch_by_size
from binidx.jobs.parts import JobFolder, JobStage, Values, Workers, run_stages
from binidx.jobs.runner import check_stop
from binidx.native.token_files import copy_pieces
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.ranges import cut
from binidx.storage.writing.copy import ProgressWatcher

ALGORITHM = 1
"""Version of the exchange objects; increased if a task gives other bytes, so that older ones are not reused."""

BUCKET_BYTES = 1 << 30
"""Bytes of tokens in a bucket, about."""

SEQUENCE = np.dtype([("length", "<i4"), ("mode", "i1")])
"""Record of a sequence; its mode is 0 in a dataset without modes."""


def sequence_records(block: DocumentBlock, low: int, high: int) -> Column:
    """Return the sequences of documents [low, high) of a block as a column of `SEQUENCE` records, a run a document."""
    bounds = block.bounds[low : high + 1] - block.bounds[0]
    records = np.zeros(bounds[-1] - bounds[0], SEQUENCE)
    records["length"] = block.lengths[bounds[0] : bounds[-1]]
    if block.modes is not None:
        records["mode"] = block.modes[bounds[0] : bounds[-1]]
    return records.view(np.uint8), (bounds - bounds[0]) * SEQUENCE.itemsize


DOCUMENT = np.dtype([("key", "<u8"), ("num_bytes", "<u8"), ("num_sequences", "<u4")])
"""Row of a document; its data are the records of its sequences, then its tokens."""


@dataclass(frozen=True)
class ShuffleParts:
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
        tasks, task_bytes = list[ExchangeTask](), max(MEMORY_BYTES, BLOCK_BYTES * self.num_buckets)
        for source, (num_documents, num_bytes) in enumerate(self.counts):
            count = max(1, -(-num_bytes // task_bytes))
            bounds = [num_documents * number // count for number in range(count + 1)]
            for rows in itertools.starmap(range, itertools.pairwise(bounds)):
                tasks.append(ExchangeTask(f"documents-{len(tasks):06}", num_bytes // count, source, rows))
        return tasks

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

    def finish(
        self, check: Callable[[], object], remove_existing: Callable[[], object], watch: ProgressWatcher
    ) -> None:
        """Join the parts to the target, and remove them.

        Args:
            check: raises if a source has changed.
            remove_existing: called right before the tokens become visible.
        """
        tasks = self.bucket_tasks({})
        parts = SourceDatasets([self.folder.location / task.name for task in tasks])

        def before_publish() -> None:
            check()
            remove_existing()

        with merged_index(parts, watch) as columns:
            merge_tokens(parts, self.target, columns, before_publish, watch)
        self.target.say_complete(watch)
        firsts = self.document_tasks()
        objects = [exchange_file(self.folder.location, task.name) for task in firsts]
        outputs = [self._output(task) for task in tasks]
        objects += [file for output in outputs for file in (output.idx, output.bin)]
        self.folder.remove([*firsts, *tasks], objects)

    def write_documents(self, task: ExchangeTask) -> Values:
        """Write some documents, grouped by bucket."""
        pinned, before = self.sources[task.number], sum(count for count, _ in self.counts[: task.number])
        dataset, plain = pinned.open(), pinned.reader()
        with closing(ExchangeWriter(self.num_buckets, self.scratch)) as writer:
            for block in dataset.index.documents(len(task.rows), task.rows.start):
                keys = shuffle_keys(self.seed, before + block.first, len(block))
                buckets, bounds = (
                    assign_buckets(keys, self.num_buckets),
                    block.token_bounds() * dataset.index.item_bytes,
                )
                for low, high in batch_by_size(bounds, ROUND_BYTES):
                    check_stop()
                    rows, data = _read_documents(block, low, high, bounds, plain)
                    rows["key"] = keys[low:high]
                    starts = np.cumsum(rows["num_bytes"].astype(np.int64)) - rows["num_bytes"].astype(np.int64)
                    writer.add(buckets[low:high].astype(np.int64), rows, data, starts)
            return writer.publish(exchange_file(self.folder.location, task.name))

    def write_bucket(self, task: ExchangeTask) -> Values:
        """Write the documents of a bucket, sorted, as a part of the target."""
        rows, data, starts = read_bucket(self.folder.location, task.blocks, DOCUMENT)
        order = shuffle_order(rows["key"])
        records = rows["num_sequences"].astype(np.int64) * SEQUENCE.itemsize
        tokens = rows["num_bytes"].astype(np.int64) - records
        of_records, of_tokens = place_pieces(starts, records), place_pieces(starts + records, tokens)
        output = DatasetOutput(self._output(task), np.dtype(self.dtype), self.multimodal)
        try:
            bounds = np.concatenate([[0], np.cumsum(tokens[order] + records[order])])
            for first, stop in batch_by_size(bounds, BLOCK_BYTES):
                check_stop()
                chosen = order[first:stop]
                output.bin.write(_gather(data, of_tokens, chosen, int(tokens[chosen].sum())).data)
                sequences = _gather(data, of_records, chosen, int(records[chosen].sum())).view(SEQUENCE)
                ends = np.cumsum(rows["num_sequences"][chosen], dtype=np.int64)
                output.columns.add(sequences["length"], ends, sequences["mode"] if self.multimodal else None)
            output.publish()
        finally:
            output.close()
        return {}

    def _output(self, task: ExchangeTask) -> DatasetTarget:
        return DatasetTarget(self.folder.location / task.name, self.target.codec)


def _read_documents(
    block: DocumentBlock, low: int, high: int, bounds: NDArray[np.int64], plain: RangeReader
) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return rows without keys, and the data, of documents [low, high) of a block.

    Args:
        bounds: first byte of each document of the block, then the end.
    """
    start, stop = bounds[[low, high]].tolist()
    records, ends = sequence_records(block, low, high)
    data = np.concatenate([records, *(np.frombuffer(v, np.uint8) for v in plain.read(cut((start, stop), BLOCK_BYTES)))])
    tokens, rows = bounds[low : high + 1] - start + len(records), np.zeros(high - low, DOCUMENT)
    rows["num_sequences"] = np.diff(block.bounds[low : high + 1])
    rows["num_bytes"] = np.diff(ends) + np.diff(tokens)
    starts = np.column_stack([ends[:-1], tokens[:-1]]).reshape(-1)
    lengths = np.column_stack([np.diff(ends), np.diff(tokens)]).reshape(-1)
    return rows, _gather(data, place_pieces(starts, lengths), np.arange(len(starts)), len(data))


def _gather(
    data: NDArray[np.uint8], places: NDArray[np.int64], order: NDArray[np.int64], num_bytes: int
) -> NDArray[np.uint8]:
    copy_pieces(data, places, 2 * order, out := np.empty(num_bytes, np.uint8))
    return out
