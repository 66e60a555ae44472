"""Exchange of records between two stages of a job.

Each task of the first stage groups its records by bucket, and writes one object. Each task of the second stage reads
one bucket of all objects:

    first stage, task 0     | bucket 0 | bucket 1 | bucket 2 |
    first stage, task 1     | bucket 0 | bucket 1 | bucket 2 |
                                  ▼          ▼          ▼
    second stage              task 0     task 1     task 2

    block of a bucket         u64 number of records ─ rows ─ data of each record ─ xxh3_64 of the bytes before

A record is a row of one dtype, and the bytes that its field `num_bytes` counts, if it has this field. Blocks of 8 MiB
are read by one request each, so the tasks of the first stage should have 8 MiB of records for each bucket.

Memory: `MEMORY_BYTES` of records in the first stage, further ones are in a scratch file; one bucket in the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from binidx.corpus.shuffle_buckets import ScratchFile
from binidx.errors import FormatError
from binidx.format.idx_blocks import batch_by_size
from binidx.jobs.parts import Values
from binidx.native.token_files import copy_pieces
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut, read_many
from binidx.storage.requests.remote_object import object_identity, recorded_object
from binidx.storage.writing.publish import create_object

MEMORY_BYTES = 1 << 30
BLOCK_BYTES = 8 << 20
"""Bytes of a request, and wanted size of a block."""

ROUND_BYTES = 64 << 20
"""Bytes that are fetched, sorted or copied at once."""

TASK_BYTES = 3 << 29
"""Memory of a task, of either stage."""

COUNT = np.dtype("<u8")
DIGEST_BYTES = 8


def place_pieces(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the bounds of pieces that lie anywhere, for `copy_pieces`: piece p is number 2 p.

    Args:
        starts, lengths: in bytes, shape (n,).
    """
    return np.column_stack([starts, starts + lengths]).astype(np.int64).reshape(-1)


class ExchangeWriter:
    """Writer of the object of one task of the first stage.

    Args:
        num_buckets: number of tasks of the second stage.
        scratch: directory of the scratch file; None for the system's temporary directory.
    """

    def __init__(self, num_buckets: int, scratch: str | None = None) -> None:
        self.num_buckets, self._directory = num_buckets, scratch
        self._held: dict[int, list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]] = {}
        self._held_bytes, self._counts = 0, np.zeros(num_buckets, COUNT)
        self._scratch: ScratchFile | None = None

    def add(
        self,
        buckets: NDArray[np.int64],
        rows: NDArray[Any],
        data: NDArray[np.uint8] | None = None,
        starts: NDArray[np.int64] | None = None,
    ) -> None:
        """Add records, about `ROUND_BYTES` at most.

        Args:
            buckets: bucket of each record, shape (n,).
            rows: row of each record, shape (n,), contiguous.
            data: bytes that hold the data of the records.
            starts: offset of each record's data, shape (n,).
        """
        if not len(rows):
            return
        small = np.uint16 if self.num_buckets <= 1 << 16 else np.int64
        order = np.argsort(buckets.astype(small), kind="stable")
        counts = np.bincount(buckets, minlength=self.num_buckets)
        self._counts += counts.astype(COUNT)
        grouped, ends = rows[order].view(np.uint8).reshape(-1), np.cumsum(counts)
        copied, data_ends = np.empty(0, np.uint8), np.zeros(self.num_buckets, np.int64)
        if data is not None and starts is not None:
            lengths = rows["num_bytes"].astype(np.int64)
            copied = np.empty(lengths.sum(), np.uint8)
            copy_pieces(data, place_pieces(starts, lengths), 2 * order, copied)
            data_ends = np.concatenate([[0], np.cumsum(lengths[order])])[ends]
        filled = np.flatnonzero(counts)
        of_rows = np.split(grouped, ends[filled][:-1] * rows.dtype.itemsize)
        of_data = np.split(copied, data_ends[filled][:-1])
        for bucket, *columns in zip(filled.tolist(), of_rows, of_data, strict=True):
            self._held.setdefault(bucket, []).append((columns[0], columns[1]))
        self._held_bytes += len(grouped) + len(copied)
        if self._held_bytes > MEMORY_BYTES:
            self._spill()

    def publish(self, file: Location) -> Values:
        """Write the object; return its identity, and the end of each bucket's block in it, in JSON values."""
        ends, end = [], 0
        with create_object(file, durable=False) as out:
            for bucket in range(self.num_buckets):
                if self._counts[bucket]:
                    digest = xxhash.xxh3_64()
                    for piece in self._pieces(bucket):
                        digest.update(piece)
                        end += out.write(piece)
                    end += out.write(digest.digest())
                ends.append(end)
        return {"ends": ends, "identity": object_identity(file)}

    def close(self) -> None:
        """Free memory and disk."""
        self._held = {}
        if self._scratch is not None:
            self._scratch.close()

    def _pieces(self, bucket: int) -> Iterator[bytes | memoryview]:
        yield self._counts[bucket : bucket + 1].tobytes()
        for column in range(2):
            if self._scratch is not None:
                stream = 2 * bucket + column
                for start, stop in cut((0, int(self._scratch.sizes[stream])), BLOCK_BYTES):
                    self._scratch.read(stream, start, out := np.empty(stop - start, np.uint8))
                    yield out.data
            yield from (columns[column].data for columns in self._held.get(bucket, []))

    def _spill(self) -> None:
        self._scratch = self._scratch or ScratchFile(self._directory, 2 * self.num_buckets)
        for bucket, pieces in self._held.items():
            for column in range(2):
                self._scratch.append(2 * bucket + column, np.concatenate([columns[column] for columns in pieces]))
        self._held, self._held_bytes = {}, 0


