"""Stratified sample of units, and the estimate of a total from it. No I/O happens here.

    units      |--|--|----|--|--|--|----|--|-|-|-|--|    pieces of a corpus in its order, of known stored bytes x
    strata     |   0    |    1    |    2    |    3   |    equal bytes of neighbours: each file gets its share
    sample        ^  ^     ^   ^     ^ ^      ^   ^      two of each stratum, at random

The estimated quantity is the ratio R of tokens to stored bytes over the whole sample (the combined ratio estimator):
the stored bytes of every unit are known and predict its tokens well. So files in other languages cost little accuracy,
and the beginning of a file does not stand for the rest.

    total   R X            X: stored bytes of all units
    error   the spread of y - R x between the two units of each stratum, and the unread part of a unit

Source: Cochran, Sampling Techniques, 3rd ed., 6.11 (combined ratio estimate), 11.7 (two stages); the strata are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

OF_EACH = 2
"""Sampled units of a stratum: the fewest that show a variance, so that there are as many strata as possible."""

QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571)
"""Student's t at 97.5 % for 1 to 5 degrees of freedom."""


@dataclass(frozen=True)
class Stratum:
    """Run of neighbouring units, and the sampled ones among them."""

    first: int
    num_units: int
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class StratumSample:
    """Counts of a stratum's sampled units.

    Attributes:
        num_units: number of units in the stratum.
        sizes: stored bytes of each sampled unit, shape (n,).
        counts: count in each sampled unit, shape (n,).
        variances: variance of each count, shape (n,); 0 for a unit that was counted whole.
    """

    num_units: int
    sizes: NDArray[np.float64]
    counts: NDArray[np.float64]
    variances: NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """Total, with the interval that contains the true total in 95 of 100 samples."""

    total: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half of the interval as a share of the total."""
        return (self.high - self.low) / 2 / self.total if self.total else 0.0


def draw_strata(sizes: NDArray[np.int64], count: int, seed: int) -> list[Stratum]:
    """Draw about `count` units: two of each of count / 2 strata of about equal bytes, or all of a smaller stratum.

    Args:
        sizes: bytes of each unit, shape (num_units,).
        seed: of the sample.
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


def estimate_total(seen: Sequence[StratumSample], total_bytes: int) -> Estimate:
    """Return the total count of all units, by its ratio to their `total_bytes`."""
    weights = [each.num_units / len(each.sizes) for each in seen]
    size = sum(weight * each.sizes.sum() for weight, each in zip(weights, seen, strict=True))
    count = sum(weight * each.counts.sum() for weight, each in zip(weights, seen, strict=True))
    if not size:
        return Estimate(0.0, 0.0, 0.0)
    ratio = count / size
    total = ratio * total_bytes
    margin = student_quantile(sum(max(len(each.sizes) - 1, 0) for each in seen if len(each.sizes) < each.num_units)) * (
        math.sqrt(sum(_variance(each, ratio) for each in seen)) * total_bytes / size
    )
    return Estimate(total, max(total - margin, 0.0), total + margin)


def _variance(each: StratumSample, ratio: float) -> float:
    """Return the variance of a stratum's contribution to the total."""
    drawn, most = len(each.sizes), each.num_units
    spread = np.var(each.counts - ratio * each.sizes, ddof=1) if drawn > 1 else 0.0
    return float(most**2 * (1 - drawn / most) * spread / drawn + most / drawn * each.variances.sum())


def student_quantile(degrees: int) -> float:
    """Return Student's t at 97.5 %; 1.96 for 0 degrees of freedom, if only the counts within units vary.

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
