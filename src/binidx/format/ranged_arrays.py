"""Arrays of stored objects that are read row by row, and an index made of them.

    array[[7, 8, 4711]]    reads rows 7-8 and row 4711         array[5:9]    reads one range

A `RangedArray` has the part of NumPy's interface that the readers of indices use: `len`, `dtype`, `shape`, `item`,
`searchsorted` and indexing by rows. Each call reads its ranges once, all at the same time. A row of a large remote
array costs a request, so callers read many rows at a time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.format.idx import HEADER, SequenceIndex, parse_idx_counts
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.ranges import stored_reader
from binidx.storage.requests.remote_object import Found
from binidx.storage.settings import OURS

Numbers = NDArray[np.int64]
READ_BYTES = 4096
"""Bytes that a search reads at one position; a request for fewer takes as long."""

MAX_GAP = 256 << 10
"""Gap within a request. Rows of a step lie closer than that in arrays of 30 million documents: it takes
250 requests and 200 MB; with gaps of 64 KiB 1,250 and 70 MB. A server that keeps its chunks as gzip inflates one for
each request: 3 s of its CPU instead of 17. Gaps of 1 MiB would move 280 MB."""


def open_cached_in_blocks(location: Location, found: Found | None = None) -> RangeReader:
    """Open an index file to read small parts of it; a remote one is cached on disk in blocks of READ_BYTES.

    Args:
        location: of the index file.
        found: version of the object to read, if it is known; that saves a HEAD.
    """
    options = dict(location.options or {})
    options[OURS] = {"cache_chunk_bytes": READ_BYTES, "max_gap": MAX_GAP, **(options.get(OURS) or {})}
    return open_object(location.uri, storage_options=options, cache="disk", found=found)


class RangedArray:
    """Array in a stored object that is read by rows; the returned rows are copies.

    Args:
        reader: reader of the object.
        offset: bytes before the array.
        dtype, shape: type and shape of the array, stored in C order.

    Raises:
        FormatError: the object is too small for the array.
    """

    column: int | None = None

    def __init__(self, reader: RangeReader, offset: int, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
        self.reader, self.offset = reader, offset
        self.dtype, self.shape = np.dtype(dtype), shape
        self.row_bytes = prod(shape[1:]) * self.dtype.itemsize
        if reader.size < offset + len(self) * self.row_bytes:
            needed = offset + len(self) * self.row_bytes
            raise FormatError(f"{reader.uri}: {reader.size} bytes, {self.dtype} of shape {shape} needs {needed}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, wanted: Any) -> Any:
        """Return rows by number, by numbers in any order, or by a slice with step 1.

        `[rows, 1]` returns one column of these rows, `[:, 1]` a RangedArray of one column.

        Raises:
            IndexError: there is no such row; negative numbers do not count from the end.
        """
        if isinstance(wanted, tuple):
            rows, column = wanted
            return self._column(column) if isinstance(rows, slice) and rows == slice(None) else self[rows][..., column]
        if isinstance(wanted, slice):
            start, stop, step = wanted.indices(len(self))
            if step != 1:
                raise IndexError(f"{self.reader.uri}: slice with step {step}, needed 1")
            return self.runs(np.array([start]), np.array([max(start, stop)]))
        numbers = np.asarray(wanted, np.int64)
        rows, place = np.unique(numbers, return_inverse=True)
        ends = np.flatnonzero(np.diff(rows, append=rows[-1:] + 2) != 1)
        starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
        return self.runs(rows[starts], rows[ends] + 1)[place.reshape(numbers.shape)]

    def item(self, row: int) -> Any:
        """Return one element as a Python number."""
        return self[row].item()

    def _column(self, column: int) -> RangedArray:
        view = copy.copy(self)
        view.column, view.shape = column, self.shape[:1]
        return view

    def runs(self, starts: Numbers, stops: Numbers) -> NDArray[Any]:
        """Return the rows of several slices, starts[i] up to stops[i], one after the other.

        Args:
            starts, stops: first row of each slice, and the row after its last, shape (n,).

        Raises:
            IndexError: a slice leaves the array.
        """
        if len(starts) and not (starts.min() >= 0 and (starts <= stops).all() and stops.max() <= len(self)):
            raise IndexError(f"{self.reader.uri}: rows {starts.min()} to {stops.max()}, it has {len(self)}")
        first, last = self.offset + starts * self.row_bytes, self.offset + stops * self.row_bytes
        views = self.reader.read([*zip(first.tolist(), last.tolist(), strict=True)])
        rows = np.frombuffer(b"".join(views), self.dtype)
        if self.column is not None:
            return rows.reshape(-1, self.row_bytes // self.dtype.itemsize)[:, self.column]
        return rows.reshape(-1, *self.shape[1:])

    def searchsorted(self, values: Numbers, side: str) -> Numbers:
        """Return `numpy.searchsorted` of ascending elements for side "right": how many are at most each value.

        All values are searched together. Each round reads one block of READ_BYTES for each value, at the position that
        linear interpolation gives, or in the middle in every third round. That takes two or three rounds if the array
        grows evenly, and at most 3 log2(n / 512) for any array.

        Args:
            values: shape (n,), in any order.
            side: "right".
        """
        assert side == "right", "the only side that callers need"
        if not len(self):
            return np.zeros(len(values), np.int64)
        count, size = len(values), READ_BYTES // self.row_bytes
        # Elements before `low` are at most the value, those from `high` on are above it; `below` and `above` are the
        # known elements next to these two positions.
        low, high = np.zeros(count, np.int64), np.full(count, len(self), np.int64)
        least, most = self[[0, len(self) - 1]].tolist()
        below, above = np.full(count, least, np.int64), np.full(count, most, np.int64)
        turn = 0
        while len(left := np.flatnonzero(low < high)):
            part = (values[left] - below[left]) / np.maximum(above[left] - below[left], 1) if turn % 3 < 2 else 0.5
            guess = low[left] + (np.clip(part, 0, 1) * (high[left] - low[left])).astype(np.int64)
            starts = np.unique(np.minimum(guess, high[left] - 1) // size) * size
            stops = np.minimum(starts + size, len(self))
            places = np.concatenate([np.arange(*block) for block in zip(starts, stops, strict=True)])
            elements = self.runs(starts, stops).astype(np.int64)
            # The elements of all blocks ascend, so one search finds the two neighbours of each value.
            after = elements.searchsorted(values[left], side="right")
            places, elements = np.concatenate([[-1], places, [len(self)]]), np.concatenate([[least], elements, [most]])
            low[left] = np.maximum(low[left], places[after] + 1)
            high[left] = np.minimum(high[left], places[after + 1])
            below[left] = np.maximum(below[left], elements[after])
            above[left] = np.minimum(above[left], elements[after + 1])
            turn += 1
        return low


@dataclass(frozen=True)
class CheckedIndex:
    """Facts about an `.idx` that was fully checked before.

    Attributes:
        num_sequences, digest: "num_sequences" and "index_digest" of `IndexedDataset.identity`.
        documents_are_sequences: whether each document is known to be one sequence.
        found: the checked version of the `.idx` in its store; None: open whatever has its name now.
    """

    num_sequences: int
    digest: str
    documents_are_sequences: bool
    found: Found | None


def open_index_in_ranges(prefix: Location, checked: CheckedIndex) -> tuple[SequenceIndex, RangeReader]:
    """Open an `.idx` whose arrays are read by ranges, and return it with the reader of the object.

    Only the header and the counts are checked. Later reads are pinned to this version of the object.

    Args:
        prefix: of the dataset.
        checked: facts about its `.idx`, which was checked before.

    Raises:
        FormatError: the header breaks a rule, or belongs to another dataset.
        ObjectChangedError: a remote `.idx` is not the one that was checked.
    """
    idx, count = prefix + ".idx", checked.num_sequences
    reader = open_cached_in_blocks(idx, checked.found)
    index = parse_index_in_ranges(reader, idx.uri, count, documents_are_sequences=checked.documents_are_sequences)
    return index, reader


def parse_index_in_ranges(
    reader: RangeReader, uri: str, count: int | None = None, *, documents_are_sequences: bool = False
) -> SequenceIndex:
    """Return an `.idx` whose arrays are read by ranges; only the header and the counts are checked.

    Args:
        uri: name of the file, for errors.
        count: number of sequences that the header must have, if it is known; that saves a round trip.

    Raises:
        FormatError: the header breaks a rule, or has another number of sequences.
    """
    stored, header_bytes = stored_reader(reader), (0, min(HEADER.size, reader.size))
    if count is None:
        count = parse_idx_counts(stored.read([header_bytes])[0], reader.size, uri=uri)[1]
    lengths: Any = RangedArray(reader, HEADER.size, "<i4", (count,))
    pointers: Any = RangedArray(reader, HEADER.size + 4 * count, "<i8", (count,))
    ends = HEADER.size + 4 * count, HEADER.size + 12 * count
    header, *last = stored.read([header_bytes, (ends[0] - 4, ends[0]), (ends[1] - 8, ends[1])][: 3 if count else 1])
    dtype, num_sequences, num_bounds, _ = parse_idx_counts(header, reader.size, uri=uri)
    if num_sequences != count:
        raise FormatError(f"{uri}: {num_sequences} sequences, needed {count}")
    bounds: Any = RangedArray(reader, ends[1], "<i8", (num_bounds,))
    length, pointer = (int.from_bytes(value, "little", signed=True) for value in last) if last else (0, 0)
    num_tokens = pointer // np.dtype(dtype).itemsize + length
    return SequenceIndex(dtype, lengths, pointers, bounds, None, num_tokens, documents_are_sequences)
