"""Records in buckets, and their shuffle: a random key for each record, and two passes over a scratch file.

Order: record i gets the key Philox(seed, i), 64 random bits, and the records are sorted by key; equal keys keep their
order.

    record   0     1     2     3
    key      7..   2..   9..   4..
    order    1     3     0     2

The order is a permutation because it is a sort, and it depends on the seed and the number of records alone: not on
memory, buckets, machines or the way the records are read. The first m of n records are in the order that m records
alone would have. Philox 4x64-10 passes BigCrush (Salmon, Moraes, Dror, Shaw, SC 2011), so each order is as likely as
any other as far as is known, except for equal keys: 304 million records have one pair of them with a chance of 0.25 %.

Passes, both with long sequential reads and writes:

    pass 1   records in their order ──► buckets by ranges of keys ──► scratch file, one stream for each bucket
    pass 2   one bucket at a time: its records in memory ──► sorted by key ──► output

A record is a row of one dtype, here with its key, and some bytes in each of several columns (tokens, sequences); the
field `num_bytes` of the row counts them. In jobs of several stages pass 1 ends in an object of the store (`exchange`).

Scratch file: streams of extents. It has no name, so its space is free once the process ends, however it ends.

    file      | a a a a | b b b b | a a . . | c c c . |      extents in the order of their allocation
    streams     a: 1, 3   b: 2   c: 4

Cost: each byte is copied to its bucket, written, read and copied to the output; about 100 ns for a record.
Memory: twice a round in pass 1, and the bytes that an exchange holds; a bucket in pass 2. A bucket that is too large,
as a few records have most of its bytes, stays on disk, and its records are read one by one.

Source: ours; the keys are NumPy's Philox, whose stream NumPy promises to keep (NEP 19).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, StorageError
from binidx.format.document_blocks import batch_by_size
from binidx.native.token_files import copy_pieces
from binidx.storage.ranges import cut

BUCKET_EXTENT_BYTES = 4 << 20
"""Bytes of an extent. The unfilled rest of a stream's last extent is a hole, which takes no space on most
filesystems."""

MIB = 1 << 20
MIN_MEMORY_BYTES = 512_000_000

RESERVED_BYTES = 320 * MIB
"""Memory for everything but buckets: Python, drivers and pyarrow (about 200 MiB), index blocks, upload buffers."""

BUCKET_CHUNK_BYTES = 2 * MIB
"""Bytes of records that pass 2 outputs together: few enough to stay in the CPU cache until they are written."""

RECORD_BYTES, COLUMN_BYTES = 40, 24
"""Bytes of memory for each record of a bucket in pass 2, besides its data, and for each of its columns."""

Column = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Data of n neighbouring records in one column; offset of each record in it, then the end, shape (n + 1,)."""

Pieces = Iterator[memoryview]
"""Data of sorted records in one column, in pieces; a piece is valid until the next one is yielded."""


