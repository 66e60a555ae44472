"""Checks of `.idx` arrays (`native/check_index.c`), token ids of rows (`native/wrap_rows.c`), and copies of pieces
(`native/copy_pieces.c`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx._native import ffi, lib
from binidx.errors import FormatError
from binidx.native.arguments import borrow, items, pointer


def count_valid_sequences(lengths: NDArray[np.int32], pointers: NDArray[np.int64], item_bytes: int) -> tuple[int, int]:
    """Count the leading sequences that obey the rules of the format, and their tokens.

    Args:
        lengths: tokens of each sequence, shape (num_sequences,).
        pointers: first byte of each sequence in the `.bin`, shape (num_sequences,).
        item_bytes: bytes of one token.

    Returns:
        (number of the first wrong sequence, or num_sequences; tokens before it).
    """
    if len(lengths) != len(pointers):
        raise ValueError(f"{len(lengths)} lengths, {len(pointers)} pointers")
    total, arrays = ffi.new("int64_t *"), (pointer(lengths, np.int32), pointer(pointers, np.int64))
    right = lib.binidx_check_sequences(*arrays, len(lengths), item_bytes, total)
    return right, total[0]


def count_valid_documents(document_indices: NDArray[np.int64], num_sequences: int) -> int:
    """Count the leading document bounds that never fall and never exceed `num_sequences`.

    Args:
        document_indices: first sequence of each document, then the end, shape (num_documents + 1,); may be unaligned.
        num_sequences: largest allowed bound.
    """
    return int(lib.binidx_check_documents(pointer(document_indices, np.int64), len(document_indices), num_sequences))


# uint16 and int32 are types of Megatron, uint32 is that of tokenizer engines.
LARGEST = {np.dtype(np.uint16): 0xFFFF, np.dtype(np.int32): 0x7FFFFFFF, np.dtype(np.uint32): 0xFFFFFFFF}


def wrap_rows(
    ids: NDArray[np.uint32],
    offsets: NDArray[np.int64],
    dtype: DTypeLike,
    *,
    prefix: Sequence[int] = (),
    suffix: Sequence[int] = (),
    empty_too: bool = False,
) -> NDArray[Any]:
    """Return the ids of all rows, one after the other, with `prefix` before and `suffix` after each row.

    Args:
        ids: shape (num_ids,).
        offsets: first id of each row, then the end of the last; ascending, shape (num_rows + 1,).
        dtype: of the result: uint16, int32 or uint32.
        empty_too: whether empty rows get prefix and suffix; else they are left out.

    Raises:
        FormatError: an id is too large for the dtype; the message names the first one.
    """
    kind = np.dtype(dtype)
    rows = np.count_nonzero(np.diff(offsets)) if not empty_too else len(offsets) - 1
    capacity = int(offsets[-1] - offsets[0]) + int(rows) * (len(prefix) + len(suffix))
    out = np.empty(capacity, kind)
    before, behind = np.array(prefix, np.uint32), np.array(suffix, np.uint32)
    wrapping = ffi.new("binidx_wrapping *", {
        "ids": items(ids, np.uint32), "offsets": items(offsets, np.int64), "out": borrow(out),
        "prefix": items(before, np.uint32), "suffix": items(behind, np.uint32), "num_ids": len(ids),
        "num_rows": len(offsets) - 1, "num_prefix": len(before), "num_suffix": len(behind), "room": capacity,
        "largest": LARGEST[kind], "item_bytes": kind.itemsize, "empty_too": empty_too,
    })  # fmt: skip
    count = lib.binidx_wrap_rows(wrapping)
    if count == lib.BINIDX_BAD_ID:
        wide = next(value for value in (*before, *behind, *ids[ids > LARGEST[kind]]) if value > LARGEST[kind])
        raise FormatError(f"token id {wide}: {kind.name} holds up to {LARGEST[kind]}, needs a tokenizer whose ids fit")
    if count < 0:
        raise ValueError(f"offsets of rows: {offsets[0]} to {offsets[-1]} in {len(ids)} ids, needs rising ones within")
    return out


def copy_pieces(
    source: NDArray[np.uint8], bounds: NDArray[np.int64], order: NDArray[np.int64], target: NDArray[np.uint8]
) -> int:
    """Copy pieces `order[0]`, `order[1]`, ... of the source one after another into the target; return their bytes.

    Args:
        bounds: piece p is source[bounds[p] : bounds[p + 1]], shape (num_pieces + 1,).

    Raises:
        ValueError: a piece does not exist, leaves the source, or exceeds the target.
    """
    given = items(source, np.uint8), len(source), items(bounds, np.int64), max(len(bounds) - 1, 0)
    wanted = items(order, np.int64), len(order)
    done = lib.binidx_copy_pieces(*given, *wanted, items(target, np.uint8, write=True), len(target))
    if done < 0:
        raise ValueError(f"{len(order)} pieces of {len(source)} bytes: one leads outside, or past {len(target)} bytes")
    return int(done)
