"""Pieces of a buffer in another order: `native/copy_pieces.c`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx._native import lib
from binidx.native.arguments import items


def copy_pieces(
    source: NDArray[np.uint8], bounds: NDArray[np.int64], order: NDArray[np.int64], target: NDArray[np.uint8]
) -> int:
    """Put pieces `order[0]`, `order[1]`, ... of the source one after another into the target; their bytes.

    Args:
        bounds: piece p is source[bounds[p] : bounds[p + 1]], shape (num_pieces + 1,).

    Raises:
        ValueError: there is no such piece, it leads outside the source, or there is no room for it.
    """
    given = items(source, np.uint8), len(source), items(bounds, np.int64), max(len(bounds) - 1, 0)
    done = lib.binidx_copy_pieces(
        *given, items(order, np.int64), len(order), items(target, np.uint8, write=True), len(target)
    )
    if done < 0:
        raise ValueError(f"{len(order)} pieces of {len(source)} bytes: one leads outside, or past {len(target)} bytes")
    return int(done)
