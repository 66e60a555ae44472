"""Claims that hold for a machine after each event of a simulated world."""

from __future__ import annotations

import math

from simulation.fleet import Fleet

from binidx.storage.requests.rate_limiter import RateLimiter
from binidx.storage.requests.request_rate import LEAST, RequestRate


def check_rate(rate: RequestRate, now: float) -> None:
    """Check a rate after an event.

    Raises:
        AssertionError: a claim does not hold.
    """
    assert rate.is_possible(), f"clients cannot have brought about {rate}"
    assert rate.limit >= LEAST, rate.limit
    assert rate.updated <= now + 1e-9, "changed in the future"
    assert not any(map(math.isnan, vars(rate).values())), rate


def check_line(limiter: RateLimiter) -> None:
    """Check after an event that requests which wait in a limiter have a timer, or one in flight that will wake them.

    Raises:
        AssertionError: nothing would send them.
    """
    if not limiter._line:
        return
    if limiter._has_tickets:
        assert limiter._timer is not None, "requests wait for tickets, and no timer sends them"
    elif limiter._window < limiter._largest_window:
        assert limiter._window_timer is not None, "requests wait for a window that no timer widens"
    else:
        assert limiter.in_flight >= limiter._window, "requests wait, and none in flight wakes them"


def check_fleet(fleet: Fleet) -> None:
    """Check the process and the rates of the last response, and after every thousandth event all.

    Raises:
        AssertionError: a claim does not hold.
    """
    if (fleet.touched is None) or fleet.world.num_events % 1_000 == 0:
        touched = [(process, folder) for process in fleet.processes for folder in ("*", *process.folders)]
    else:
        process, folder = fleet.touched
        touched = [(process, folder), (process, "*")]
    for process, folder in touched:
        if (rate := process.node.rates.by_partition.get(folder)) is not None:
            check_rate(rate, fleet.world.now)
        limiter = process.bucket if folder == "*" else process.limiters[folder]
        line = limiter._line
        assert not line or line[0][2].limiter.holds(line[0][2]), "a read waits, and its limiter does not hold it"
        check_line(limiter)
        permits = sum(limiter.in_flight for limiter in process.limiters.values())
        assert permits == process.in_flight, f"{permits} permits of {process.in_flight} requests in flight"