class Records(NamedTuple):
    """Records of one bucket.

    Attributes:
        rows: shape (n,), in the order of the objects.
        data: bytes that hold the data of all records.
        starts: offset of each record's data, shape (n,).
    """

    rows: NDArray[Any]
    data: NDArray[np.uint8]
    starts: NDArray[np.int64]

    def sorted(self, order: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], memoryview]]:
        """Yield (numbers of some records, their data), all records in this order; a piece is valid until the next."""
        lengths = self.rows["num_bytes"].astype(np.int64)
        places, out = place_pieces(self.starts, lengths), np.empty(0, np.uint8)
        bounds = np.concatenate([[0], np.cumsum(lengths[order])])
        for first, stop in batch_by_size(bounds, BLOCK_BYTES):
            if len(out) < bounds[stop] - bounds[first]:
                out = np.empty(bounds[stop] - bounds[first], np.uint8)
            chosen = order[first:stop]
            yield chosen, out.data[: copy_pieces(self.data, places, 2 * chosen, out)]


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


def read_bucket(folder: Location, blocks: Sequence[Block], row: DTypeLike) -> Records:
    """Return the records of one bucket.

    Args:
        folder: folder of the objects.
        blocks: blocks of the bucket.
        row: dtype of the rows.

    Raises:
        FormatError: a block is damaged.
        ObjectChangedError: an object was replaced.
    """
    row, readers = np.dtype(row), list[RangeReader]()
    for block in blocks:
        file = exchange_file(folder, block.name)
        readers.append(open_stored(file, mmap=False, found=recorded_object(file.uri, block.identity)))
    bounds = np.concatenate([[0], np.cumsum([block.stop - block.start for block in blocks], dtype=np.int64)])
    data, done = np.empty(bounds[-1], np.uint8), 0
    ranges = [
        (reader, part)
        for reader, block in zip(readers, blocks, strict=True)
        for part in cut((block.start, block.stop), BLOCK_BYTES)
    ]
    places = np.concatenate([[0], np.cumsum([stop - start for _, (start, stop) in ranges], dtype=np.int64)])
    for first, last in batch_by_size(places, ROUND_BYTES):
        for (view,) in read_many([(reader, [part]) for reader, part in ranges[first:last]]):
            data[done : done + len(view)] = np.frombuffer(view, np.uint8)
            done += len(view)
    rows, starts = [np.empty(0, row)], [np.empty(0, np.int64)]
    for reader, (first, stop) in zip(readers, itertools.pairwise(bounds.tolist()), strict=True):
        end = stop - DIGEST_BYTES
        if xxhash.xxh3_64_digest(data[first:end].data) != data[end:stop].tobytes():
            raise FormatError(f"{reader.uri}: damaged; delete it and the .json beside it, and give the command again")
        begin, count = first + COUNT.itemsize, int(data[first : first + COUNT.itemsize].view(COUNT)[0])
        rows.append(data[begin : begin + count * row.itemsize].view(row))
        if row.names and "num_bytes" in row.names:
            lengths = rows[-1]["num_bytes"].astype(np.int64)
            starts.append(begin + count * row.itemsize + np.cumsum(lengths) - lengths)
    return Records(np.concatenate(rows), data, np.concatenate(starts))


def exchange_file(folder: Location, name: str) -> Location:
    """Return the location of the object of the task with this name."""
    return folder / f"{name}.exchange"
