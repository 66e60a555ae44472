"""Claims that hold for a machine after each event of a simulated world."""

from __future__ import annotations

import math

from simulation.fleet import Fleet

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
        line = (process.bucket if folder == "*" else process.limiters[folder])._line
        assert not line or line[0][2].limiter.holds(line[0][2]), "a read waits, and its limiter does not hold it"
        permits = sum(limiter.in_flight for limiter in process.limiters.values())
        assert permits == process.in_flight, f"{permits} permits of {process.in_flight} requests in flight"
