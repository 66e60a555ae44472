"""Shuffle more records than memory holds: a random key for each record, and two passes over a scratch file.

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

A record has a key and some bytes in each of several columns (tokens, lengths, modes).

Scratch file: streams of extents. It has no name, so its space is free once the process ends, however it ends.

    file      | a a a a | b b b b | a a . . | c c c . |      extents in the order of their allocation
    streams     a: 1, 3   b: 2   c: 4

Cost: each byte is copied to its bucket, written, read and copied to the output; about 100 ns for a record.
Memory: twice a round in pass 1, a bucket in pass 2. A bucket that is too large, as a few records have most of its
bytes, stays on disk, and its records are read one by one.

Source: ours; the keys are NumPy's Philox, whose stream NumPy promises to keep (NEP 19).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, StorageError
from binidx.format.idx_blocks import batch_by_size
from binidx.native.token_files import copy_pieces
from binidx.storage.ranges import cut

PURPOSE = 0x62696E6964780001
"""Second word of Philox's key, so that another use of the same seed draws other numbers."""

PHILOX_BLOCK = 4
"""Number of keys that Philox draws for one value of its counter."""

EXTENT_BYTES = 4 << 20
"""Bytes of an extent. The unfilled rest of a stream's last extent is a hole, which takes no space on most
filesystems."""

MIB = 1 << 20
MIN_MEMORY_BYTES = 512 * MIB

RESERVED_BYTES = 320 * MIB
"""Memory for everything but buckets: Python, drivers and pyarrow (about 200 MiB), index blocks, upload buffers."""

CHUNK_BYTES = 2 * MIB
"""Bytes of records that pass 2 outputs together: few enough to stay in the CPU cache until they are written."""

RECORD_BYTES, COLUMN_BYTES = 40, 24
"""Bytes of memory for each record of a bucket in pass 2, besides its data, and for each of its columns."""

