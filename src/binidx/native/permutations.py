"""Random permutations: NumPy's legacy shuffle (`native/shuffle.c`, `native/shuffle_targets.c`) and torch's permutation
without torch (`native/randperm.c`).
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import LEVEL, borrow, count, items, runnable

SHUFFLES = {size: getattr(lib, f"binidx_shuffle_{size}") for size in (1, 2, 4, 8)}
"""Bytes of an item -> C function that shuffles such items."""


class RandomState:
    """NumPy's legacy `RandomState(seed)` with `shuffle` alone: the same permutation, and the same state afterwards.

    An instance continues from shuffle to shuffle, as NumPy's does; only one thread at a time may use it.

    Args:
        seed: 0 to 2**32 - 1.
        level: a vector level of `native.arguments`, by default the best one; all levels give the same result.

    Source: NumPy, `numpy.random.RandomState` over MT19937, frozen by NEP 19.
    """

    def __init__(self, seed: int, *, level: int | None = None) -> None:
        if not 0 <= seed < 2**32:
            raise ValueError(f"seed: {seed}, needs 0 <= seed < 2**32")
        self._rng = ffi.new("binidx_mt19937 *")
        lib.binidx_mt19937_seed(self._rng, operator.index(seed), runnable(level))

    @property
    def state(self) -> tuple[NDArray[np.uint32], int]:
        """NumPy's `get_state()[1:3]`: the block of 624 words, and how many of them were drawn."""
        return np.frombuffer(ffi.buffer(self._rng.key), np.uint32).copy(), int(self._rng.position)

    def shuffle(self, array: NDArray[Any]) -> None:
        """Shuffle a contiguous 1-D array of numbers of 1, 2, 4 or 8 bytes in place, at any alignment.

        The draws do not depend on the dtype. Cost: 1 to 4 ns an item, see `native/shuffle.c`.
        """
        if array.dtype.kind not in "iuf" or array.itemsize not in SHUFFLES or array.ndim != 1:
            raise TypeError(f"shuffle: {array.ndim}-D {array.dtype}, needs 1-D numbers of 1, 2, 4 or 8 bytes")
        if not array.flags.c_contiguous:
            raise TypeError(f"shuffle: strides {array.strides}, needs a contiguous array")
        shuffle = SHUFFLES[array.itemsize]
        shuffle(self._rng, borrow(array, write=True), len(array))


def torch_randperm(n: int, seed: int) -> NDArray[np.int64]:
    """Return the permutation of `torch.manual_seed(seed); torch.randperm(n)` on the CPU, without torch; shape (n,).

    A `torch.Generator` with this seed gives the same one. torch keeps the low 32 bits of a seed. From
    n = (2**32 - 1) // 20 on, torch uses a rule with 64-bit draws, and so does this function.

    Args:
        n: number of items.
        seed: any number that `torch.manual_seed` accepts.

    Source: PyTorch, `randperm_cpu`.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: {seed}, needs -2**63 <= seed < 2**64")
    return _randperm(n, seed, wide=n >= (2**32 - 1) // 20)


def _randperm(n: int, seed: int, *, wide: bool) -> NDArray[np.int64]:
    """Return torch's permutation by its rule with 64-bit draws (`wide`) or by that with 32-bit draws, for any n."""
    out = np.empty(count("n", n), np.int64)
    rng = ffi.new("binidx_mt19937 *")
    lib.binidx_mt19937_seed(rng, seed & 0xFFFFFFFF, LEVEL)
    permute = lib.binidx_randperm_64 if wide else lib.binidx_randperm_32
    permute(rng, len(out), items(out, np.int64, write=True))
    return out
