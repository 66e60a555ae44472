"""The blocks of an object that a process has mapped, and what it found good in them.

Only ever added to, so that threads may read it without a lock: a chunk that is marked good in one `Maps` is good in the
block that the same one has mapped. Letting blocks go makes another `Maps`; who still uses the old one keeps its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from binidx.native.place import PlacedBlocks
from binidx.storage.cache_block import Block
from binidx.storage.cache_layout import Layout


class Maps:
    """Blocks by number, and per chunk whether it was compared; `used` has the number of the last read of each.

    Args:
        layout: of the object.
        like: has what this is to have, but for the blocks `without`.
    """

    def __init__(self, layout: Layout, like: Maps | None = None, without: Sequence[int] = ()) -> None:
        self._layout = layout
        if like is None:
            self.blocks: list[Block | None] = [None] * layout.num_blocks
            self.data: list[memoryview | None] = [None] * layout.num_blocks
            self.addresses: NDArray[np.int64] = np.zeros(layout.num_blocks, np.int64)
            self.used: NDArray[np.int64] = np.zeros(layout.num_blocks, np.int64)
            self.good: NDArray[np.uint8] = np.zeros(layout.num_chunks, np.uint8)
        else:
            self.blocks, self.data = list(like.blocks), list(like.data)
            self.addresses, self.used, self.good = like.addresses.copy(), like.used.copy(), like.good.copy()
        for number in without:
            self.blocks[number] = self.data[number] = None
            self.addresses[number] = 0
            chunks = layout.chunks_in(number)
            self.good[chunks.start : chunks.stop] = 0
        # Python takes one element of a memoryview in half the time that NumPy needs.
        self.good_at, self.used_at = self.good.data, self.used.data
        sizes = layout.size, layout.chunk_bytes, layout.block_bytes
        self.placed = PlacedBlocks(self.good, self.addresses, self.used, *sizes)

    def add(self, block: Block) -> None:
        """Last in `blocks`: who finds it there marks chunks, and who finds chunks marked looks at the others."""
        self.addresses[block.number] = block.address
        self.data[block.number] = block.data
        self.blocks[block.number] = block

    def without(self, numbers: Sequence[int]) -> Maps:
        """The same, but for these blocks."""
        return Maps(self._layout, self, numbers)

    def mapped(self) -> list[int]:
        """Numbers of the blocks that are mapped, least recently used first."""
        return sorted(np.flatnonzero(self.addresses).tolist(), key=self.used.__getitem__)
