"""A column of integers that grows without growing in memory: a buffer over a temporary file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

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
