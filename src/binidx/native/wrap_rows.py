"""Token ids as a `.bin` stores them, with fixed ids around each row: `native/wrap_rows.c`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx._native import ffi, lib
from binidx.errors import FormatError
from binidx.native.arguments import items

# uint16 and int32 are Megatron's, uint32 is what engines give.
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
    """The ids of all rows, one after the other, with `prefix` before and `suffix` behind each.

    Args:
        ids: shape (num_ids,).
        offsets: where each row begins in `ids`, and the end of the last; rising, shape (num_rows + 1,).
        dtype: of the result: uint16, int32 or uint32.
        empty_too: whether rows of no ids get prefix and suffix; else nothing comes of them.

    Raises:
        FormatError: an id that the dtype does not hold, the first of them named.
    """
    kind = np.dtype(dtype)
    rows = np.count_nonzero(np.diff(offsets)) if not empty_too else len(offsets) - 1
    room = int(offsets[-1] - offsets[0]) + int(rows) * (len(prefix) + len(suffix))
    out = np.empty(room, kind)
    before, behind = np.array(prefix, np.uint32), np.array(suffix, np.uint32)
    wrapping = ffi.new("binidx_wrapping *", {
        "ids": items(ids, np.uint32), "offsets": items(offsets, np.int64), "out": ffi.from_buffer(out),
        "prefix": items(before, np.uint32), "suffix": items(behind, np.uint32), "num_ids": len(ids),
        "num_rows": len(offsets) - 1, "num_prefix": len(before), "num_suffix": len(behind), "room": room,
        "largest": LARGEST[kind], "item_bytes": kind.itemsize, "empty_too": empty_too,
    })  # fmt: skip
    count = lib.binidx_wrap_rows(wrapping)
    if count == lib.BINIDX_BAD_ID:
        wide = next(value for value in (*before, *behind, *ids[ids > LARGEST[kind]]) if value > LARGEST[kind])
        raise FormatError(f"token id {wide}: {kind.name} holds up to {LARGEST[kind]}, needs a tokenizer whose ids fit")
    if count < 0:
        raise ValueError(f"offsets of rows: {offsets[0]} to {offsets[-1]} in {len(ids)} ids, needs rising ones within")
    return out
