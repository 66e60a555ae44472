"""The C functions over NumPy arrays: the only module that imports the compiled core.

Each wrapper checks dtype, contiguity and bounds before it takes a pointer; the GIL is released inside every call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib


def _pointer(array: NDArray[Any], dtype: type[np.generic]) -> Any:
    """A `const void *` to an array that may be unaligned, as those mapped from an .idx are."""
    if array.dtype != dtype or array.ndim != 1 or array.strides != (array.itemsize,):
        raise TypeError(f"needs a contiguous 1-D {np.dtype(dtype).name} array, found {array.ndim}-D {array.dtype}")
    return ffi.from_buffer(array)


def check_sequences(
    lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int
) -> tuple[int, int]:
    """How many leading sequences are true to the format, and their tokens.

    Args:
        lengths: tokens of each sequence, shape (num_sequences,).
        pointers: first byte of each sequence in the `.bin`, shape (num_sequences,).
        item_bytes: bytes of one token.

    Returns:
        (number of the first wrong sequence, or num_sequences; tokens before it).
    """
    if len(lengths) != len(pointers):
        raise ValueError(f"{len(lengths)} lengths, {len(pointers)} pointers")
    total = ffi.new("int64_t *")
    right = lib.binidx_check_sequences(
        _pointer(lengths, np.int32), _pointer(pointers, np.int64), len(lengths), item_bytes, total
    )
    return right, total[0]


def check_documents(document_indices: NDArray[np.int64], num_sequences: int) -> int:
    """How many leading document bounds never fall and never pass `num_sequences`; all of them when it is right."""
    bounds = _pointer(document_indices, np.int64)
    return int(lib.binidx_check_documents(bounds, len(document_indices), num_sequences))
