"""What an `.idx` will say, gathered in a memory that does not grow with it.

lengths, modes ──┐
document bounds ─┴───► spools ─► .idx      in blocks; the pointers are a running sum
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.format.idx import format_header, stored
from binidx.format.spool import SpooledColumn


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
        yield format_header(self.dtype, len(self.lengths), len(self._bounds))
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
        yield ends.astype(stored(np.int64), copy=False)
