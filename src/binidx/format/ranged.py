"""Arrays that stay where they lie: of what is asked for, the ranges are read, each once, all of one call together.

    array[[7, 8, 4711]]    ranges of rows 7-8 and 4711         array[5:9]    one range

A row of a large remote array costs a request, so callers ask for many at a time, and in as few turns as they can.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.storage.backends import open_object
from binidx.storage.disk_cache import DiskCache
from binidx.storage.look_up import Found
from binidx.storage.ranges import Range, RangeReader
from binidx.storage.settings import OURS

Numbers = NDArray[np.int64]

BLOCK_BYTES = 4096
"""What a search looks at in one place: as much as a request brings at the price of one element."""


def open_in_ranges(
    uri: str, storage_options: Mapping[str, Any] | None = None, *, found: Found | None = None
) -> RangeReader:
    """An index file of which little is wanted: what was read of a remote one is kept in the node's index_dir, in
    BLOCK_BYTES."""
    options = dict(storage_options or {})
    options[OURS] = {"cache_chunk_bytes": BLOCK_BYTES, **(options.get(OURS) or {})}
    return open_object(uri, storage_options=options, cache="disk", found=found)


def beneath_copy(reader: RangeReader) -> RangeReader:
    """What asks the store itself, which says whether the object is still that one; its copy would not."""
    return reader.reader if isinstance(reader, DiskCache) else reader


class RangedArray:
    """An array of a stored object, read by rows. As of an ndarray, what is read is a copy.

    Args:
        reader: of the object.
        offset: bytes before the array.
        dtype, shape: of the array, which lies there row by row.

    Raises:
        FormatError: the object is too small for it.
    """

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
        """Rows by a number, numbers of any order, a slice of neighbours; or of these rows one column: `[rows, 1]`.

        Raises:
            IndexError: there is no such row; one below 0 does not count from the end.
        """
        if isinstance(wanted, tuple):
            rows, column = wanted
            return self[rows][..., column]
        if isinstance(wanted, slice):
            start, stop, step = wanted.indices(len(self))
            if step != 1:
                raise IndexError(f"{self.reader.uri}: slice with step {step}, needs neighbours")
            return self.runs(np.array([start]), np.array([max(start, stop)]))
        numbers = np.asarray(wanted, np.int64)
        rows, place = np.unique(numbers, return_inverse=True)
        ends = np.flatnonzero(np.diff(rows, append=rows[-1:] + 2) != 1)
        starts = np.concatenate([[0], ends[:-1] + 1])[: len(ends)]
        return self.runs(rows[starts], rows[ends] + 1)[place.reshape(numbers.shape)]

    def range_of(self, row: int) -> Range:
        """The bytes of a row in the object."""
        first = self.offset + row * self.row_bytes
        return first, first + self.row_bytes

    def runs(self, starts: Numbers, stops: Numbers) -> NDArray[Any]:
        """The rows of stretches, start to before stop, one after the other.

        Raises:
            IndexError: one leaves the array.
        """
        if len(starts) and not (starts.min() >= 0 and (starts <= stops).all() and stops.max() <= len(self)):
            raise IndexError(f"{self.reader.uri}: rows {starts.min()} to {stops.max()}, it has {len(self)}")
        first, last = self.offset + starts * self.row_bytes, self.offset + stops * self.row_bytes
        views = self.reader.read([*zip(first.tolist(), last.tolist(), strict=True)])
        return np.frombuffer(b"".join(views), self.dtype).reshape(-1, *self.shape[1:])

    def searchsorted(self, values: Numbers, side: str) -> Numbers:
        """`numpy.searchsorted` for side "right", of an array that rises: how many elements are at most each value.
        Of rows of several the first ones.

        All values are looked for at the same time, in each turn one block of BLOCK_BYTES for each: where the line
        between what is known on either side has it, every third turn in the middle. Two or three turns where the array
        rises evenly; at most 3 log2(n / 512) whatever it holds.
        """
        assert side == "right", "what it is for"
        if not len(self):
            return np.zeros(len(values), np.int64)
        count, size = len(values), BLOCK_BYTES // self.row_bytes
        # Elements before `low` are at most the value, those from `high` on above it; the last and first known of each.
        low, high = np.zeros(count, np.int64), np.full(count, len(self), np.int64)
        least, most = self[[0, len(self) - 1]].reshape(2, -1)[:, 0].tolist()
        below, above = np.full(count, least, np.int64), np.full(count, most, np.int64)
        for turn in itertools.count():
            left = np.flatnonzero(low < high)
            if not len(left):
                return low
            part = (values[left] - below[left]) / np.maximum(above[left] - below[left], 1) if turn % 3 < 2 else 0.5
            guess = low[left] + (np.clip(part, 0, 1) * (high[left] - low[left])).astype(np.int64)
            starts = np.unique(np.minimum(guess, high[left] - 1) // size) * size
            stops = np.minimum(starts + size, len(self))
            places = np.concatenate([np.arange(*each) for each in zip(starts, stops, strict=True)])
            rows = self.runs(starts, stops)
            found = rows.reshape(len(rows), -1)[:, 0].astype(np.int64)
            # All of what was read rises, so one search tells between which two of its elements each value lies.
            after = found.searchsorted(values[left], side="right")
            places, found = np.concatenate([[-1], places, [len(self)]]), np.concatenate([[least], found, [most]])
            low[left] = np.maximum(low[left], places[after] + 1)
            high[left] = np.minimum(high[left], places[after + 1])
            below[left] = np.maximum(below[left], found[after])
            above[left] = np.minimum(above[left], found[after + 1])
        raise AssertionError("a block in the middle is always between what is known")
