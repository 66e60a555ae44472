"""Blend index: the dataset of each sample of a blend (`native/blend_index.c`, in chunks `native/blend_chunks.c`)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import items, runnable

ROWS_PER_DATASET = 16
"""Minimum rows of a chunk for each dataset: the replay at its start takes about one a dataset, rarely ten."""

MIN_ROWS = 2048
"""Minimum rows of a chunk, which takes 10 us to start."""

WHOLE, ROTATED_AT_ONCE = 128, 1 << 16
"""With up to so many datasets each sample compares all of them, as in native/blend_window.h. More of equal weights are
drawn in rotation, so many rows at once: their windows take 40 times as long."""


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
        """Estimate the samples drawn of each dataset before a sample, shape (width,), by largest remainders.

        Exact for sample 0. Exhausted datasets, and the padding after the last one, are infinite.
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
        """Draw the rows of `lanes` chunks at once from `counts`, shape (lanes, width); update these to their ends."""
        if counts.shape != (self.lanes, self.width) or not 0 <= first <= self.size - self.lanes * length:
            raise ValueError(f"{counts.shape} counts, rows from {first}, {length} a chunk, {self.size} in all")
        lib.binidx_blend_chunks(self._c, self.level, first, length, items(counts, np.float64, self.width, write=True))

    def replay(self, first: int, stop: int, counts: NDArray[np.float64], guess: NDArray[np.float64] | None) -> int:
        """Draw rows again from the true counts at `first`, until these equal the counts drawn from `guess`."""
        given = {len(counts), self.width if guess is None else len(guess)}
        if given != {self.width} or not 0 <= first <= stop <= self.size:
            raise ValueError(f"{len(counts)} counts, rows {first} to {stop} of {self.size}")
        guessed = ffi.NULL if guess is None else items(guess, np.float64, write=True)
        true = items(counts, np.float64, write=True)
        return int(lib.binidx_blend_replay(self._c, self.level, first, stop, true, guessed))


def blend_in_chunks(blend: Blend, chunk: int | None = None) -> None:
    """Draw all rows, one chunk in each lane at a time; the start of each is drawn again from the end of the one before.

    Args:
        chunk: rows of a chunk; by default the rows of a lane, or 0 (no chunks) if these are too few.
    """
    if chunk is None:
        chunk = blend.size // blend.lanes
        # Of weights with another sum than 1, the starts of chunks cannot be estimated.
        sums_to_one = blend.weights.max() <= 1 and abs(blend.weights.sum() - 1) * blend.size < 0.5
        chunk = 0 if chunk < max(MIN_ROWS, ROWS_PER_DATASET * blend.num) or not sums_to_one else chunk
    counts, first = blend.counts_at(0), 0
    while chunk and first + blend.lanes * chunk <= blend.size:
        guesses = np.stack([blend.counts_at(first + lane * chunk) for lane in range(blend.lanes)])
        blend.draw(first, chunk, ends := guesses.copy())
        for guess, end in zip(guesses, ends, strict=True):
            counts = end if blend.replay(first, first + chunk, counts, guess) < chunk else counts
            first += chunk
    blend.replay(first, blend.size, counts, None)


def fill_blend_index(
    weights: NDArray[np.float64],
    limits: NDArray[np.int64] | None,
    dataset_index: NDArray[np.int16],
    dataset_sample_index: NDArray[np.int64],
    *,
    level: int | None = None,
) -> None:
    """Fill the two indices, shape (size,), see `index.blend`; arguments as for `Blend`.

    Args:
        limits: samples of each dataset, `size` in all; None: the weights are positive, and no dataset ends.
    """
    size = len(dataset_index)
    if len(dataset_sample_index) != size or not 0 < len(weights) < 2**15:
        raise ValueError(f"{len(weights)} weights, {size} and {len(dataset_sample_index)} rows")
    if limits is not None and (min(limits) < 0 or sum(map(int, limits)) != size):
        raise ValueError(f"sizes {min(limits)} to {max(limits)} of {len(limits)} datasets, {size} rows")
    # Below 2^50 samples, rounding keeps a difference of one between the counts of equal weights.
    if len(weights) > WHOLE and (weights == weights[0]).all() and float(weights[0]) * size < 2.0**50:
        for first in range(0, size, ROTATED_AT_ONCE):
            rows = slice(first, min(first + ROTATED_AT_ONCE, size))
            dataset_sample_index[rows], dataset_index[rows] = np.divmod(np.arange(first, rows.stop), len(weights))
    else:
        blend_in_chunks(Blend(weights, limits, dataset_index, dataset_sample_index, level))
