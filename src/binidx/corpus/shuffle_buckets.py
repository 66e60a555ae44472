"""The permutation: record i gets the key Philox(seed, i), 64 random bits, and the records are sorted by their keys.

    record   0     1     2     3            equal keys: the lower record first
    key      7..   2..   9..   4..
    order    1     3     0     2

So it is a permutation because it is a sort, and a function of the seed and the number of records alone: not of memory,
buckets, machines or how the records are read. The first m of n records stand in the order that m records alone have.

Quality: keys of Philox 4x64-10, which passes BigCrush (Salmon, Moraes, Dror, Shaw, SC 2011), are independent and
uniform for all that is known, so each order is as likely as any other, but for equal keys: 304 million records have
one pair of them with a chance of 0.25 %. There are 2^64 seeds, so that many of the n! orders can come out.

Source: ours; NumPy's Philox is what is computed, whose stream NumPy promises to keep (NEP 19).

Streams of bytes in one temporary file: each grows at its end, in extents, and is read back at any place.

    file      | a a a a | b b b b | a a . . | c c c . |      an extent after the other, as they are begun
    streams     a: 1, 3   b: 2   c: 4

The file has no name: when its process ends, however it ends, its room is free again.

Records sorted by random keys, more of them than memory holds: the two passes of every shuffle here.

    pass 1   records as they come ──► buckets by the range of their keys ──► scratch, each bucket a stream at its end
    pass 2   a bucket at a time: its records in memory ──► by their keys ──► given in order

A record has a key and some bytes in each of several columns (tokens, lengths, modes). Both passes read and write in
long runs. The order is that of the keys, so how many buckets there are changes nothing of what comes out.

Price: each byte is copied into its bucket, written, read and copied out of it; some 100 ns a record.
Memory: pass 1 twice a round, pass 2 a bucket. One that turns out too large, for a few records that have most of the
bytes, is left on the disk, and its records are read one by one.
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
from binidx.native.token_files import copy_pieces
from binidx.storage.interfaces import Range
from binidx.storage.ranges import cut

PURPOSE = 0x62696E6964780001


"""Second word of Philox's key, so that another use of the same seed draws other numbers."""


BLOCK = 4


"""Numbers that Philox gives for one value of its counter."""


