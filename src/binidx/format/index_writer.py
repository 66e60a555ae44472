"""Columns of an `.idx` while it is written, in a constant amount of memory.

lengths, modes ──┐
document bounds ─┴───► spooled columns ─► .idx      in blocks; the pointers are a running sum
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.format.idx import format_idx_header, little_endian
from binidx.storage.ranges import cut

MEMORY_BYTES = 1 << 18
"""Bytes of a column in memory; more of them go to a file in the temporary directory."""

BLOCK_VALUES = 1 << 17
"""Values of a block: a column is read back in blocks."""


class SpooledColumn:
    """Append-only column of integers. Memory: 256 KiB; then `itemsize` bytes of disk for each value.

    Args:
        dtype: stored type; appended values must fit it.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        # A buffer of our own over a raw file: a forked child that exits flushes the buffers of file objects again.
        self._buffer = bytearray()
        self._file: Any = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: Sequence[int] | NDArray[Any], plus: int = 0) -> None:
        """Append values, each with `plus` added, in blocks: a mapped array is not copied as a whole.

        Raises:
            OSError: the disk is full; the number of appended values is then undefined.
        """
        for start in range(0, len(values), BLOCK_VALUES):
            block = np.asarray(values[start : start + BLOCK_VALUES], self.dtype)
            self._buffer += (block + plus if plus else block).tobytes()
            if len(self._buffer) > MEMORY_BYTES:
                self._spill()
        self._count += len(values)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all values in arrays of at most `BLOCK_VALUES`; the column can be extended afterwards."""
        if self._file is not None:
            self._spill()
        for start, stop in cut((0, self._count * self.dtype.itemsize), BLOCK_VALUES * self.dtype.itemsize):
            yield np.frombuffer(self._read(start, stop), self.dtype)

    def close(self) -> None:
        """Free the memory and the file."""
        self._buffer = bytearray()
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = TemporaryFile(buffering=0)  # noqa: SIM115
        rest = memoryview(self._buffer)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._buffer = bytearray()

    def _read(self, start: int, stop: int) -> bytes:
        if self._file is None:
            return bytes(self._buffer[start:stop])
        return os.pread(self._file.fileno(), stop - start, start)


class IndexColumns:
    """Columns of an `.idx`; values are not checked.

    Args:
        dtype: type of a token.
        multimodal: whether each sequence has a mode.
    """

    def __init__(self, dtype: DTypeLike, multimodal: bool = False) -> None:
        self.dtype, self.multimodal = dtype, multimodal
        self.lengths, self.modes, self._bounds = SpooledColumn("i4"), SpooledColumn("i1"), SpooledColumn("i8")
        self._bounds.extend([0])
        self._last_bound = 0

    @property
    def num_open(self) -> int:
        """Number of sequences after the last document bound."""
        return len(self.lengths) - self._last_bound

    @property
    def num_documents(self) -> int:
        return len(self._bounds) - 1

    def end_document(self) -> None:
        """Add a bound after the last sequence."""
        self.add_bounds([len(self.lengths)], plus=0)

    def add_bounds(self, bounds: Sequence[int] | NDArray[np.int64], *, plus: int) -> None:
        """Add document bounds, each with `plus` added; sequences added later belong to a new document."""
        if len(bounds):
            self._bounds.extend(bounds, plus=plus)
            self._last_bound = int(bounds[-1]) + plus

    def format(self) -> Iterator[bytes]:
        """Yield the bytes of the `.idx`."""
        yield format_idx_header(self.dtype, len(self.lengths), len(self._bounds))
        yield from (block.tobytes() for block in self.lengths.blocks())
        yield from (block.tobytes() for block in _pointers(self.lengths.blocks(), np.dtype(self.dtype).itemsize))
        yield from (block.tobytes() for block in self._bounds.blocks())
        yield from (block.tobytes() for block in self.modes.blocks())

    def close(self) -> None:
        """Free the memory and the files."""
        for column in (self.lengths, self.modes, self._bounds):
            column.close()


def _pointers(lengths: Iterator[NDArray[np.int32]], item_bytes: int) -> Iterator[NDArray[Any]]:
    """Yield the first byte of each sequence, in blocks."""
    start = 0
    for block in lengths:
        ends = np.cumsum(block, dtype=np.int64)
        ends += start
        start = int(ends[-1])
        ends -= block
        ends *= item_bytes
        yield ends.astype(little_endian(np.int64), copy=False)
