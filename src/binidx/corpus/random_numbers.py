"""Random numbers of records, by a seed and the number of the record: any range of them is drawn on its own.

shuffle_keys    64 bits of NumPy's Philox: sort keys of a shuffle
uniform_hash    SplitMix64 as a number in [0, 1): records of a sample, or shares of a split
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PURPOSE = 0x62696E6964780001
"""Second word of Philox's key, so that another use of the same seed draws other numbers."""

PHILOX_BLOCK = 4
"""Number of keys that Philox draws for one value of its counter."""


def shuffle_keys(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Return the random sort keys of `count` records, from record number `first` on; shape (count,).

    Args:
        seed: any integer; only its low 64 bits are used.
    """
    key, before = np.array([seed % 2**64, PURPOSE], np.uint64), first % PHILOX_BLOCK
    numbers = np.random.Philox(key=key, counter=first // PHILOX_BLOCK).random_raw(before + count)
    keys: NDArray[np.uint64] = numbers[before:]
    return keys


def uniform_hash(seed: int, first: int, count: int) -> NDArray[np.float64]:
    """Return a pseudorandom number in [0, 1) for each of the documents first, first + 1, ...; shape (count,).

    Args:
        seed: any integer; its low 64 bits are used.
        first, count: number of the first document, and how many there are.

    Source: SplitMix64 (Steele, Lea, Flood 2014): output (document number + 1) of the generator with this seed.
    """
    steps = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    mixed = np.uint64(seed % 2**64) + steps * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    uniform: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform
