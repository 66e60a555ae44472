"""Shrink a failing world: the fewest faults, and the shortest time, with which it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def shrink(items: Sequence[Item], fails: Callable[[Sequence[Item]], bool]) -> list[Item]:
    """Return a part of `items` with which `fails` still holds, and without any one of which it does not.

    Source: ddmin (Zeller and Hildebrandt 2002): halves are removed first, then quarters, and so on.
    """
    left, size = list(items), max(1, len(items) // 2)
    while True:
        start, before = 0, len(left)
        while start < len(left):
            fewer = left[:start] + left[start + size :]
            if fails(fewer):
                left = fewer
            else:
                start += size
        if size == 1 and len(left) == before:
            return left
        size = max(1, size // 2)
