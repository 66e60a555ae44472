"""Statistics of sequence lengths: percentiles, logarithmic bins, and bars for the terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 20
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


def percentiles(lengths: NDArray[np.int32]) -> dict[str, int]:
    """Return the percentiles of the lengths (nearest rank) and their maximum; {} if there are none.

    Cost: one copy of the lengths, 4 bytes each, and a partition of it.
    """
    if not len(lengths):
        return {}
    ranks = [max(0, -(-percent * len(lengths) // 100) - 1) for percent in PERCENTILES]
    ordered = np.partition(lengths, ranks)
    found = {str(percent): int(ordered[rank]) for percent, rank in zip(PERCENTILES, ranks, strict=True)}
    return {**found, "max": int(lengths.max())}


def bins(lengths: NDArray[np.int32]) -> list[dict[str, int]]:
    """Count the sequences of 0 tokens, 1, 2-3, 4-7, 8-15, ...: from the shortest to the longest that occur."""
    counts = np.zeros(33, np.int64)
    for start in range(0, len(lengths), BLOCK):
        # frexp gives the number of binary digits: 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3; exact in float64.
        digits = np.frexp(lengths[start : start + BLOCK].astype(np.float64))[1]
        counts += np.bincount(digits, minlength=33)
    used = counts.nonzero()[0]
    return [
        {"from": (1 << d) >> 1, "to": (1 << d) - 1, "sequences": int(counts[d])}
        for d in (range(used[0], used[-1] + 1) if len(used) else ())
    ]


def draw(histogram: list[dict[str, int]], columns: int, smooth: bool = True) -> list[str]:
    """Return the bins as bars; the bar of a bin that is not empty is never empty.

    Args:
        columns: width of the terminal.
        smooth: draw eighths of a character; False for ASCII.
    """
    labels = [span(each) for each in histogram]
    counts = [f"{each['sequences']:,}" for each in histogram]
    left, right = max(map(len, labels)), max(map(len, counts))
    width = max(8, min(columns, 100) - left - right - 8)
    highest = max(each["sequences"] for each in histogram)
    return [
        f"  {label:>{left}}  {bar(each['sequences'], highest, width, smooth):<{width}}  {count:>{right}}"
        for each, label, count in zip(histogram, labels, counts, strict=True)
    ]


def span(each: dict[str, Any]) -> str:
    """Format the bounds of a bin: `8-15`, `0`."""
    return f"{each['from']:,}" if each["from"] == each["to"] else f"{each['from']:,}-{each['to']:,}"


def bar(count: int, highest: int, width: int, smooth: bool = True) -> str:
    """Return a bar of at most `width` characters."""
    if not smooth:
        return "#" * -(-count * width // highest)
    eighths = -(-count * width * 8 // highest)
    full, rest = divmod(eighths, 8)
    return "█" * full + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[rest]
