"""When a request is late: much later than its like. What is late may be asked a second time, within a budget.

A request is late after max(0.5 s, 4 x the median of the last 64 answers of its store and size). 5 % more requests, at
most, are the price, so a store that is slow as a whole is not asked twice as much because of it.

Source: Dean and Barroso, The Tail at Scale, 2013.
"""

from __future__ import annotations

from collections import defaultdict, deque


class Lateness:
    """How long answers took, and the budget of second requests. For one thread."""

    FLOOR = 0.5
    """Seconds: nothing is late before."""

    TIMES = 4
    """Late is so many times the median."""

    SAMPLES = 64
    ENOUGH = 8
    """Answers that a median is taken of, at most and at least."""

    UNKNOWN = 5.0
    """Seconds: late, while there are too few answers to tell."""

    STANDING = 10.0
    """Seconds, beside what the bytes in flight need on the slowest link: what stands still for so long is sent anew."""

    SHARE, AT_ONCE, AT_FIRST = 0.05, 16.0, 2.0
    """Second requests for each answer; the most saved up, and what there is to begin with."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=self.SAMPLES))
        self._budget = self.AT_FIRST

    def note(self, store: str, size: int, seconds: float) -> None:
        self._seconds[store, _like(size)].append(seconds)
        self._budget = min(self.AT_ONCE, self._budget + self.SHARE)

    def patience(self, needed: float) -> float:
        """Seconds after which a request stands still, where all bytes in flight need so many on the slowest link."""
        return self.STANDING + needed

    def is_late(self, store: str, size: int, age: float, needed: float) -> bool:
        known = self._seconds[store, _like(size)]
        if len(known) < self.ENOUGH:
            return age > self.UNKNOWN + needed
        return age > max(self.FLOOR, self.TIMES * sorted(known)[len(known) // 2])

    def take(self) -> bool:
        """Whether there is one more second request to be had."""
        if self._budget < 1:
            return False
        self._budget -= 1
        return True


def _like(size: int) -> int:
    """Sizes that take the same time: up to 256 KiB the first byte is what takes it, then every doubling is another."""
    return max(18, (size - 1).bit_length())
