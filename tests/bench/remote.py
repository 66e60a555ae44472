"""Remote rows come from the store: what a cache in memory served is no row.

A second pass over an object that was read is memory: no request, and faster than one round trip. Every bench that
reads from a server checks each of its passes here.
"""

from __future__ import annotations

from collections.abc import Callable

from binidx.storage.stats import usage
from binidx.storage.usage_report import sum_usage
from tests.bench.table import seconds


class NotRemoteError(RuntimeError):
    """A pass of a remote row did not read from the store."""


def check_reached(work: str, num_requests: float, taken: float, delay_ms: float) -> None:
    """Raise NotRemoteError unless a pass could have read from the store.

    Args:
        work: name of the pass.
        num_requests: requests during the pass, by the proxy's or the process's own count.
        taken: seconds of the pass.
        delay_ms: round trip to the store; 0 if it is on loopback.
    """
    if not num_requests:
        raise NotRemoteError(f"{work}: found no request to the store, needs one; open the data anew for each pass")
    if taken < delay_ms / 1e3:
        raise NotRemoteError(
            f"{work}: took {1e3 * taken:.3g} ms, one round trip is {delay_ms:g} ms; open the data anew for each pass"
        )


def own_requests() -> float:
    """Return the number of requests that this process has sent to stores."""
    return sum_usage(usage())["requests"]


def remote_seconds(
    work: str, delay_ms: float, run: Callable[[], object], count: Callable[[], float] = own_requests
) -> float:
    """Return the wall time of a pass over a store, checked.

    Args:
        work: name of the pass.
        delay_ms: round trip to the store.
        run: the pass.
        count: returns the number of requests so far; by default those of this process.
    """
    before = count()
    taken = seconds(run)
    check_reached(work, count() - before, taken, delay_ms)
    return taken
