"""The blocks of an object that a process has mapped, and what it found good in them.

Only ever added to, so that threads may read it without a lock: a chunk that is marked good in one `Maps` is good in the
block that the same one has mapped. Letting blocks go makes another `Maps`; who still uses the old one keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from binidx.storage.cache_block import Block
from binidx.storage.cache_layout import Layout


class Maps:
    """Blocks by number, and per chunk whether it was compared; `used` counts reads."""

    def __init__(self, num_blocks: int, num_chunks: int) -> None:
        self.blocks: list[Block | None] = [None] * num_blocks
        self.data: list[memoryview | None] = [None] * num_blocks
        self.addresses: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.used: NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.good: NDArray[np.uint8] = np.zeros(num_chunks, np.uint8)
        self._views()

    def _views(self) -> None:
        # Python takes one element of a memoryview in half the time that NumPy needs.
        self.good_at, self.used_at = self.good.data, self.used.data

    def add(self, block: Block) -> None:
        self.blocks[block.number] = block
        self.addresses[block.number] = block.address
        self.data[block.number] = block.data

    def without(self, numbers: Sequence[int], layout: Layout) -> Maps:
        """The same, but for these blocks."""
        other = Maps(0, 0)
        other.blocks, other.data = list(self.blocks), list(self.data)
        other.addresses, other.used, other.good = self.addresses.copy(), self.used.copy(), self.good.copy()
        for number in numbers:
            other.blocks[number] = other.data[number] = None
            other.addresses[number] = 0
            chunks = layout.chunks_in(number)
            other.good[chunks.start : chunks.stop] = 0
        other._views()
        return other

    def mapped(self) -> list[int]:
        """Numbers of the blocks that are mapped, least recently used first."""
        return sorted(np.flatnonzero(self.addresses).tolist(), key=self.used.__getitem__)