def shuffle_keys(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Keys of the records first, first + 1, ...; shape (count,).

    Args:
        seed: any number; its low 64 bits count.
    """
    key, before = np.array([seed % 2**64, PURPOSE], np.uint64), first % BLOCK
    numbers = np.random.Philox(key=key, counter=first // BLOCK).random_raw(before + count)
    found: NDArray[np.uint64] = numbers[before:]
    return found


def assign_buckets(keys: NDArray[np.uint64], num_buckets: int) -> NDArray[np.intp]:
    """Which of `num_buckets` equal ranges of keys each lies in; shape as keys. At most 2^31 buckets."""
    high = keys >> np.uint64(32)
    found: NDArray[np.intp] = ((high * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.intp)
    return found


def shuffle_order(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Which record stands where, shape (count,): by their keys, equal ones in their order."""
    order: NDArray[np.int64] = np.argsort(keys, kind="stable")
    return order


EXTENT_BYTES = 4 << 20


"""What is not filled of the last one of a stream is a hole: it takes no room where files may have holes."""


class ScratchFile:
    """The streams 0, 1, ... of a shuffle.

    Args:
        directory: where the file is to be; None: the directory for temporary files.

    Attributes:
        sizes: bytes of each stream.

    Raises:
        ConfigError: there is no such directory, or nobody may write to it.
        StorageError: there is no room.
    """

    def __init__(self, directory: str | None, num_streams: int) -> None:
        self._directory = directory or tempfile.gettempdir()
        self.sizes = np.zeros(num_streams, np.int64)
        try:
            self._file: Any = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            raise ConfigError(f"scratch {self._directory}: {error.strerror}, needed a folder to write to") from error
        except OSError as error:
            raise self._error(error) from error
        self._extents: list[list[int]] = [[] for _ in range(num_streams)]
        self._end = 0

    def append(self, stream: int, data: NDArray[np.uint8]) -> None:
        """Bytes to the end of a stream."""
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
        """Bytes [start, start + len(out)) of a stream."""
        done = 0
        while done < len(out):
            extent, offset = divmod(start + done, EXTENT_BYTES)
            part = out.data[done : done + EXTENT_BYTES - offset]
            count = os.preadv(self._file.fileno(), [part], self._extents[stream][extent] + offset)
            assert count, "a stream holds what was appended"
            done += count

    def close(self) -> None:
        """Give the room back."""
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
        held = int(self.sizes.sum())
        return StorageError(
            f"{self._directory}: {error.strerror}, with {held:,} bytes of a shuffle there; needed room for all that is "
            "shuffled; --scratch names another directory"
        )


MIB = 1 << 20


LEAST_MEMORY = 512 * MIB


RESERVED_BYTES = 320 * MIB


"""Of the memory that is allowed: Python, s3fs and pyarrow, some 200 MiB; blocks of indices; what an upload gathers."""


CHUNK_BYTES = 2 * MIB


"""Given at once: what is copied stays in the cache of a core until it is written."""


RECORD_BYTES = 40


"""In memory for a record of a bucket, besides its bytes, and `COLUMN_BYTES` for each of its columns."""


COLUMN_BYTES = 24


Column = tuple[NDArray[np.uint8], NDArray[np.int64]]


"""Bytes of neighbouring records, and where each begins, then the end: shape (n + 1,)."""


@dataclass(frozen=True)
class ShufflePlan:
    """How a shuffle is done within a memory.

    Attributes:
        num_buckets: into which the keys are cut.
        round_bytes: of records that are thrown together in pass 1.
        bucket_bytes: what a bucket may have in memory in pass 2.
    """

    num_buckets: int
    round_bytes: int
    bucket_bytes: int


def plan_shuffle(memory_bytes: int, num_bytes: int, num_records: int, num_columns: int) -> ShufflePlan:
    """Buckets of which each, with room for chance, fits into the memory.

    Args:
        memory_bytes: that the whole process may use.
        num_bytes, num_records: of all that is shuffled, where they are not known about so many.

    Raises:
        ConfigError: less memory than any shuffle needs.
    """
    if memory_bytes < LEAST_MEMORY:
        raise ConfigError(f"memory: {memory_bytes:,} bytes, needed {LEAST_MEMORY:,} or more")
    bucket_bytes = (memory_bytes - RESERVED_BYTES) * 3 // 4
    needed = num_bytes + num_records * (RECORD_BYTES + COLUMN_BYTES * num_columns)
    num_buckets = max(1, -(-needed * 5 // (bucket_bytes * 4)))
    round_bytes = min(max(8 * MIB, num_buckets * MIB // 8), (memory_bytes - RESERVED_BYTES) // 8, 64 * MIB)
    return ShufflePlan(num_buckets, round_bytes, bucket_bytes)


class RecordRun:
    """Records that follow each other in the new order.

    Attributes:
        lengths: bytes of each in each column, shape (n, num_columns).
    """

    def __init__(self, lengths: NDArray[np.int64], order: NDArray[np.int64], columns: Sequence[_Column]) -> None:
        self.lengths, self._order, self._columns = lengths, order, columns

    def __len__(self) -> int:
        return len(self._order)

    def pieces(self, column: int) -> Iterator[memoryview]:
        """Their bytes in one column, in order; each piece holds until the next is asked for."""
        return self._columns[column].pieces(self._order)

    def joined(self, column: int) -> bytes:
        """The same as one."""
        return b"".join(map(bytes, self.pieces(column)))


class Buckets:
    """Takes records with their keys, and gives them back in the order of the keys."""

    def __init__(self, plan: ShufflePlan, num_columns: int, directory: str | None = None) -> None:
        self.plan, self.num_columns = plan, num_columns
        self._scratch = ScratchFile(directory, plan.num_buckets * (1 + num_columns))
        self._grouped = _Buffer()

    def add(self, keys: NDArray[np.uint64], columns: Sequence[Column]) -> None:
        """Some `round_bytes` of records."""
        buckets = assign_buckets(keys, self.plan.num_buckets)
        small = np.uint16 if self.plan.num_buckets <= 1 << 16 else np.int64
        order = np.argsort(buckets.astype(small), kind="stable")
        bounds = np.zeros(self.plan.num_buckets + 1, np.int64)
        np.cumsum(np.bincount(buckets, minlength=self.plan.num_buckets), out=bounds[1:])
        heads = _heads(keys, [np.diff(each) for _, each in columns])[order]
        self._append(0, heads.view(np.uint8).reshape(-1), bounds * heads.itemsize * heads.shape[1])
        for number, (data, places) in enumerate(columns, 1):
            ends = np.zeros(len(keys) + 1, np.int64)
            np.cumsum(heads[:, number], out=ends[1:])
            grouped = self._grouped.of(int(ends[-1]))
            copy_pieces(data, places, order, grouped)
            self._append(number, grouped, ends[bounds])

    def add_one(self, key: NDArray[np.uint64], columns: Sequence[Iterable[memoryview]]) -> None:
        """A record that is too long for a round; `key` has shape (1,)."""
        bucket, lengths = int(assign_buckets(key, self.plan.num_buckets)[0]), []
        for number, pieces in enumerate(columns, 1):
            before = int(self._scratch.sizes[self._stream(number, bucket)])
            for piece in pieces:
                self._scratch.append(self._stream(number, bucket), np.frombuffer(piece, np.uint8))
            lengths.append(int(self._scratch.sizes[self._stream(number, bucket)]) - before)
        heads = _heads(key, [np.array([each]) for each in lengths])
        self._scratch.append(self._stream(0, bucket), heads.view(np.uint8).reshape(-1))

    def sorted(self) -> Iterator[RecordRun]:
        """All records by their keys, in runs of `CHUNK_BYTES` and less, or of one record."""
        self._grouped = _Buffer()
        buffers = [_Buffer() for _ in range(self.num_columns)]
        for bucket in range(self.plan.num_buckets):
            heads = np.empty(self._scratch.sizes[self._stream(0, bucket)], np.uint8)
            self._scratch.read(self._stream(0, bucket), 0, heads)
            table = heads.view(np.int64).reshape(-1, 1 + self.num_columns)
            order = shuffle_order(table[:, 0].view(np.uint64))
            columns = [self._column(number, bucket, table[:, number], buffers[number - 1]) for number in self._numbers]
            totals = np.zeros(len(order) + 1, np.int64)
            np.cumsum(table[order, 1:].sum(axis=1), out=totals[1:])
            for first, stop in batch_by_size(totals, CHUNK_BYTES):
                part = order[first:stop]
                yield RecordRun(table[part, 1:], part, columns)

    def close(self) -> None:
        """Give the room back."""
        self._scratch.close()

    @property
    def _numbers(self) -> range:
        return range(1, self.num_columns + 1)

    def _column(self, number: int, bucket: int, lengths: NDArray[np.int64], buffer: _Buffer) -> _Column:
        """In memory if its share of the bucket's room is enough, else left where it is."""
        stream = self._stream(number, bucket)
        bounds = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=bounds[1:])
        size = int(bounds[-1])
        sizes = [int(self._scratch.sizes[self._stream(each, bucket)]) for each in self._numbers]
        if sum(sizes) > self.plan.bucket_bytes and size > self.plan.bucket_bytes // (2 * self.num_columns):
            return _OnDisk(self._scratch, stream, bounds)
        data = buffer.of(size)
        self._scratch.read(stream, 0, data)
        return _InMemory(data, bounds)

    def _append(self, column: int, data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> None:
        """To each bucket its bytes."""
        places = bounds.tolist()
        for bucket in np.flatnonzero(np.diff(bounds)).tolist():
            self._scratch.append(self._stream(column, bucket), data[places[bucket] : places[bucket + 1]])

    def _stream(self, column: int, bucket: int) -> int:
        return column * self.plan.num_buckets + bucket


class _InMemory:
    """The bytes of a bucket's records in one column."""

    def __init__(self, data: NDArray[np.uint8], bounds: NDArray[np.int64]) -> None:
        self._data, self._bounds, self._out = data, bounds, _Buffer()

    def pieces(self, order: NDArray[np.int64]) -> Iterator[memoryview]:
        if len(order) == 1:
            start, stop = self._bounds[order[0] : order[0] + 2].tolist()
            yield self._data.data[start:stop]
        else:
            out = self._out.of(CHUNK_BYTES)
            yield out.data[: copy_pieces(self._data, self._bounds, order, out)]


class _OnDisk:
    """The same, read when they are asked for."""

    def __init__(self, scratch: ScratchFile, stream: int, bounds: NDArray[np.int64]) -> None:
        self._scratch, self._stream, self._bounds = scratch, stream, bounds
        self._out = _Buffer()

    def pieces(self, order: NDArray[np.int64]) -> Iterator[memoryview]:
        for record in order.tolist():
            for start, stop in cut(tuple(self._bounds[record : record + 2].tolist()), CHUNK_BYTES):
                out = self._out.of(stop - start)
                self._scratch.read(self._stream, start, out)
                yield out.data


_Column = _InMemory | _OnDisk


class _Buffer:
    """Memory that is kept: fresh pages cost as much as what is written to them."""

    def __init__(self) -> None:
        self._data = np.empty(0, np.uint8)

    def of(self, size: int) -> NDArray[np.uint8]:
        """So many bytes; those given before are gone."""
        if len(self._data) < size:
            self._data = np.empty(0, np.uint8)  # the old one goes before the new one comes
            self._data = np.empty(size, np.uint8)
        return self._data[:size]


def _heads(keys: NDArray[np.uint64], lengths: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Key and lengths of each record, shape (n, 1 + num_columns)."""
    heads = np.empty((len(keys), 1 + len(lengths)), np.int64)
    heads[:, 0] = keys.view(np.int64)
    for number, each in enumerate(lengths, 1):
        heads[:, number] = each
    return heads


def batch_by_size(bounds: NDArray[np.int64], most: int) -> Iterator[Range]:
    """Runs of records that have at most `most` bytes together, or are one record."""
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = int(np.searchsorted(bounds, bounds[first] + most, "right")) - 1
        stop = max(first + 1, min(stop, last))
        yield first, stop
        first = stop
