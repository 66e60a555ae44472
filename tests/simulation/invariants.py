"""Claims that hold for a machine after each event of a simulated world."""

from __future__ import annotations

import math

from binidx.storage.requests.request_rate import LEAST, RequestRate


def check_rate(rate: RequestRate, now: float) -> None:
    """Check a rate after an event.

    Raises:
        AssertionError: a claim does not hold.
    """
    assert rate.is_possible(), f"clients cannot have brought about {rate}"
    assert rate.limit >= LEAST, rate.limit
    assert rate.updated <= now, "changed in the future"
    assert not any(map(math.isnan, vars(rate).values())), rate
