"""Is an `.idx` true to its own rules? `native/check_index.c`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import pointer


def check_sequences(lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int) -> tuple[int, int]:
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
        pointer(lengths, np.int32), pointer(pointers, np.int64), len(lengths), item_bytes, total
    )
    return right, total[0]


def check_documents(document_indices: NDArray[np.int64], num_sequences: int) -> int:
    """How many leading document bounds never fall and never pass `num_sequences`; all of them when it is right."""
    bounds = pointer(document_indices, np.int64)
    return int(lib.binidx_check_documents(bounds, len(document_indices), num_sequences))
