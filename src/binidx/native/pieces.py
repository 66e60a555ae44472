"""Stored tokens in memory, as C takes them: a map as a whole, or pieces anywhere. `native/read_ahead.c`"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import items

MAPPING = ffi.typeof("binidx_mapping *")
ANYWHERE = (1 << 63) - 1


@dataclass(frozen=True)
class Pieces:
    """Stored tokens: piece i is at the addresses `ranges[i]`, shape (n, 2); `owners` keep it there."""

    owners: Any
    ranges: NDArray[np.int64]


def placed_pieces(owner: Any, places: NDArray[np.int64]) -> tuple[Pieces, int]:
    """Pieces at these addresses, shape (n, 2), in files that `owner` keeps mapped, read ahead; and their bytes."""
    count = lib.binidx_read_ahead(0, ANYWHERE, items(places, np.int64, 2), len(places), PAGESIZE)
    return Pieces(owner, places), int(count)


def scattered_pieces(views: Sequence[memoryview]) -> Pieces:
    """Pieces that were read one by one."""
    owners = [ffi.from_buffer(view) for view in views]
    starts = np.array([_address(owner) for owner in owners], np.int64)
    lengths = np.array([len(view) for view in views], np.int64)
    return Pieces(owners, np.stack([starts, starts + lengths], axis=1))


class Mapped:
    """The whole content of an object in memory, for C to take from; `disk` says whether one is behind it."""

    def __init__(self, content: memoryview, *, disk: bool) -> None:
        self.owner = ffi.from_buffer(content)
        self.template = ffi.new(MAPPING)
        self.template.base, self.template.size = _address(self.owner), len(content)
        self.template.page_bytes = PAGESIZE if disk else 0

    def read_ahead(self, ranges: NDArray[np.int64]) -> None:
        """Ask the disk for ranges (first byte, end), shape (n, 2), all at once."""
        about = self.template
        lib.binidx_read_ahead(about.base, about.size, items(ranges, np.int64, 2), len(ranges), about.page_bytes)

    def taking(self, *, ask_ahead: bool) -> Any:
        """For one call of C: what it is to take from, and where it says what that was."""
        about = ffi.new(MAPPING, self.template[0])
        about.ask_ahead = ask_ahead
        return about


def _address(owner: Any) -> int:
    return int(ffi.cast("intptr_t", owner))
