"""Arguments of C functions: NumPy arrays and ints, with dtype, contiguity and bounds checked; the vector levels of the
machine (`native/cpu.c`); and mapped bytes, a file that is mapped as a whole (`native/read_ahead.c`) or in blocks
(`native/place.c`).

Read-ahead of the disk (`AskAhead`) gives ten times the bytes while pages are cold, and doubles the work when they are
warm, so it is switched off after a run of warm reads:

    reads        cold cold cold warm warm .. warm | warm warm warm warm cold | cold ..
    read-ahead    on   on   on   on   on  ..  on  |  off  off  off  off  off |  on  ..
                                    64 reads                          waited
"""

from __future__ import annotations

import operator
from enum import IntEnum
from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx._native import ffi, lib

# By dtype and not by its name: numpy takes 6 us to spell one.
INTEGERS = "int16", "int32", "int64", "uint8", "uint32", "uint64"
C_ITEMS = {np.dtype(name): f"{name}_t[]" for name in INTEGERS}
C_ITEMS |= {np.dtype(np.float32): "float[]", np.dtype(np.float64): "double[]"}

MAX_COUNT = 2**53
"""Exclusive limit of counts: sums of two fit int64, and each is exact as a double."""

TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Code of a dtype in an `.idx` -> bytes of a token."""


def check_token(dtype_code: int, item_bytes: int) -> None:
    """Raise ValueError unless a token of this dtype has `item_bytes` bytes; the C functions divide by this number."""
    if item_bytes != TOKEN_BYTES.get(dtype_code):
        raise ValueError(f"bytes of a token: {item_bytes} of dtype {dtype_code}, needs {TOKEN_BYTES}")


def borrow(content: Any, kind: Any = "char[]", *, write: bool = False) -> Any:
    """Return a pointer to the bytes of a buffer, which it keeps alive.

    cffi gets an array, never a `memoryview`: where a view and a pointer into it are garbage in one cycle, Python 3.11
    and 3.12 clear the view although its buffer is held, and crash as they free it.

    Args:
        content: an array or another buffer.
        kind: C type of the pointer.
        write: whether the buffer must be writable.
    """
    return ffi.from_buffer(kind, np.asarray(memoryview(content)), require_writable=write)


def pointer(array: NDArray[Any], dtype: type[np.generic]) -> Any:
    """Return a `const void *` to an array, which may be unaligned, like those mapped from an `.idx`."""
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise TypeError(f"needs a contiguous 1-D {np.dtype(dtype).name} array, found {array.ndim}-D {array.dtype}")
    return ffi.from_buffer(array)


def items(array: NDArray[Any], dtype: DTypeLike, columns: int | None = None, *, write: bool = False) -> Any:
    """Return a typed pointer to an aligned, C-contiguous array, 1-D or of shape (n, columns), writable for `write`.

    Args:
        array: the array; the pointer keeps it alive.
        dtype: its needed dtype.
        columns: its needed number of columns; None for a 1-D array.
        write: whether it must be writable.
    """
    found, needed, row = array.dtype, np.dtype(dtype), () if columns is None else (columns,)
    if found != needed or not array.flags.c_contiguous or not array.flags.aligned:
        raise TypeError(f"needs an aligned, contiguous {needed.name} array, found {found} with strides {array.strides}")
    if array.shape[1:] != row or array.ndim == 0:
        raise TypeError(f"needs {'1-D' if columns is None else f'(n, {columns})'}, found shape {array.shape}")
    return ffi.from_buffer(C_ITEMS[needed], array, require_writable=write)


def count(name: str, value: int, least: int = 0) -> int:
    """Return `value`, of at least `least`, as an int that C can add to another one without overflow.

    Args:
        name: name of the argument, for the error.
        value: an integer.
        least: smallest allowed value.
    """
    if not least <= value < MAX_COUNT:
        raise ValueError(f"{name}: {value}, needs {least} <= {name} < {MAX_COUNT}")
    return operator.index(value)


class Level(IntEnum):
    """Vector level of the C core; every level gives the same result."""

    PORTABLE = lib.BINIDX_PORTABLE
    AVX2 = lib.BINIDX_AVX2
    AVX512 = lib.BINIDX_AVX512
    NEON = lib.BINIDX_NEON


LEVEL = Level(lib.binidx_cpu_level())
"""Best level of this machine."""

LEVELS = (Level.PORTABLE, LEVEL) if LEVEL is Level.NEON else tuple(level for level in Level if level <= LEVEL)
"""Levels that this machine can run."""


def runnable(level: int | None) -> int:
    """Return a vector level that this machine can run: the given one, or LEVEL for None.

    Raises:
        ValueError: this machine cannot run it.
    """
    if level is None:
        return LEVEL
    if level not in LEVELS:
        known = ", ".join(f"{level} ({level.name})" for level in LEVELS)
        raise ValueError(f"level: {level}, this machine runs {known}")
    return level


MAPPING = ffi.typeof("binidx_mapping *")
ANYWHERE = (1 << 63) - 1


class Mapped:
    """Whole content of an object in memory, for C functions that read ranges of it.

    Args:
        content: all bytes of the object.
        disk: whether `content` is a mapped file, whose pages may have to be read from the disk.
    """

    def __init__(self, content: memoryview, *, disk: bool) -> None:
        self.owner = borrow(content)
        self.template = ffi.new(MAPPING)
        self.template.base, self.template.size = int(ffi.cast("intptr_t", self.owner)), len(content)
        self.template.page_bytes = PAGESIZE if disk else 0

    def read_ahead(self, ranges: NDArray[np.int64]) -> None:
        """Ask the kernel to read ranges (first byte, end), shape (n, 2), from the disk, all at once."""
        about = self.template
        lib.binidx_read_ahead(about.base, about.size, items(ranges, np.int64, 2), len(ranges), about.page_bytes)

    def taking(self, *, ask_ahead: bool) -> Any:
        """Return a C struct for one call that reads the content; the call counts its bytes in the struct.

        Args:
            ask_ahead: whether the call first asks the disk for all its ranges.
        """
        about = ffi.new(MAPPING, self.template[0])
        about.ask_ahead = ask_ahead
        return about


class PlacedBlocks:
    """Blocks of one cached object, some of them mapped; the caller may change the arrays between and during calls.

    Args:
        good: for each chunk, not 0 if its bytes are mapped and checked, shape (num_chunks,).
        addresses: address of the first byte of each block, 0 if it is not mapped, shape (num_blocks,).
        used: for each block, tick of the last call that used it, shape (num_blocks,).
        size, chunk_bytes, block_bytes: bytes of the object, of a chunk and of a block; the last ones may be shorter.

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
        """Return a C struct for one call, as `Mapped.taking`; the call marks the blocks that it uses with `tick`.

        The blocks must stay mapped until the call returns.

        Args:
            tick: number of the call, larger than those before.
            ask_ahead: whether the call first asks the disk for all its ranges.
        """
        self._blocks.tick = tick
        about = ffi.new(MAPPING, self._template[0])
        about.ask_ahead = ask_ahead
        return about


WARM_READS = 64


class AskAhead:
    """Switch of the disk's read-ahead: off after 64 reads in a row without disk access, on again after one with it.

    Some filesystems in user space do not count pages that were read ahead, so each read seems to need no disk access
    while read-ahead helps: on these, 1 read in 65 is done without read-ahead.
    """

    def __init__(self) -> None:
        self.warm_reads = 0

    @property
    def wanted(self) -> bool:
        return self.warm_reads < WARM_READS

    def saw(self, disk_moved: bool) -> None:
        """Record one more read, and whether the disk was read for it."""
        self.warm_reads = 0 if disk_moved else self.warm_reads + 1
