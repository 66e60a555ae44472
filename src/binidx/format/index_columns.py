"""An `.idx` written in blocks, in a constant amount of memory; `idx` reads one so.

The pointers are a running sum:

    lengths, modes ──┐
    document bounds ─┴───► spooled columns ─► .idx
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

SPOOLED_VALUES = 1 << 17
"""Values of a block of a spooled column."""

MEMORY_BYTES = 1 << 18
"""Bytes of a spooled column in memory; more of them go to a file in the temporary directory."""


class SpooledColumn:
    """Append-only column of integers. Memory: 256 KiB; then `itemsize` bytes of disk for each value.

    Args:
        dtype: stored type; appended values must fit it.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = little_endian(dtype)
        # A buffer of our own over a raw file: a forked child that exits flushes the buffers of file objects again.
        self._buffer = bytearray()
        self._file: Any = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: Sequence[int] | NDArray[Any], plus: int = 0) -> None:
        """Append values in blocks: a mapped array is not copied as a whole.

        Args:
            values: integers that fit the dtype, shape (n,).
            plus: number that is added to each value.

        Raises:
            OSError: the disk is full; the number of appended values is then undefined.
        """
        for start in range(0, len(values), SPOOLED_VALUES):
            block = np.asarray(values[start : start + SPOOLED_VALUES], self.dtype)
            self._buffer += (block + plus if plus else block).tobytes()
            if len(self._buffer) > MEMORY_BYTES:
                self._spill()
        self._count += len(values)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all values in arrays of at most `SPOOLED_VALUES`; the column can be extended afterwards."""
        if self._file is not None:
            self._spill()
        size = self.dtype.itemsize
        for first, stop in cut((0, self._count * size), SPOOLED_VALUES * size):
            data = os.pread(self._file.fileno(), stop - first, first) if self._file else bytes(self._buffer[first:stop])
            yield np.frombuffer(data, self.dtype)

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


class IndexColumns:
    """Columns of an `.idx` that is being written; values are not checked.

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

    def counts(self) -> dict[str, int]:
        """Count the tokens; return the numbers of documents, sequences and tokens, as a manifest has them."""
        tokens = sum(int(block.sum(dtype=np.int64)) for block in self.lengths.blocks())
        return {"documents": self.num_documents, "sequences": len(self.lengths), "tokens": tokens}

    def add(
        self, lengths: Sequence[int] | NDArray[np.int32], ends: NDArray[np.int64], modes: NDArray[np.int8] | None = None
    ) -> None:
        """Append whole documents.

        Args:
            lengths: tokens of each sequence, shape (num_sequences,).
            ends: end of each document, counted in these sequences, shape (num_documents,).
            modes: mode of each sequence, shape (num_sequences,); None in a dataset of text.
        """
        before = len(self.lengths)
        self.lengths.extend(lengths)
        if modes is not None:
            self.modes.extend(modes)
        self.add_bounds(ends, plus=before)

    def end_document(self) -> None:
        """Add a bound after the last sequence."""
        self.add_bounds([len(self.lengths)], plus=0)

    def add_bounds(self, bounds: Sequence[int] | NDArray[np.int64], *, plus: int) -> None:
        """Add document bounds; sequences added later belong to a new document.

        Args:
            bounds: end of each document in sequences, shape (num_documents,), ascending.
            plus: number that is added to each bound.
        """
        if len(bounds):
            self._bounds.extend(bounds, plus=plus)
            self._last_bound = int(bounds[-1]) + plus

    def format(self) -> Iterator[bytes]:
        """Yield the bytes of the `.idx`."""
        yield format_idx_header(self.dtype, len(self.lengths), len(self._bounds))
        pointers = _pointers(self.lengths.blocks(), np.dtype(self.dtype).itemsize)
        for blocks in (self.lengths.blocks(), pointers, self._bounds.blocks(), self.modes.blocks()):
            yield from (block.tobytes() for block in blocks)

    def close(self) -> None:
        """Free the memory and the files."""
        for column in (self.lengths, self.modes, self._bounds):
            column.close()


def _pointers(lengths: Iterator[NDArray[np.int32]], item_bytes: int) -> Iterator[NDArray[Any]]:
    """Yield blocks of sequence pointers, from blocks of sequence lengths."""
    start = 0
    for block in lengths:
        ends = np.cumsum(block, dtype=np.int64) + start
        start = int(ends[-1])
        yield ((ends - block) * item_bytes).astype("<i8", copy=False)
