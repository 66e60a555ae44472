"""The permutation: record i gets the key Philox(seed, i), 64 random bits, and the records are sorted by their keys.

    record   0     1     2     3            equal keys: the lower record first
    key      7..   2..   9..   4..
    order    1     3     0     2

So it is a permutation because it is a sort, and a function of the seed and the number of records alone: not of memory,
buckets, machines or how the records are read. The first m of n records stand in the order that m records alone have.

Quality: keys of Philox 4x64-10, which passes BigCrush (Salmon, Moraes, Dror, Shaw, SC 2011), are independent and
uniform for all that is known, so each order is as likely as any other, but for equal keys: 304 million records have
one pair of them with a chance of 0.25 %. There are 2^64 seeds, so that many of the n! orders can come out.

Source: ours; NumPy's Philox is what is computed, whose stream NumPy promises to keep (NEP 19).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PURPOSE = 0x62696E6964780001
"""Second word of Philox's key, so that another use of the same seed draws other numbers."""

BLOCK = 4
"""Numbers that Philox gives for one value of its counter."""


def shuffle_keys(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """Keys of the records first, first + 1, ...; shape (count,).

    Args:
        seed: any number; its low 64 bits count.
    """
    key, before = np.array([seed % 2**64, PURPOSE], np.uint64), first % BLOCK
    numbers = np.random.Philox(key=key, counter=first // BLOCK).random_raw(before + count)
    found: NDArray[np.uint64] = numbers[before:]
    return found


def bucket_of(keys: NDArray[np.uint64], num_buckets: int) -> NDArray[np.intp]:
    """Which of `num_buckets` equal ranges of keys each lies in; shape as keys. At most 2^31 buckets."""
    high = keys >> np.uint64(32)
    found: NDArray[np.intp] = ((high * np.uint64(num_buckets)) >> np.uint64(32)).astype(np.intp)
    return found


def shuffle_order(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Which record stands where, shape (count,): by their keys, equal ones in their order."""
    order: NDArray[np.int64] = np.argsort(keys, kind="stable")
    return order
