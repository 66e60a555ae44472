"""Mapped bytes for C: a file that is mapped as a whole (`native/read_ahead.c`) or in blocks (`native/place.c`)."""

from __future__ import annotations

from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import items

MAPPING = ffi.typeof("binidx_mapping *")
ANYWHERE = (1 << 63) - 1


class Mapped:
    """Whole content of an object in memory.

    Args:
        content: of the object.
        disk: whether it is a mapped file, whose pages may have to be read.
    """

    def __init__(self, content: memoryview, *, disk: bool) -> None:
        self.owner = ffi.from_buffer(content)
        self.template = ffi.new(MAPPING)
        self.template.base, self.template.size = int(ffi.cast("intptr_t", self.owner)), len(content)
        self.template.page_bytes = PAGESIZE if disk else 0

    def read_ahead(self, ranges: NDArray[np.int64]) -> None:
        """Let the disk read ranges (first byte, end), shape (n, 2), all at once."""
        about = self.template
        lib.binidx_read_ahead(about.base, about.size, items(ranges, np.int64, 2), len(ranges), about.page_bytes)

    def taking(self, *, ask_ahead: bool) -> Any:
        """Return a C mapping for one call, which also counts the bytes that the call reads."""
        about = ffi.new(MAPPING, self.template[0])
        about.ask_ahead = ask_ahead
        return about


class PlacedBlocks:
    """Blocks of one file, of which some are mapped; the caller may change the arrays between and during calls.

    Args:
        good: of each chunk: not 0 if its bytes are in memory and checked, shape (num_chunks,).
        addresses: of the first byte of each block, or 0, shape (num_blocks,).
        used: of each block: tick of the last call that used it.
        size, chunk_bytes, block_bytes: of the file, and of all its chunks and blocks but the last.

    Raises:
        ValueError: an array is too short for these sizes.
    """

    def __init__(
        self,
        good: NDArray[np.uint8],
        addresses: NDArray[np.int64],
        used: NDArray[np.int64],
        size: int,
        chunk_bytes: int,
        block_bytes: int,
    ) -> None:
        needed = -(-size // block_bytes)
        if (
            min(chunk_bytes, block_bytes) < 1
            or min(len(addresses), len(used)) < needed
            or len(good) < -(-size // chunk_bytes)
        ):
            raise ValueError(f"{len(good)} chunks, {len(addresses)} and {len(used)} blocks for {size} bytes")
        self._keep = [items(good, np.uint8), items(addresses, np.int64), items(used, np.int64, write=True)]
        self._blocks = ffi.new("binidx_blocks *")  # borrows the arrays, which `_keep` holds
        self._blocks.good, self._blocks.addresses, self._blocks.used = self._keep
        self._blocks.size, self._blocks.chunk_bytes, self._blocks.block_bytes = size, chunk_bytes, block_bytes
        self._template = ffi.new(MAPPING)
        self._template.size, self._template.page_bytes, self._template.blocks = ANYWHERE, PAGESIZE, self._blocks

    def taking(self, tick: int, *, ask_ahead: bool) -> Any:
        """Return a C mapping for one call, as `Mapped.taking`; the blocks must stay mapped until the call returns."""
        self._blocks.tick = tick
        about = ffi.new(MAPPING, self._template[0])
        about.ask_ahead = ask_ahead
        return about
