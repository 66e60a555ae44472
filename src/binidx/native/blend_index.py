"""Blend index: the dataset of each sample of a blend (`native/blend_index.c`, in chunks `native/blend_chunks.c`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import items, runnable

ROWS_PER_DATASET = 16
"""Minimum rows of a chunk for each dataset: `Blend.replay` draws about one for each dataset again, rarely ten."""

MIN_ROWS = 2048
"""Minimum rows of a chunk, which takes 10 us to start."""

WHOLE = 128
"""Up to this number of datasets, all of them are compared for each sample; as in native/blend_window.h."""


class Blend:
    """State of drawing the rows of a blend in chunks.

    Args:
        weights: share of each dataset, shape (num_datasets,); finite, none below 0.
        limits: samples of each dataset, shape (num_datasets,); None: unlimited.
        dataset_index, dataset_sample_index: output arrays, shape (size,).
        level: vector level; by default the best of this machine.
    """

    def __init__(
        self,
        weights: NDArray[np.float64],
        limits: NDArray[np.int64] | None,
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
        level: int | None,
    ) -> None:
        self.num, self.size, self.level = len(weights), len(dataset_index), runnable(level)
        self.width = -(-self.num // 16) * 16
        self.weights = self._padded(weights, 0)
        self.limits = None if limits is None else self._padded(limits, 0)
        self._rows = dataset_index, dataset_sample_index
        self._c = ffi.new("binidx_blend *")
        self._c.weights = items(self.weights, np.float64)
        self._c.limits = ffi.NULL if self.limits is None else items(self.limits, np.float64)
        self._c.num_datasets, self._c.width = self.num, self.width
        self._c.dataset_index = items(dataset_index, np.int16, write=True)
        self._c.dataset_sample_index = items(dataset_sample_index, np.int64, write=True)
        self.lanes: int = lib.binidx_blend_lanes(self.level)

    def _padded(self, values: NDArray[Any], rest: float) -> NDArray[np.float64]:
        padded = np.full(self.width, rest, np.float64)
        padded[: self.num] = values
        return padded

    def counts_at(self, sample: int) -> NDArray[np.float64]:
        """Estimate how many samples of each dataset precede a sample of the blend, shape (width,).

        The method is that of largest remainders; it is exact for sample 0. The counts of exhausted datasets, and of the
        padding after the last dataset, are infinite.
        """
        share = self.weights[: self.num] * sample
        drawn = np.floor(share)
        missing = min(max(sample - int(drawn.sum()), 0), self.num)
        drawn[np.argsort(drawn - share, kind="stable")[:missing]] += 1
        counts = self._padded(drawn, np.inf)
        if self.limits is not None:
            counts[counts >= self.limits] = np.inf
        return counts

    def draw(self, first: int, length: int, counts: NDArray[np.float64]) -> None:
        """Draw `lanes` chunks of `length` rows at once, the first from row `first` on.

        Args:
            counts: samples drawn of each dataset before each chunk, shape (lanes, width); updated to those after it.
        """
        if counts.shape != (self.lanes, self.width) or not 0 <= first <= self.size - self.lanes * length:
            raise ValueError(f"{counts.shape} counts, rows from {first}, {length} a chunk, {self.size} in all")
        lib.binidx_blend_chunks(self._c, self.level, first, length, items(counts, np.float64, self.width, write=True))

    def replay(self, first: int, stop: int, counts: NDArray[np.float64], guess: NDArray[np.float64] | None) -> int:
        """Draw rows from `first` on again, until `stop` or until the true counts equal those that came of a guess.

        Args:
            counts: true counts of drawn samples at row `first`, shape (width,); updated.
            guess: counts from which the present rows were drawn, shape (width,); updated. None: draw all rows.

        Returns:
            The number of rows that were drawn.
        """
        given = {len(counts), self.width if guess is None else len(guess)}
        if given != {self.width} or not 0 <= first <= stop <= self.size:
            raise ValueError(f"{len(counts)} counts, rows {first} to {stop} of {self.size}")
        guessed = ffi.NULL if guess is None else items(guess, np.float64, write=True)
        true = items(counts, np.float64, write=True)
        replayed: int = lib.binidx_blend_replay(self._c, self.level, first, stop, true, guessed)
        return replayed


def blend_in_chunks(blend: Blend, num_threads: int, chunk: int | None = None) -> NDArray[np.float64]:
    """Draw all rows of a blend; return the number of samples drawn of each dataset, shape (width,).

    Args:
        num_threads: threads that draw; the start of each chunk is drawn again once the chunk before it is complete.
        chunk: rows of a chunk; by default the size over lanes and threads, or 0 (no chunks) if that is too small.
    """
    if chunk is None:
        # Unless the weights sum to 1, estimated counts are wrong, and replay draws all rows again.
        estimated = blend.weights.max() <= 1 and abs(blend.weights.sum() - 1) * blend.size < 0.5
        chunk = blend.size // (blend.lanes * num_threads)
        chunk = 0 if chunk < max(MIN_ROWS, ROWS_PER_DATASET * blend.num) or not estimated else chunk
    span = blend.lanes * chunk
    firsts = range(0, blend.size - span + 1, span) if chunk else range(0)
    starts = [np.stack([blend.counts_at(first + lane * chunk) for lane in range(blend.lanes)]) for first in firsts]
    ends = [start.copy() for start in starts]
    with ThreadPoolExecutor(num_threads) as pool:  # which starts a thread at its first use
        draws = map if num_threads == 1 else pool.map
        list(draws(lambda first, counts: blend.draw(first, chunk, counts), firsts, ends))
    counts, first = blend.counts_at(0), 0
    for guess, end in zip([g for s in starts for g in s], [e for s in ends for e in s], strict=True):
        counts = end if blend.replay(first, first + chunk, counts, guess) < chunk else counts
        first += chunk
    blend.replay(first, blend.size, counts, None)
    return counts


def fill_in_rotation(num: int, dataset_index: NDArray[np.int16], dataset_sample_index: NDArray[np.int64]) -> None:
    """Fill both arrays for `num` datasets of equal weight: 0, 1, ... num - 1, and again from 0."""
    items(dataset_index, np.int16, write=True)  # raises for an array of which a view would be a copy
    items(dataset_sample_index, np.int64, write=True)
    rounds, rest = divmod(len(dataset_index), num)
    dataset_index[: rounds * num].reshape(rounds, num)[:] = np.arange(num)
    dataset_sample_index[: rounds * num].reshape(rounds, num)[:] = np.arange(rounds)[:, None]
    dataset_index[rounds * num :] = np.arange(rest)
    dataset_sample_index[rounds * num :] = rounds


def _rotates(weights: NDArray[np.float64], size: int) -> bool:
    """Return whether `fill_in_rotation` gives the rows of these weights, and is faster than comparing the weights.

    With fewer than 2^50 samples of each dataset, no rounding error hides a difference of one sample.
    """
    return len(weights) > WHOLE and bool((weights == weights[0]).all()) and float(weights[0]) * size < 2.0**50


def blend_weighted(
    weights: NDArray[np.float64],
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    *,
    num_threads: int = 1,
    level: int | None = None,
) -> NDArray[np.float64]:
    """Fill both arrays, shape (size,), as `index.blend.build_blend_index`; return the samples drawn of each dataset.

    The weights must be finite and positive.

    Args:
        weights: share of each dataset, shape (num_datasets,).
        dataset_index, dataset_sample_index: arrays to fill, shape (size,).
        num_threads: threads that draw; the rows are the same for any number.
        level: vector level; by default the best of this machine.
    """
    size = len(dataset_index)
    if len(dataset_sample_index) != size or not 0 < len(weights) < 2**15:
        raise ValueError(f"{len(weights)} weights, {size} and {len(dataset_sample_index)} rows")
    if _rotates(weights, size):
        fill_in_rotation(len(weights), dataset_index, dataset_sample_index)
        return np.float64(size // len(weights)) + (np.arange(len(weights)) < size % len(weights))
    blend = Blend(weights, None, dataset_index, dataset_sample_index, level)
    return blend_in_chunks(blend, num_threads)[: len(weights)]


def blend_exhaustive(
    sizes: NDArray[np.int64],
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    *,
    num_threads: int = 1,
    level: int | None = None,
) -> None:
    """Fill both arrays, shape (sum of sizes,), as `index.blend.build_exhaustive_blend_index` returns them.

    Args:
        sizes: samples of each dataset, shape (num_datasets,).
        dataset_index, dataset_sample_index: arrays to fill, shape (sum of sizes,).
        num_threads, level: as in `blend_weighted`.
    """
    total = sum(map(int, sizes))
    if not len(dataset_index) == len(dataset_sample_index) == total or not 0 < len(sizes) < 2**15 or min(sizes) < 0:
        raise ValueError(f"{len(sizes)} sizes of {total} in all, {len(dataset_index)} rows")
    weights = sizes / np.float64(max(total, 1))
    if _rotates(weights, total):
        fill_in_rotation(len(sizes), dataset_index, dataset_sample_index)
    else:
        blend_in_chunks(Blend(weights, sizes, dataset_index, dataset_sample_index, level), num_threads)