def assign_buckets(keys: NDArray[np.uint64], num_buckets: int) -> NDArray[np.intp]:
    """Return the bucket number of each key, of `num_buckets` (at most 2^31) equal ranges of keys; shape as keys."""
    high = keys >> np.uint64(32)
    buckets: NDArray[np.intp] = ((high * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.intp)
    return buckets


def shuffle_order(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the numbers of the records sorted by key; records with equal keys keep their order. Shape (count,)."""
    order: NDArray[np.int64] = np.argsort(keys, kind="stable")
    return order


class ScratchFile:
    """Byte streams that grow at their ends: in memory up to a limit, then in a temporary file.

    Args:
        directory: directory of the file; None for the system's temporary directory.
        memory_bytes: bytes to hold in memory before they are written together; 0 writes each append.

    Attributes:
        sizes: bytes of each stream.

    Raises:
        ConfigError: the directory does not exist or is not writable.
        StorageError: the disk is full.
    """

    def __init__(self, directory: str | None, num_streams: int, memory_bytes: int = 0) -> None:
        self._directory, self._memory_bytes = directory or tempfile.gettempdir(), memory_bytes
        self.sizes, self._stored = np.zeros(num_streams, np.int64), np.zeros(num_streams, np.int64)
        try:
            self._file: Any = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            problem = f"found {self._directory} ({error.strerror}), need a folder to write to"
            raise ConfigError(f"scratch: {problem}") from error
        except OSError as error:
            raise self._error(error) from error
        self._extents: list[list[int]] = [[] for _ in range(num_streams)]
        self._end, self._held_bytes = 0, 0
        self._held: dict[int, list[NDArray[np.uint8]]] = {}

    def append(self, stream: int, data: NDArray[np.uint8]) -> None:
        """Append bytes to a stream.

        Args:
            stream: number of the stream.
            data: the bytes, contiguous; with memory they must not change afterwards.
        """
        self.sizes[stream] += len(data)
        self._held.setdefault(stream, []).append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._memory_bytes:
            for number, arrays in self._held.items():
                self._store(number, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
            self._held, self._held_bytes = {}, 0

    def _store(self, stream: int, data: NDArray[np.uint8]) -> None:
        size, done = int(self._stored[stream]), 0
        while done < len(data):
            if size % BUCKET_EXTENT_BYTES == 0:
                self._extents[stream].append(self._end)
                self._end += BUCKET_EXTENT_BYTES
            offset = size % BUCKET_EXTENT_BYTES
            part = data[done : done + BUCKET_EXTENT_BYTES - offset]
            self._write(part, self._extents[stream][-1] + offset)
            size, done = size + len(part), done + len(part)
        self._stored[stream] = size

    def read(self, stream: int, start: int, out: NDArray[np.uint8]) -> None:
        """Read bytes [start, start + len(out)) of a stream into `out`.

        Args:
            stream: number of the stream.
            start: first byte in the stream; all bytes up to start + len(out) must be in the file.
            out: contiguous array to fill.
        """
        done = 0
        while done < len(out):
            extent, offset = divmod(start + done, BUCKET_EXTENT_BYTES)
            part = out.data[done : done + BUCKET_EXTENT_BYTES - offset]
            count = os.preadv(self._file.fileno(), [part], self._extents[stream][extent] + offset)
            assert count, "a stream holds what was appended"
            done += count

    def pieces(self, stream: int) -> Iterator[memoryview]:
        """Yield the bytes of a stream."""
        for start, stop in cut((0, int(self._stored[stream])), BUCKET_EXTENT_BYTES):
            self.read(stream, start, out := np.empty(stop - start, np.uint8))
            yield out.data
        yield from (data.data for data in self._held.get(stream, []))

    def close(self) -> None:
        """Free memory and disk space."""
        self._held = {}
        self._file.close()

    def _write(self, data: NDArray[np.uint8], offset: int) -> None:
        rest = data.data
        try:
            while rest:
                count = os.pwrite(self._file.fileno(), rest, offset)
                rest, offset = rest[count:], offset + count
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> StorageError:
        problem = f"{error.strerror}, with {int(self.sizes.sum()):,} bytes of a shuffle there"
        way = "needed room for all that is shuffled; --scratch names another directory"
        return StorageError(f"{self._directory}: {problem}; {way}")


@dataclass(frozen=True)
class ShufflePlan:
    """Sizes of a shuffle within a limit of memory.

    Attributes:
        num_buckets: number of buckets, which are equal ranges of keys.
        round_bytes: bytes of records that pass 1 distributes to the buckets together.
        bucket_bytes: bytes of a bucket that pass 2 may hold in memory.
    """

    num_buckets: int
    round_bytes: int
    bucket_bytes: int


def plan_shuffle(memory_bytes: int, num_bytes: int, num_records: int, num_columns: int) -> ShufflePlan:
    """Return a plan in which each bucket fits into memory, with a margin as their sizes are random.

    Args:
        memory_bytes: memory of the whole process.
        num_bytes, num_records: bytes and number of all records; estimates if they are not known.
        num_columns: number of columns of a record.

    Raises:
        ConfigError: the memory is less than any shuffle needs.
    """
    if memory_bytes < MIN_MEMORY_BYTES:
        raise ConfigError(f"memory: {memory_bytes:,} bytes are too few, need at least {MIN_MEMORY_BYTES // 10**6} MB")
    bucket_bytes = (memory_bytes - RESERVED_BYTES) * 3 // 4
    needed = num_bytes + num_records * (RECORD_BYTES + COLUMN_BYTES * num_columns)
    num_buckets = max(1, -(-needed * 5 // (bucket_bytes * 4)))
    round_bytes = min(max(8 * MIB, num_buckets * MIB // 8), (memory_bytes - RESERVED_BYTES) // 8, 64 * MIB)
    return ShufflePlan(num_buckets, round_bytes, bucket_bytes)


def keyed_row(num_columns: int) -> np.dtype[Any]:
    """Return the dtype of the rows of a shuffle."""
    return np.dtype([("key", "<u8"), ("num_bytes", "<i8", (num_columns,))])


def _keyed_rows(keys: NDArray[np.uint64], lengths: Sequence[Any]) -> NDArray[Any]:
    rows: NDArray[Any] = np.column_stack([keys.view(np.int64), *lengths]).view(keyed_row(len(lengths))).reshape(-1)
    return rows


def record_lengths(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return the bytes of n records in each column, shape (n, num_columns)."""
    names = rows.dtype.names or ()
    return rows["num_bytes"].astype(np.int64, copy=False) if "num_bytes" in names else np.empty((len(rows), 0), int)


class BucketColumn(NamedTuple):
    """Data of the records of a bucket in one column: in memory or, if `data` is None, in a scratch file.

    Attributes:
        bounds: piece p is data[bounds[p] : bounds[p + 1]].
    """

    bounds: NDArray[np.int64]
    data: NDArray[np.uint8] | None
    scratch: ScratchFile | None = None
    stream: int = 0

    def pieces(self, numbers: NDArray[np.int64], buffer: _Buffer) -> Pieces:
        """Yield the pieces with these numbers, in this order; from disk each is read on its own."""
        if self.data is not None and len(numbers) > 1:
            out = buffer.resize(BUCKET_CHUNK_BYTES)
            yield out.data[: copy_pieces(self.data, self.bounds, numbers, out)]
            return
        for number in numbers.tolist():
            start, stop = self.bounds[number : number + 2].tolist()
            if self.data is not None:
                yield self.data.data[start:stop]
                return
            assert self.scratch is not None
            for part in cut((start, stop), BUCKET_CHUNK_BYTES):
                out = buffer.resize(part[1] - part[0])
                self.scratch.read(self.stream, part[0], out)
                yield out.data


class BucketRecords(NamedTuple):
    """Records of one bucket.

    Attributes:
        rows: shape (n,), in the order in which they were added.
        numbers: number of each record's piece in the columns, shape (n,).
    """

    rows: NDArray[Any]
    columns: Sequence[BucketColumn]
    numbers: NDArray[np.int64]

    def sorted(self, order: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], list[Pieces]]]:
        """Yield all records in this order, in runs of at most `BUCKET_CHUNK_BYTES` or of one longer record.

        Each run has two items: the lengths in bytes of its n records in each column, shape (n, num_columns), and the
        data of each column in pieces.
        """
        lengths, buffers = np.ascontiguousarray(record_lengths(self.rows)), [_Buffer() for _ in self.columns]
        # By column and with `take`: ten times as fast as `sum(axis=1)` and indices.
        for first, stop in batch_by_size(ends_of(sum(lengths.T, np.int64(0)).take(order)), BUCKET_CHUNK_BYTES):
            part = order[first:stop]
            columns = zip(self.columns, buffers, strict=True)
            yield lengths.take(part, 0), [column.pieces(self.numbers[part], buffer) for column, buffer in columns]