Column = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""Data of n neighbouring records in one column; offset of each record in it, then the end, shape (n + 1,)."""

Pieces = Iterator[memoryview]
"""Data of sorted records in one column, in pieces; a piece is valid until the next one is yielded."""


def shuffle_keys(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return the random sort keys of `count` records, from record number `first` on; shape (count,).

    Args:
        seed: any integer; only its low 64 bits are used.
    """
    key, before = np.array([seed % 2**64, PURPOSE], np.uint64), first % PHILOX_BLOCK
    numbers = np.random.Philox(key=key, counter=first // PHILOX_BLOCK).random_raw(before + count)
    keys: NDArray[np.uint64] = numbers[before:]
    return keys


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
    """Temporary file of byte streams that grow at their ends.

    Args:
        directory: directory of the file; None for the system's temporary directory.

    Attributes:
        sizes: bytes of each stream.

    Raises:
        ConfigError: the directory does not exist or is not writable.
        StorageError: the disk is full.
    """

    def __init__(self, directory: str | None, num_streams: int) -> None:
        self._directory = directory or tempfile.gettempdir()
        self.sizes = np.zeros(num_streams, np.int64)
        try:
            self._file: Any = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            problem = f"found {self._directory} ({error.strerror}), need a folder to write to"
            raise ConfigError(f"scratch: {problem}") from error
        except OSError as error:
            raise self._error(error) from error
        self._extents: list[list[int]] = [[] for _ in range(num_streams)]
        self._end = 0

    def append(self, stream: int, data: NDArray[np.uint8]) -> None:
        """Append bytes to a stream.

        Args:
            stream: number of the stream.
            data: the bytes, contiguous.
        """
        size, done = int(self.sizes[stream]), 0
        while done < len(data):
            if size % EXTENT_BYTES == 0:
                self._extents[stream].append(self._end)
                self._end += EXTENT_BYTES
            offset = size % EXTENT_BYTES
            part = data[done : done + EXTENT_BYTES - offset]
            self._write(part, self._extents[stream][-1] + offset)
            size, done = size + len(part), done + len(part)
        self.sizes[stream] = size

    def read(self, stream: int, start: int, out: NDArray[np.uint8]) -> None:
        """Read bytes [start, start + len(out)) of a stream into `out`.

        Args:
            stream: number of the stream.
            start: first byte in the stream; all bytes up to start + len(out) must have been appended.
            out: contiguous array to fill.
        """
        done = 0
        while done < len(out):
            extent, offset = divmod(start + done, EXTENT_BYTES)
            part = out.data[done : done + EXTENT_BYTES - offset]
            count = os.preadv(self._file.fileno(), [part], self._extents[stream][extent] + offset)
            assert count, "a stream holds what was appended"
            done += count

    def close(self) -> None:
        """Free the disk space."""
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
        raise ConfigError(f"memory: {memory_bytes:,} bytes are too few, need at least {MIN_MEMORY_BYTES >> 20} MiB")
    bucket_bytes = (memory_bytes - RESERVED_BYTES) * 3 // 4
    needed = num_bytes + num_records * (RECORD_BYTES + COLUMN_BYTES * num_columns)
    num_buckets = max(1, -(-needed * 5 // (bucket_bytes * 4)))
    round_bytes = min(max(8 * MIB, num_buckets * MIB // 8), (memory_bytes - RESERVED_BYTES) // 8, 64 * MIB)
    return ShufflePlan(num_buckets, round_bytes, bucket_bytes)


class Buckets:
    """Sorter of records: it collects them in buckets on disk and yields them sorted by their keys.

    Args:
        directory: directory of the scratch file; None for the system's temporary directory.
    """

    def __init__(self, plan: ShufflePlan, num_columns: int, directory: str | None = None) -> None:
        self.plan, self.num_columns = plan, num_columns
        self._scratch = ScratchFile(directory, plan.num_buckets * (1 + num_columns))
        self._grouped = _Buffer()

    def add(self, keys: NDArray[np.uint64], columns: Sequence[Column]) -> None:
        """Distribute records to the buckets; one call holds about `plan.round_bytes` of records at most.

        Args:
            keys: key of each record, shape (n,).
            columns: the records' data in each column.
        """
        buckets = assign_buckets(keys, self.plan.num_buckets)
        small = np.uint16 if self.plan.num_buckets <= 1 << 16 else np.int64
        order = np.argsort(buckets.astype(small), kind="stable")
        bounds = _ends(np.bincount(buckets, minlength=self.plan.num_buckets))
        heads = _heads(keys, [np.diff(places) for _, places in columns])[order]
        self._append(0, heads.view(np.uint8).reshape(-1), bounds * heads.itemsize * heads.shape[1])
        for number, (data, places) in enumerate(columns, 1):
            ends = _ends(heads[:, number])
            grouped = self._grouped.resize(int(ends[-1]))
            copy_pieces(data, places, order, grouped)
            self._append(number, grouped, ends[bounds])

    def add_one(self, key: NDArray[np.uint64], columns: Sequence[Iterable[memoryview]]) -> None:
        """Add one record of more than `plan.round_bytes`, with the data of each column in pieces.

        Args:
            key: shape (1,).
            columns: the record's data in each column, in pieces.
        """
        bucket, lengths = int(assign_buckets(key, self.plan.num_buckets)[0]), []
        for number, pieces in enumerate(columns, 1):
            before = int(self._scratch.sizes[self._stream(number, bucket)])
            for piece in pieces:
                self._scratch.append(self._stream(number, bucket), np.frombuffer(piece, np.uint8))
            lengths.append(int(self._scratch.sizes[self._stream(number, bucket)]) - before)
        heads = _heads(key, [np.array([length]) for length in lengths])
        self._scratch.append(self._stream(0, bucket), heads.view(np.uint8).reshape(-1))

    def sorted(self) -> Iterator[tuple[NDArray[np.int64], list[Pieces]]]:
        """Yield all records sorted by key, in runs of at most `CHUNK_BYTES` or of one longer record.

        Each run has two items: the lengths in bytes of its n records in each column, shape (n, num_columns), and the
        data of each column in pieces.
        """
        self._grouped = _Buffer()
        buffers = [_Buffer() for _ in range(self.num_columns)]
        for bucket in range(self.plan.num_buckets):
            heads = np.empty(self._scratch.sizes[self._stream(0, bucket)], np.uint8)
            self._scratch.read(self._stream(0, bucket), 0, heads)
            table = heads.view(np.int64).reshape(-1, 1 + self.num_columns)
            order = shuffle_order(table[:, 0].view(np.uint64))
            columns = [self._column(number, bucket, table[:, number], buffers[number - 1]) for number in self._numbers]
            for first, stop in batch_by_size(_ends(table[order, 1:].sum(axis=1)), CHUNK_BYTES):
                part = order[first:stop]
                yield table[part, 1:], [column.pieces(part) for column in columns]

    def close(self) -> None:
        """Free the disk space."""
        self._scratch.close()

    @property
    def _numbers(self) -> range:
        return range(1, self.num_columns + 1)

    def _column(self, number: int, bucket: int, lengths: NDArray[np.int64], buffer: _Buffer) -> _Column:
        """Return a column of a bucket: in memory, or left on disk if both column and bucket are too large."""
        stream = self._stream(number, bucket)
        bounds = _ends(lengths)
        size = int(bounds[-1])
        sizes = [int(self._scratch.sizes[self._stream(column, bucket)]) for column in self._numbers]
        if sum(sizes) > self.plan.bucket_bytes and size > self.plan.bucket_bytes // (2 * self.num_columns):
            return _Column(self._scratch, stream, bounds, None)
        data = buffer.resize(size)
        self._scratch.read(stream, 0, data)
        return _Column(self._scratch, stream, bounds, data)

    def _append(self, column: int, data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> None:
        """Append data of a column to the buckets; `bounds` has the offset of each bucket in `data`, then the end."""
        places = bounds.tolist()
        for bucket in np.flatnonzero(np.diff(bounds)).tolist():
            self._scratch.append(self._stream(column, bucket), data[places[bucket] : places[bucket + 1]])

    def _stream(self, column: int, bucket: int) -> int:
        return column * self.plan.num_buckets + bucket


class _Column:
    """Column of a bucket, in memory or, if `data` is None, on disk; from disk each record is read on its own."""

    def __init__(
        self, scratch: ScratchFile, stream: int, bounds: NDArray[np.int64], data: NDArray[np.uint8] | None
    ) -> None:
        self._scratch, self._stream, self._bounds, self._data = scratch, stream, bounds, data
        self._out = _Buffer()

    def pieces(self, order: NDArray[np.int64]) -> Pieces:
        if self._data is not None and len(order) > 1:
            out = self._out.resize(CHUNK_BYTES)
            yield out.data[: copy_pieces(self._data, self._bounds, order, out)]
            return
        for record in order.tolist():
            start, stop = self._bounds[record : record + 2].tolist()
            if self._data is not None:
                yield self._data.data[start:stop]
                return
            for part in cut((start, stop), CHUNK_BYTES):
                out = self._out.resize(part[1] - part[0])
                self._scratch.read(self._stream, part[0], out)
                yield out.data


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


def _heads(keys: NDArray[np.uint64], lengths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the key of each record and its length in each column, shape (n, 1 + num_columns)."""
    return np.column_stack([keys.view(np.int64), *lengths])


def _ends(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start offset of each of n items, followed by the end of the last one; shape (n + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths)])
