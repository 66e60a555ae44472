"""From which dataset each sample of a blend is drawn, and which of its samples it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.document_sample import out_or_empty
from binidx.native import arguments, blend_index

MAX_DATASETS = 2**15 - 2


"""Megatron Core asks for fewer than 32767."""


BlendIndex = tuple[NDArray[np.int16], NDArray[np.int64]]


def build_blend_index(
    weights: Sequence[float] | NDArray[np.float64], size: int, *, num_threads: int = 1, out: BlendIndex | None = None
) -> BlendIndex:
    """`size` samples, each from the dataset that is furthest behind its share; a tie goes to the lowest number.

    Args:
        weights: share of each dataset, shape (num_datasets,), used as given: normalise them before.
        size: samples in all.
        num_threads: how many threads draw; the rows are the same for any number.
        out: where both go, contiguous, of their shapes and dtypes; new arrays by default.

    Returns:
        dataset_index and dataset_sample_index, both of shape (size,).

    Raises:
        IndexBuildError: a weight that is not positive and finite, too many datasets or none, a negative size.

    Source: Megatron Core, build_blending_indices, as its x86-64 wheels compute it: no fused multiply-add.
    """
    shares = np.ascontiguousarray(weights, np.float64)
    _check_datasets(shares, size)
    if not (np.isfinite(shares) & (shares > 0)).all():
        raise IndexBuildError(f"blend: weights {shares.tolist()}, needs each above 0 and finite")
    index = _checked_index(out, size)
    blend_index.blend_weighted(shares, *index, num_threads=num_threads)
    return index


def build_exhaustive_blend_index(
    sizes: Sequence[int] | NDArray[np.int64], *, num_threads: int = 1, out: BlendIndex | None = None
) -> BlendIndex:
    """Every sample of every dataset, spread in proportion: the rule of `build_blend_index` among those not yet spent.

    Args:
        sizes: samples of each dataset, shape (num_datasets,); 0 is a dataset that is never drawn from.
        num_threads: how many threads draw; the rows are the same for any number.
        out: where both go, contiguous, of their shapes and dtypes; new arrays by default.

    Returns:
        dataset_index and dataset_sample_index, both of shape (sum of sizes,).

    Raises:
        IndexBuildError: a negative size, too many datasets or none.

    Source: Megatron Core, build_exhaustive_blending_indices; there a size of 0 is drawn from and writes past the end.
    """
    counts = np.ascontiguousarray(sizes, np.int64)
    _check_datasets(counts, total := sum(map(int, sizes)))
    if (counts < 0).any():
        raise IndexBuildError(f"blend: sizes {counts.tolist()}, needs each 0 or more")
    index = _checked_index(out, total)
    blend_index.blend_exhaustive(counts, *index, num_threads=num_threads)
    return index


def _check_datasets(datasets: NDArray[np.float64] | NDArray[np.int64], size: int) -> None:
    if datasets.ndim != 1 or not 1 <= len(datasets) <= MAX_DATASETS:
        raise IndexBuildError(f"blend: shape {datasets.shape} of datasets, needs 1 to {MAX_DATASETS}")
    if not 0 <= size < arguments.MAX_COUNT:
        raise IndexBuildError(f"blend: {size} samples, needs 0 to {arguments.MAX_COUNT}")


def _checked_index(out: BlendIndex | None, size: int) -> BlendIndex:
    datasets, samples = out or (None, None)
    return out_or_empty(datasets, size, np.int16), out_or_empty(samples, size, np.int64)
