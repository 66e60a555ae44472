"""Which share of the sequences each split takes."""

from __future__ import annotations

import re
from enum import Enum
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError

Bookends = tuple[float, float]
SplitMatrix = list[Bookends | None]


class Split(Enum):
    """The splits, in the order every list over splits has."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: list[float] | list[int]) -> list[float]:
    """Weights over their sum, in float64. Source: Megatron Core, `normalize` (its rounding decides ties of a blend)."""
    array = np.asarray(weights, dtype=np.float64)
    return [float(weight) for weight in array / np.sum(array)]


def parse_and_normalize_split(split: str) -> list[float]:
    """The three shares of a split string such as "969, 30, 1".

    Raises:
        ConfigError: a sign or an exponent (Megatron reads "1e-3" as 1 and 3), no three numbers, or a sum of zero.

    Source: Megatron Core: every run of digits and dots is a number, missing ones are 0.
    """
    if re.search(r"[^\d\s.,:;/|]|\.\d*\.", split):
        raise ConfigError(f"split {split!r}: needs plain numbers such as '969, 30, 1'")
    shares = [float(number) for number in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (len(Split) - len(shares))
    if len(shares) != len(Split) or sum(shares) <= 0:
        raise ConfigError(f"split {split!r}: found {shares}, needs one to three numbers with a positive sum")
    return normalize(shares)


def convert_split_vector_to_split_matrix(vector_a: list[float], vector_b: list[float] | None = None) -> SplitMatrix:
    """Where each split begins and ends in [0, 1]; `None` for a split without a share.

    Args:
        vector_a: one share per split.
        vector_b: a second partition that narrows the first.

    Source: Megatron Core. Sums run from the left, in float64, as its do.
    """
    bookends_a, bookends_b = ([*pairwise(accumulate(vector, initial=0))] for vector in (vector_a, vector_b or vector_a))
    overlaps = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(bookends_a, bookends_b, strict=True)]
    return [(begin, end) if begin < end else None for begin, end in overlaps]


def split_indices(bookends: Bookends, num_elements: int) -> NDArray[np.int32]:
    """The elements of one split, shape (num_in_split,); may be empty.

    Source: Megatron Core: Python's `round`, which takes halves to the even neighbour.
    """
    found = split_range(bookends, num_elements)
    return np.arange(found.start, found.stop, dtype=np.int32)


def split_range(bookends: Bookends, num_elements: int) -> range:
    """The same as a range: of 300 million numbers an array is 1.2 GB."""
    begin, end = (round(edge * float(num_elements)) for edge in bookends)
    return range(begin, end)
