"""A stratified sample of units, and what follows from it for all of them. No I/O happens here.

    units      |--|--|----|--|--|--|----|--|-|-|-|--|    pieces of a corpus in its order, of known stored bytes x
    strata     |   0    |    1    |    2    |    3   |    equal bytes of neighbours: each file gets its share
    sample        ^  ^     ^   ^     ^ ^      ^   ^      two of each stratum, by chance

What is estimated is the ratio R of tokens to stored bytes over the whole sample (the combined ratio estimator): stored
bytes are known of every unit, and say most of what there is to say about its tokens. So files of other languages cost
little accuracy, and a head is not taken for the whole.

    total   R X            X: stored bytes of all
    error   the spread of y - R x between the two of each stratum, and what was not looked at within a unit

Source: Cochran, Sampling Techniques, 3rd ed., 6.11 (combined ratio estimate), 11.7 (two stages); the strata are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OF_EACH = 2
"""Units of a stratum: the fewest that tell how much they differ, so there are as many strata as can be."""

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571)
"""Student's t at 97.5 % for 1 to 5 degrees of freedom."""


@dataclass(frozen=True)
class Stratum:
    """Neighbouring units, and those of them that were drawn."""

    first: int
    num_units: int
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """What was found in a stratum.

    Attributes:
        num_units: that it has.
        sizes: stored bytes of those that were drawn, shape (n,).
        counts: what was counted in each.
        variances: of these counts, where a unit was not counted whole; else 0.
    """

    num_units: int
    sizes: NDArray[np.float64]
    counts: NDArray[np.float64]
    variances: NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A total, and the interval that holds the true one in 95 of 100 samples."""

    total: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half of the interval, as a share of the total."""
        return (self.high - self.low) / 2 / self.total if self.total else 0.0


def draw(sizes: NDArray[np.int64], count: int, seed: int) -> list[Stratum]:
    """Some `count` units: two of each of count / 2 strata of about equal bytes, or all of a stratum that has fewer.

    Args:
        sizes: bytes of each unit, shape (num_units,).
        seed: of the choice.
    """
    if not len(sizes):
        return []
    ends = np.cumsum(sizes)
    middles = ends - sizes / 2
    num_strata = max(1, count // OF_EACH)
    numbers = np.minimum((middles * num_strata / max(int(ends[-1]), 1)).astype(np.int64), num_strata - 1)
    firsts = np.flatnonzero(np.diff(numbers, prepend=-1))
    lengths = np.diff(np.append(firsts, len(sizes)))
    rng = np.random.Generator(np.random.Philox(key=seed % 2**64))
    return [
        Stratum(
            first, length, tuple((first + np.sort(rng.choice(length, min(OF_EACH, length), replace=False))).tolist())
        )
        for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True)
    ]


def estimate_total(seen: Sequence[Seen], total_bytes: int) -> Estimate:
    """The count in all units, by its ratio to their `total_bytes`."""
    weights = [each.num_units / len(each.sizes) for each in seen]
    size = sum(weight * each.sizes.sum() for weight, each in zip(weights, seen, strict=True))
    count = sum(weight * each.counts.sum() for weight, each in zip(weights, seen, strict=True))
    if not size:
        return Estimate(0.0, 0.0, 0.0)
    ratio = count / size
    total = ratio * total_bytes
    margin = student(sum(max(len(each.sizes) - 1, 0) for each in seen if len(each.sizes) < each.num_units)) * (
        math.sqrt(sum(_variance(each, ratio) for each in seen)) * total_bytes / size
    )
    return Estimate(total, max(total - margin, 0.0), total + margin)


def _variance(each: Seen, ratio: float) -> float:
    """Of what a stratum adds to the total."""
    drawn, most = len(each.sizes), each.num_units
    spread = np.var(each.counts - ratio * each.sizes, ddof=1) if drawn > 1 else 0.0
    return float(most**2 * (1 - drawn / most) * spread / drawn + most / drawn * each.variances.sum())


def student(degrees: int) -> float:
    """Student's t at 97.5 %; 1.96 for 0 degrees, where nothing varies but what is within units.

    Source: Cornish and Fisher's expansion, right to five thousandths beyond the table.
    """
    z = 1.959964
    if degrees == 0:
        return z
    if degrees <= len(QUANTILES):
        return QUANTILES[degrees - 1]
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3
