"""Exchange of records between two stages of a job.

Each task of the first stage groups its records by bucket, and writes one object. Each task of the second stage reads
one bucket of all objects:

    first stage, task 0     | bucket 0 | bucket 1 | bucket 2 |
    first stage, task 1     | bucket 0 | bucket 1 | bucket 2 |
                                  ▼          ▼          ▼
    second stage              task 0     task 1     task 2

    block of a bucket         u64 number of records ─ rows ─ each column ─ xxh3_64 of the bytes before

Records are those of `shuffle_buckets`: a row of one dtype, and the bytes that its field `num_bytes` counts, if it has
this field. Blocks of 8 MiB are read by one request each, so the tasks of the first stage should have 8 MiB of records
for each bucket.

Memory: `HELD_BYTES` of records in the first stage, further ones are in a scratch file; one bucket in the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.shuffle_buckets import BucketColumn, BucketRecords, Buckets, ShufflePlan, ends_of, record_lengths
from binidx.errors import FormatError
from binidx.format.document_blocks import batch_by_size
from binidx.jobs.parts import Values
from binidx.storage.location import Location
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut, read_many
from binidx.storage.requests.remote_object import object_identity
from binidx.storage.writing.publish import create_object

HELD_BYTES = 1 << 30
PIECE_BYTES = 8 << 20
"""Bytes of a request, and wanted size of a block."""

ROUND_BYTES = 64 << 20
"""Bytes that are fetched, sorted or copied at once."""

TASK_BYTES = 1600 << 20
"""Memory of a task, of either stage: measured without mapped files at most 1,595 MiB, of 2 GiB of documents."""

COUNT = np.dtype("<u8")
DIGEST_BYTES = 8


class ExchangeWriter(Buckets):
    """Writer of the object of one task of the first stage.

    Args:
        num_buckets: number of tasks of the second stage.
        row: dtype of the rows.
        scratch: directory of the scratch file; None for the system's temporary directory.
    """

    def __init__(self, num_buckets: int, row: np.dtype[Any], scratch: str | None = None) -> None:
        super().__init__(ShufflePlan(num_buckets, ROUND_BYTES, 0), row, scratch, HELD_BYTES)

    def publish(self, file: Location) -> Values:
        """Write the object; return its identity, and the end of each bucket's block in it, in JSON values."""
        ends, end = [], 0
        with create_object(file, durable=False) as out:
            for bucket in range(self.plan.num_buckets):
                if count := self._scratch.sizes[bucket] // self.row.itemsize:
                    digest, streams = xxhash.xxh3_64(), map(self._scratch.pieces, self._streams(bucket))
                    for piece in itertools.chain([count.astype(COUNT).tobytes()], *streams):
                        digest.update(piece)
                        end += out.write(piece)
                    end += out.write(digest.digest())
                ends.append(end)
        return {"ends": ends, "identity": object_identity(file)}


class Block(NamedTuple):
    """Block of one bucket: name and identity of its object, and its byte range."""

    name: str
    identity: Mapping[str, Any]
    start: int
    stop: int


@dataclass(frozen=True)
class ExchangeTask:
    """Task of a stage.

    Attributes:
        name: stage and number; names are sorted as the numbers are.
        size: units of work, for progress.
        number: number of the source, chunk or part that it reads or writes, if the stage has any.
        rows: documents, positions or bytes that it reads.
        blocks: the records that it reads, of each side if there are two.
    """

    name: str
    size: int
    number: int = 0
    rows: range = range(0)
    blocks: Sequence[Any] = ()

    def __str__(self) -> str:
        return self.name


