"""Blend index: the dataset of each sample of a blend, and the number of the sample in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.index.documents import ArrayAllocator, check_array, check_within, out_or_empty
from binidx.native import arguments, blend_index

BlendIndex = tuple[NDArray[np.int16], NDArray[np.int64]]

MAX_DATASETS = 2**15 - 2
"""Megatron Core accepts fewer than 32767 datasets."""

CHECKED_AT_ONCE = COUNTED_AT_ONCE = 1 << 20

ARRAYS = ("dataset_index", "dataset_sample_index")


def build_blend_index(
    weights: Sequence[float] | NDArray[np.float64], size: int, *, num_threads: int = 1, out: BlendIndex | None = None
) -> BlendIndex:
    """Return an index of `size` samples, each from the dataset that is furthest behind its share (the first if equal).

    Args:
        weights: share of each dataset, shape (num_datasets,), used as given: normalise them before.
        size: number of samples in all.
        num_threads: number of threads; the rows are the same for any number.
        out: the two arrays to fill, contiguous; None: new arrays.

    Returns:
        dataset_index, int16, and dataset_sample_index, int64, both of shape (size,).

    Raises:
        IndexBuildError: a weight is not positive and finite, there are too many datasets or none, or size is negative.

    Source: Megatron Core, build_blending_indices, as its x86-64 wheels compute it: no fused multiply-add.
    """
    shares = np.ascontiguousarray(weights, np.float64)
    _check_datasets(shares, size)
    if not (np.isfinite(shares) & (shares > 0)).all():
        raise IndexBuildError(f"blend: found weights {shares.tolist()}, need each above 0 and finite")
    index = _out_or_new_index(out, size)
    blend_index.blend_weighted(shares, *index, num_threads=num_threads)
    return index


def build_exhaustive_blend_index(
    sizes: Sequence[int] | NDArray[np.int64], *, num_threads: int = 1, out: BlendIndex | None = None
) -> BlendIndex:
    """Return an index of every sample of every dataset, mixed in proportion to the sizes of the datasets.

    The rule is that of `build_blend_index`, among the datasets that have samples left.

    Args:
        sizes: number of samples of each dataset, shape (num_datasets,); an empty dataset is never drawn from.
        num_threads: number of threads; the rows are the same for any number.
        out: the two arrays to fill, contiguous; None: new arrays.

    Returns:
        dataset_index, int16, and dataset_sample_index, int64, both of shape (sum of sizes,).

    Raises:
        IndexBuildError: a size is negative, or there are too many datasets or none.

    Source: Megatron Core, build_exhaustive_blending_indices, which draws from empty datasets and writes past the end.
    """
    counts = np.ascontiguousarray(sizes, np.int64)
    _check_datasets(counts, total := sum(map(int, sizes)))
    if (counts < 0).any():
        raise IndexBuildError(f"blend: found sizes {counts.tolist()}, need each 0 or more")
    index = _out_or_new_index(out, total)
    blend_index.blend_exhaustive(counts, *index, num_threads=num_threads)
    return index


def check_blend_index(arrays: Mapping[str, NDArray[Any]], sizes: Sequence[int], size: int | None) -> None:
    """Raise ValueError unless the arrays can be the indices of a blend.

    Args:
        arrays: dataset_index and dataset_sample_index.
        sizes: number of samples of each dataset.
        size: number of samples of the blend; None: any number.
    """
    datasets, samples = arrays["dataset_index"], arrays["dataset_sample_index"]
    check_array("dataset_index", datasets, (np.int16,), 1)
    check_array("dataset_sample_index", samples, (np.int64,), 1)
    if len(datasets) != len(samples) or (size is not None and len(datasets) != size):
        raise ValueError(f"found {len(datasets)} and {len(samples)} samples, need {size or 'equal numbers'}")
    limits = np.array(sizes, np.int64)
    for first in range(0, len(datasets), CHECKED_AT_ONCE):
        which, numbers = datasets[first : first + CHECKED_AT_ONCE], samples[first : first + CHECKED_AT_ONCE]
        check_within("dataset_index", which, 0, len(sizes) - 1)
        wrong = (numbers < 0) | (numbers >= limits[which])
        if wrong.any():
            number, found = which[wrong][0], numbers[wrong][0]
            raise ValueError(f"dataset {number}: found sample {found}, need 0 to {sizes[number] - 1}")


def _check_datasets(datasets: NDArray[np.float64] | NDArray[np.int64], size: int) -> None:
    if datasets.ndim != 1 or not 1 <= len(datasets) <= MAX_DATASETS:
        raise IndexBuildError(f"blend: found datasets of shape {datasets.shape}, need 1 to {MAX_DATASETS}")
    if not 0 <= size < arguments.MAX_COUNT:
        raise IndexBuildError(f"blend: found {size} samples, need 0 to {arguments.MAX_COUNT}")


def _out_or_new_index(out: BlendIndex | None, size: int) -> BlendIndex:
    datasets, samples = out or (None, None)
    return out_or_empty(datasets, size, np.int16), out_or_empty(samples, size, np.int64)


@contextlib.contextmanager
def blend_arrays(writer: ArrayAllocator, weights: Sequence[float], size: int | None) -> Iterator[BlendIndex]:
    """Yield the two index arrays of a blend, each straight in its file, to be filled in the block.

    Args:
        writer: writes the arrays.
        weights: numbers of samples of the datasets if `size` is None.
        size: number of samples; None is all of them.
    """
    shape = (sum(map(int, weights)) if size is None else size,)
    with writer.array(ARRAYS[0], shape, np.int16) as ids, writer.array(ARRAYS[1], shape, np.int64) as samples:
        yield ids, samples


def build_blend_arrays(writer: ArrayAllocator, weights: Sequence[float], size: int | None, threads: int) -> None:
    """Build the two index arrays of a blend.

    Args:
        writer: writes the arrays.
        weights: share of each dataset; without a size, its number of samples.
        size: number of samples; None is all samples of the datasets.
        threads: number of threads.
    """
    with blend_arrays(writer, weights, size) as out:
        if size is None:
            build_exhaustive_blend_index(np.asarray(weights, dtype=np.int64), num_threads=threads, out=out)
        else:
            build_blend_index(np.asarray(weights, np.float64), size, num_threads=threads, out=out)


def samples_per_dataset(dataset_index: NDArray[np.int16], num_datasets: int) -> list[int]:
    """Return the number of samples of each dataset.

    It counts in blocks, because NumPy copies what it counts to int64: 8 GB for a billion samples.

    Args:
        dataset_index: dataset of each sample, shape (size,).
        num_datasets: number of datasets of the blend.
    """
    served = np.zeros(num_datasets, np.int64)
    for rows in row_blocks(0, len(dataset_index), COUNTED_AT_ONCE):
        served += np.bincount(dataset_index[rows], minlength=num_datasets)
    return list(served.tolist())


def row_blocks(first: int, stop: int, size: int) -> Iterator[slice]:
    """Yield slices of up to `size` rows that cover the rows from `first` to before `stop`."""
    return (slice(begin, min(begin + size, stop)) for begin in range(first, stop, size))


def normalize(weights: list[float] | list[int]) -> list[float]:
    """Return weights divided by their sum, in float64. Source: Megatron Core; its rounding decides ties of a blend."""
    array = np.asarray(weights, dtype=np.float64)
    return [float(weight) for weight in array / np.sum(array)]
