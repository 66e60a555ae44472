"""A column of integers that grows without growing in memory: a buffer over a temporary file.

What an `.idx` will say, gathered in a memory that does not grow with it.

lengths, modes ──┐
document bounds ─┴───► spools ─► .idx      in blocks; the pointers are a running sum
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


"""What one column keeps in memory before it moves to a file in the temporary directory."""


BLOCK_VALUES = 1 << 17


"""Values of one block: what is in memory while a column is read back."""


class SpooledColumn:
    """Integers appended at the end and read back in blocks. Price: 256 KiB, then `itemsize` bytes of disk a value.

    Args:
        dtype: the type they are kept in; what is appended must fit it (the builder checks).
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        # Our own buffer over a raw file: a forked child that ends writes out those of file objects a second time.
        self._buffer = bytearray()
        self._file: Any = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: Sequence[int] | NDArray[Any], plus: int = 0) -> None:
        """Append each value `plus` a number, in blocks: an array mapped from another `.idx` is not copied whole.

        Raises:
            OSError: the disk is full. How much was appended is unknown then.
        """
        for start in range(0, len(values), BLOCK_VALUES):
            block = np.asarray(values[start : start + BLOCK_VALUES], self.dtype)
            self._buffer += (block + plus if plus else block).tobytes()
            if len(self._buffer) > MEMORY_BYTES:
                self._spill()
        self._count += len(values)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All values from the first, as arrays of up to `BLOCK_VALUES`; then appending goes on."""
        if self._file is not None:
            self._spill()
        for start, stop in cut((0, self._count * self.dtype.itemsize), BLOCK_VALUES * self.dtype.itemsize):
            yield np.frombuffer(self._read(start, stop), self.dtype)

    def close(self) -> None:
        """Give the memory and the file back."""
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
    """The columns of one `.idx` on its way. Nothing is checked here.

    Args:
        dtype: the type of a token.
        multimodal: whether a mode is kept for each sequence.
    """

    def __init__(self, dtype: DTypeLike, multimodal: bool = False) -> None:
        self.dtype, self.multimodal = dtype, multimodal
        self.lengths, self.modes, self._bounds = SpooledColumn("i4"), SpooledColumn("i1"), SpooledColumn("i8")
        self._bounds.extend([0])
        self._last_bound = 0

    @property
    def num_open(self) -> int:
        """Sequences after the last document bound."""
        return len(self.lengths) - self._last_bound

    @property
    def num_documents(self) -> int:
        return len(self._bounds) - 1

    def end_document(self) -> None:
        """A bound after the last sequence."""
        self.add_bounds([len(self.lengths)], plus=0)

    def add_bounds(self, bounds: Sequence[int] | NDArray[np.int64], *, plus: int) -> None:
        """Document bounds, each with `plus` added; the first sequence after the last of them opens a document."""
        if len(bounds):
            self._bounds.extend(bounds, plus=plus)
            self._last_bound = int(bounds[-1]) + plus

    def format(self) -> Iterator[bytes]:
        """The bytes of the `.idx`."""
        yield format_idx_header(self.dtype, len(self.lengths), len(self._bounds))
        yield from (block.tobytes() for block in self.lengths.blocks())
        yield from (block.tobytes() for block in _pointers(self.lengths.blocks(), np.dtype(self.dtype).itemsize))
        yield from (block.tobytes() for block in self._bounds.blocks())
        yield from (block.tobytes() for block in self.modes.blocks())

    def close(self) -> None:
        """Give the memory and the files back."""
        for column in (self.lengths, self.modes, self._bounds):
            column.close()


def _pointers(lengths: Iterator[NDArray[np.int32]], item_bytes: int) -> Iterator[NDArray[Any]]:
    """The first byte of each sequence, block by block."""
    start = 0
    for block in lengths:
        ends = np.cumsum(block, dtype=np.int64)
        ends += start
        start = int(ends[-1])
        ends -= block
        ends *= item_bytes
        yield ends.astype(little_endian(np.int64), copy=False)
