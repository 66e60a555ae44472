"""Arrays of stored objects that are read row by row.

    array[[7, 8, 4711]]    reads rows 7-8 and row 4711         array[5:9]    reads one range

A `RangedArray` has the part of NumPy's interface that the readers of indices use: `len`, `dtype`, `shape`, `item`,
`searchsorted` and indexing by rows. Each call reads its ranges once, all at the same time. A row of a large remote
array costs a request, so callers read many rows at a time.
"""

from __future__ import annotations

import copy
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object
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

    def range(self, first: int, stop: int) -> Range:
        """Return the byte range of the rows [first, stop)."""
        return self.offset + first * self.row_bytes, self.offset + stop * self.row_bytes

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
