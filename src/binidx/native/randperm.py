"""torch's permutation without torch: `native/randperm.c`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import count, items
from binidx.native.cpu import LEVEL


def torch_randperm(n: int, seed: int) -> NDArray[np.int64]:
    """`torch.randperm(n, generator=torch.Generator().manual_seed(seed))` on the CPU, without torch; shape (n,).

    The same as `torch.manual_seed(seed); torch.randperm(n)`: torch keeps the low 32 bits of a seed. From
    n = (2**32 - 1) // 20 on torch changes to a rule with 64-bit draws, and so do we.

    Source: PyTorch, `randperm_cpu`.
    """
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: {seed}, needs -2**63 <= seed < 2**64")
    return _randperm(n, seed, wide=n >= (2**32 - 1) // 20)


def _randperm(n: int, seed: int, *, wide: bool) -> NDArray[np.int64]:
    """torch's rule with 64-bit draws (wide) or with 32-bit ones, whatever n is."""
    out = np.empty(count("n", n), np.int64)
    rng = ffi.new("binidx_mt19937 *")
    lib.binidx_mt19937_seed(rng, seed & 0xFFFFFFFF, LEVEL)
    permute = lib.binidx_randperm_64 if wide else lib.binidx_randperm_32
    permute(rng, len(out), items(out, np.int64, write=True))
    return out
