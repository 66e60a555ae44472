"""Arguments of C functions: NumPy arrays and ints, with dtype, contiguity and bounds checked; and the vector levels
of the machine (`native/cpu.c`).
"""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx._native import ffi, lib

# By dtype and not by its name: numpy takes 6 us to spell one.
C_ITEMS: dict[np.dtype[Any], str] = {
    np.dtype(name): f"{name}_t[]" for name in ("int16", "int32", "int64", "uint8", "uint32", "uint64")
}
C_ITEMS |= {np.dtype(np.float32): "float[]", np.dtype(np.float64): "double[]"}

MAX_COUNT = 2**53
"""Exclusive limit of counts: sums of two fit int64, and each is exact as a double."""

TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}
"""Code of a dtype in an `.idx` -> bytes of a token."""


def check_token(dtype_code: int, item_bytes: int) -> None:
    """Raise ValueError unless a token of this dtype has so many bytes: C divides by them."""
    if item_bytes != TOKEN_BYTES.get(dtype_code):
        raise ValueError(f"bytes of a token: {item_bytes} of dtype {dtype_code}, needs {TOKEN_BYTES}")


def pointer(array: NDArray[Any], dtype: type[np.generic]) -> Any:
    """Return a `const void *` to an array, which may be unaligned, like those mapped from an `.idx`."""
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise TypeError(f"needs a contiguous 1-D {np.dtype(dtype).name} array, found {array.ndim}-D {array.dtype}")
    return ffi.from_buffer(array)


def items(array: NDArray[Any], dtype: DTypeLike, columns: int | None = None, *, write: bool = False) -> Any:
    """Return a typed pointer to an aligned, C-contiguous array, 1-D or of shape (n, columns)."""
    found, needed, row = array.dtype, np.dtype(dtype), () if columns is None else (columns,)
    if found != needed or not array.flags.c_contiguous or not array.flags.aligned:
        raise TypeError(f"needs an aligned, contiguous {needed.name} array, found {found} with strides {array.strides}")
    if array.shape[1:] != row or array.ndim == 0:
        raise TypeError(f"needs {'1-D' if columns is None else f'(n, {columns})'}, found shape {array.shape}")
    return ffi.from_buffer(C_ITEMS[needed], array, require_writable=write)


def count(name: str, value: int, least: int = 0) -> int:
    """Return `value` as an int that C can add to another without overflow."""
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

LEVELS = (Level.PORTABLE, LEVEL) if LEVEL is Level.NEON else tuple(each for each in Level if each <= LEVEL)
"""Levels that this machine can run."""


def runnable(level: int | None) -> int:
    """Return a level for C; LEVEL for None.

    Raises:
        ValueError: this machine cannot run it.
    """
    if level is None:
        return LEVEL
    if level not in LEVELS:
        raise ValueError(f"level: {level}, this machine runs {', '.join(f'{each} ({each.name})' for each in LEVELS)}")
    return level
