"""A column of integers that grows without growing in memory: a buffer over a temporary file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

MEMORY_BYTES = 1 << 20
"""What one column keeps in memory before it moves to a file in the temporary directory."""

BLOCK_VALUES = 1 << 17
"""Values of one block: what is in memory while a column is read back."""


class SpooledColumn:
    """Integers appended at the end and read back once, in blocks. Price: 1 MiB, then `itemsize` bytes of disk a value.

    Args:
        dtype: the type they are kept in; what is appended must fit it (the builder checks).
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._file = SpooledTemporaryFile(max_size=MEMORY_BYTES)  # noqa: SIM115
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: Sequence[int] | NDArray[Any], plus: int = 0) -> None:
        """Append each value `plus` a number, in blocks: an array mapped from another `.idx` is not copied whole."""
        for start in range(0, len(values), BLOCK_VALUES):
            block = np.asarray(values[start : start + BLOCK_VALUES], self.dtype)
            self._file.write((block + plus if plus else block).tobytes())
        self._count += len(values)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """All values from the first, as arrays of up to `BLOCK_VALUES`; then appending goes on."""
        self._file.seek(0)
        while data := self._file.read(BLOCK_VALUES * self.dtype.itemsize):
            yield np.frombuffer(data, self.dtype)

    def close(self) -> None:
        """Give the memory and the file back."""
        self._file.close()