def document_tasks(stage: str, sizes: Sequence[tuple[int, int]], task_bytes: int) -> list[ExchangeTask]:
    """Return tasks of neighbouring documents of sources; `number` is that of the source.

    Args:
        sizes: documents, and bytes of tokens, of each source.
        task_bytes: bytes of tokens of a task, about.
    """
    tasks = []
    for source, (num_documents, num_bytes) in enumerate(sizes):
        count = max(1, -(-num_bytes // task_bytes))
        bounds = [num_documents * number // count for number in range(count + 1)]
        for number, rows in enumerate(itertools.starmap(range, itertools.pairwise(bounds))):
            tasks.append(ExchangeTask(f"{stage}-{source:06}-{number:06}", num_bytes // count, source, rows))
    return tasks


def list_blocks(results: Mapping[str, Values], num_buckets: int) -> list[list[Block]]:
    """Return the blocks of each bucket.

    Args:
        results: name of each task of the first stage -> the result of its `publish`.
        num_buckets: number of buckets.
    """
    blocks: list[list[Block]] = [[] for _ in range(num_buckets)]
    for name, result in sorted(results.items()):
        for bucket, (start, stop) in enumerate(itertools.pairwise([0, *result["ends"]])):
            if start < stop:
                blocks[bucket].append(Block(name, result["identity"], start, stop))
    return blocks


def read_bucket(folder: Location, blocks: Sequence[Block], row: np.dtype[Any]) -> BucketRecords:
    """Return the records of one bucket.

    Args:
        folder: folder of the objects.
        blocks: blocks of the bucket.
        row: dtype of the rows.

    Raises:
        FormatError: a block is damaged.
        ObjectChangedError: an object was replaced.
    """
    readers = [open_stored(exchange_file(folder, block.name), mmap=False, identity=block.identity) for block in blocks]
    bounds = ends_of(np.array([block.stop - block.start for block in blocks], np.int64))
    data, done = np.empty(bounds[-1], np.uint8), 0
    ranges = [
        (reader, part)
        for reader, block in zip(readers, blocks, strict=True)
        for part in cut((block.start, block.stop), PIECE_BYTES, PIECE_BYTES / 2)
    ]
    places = ends_of(np.array([stop - start for _, (start, stop) in ranges], np.int64))
    for first, last in batch_by_size(places, ROUND_BYTES):
        for (view,) in read_many([(reader, [part]) for reader, part in ranges[first:last]]):
            data[done : done + len(view)] = np.frombuffer(view, np.uint8)
            done += len(view)
    rows, columns = [np.empty(0, row)], [bound_columns(np.empty(0, row), 0)]
    for reader, (first, stop) in zip(readers, itertools.pairwise(bounds.tolist()), strict=True):
        end = stop - DIGEST_BYTES
        if xxhash.xxh3_64_digest(data[first:end].data) != data[end:stop].tobytes():
            raise FormatError(f"{reader.uri}: damaged; delete it and the .json beside it, and give the command again")
        begin, count = first + COUNT.itemsize, int(data[first : first + COUNT.itemsize].view(COUNT)[0])
        rows.append(data[begin : begin + count * row.itemsize].view(row))
        columns.append(bound_columns(rows[-1], begin + count * row.itemsize))
    joined, block_numbers = np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(block) for block in rows])
    # The bounds of each block have one more item than its rows, so a piece between two blocks is no record's.
    numbers = np.arange(len(joined)) + block_numbers
    return BucketRecords(joined, [BucketColumn(bounds, data) for bounds in np.concatenate(columns, axis=1)], numbers)


def bound_columns(rows: NDArray[Any], start: int) -> NDArray[np.int64]:
    """Return the bounds of each column's pieces, shape (num_columns, n + 1), of columns that lie one after another.

    Args:
        start: offset of the first column.
    """
    lengths = record_lengths(rows)
    ends, count = start + ends_of(lengths.T.reshape(-1)), len(rows)
    return np.array([ends[n * count : (n + 1) * count + 1] for n in range(lengths.shape[1])]).reshape(-1, count + 1)


def exchange_file(folder: Location, name: str) -> Location:
    """Return the location of the object of the task with this name."""
    return folder / f"{name}.exchange"
