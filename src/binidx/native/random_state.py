"""NumPy's legacy shuffle: `native/shuffle.c`."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import count as checked_count
from binidx.native.arguments import items


class RandomState:
    """NumPy's legacy `RandomState(seed)` as far as `shuffle` goes: the same places, and the same state afterwards.

    One instance carries on from shuffle to shuffle, as NumPy's does; it must not be used by two threads at once.

    Source: NumPy, `numpy.random.RandomState` over MT19937, frozen by NEP 19.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed: {seed}, needs 0 <= seed < 2**32")
        self._rng = ffi.new("binidx_mt19937 *")
        lib.binidx_mt19937_seed(self._rng, operator.index(seed))

    @property
    def state(self) -> tuple[NDArray[np.uint32], int]:
        """NumPy's `get_state()[1:3]`: the block of 624 words, and how many of them are drawn."""
        return np.frombuffer(ffi.buffer(self._rng.key), np.uint32).copy(), int(self._rng.position)

    def shuffle(self, array: NDArray[Any]) -> None:
        """Shuffle a contiguous 1-D array of 4- or 8-byte numbers in place. The draws do not depend on the dtype."""
        if array.dtype.kind not in "iuf" or array.itemsize not in (4, 8) or array.ndim != 1:
            raise TypeError(f"shuffle: {array.ndim}-D {array.dtype}, needs 1-D numbers of 4 or 8 bytes")
        if not array.flags.c_contiguous or not array.flags.aligned:
            raise TypeError(f"shuffle: strides {array.strides}, needs an aligned, contiguous array")
        shuffle = lib.binidx_shuffle_4 if array.itemsize == 4 else lib.binidx_shuffle_8
        shuffle(self._rng, ffi.from_buffer(array, require_writable=True), len(array))

    def shuffle_targets(self, first: int, count: int) -> NDArray[np.int64]:
        """What steps first, first - 1, ... of a shuffle swap with, shape (count,): the draws without the array.

        Makes orders beyond memory testable: a shuffle of n items is the steps from n - 1 down to 1.
        """
        first, count = checked_count("first", first), checked_count("count", count)
        if count > first:
            raise ValueError(f"count: {count}, needs at most {first}: the last step is 1")
        targets = np.empty(count, np.int64)
        lib.binidx_shuffle_targets(self._rng, first, count, items(targets, np.int64, write=True))
        return targets