class Buckets:
    """Records that are added in any order, and grouped by bucket in a scratch file.

    Args:
        row: dtype of the rows; its field `num_bytes`, if there is one, has the bytes of a record in each column.
        directory: directory of the scratch file; None for the system's temporary directory.
        memory_bytes: bytes to hold before the file is used.
    """

    def __init__(
        self, plan: ShufflePlan, row: np.dtype[Any], directory: str | None = None, memory_bytes: int = 0
    ) -> None:
        self.plan, self.row, self._memory_bytes = plan, row, memory_bytes
        self.num_columns = record_lengths(np.empty(0, row)).shape[1]
        self._scratch = ScratchFile(directory, plan.num_buckets * (1 + self.num_columns), memory_bytes)
        self._grouped = _Buffer()

    def add(self, keys: NDArray[np.uint64], columns: Sequence[Column]) -> None:
        """Distribute records of `keyed_row` to the buckets; one call holds about `plan.round_bytes` of them at most.

        Args:
            keys: key of each record, shape (n,).
            columns: the records' data in each column.
        """
        rows = _keyed_rows(keys, [np.diff(bounds) for _, bounds in columns])
        self.add_rows(assign_buckets(keys, self.plan.num_buckets), rows, columns)

    def add_rows(
        self,
        buckets: NDArray[np.int64],
        rows: NDArray[Any],
        columns: Sequence[Column] = (),
        numbers: NDArray[np.int64] | None = None,
    ) -> None:
        """Add records with the bucket of each.

        Args:
            buckets, rows: shape (n,).
            columns: data and bounds of pieces, of each column.
            numbers: number of each record's piece; by default record i has piece i.
        """
        small = np.uint16 if self.plan.num_buckets <= 1 << 16 else np.int64
        order = np.argsort(buckets.astype(small), kind="stable")
        bounds = ends_of(np.bincount(buckets, minlength=self.plan.num_buckets))
        rows = rows.take(order)
        self._append(0, rows.view(np.uint8), bounds * self.row.itemsize)
        pieces, lengths = order if numbers is None else numbers[order], record_lengths(rows)
        for number, (data, places) in enumerate(columns, 1):
            ends = ends_of(lengths[:, number - 1])
            buffer = _Buffer() if self._memory_bytes else self._grouped
            copy_pieces(data, places, pieces, grouped := buffer.resize(int(ends[-1])))
            self._append(number, grouped, ends[bounds])

    def add_one(self, key: NDArray[np.uint64], columns: Sequence[Iterable[memoryview]]) -> None:
        """Add one record of more than `plan.round_bytes`, with the data of each column in pieces.

        Args:
            key: shape (1,).
            columns: the record's data in each column, in pieces.
        """
        bucket, lengths = int(assign_buckets(key, self.plan.num_buckets)[0]), []
        for stream, pieces in zip(self._streams(bucket)[1:], columns, strict=True):
            before = int(self._scratch.sizes[stream])
            for piece in pieces:
                self._scratch.append(stream, np.frombuffer(piece, np.uint8))
            lengths.append([int(self._scratch.sizes[stream]) - before])
        self._scratch.append(self._streams(bucket)[0], _keyed_rows(key, lengths).view(np.uint8))

    def sorted(self) -> Iterator[tuple[NDArray[np.int64], list[Pieces]]]:
        """Yield all records sorted by key, as `BucketRecords.sorted`; the buckets must hold none in memory."""
        self._grouped = _Buffer()
        buffers = [_Buffer() for _ in range(self.num_columns)]
        for bucket in range(self.plan.num_buckets):
            stream, *streams = self._streams(bucket)
            self._scratch.read(stream, 0, heads := np.empty(self._scratch.sizes[stream], np.uint8))
            rows, columns = heads.view(self.row), []
            left = self._scratch.sizes[streams].sum() > self.plan.bucket_bytes
            for stream, lengths, buffer in zip(streams, record_lengths(rows).T, buffers, strict=True):
                bounds, data = ends_of(lengths), None
                if not left or bounds[-1] <= self.plan.bucket_bytes // (2 * self.num_columns):
                    self._scratch.read(stream, 0, data := buffer.resize(int(bounds[-1])))
                columns.append(BucketColumn(bounds, data, self._scratch, stream))
            yield from BucketRecords(rows, columns, np.arange(len(rows))).sorted(shuffle_order(rows["key"]))

    def close(self) -> None:
        """Free memory and disk space."""
        self._scratch.close()

    def _append(self, column: int, data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> None:
        """Append data of a column to the buckets; `bounds` has the offset of each bucket in `data`, then the end."""
        places = bounds.tolist()
        for bucket in np.flatnonzero(np.diff(bounds)).tolist():
            self._scratch.append(self._streams(bucket)[column], data[places[bucket] : places[bucket + 1]])

    def _streams(self, bucket: int) -> range:
        """Return the streams of a bucket: rows, then each column."""
        return range(bucket, self.plan.num_buckets * (1 + self.num_columns), self.plan.num_buckets)


class _Buffer:
    """Reused memory: the kernel zeroes newly allocated pages, which costs as much as writing to them."""

    def __init__(self) -> None:
        self._data = np.empty(0, np.uint8)

    def resize(self, size: int) -> NDArray[np.uint8]:
        """Return `size` bytes; the bytes returned before become invalid."""
        if len(self._data) < size:
            self._data = np.empty(0, np.uint8)  # frees the old buffer before the new one is allocated
            self._data = np.empty(size, np.uint8)
        return self._data[:size]


def ends_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start offset of each of n items, followed by the end of the last one; shape (n + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths)])
