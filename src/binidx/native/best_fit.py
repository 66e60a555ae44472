"""Pieces of documents into bins: `native/best_fit.c`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import count, items


def best_fit(lengths: NDArray[np.int32], capacity: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which pieces lie in which bin: bin b has pieces[bounds[b] : bounds[b + 1]], longest first.

    Memory: 40 bytes a piece while it works.

    Args:
        lengths: of the pieces, 1 to capacity, shape (n,).
        capacity: of a bin.

    Returns:
        bounds, shape (num_bins + 1,), and pieces, shape (n,).

    Raises:
        IndexBuildError: a piece of no tokens, or of more than a bin holds.
    """
    num_pieces = len(lengths)
    pieces, bin_of, following = (np.empty(num_pieces, np.int64) for _ in range(3))
    bounds, heads = np.empty(num_pieces + 1, np.int64), np.empty(count("capacity", capacity, 1) + 1, np.int64)
    open_rooms = np.empty((capacity >> 6) + 1, np.uint64)
    packing = ffi.new("binidx_packing *", {
        "lengths": items(lengths, np.int32), "num_pieces": num_pieces, "capacity": capacity,
        "pieces": items(pieces, np.int64), "bounds": items(bounds, np.int64), "bin_of": items(bin_of, np.int64),
        "next": items(following, np.int64), "heads": items(heads, np.int64), "open": items(open_rooms, np.uint64),
    })  # fmt: skip
    num_bins = lib.binidx_best_fit(packing)
    if num_bins < 0:
        raise IndexBuildError(
            f"packing: pieces of {lengths.min()} to {lengths.max()} tokens, a bin needs 1 to {capacity}"
        )
    return bounds[: num_bins + 1], pieces
