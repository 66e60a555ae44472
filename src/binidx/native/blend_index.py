"""Which dataset each sample of a blend comes from: `native/blend_index.c`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx._native import lib
from binidx.native.arguments import items


def blend_weighted(
    weights: NDArray[np.float64], dataset_index: NDArray[np.int16], dataset_sample_index: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Fill the two indices, shape (size,), see `index.blend.build_blend_index`; returns the samples drawn from each.

    The weights must be finite and positive.
    """
    size = len(dataset_index)
    if len(dataset_sample_index) != size or not 0 < len(weights) < 2**15:
        raise ValueError(f"{len(weights)} weights, {size} and {len(dataset_sample_index)} rows")
    counts = np.empty(len(weights), np.float64)
    lib.binidx_blend_weighted(
        items(weights, np.float64),
        len(weights),
        size,
        items(counts, np.float64, write=True),
        items(dataset_index, np.int16, write=True),
        items(dataset_sample_index, np.int64, write=True),
    )
    return counts


def blend_exhaustive(
    sizes: NDArray[np.int64], dataset_index: NDArray[np.int16], dataset_sample_index: NDArray[np.int64]
) -> None:
    """Fill the two indices, shape (sum of sizes,), see `index.blend.build_exhaustive_blend_index`."""
    total = sum(map(int, sizes))
    if not len(dataset_index) == len(dataset_sample_index) == total or not 0 < len(sizes) < 2**15 or min(sizes) < 0:
        raise ValueError(f"{len(sizes)} sizes of {total} in all, {len(dataset_index)} rows")
    scratch = np.empty((2, len(sizes)), np.float64)
    unspent = np.empty(len(sizes), np.int16)
    lib.binidx_blend_exhaustive(
        items(sizes, np.int64),
        len(sizes),
        total,
        items(scratch[0], np.float64, write=True),
        items(scratch[1], np.float64, write=True),
        items(unspent, np.int16, write=True),
        items(dataset_index, np.int16, write=True),
        items(dataset_sample_index, np.int64, write=True),
    )
