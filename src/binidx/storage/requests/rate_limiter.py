"""Limiter of the requests of one process to one partition of a store: the line of requests that wait for the rate.

    slow start     at most `window` requests in flight: FIRST_WINDOW, fewer in a fleet of many processes; more with each
                   response, one fewer with each refusal, and twice as many after WIDEN_SECONDS with a response
    unlimited      every request is sent at once; SHARED_COUNT outcomes are counted, then shared
    limited        requests wait in a line, the oldest read first; they are sent by tickets of `RequestRate`

A store does not say what it limits: a folder, or all folders of a bucket. So each bucket has a limiter, too, which
counts outcomes of folders without a limit, and of each only the first refusals: it is limited if several folders
refuse some. Requests to folders without a limit of their own then wait in its line; a folder that refuses several times
as many as its bucket gets a limit of its own even then.

A process takes tickets for CHUNK_SECONDS at a time and waits for these before it takes the next, so all processes that
have waiting requests get equal parts. A refused request goes back to its place in the line.
"""

from __future__ import annotations

import functools
import heapq
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

from binidx.errors import redacted
from binidx.storage.location import Location
from binidx.storage.requests.node_rates import NodeRates, node_rates
from binidx.storage.requests.request_rate import LEAST, RequestRate
from binidx.storage.requests.request_schedule import Read
from binidx.storage.settings import leading_number
from binidx.storage.stats import add_usage

logger = logging.getLogger(__name__)

FIRST_WINDOW, FLEET_WINDOW, FLEET_GROWTH = 16, 64, 0.25
"""Requests that a process sends at first, those of all processes of a fleet, and by how many a response widens the
window of a process of a fleet: with 1 a limit that all of them meet is exceeded by as much as was sent before."""

FLEET_RATE = 200.0
"""Requests a second that all nodes of a fleet send at most if a store refuses some of their first requests."""

LAUNCHER_SIZES = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Variables of torchrun, Open MPI and Slurm with the number of processes, and of those on this node."""

WIDEN_SECONDS = 0.1
SHARED_COUNT, SHARED_COUNT_OF_BUCKET = 16, 256
"""Responses that a process counts before it shares them with its node; a refusal is shared at once, with these."""

CHUNK_SECONDS = 0.01
LONGEST_SLEEP = 0.25
"""Longest time until a waiting process looks at the limit again, which others may have raised."""

BUSY_SECONDS = 0.005
"""Time until a second try while another process changes a rate."""

FEW_REFUSALS = 2.5
"""Evidence of a folder up to which its refusals count for its bucket: two, so those of three folders limit a bucket."""

THROTTLED_SECONDS = 1.0
"""Time for which a process counts as throttled after a request of it had to wait."""

LOG_AFTER_SECONDS, FADE_SECONDS, LOG_SECONDS = 1.5, 10.0, 60.0
"""Time of waiting after which a throttling store is logged, the one in which it fades, and the time between two lines:
a store for which requests wait two fifths of the time is logged within 5 s."""


def is_throttled() -> bool:
    """Return whether requests of this process wait for a rate, or did a moment ago."""
    return time.monotonic() < _throttled_until.get(os.getpid(), 0.0)


@functools.cache
def fleet_size() -> tuple[int, int]:
    """Return the number of processes and of nodes that a launcher started, as far as its variables show; else 1, 1."""
    for all_processes, of_node in LAUNCHER_SIZES:
        sizes = [leading_number(name) or 0 for name in (all_processes, of_node)]
        if min(sizes) > 0:
            return sizes[0], max(1, sizes[0] // sizes[1])
    return 1, 1


_throttled_until: dict[int, float] = {}
"""Process -> until when it counts as throttled, by `time.monotonic`."""


class RateLimiter:
    """Limiter of one partition. All methods must be called on one event loop.

    Args:
        location: an object of the partition.
        later: calls a function after some seconds, unless the timer that it returns is cancelled.
        send: is called with a read and the number of its request that may be sent now.
        largest_window: requests in flight at which the slow start ends.
        name: of the partition; that of the location's folder if it is None.
        bucket: limiter of its bucket.
        rates: of the partitions; None: those that the processes of this node share.

    Attributes:
        in_flight: requests that were admitted or sent beside others, and have not ended; of a bucket not counted.
        answered_at: when the store answered a process of the node last, as far as it is known.
    """

    def __init__(
        self,
        location: Location,
        later: Callable[[float, Callable[[], None]], Any],
        send: Callable[[Any, int], None],
        largest_window: int,
        name: str | None = None,
        bucket: RateLimiter | None = None,
        rates: NodeRates | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        prices = location.store.prices()
        num_processes, num_nodes = fleet_size()
        doubling = prices.doubling_seconds
        ceiling = max(prices.reads_per_second / num_nodes, LEAST) if doubling < math.inf else math.inf
        first_limit = max(FLEET_RATE / num_nodes, LEAST) if num_nodes > 1 else math.inf
        self._new = lambda: RequestRate(ceiling=ceiling, doubling_seconds=doubling, first_limit=first_limit)
        self._name, self._later, self._send, self._bucket = name or location.partitions[0], later, send, bucket
        self._rates, self._wall_clock = rates or node_rates(), wall_clock
        self._line: list[tuple[int, int, Read]] = []
        first = max(1, min(FIRST_WINDOW, FLEET_WINDOW // num_processes)) if num_nodes > 1 else FIRST_WINDOW
        self._is_fleet, self._widening = num_nodes > 1, FLEET_GROWTH if num_nodes > 1 else 1.0
        self._window, self._largest_window = float(min(first, largest_window)), largest_window
        self._served, self._refused, self._shared_count = 0, 0, SHARED_COUNT
        if self._name != location.partitions[0]:
            self._window, self._shared_count = math.inf, SHARED_COUNT_OF_BUCKET  # folders have windows of their own
        self._has_answered = False
        self._ticket, self._num_tickets = 0.0, 0
        self._timer: Any = None
        self._waited, self._waited_at, self._counted_at, self._logged_at = 0.0, math.inf, math.inf, -math.inf
        self._is_limited, self._evidence, self._refused_share = False, 0.0, 0.0
        self.in_flight, self.answered_at = 0, -math.inf

    @property
    def is_limited(self) -> bool:
        """True if requests wait for tickets, of this partition or of its bucket."""
        return self._is_limited or (self._bucket is not None and self._bucket._is_limited)

    def admits(self, read: Read, place: int) -> bool:
        """Return whether a request may be sent now; if not, it waits in the line."""
        if self._bucket is not None and self._bucket._is_limited and not self._is_limited:
            return self._bucket.admits(read, place)
        if not self._is_limited and self.in_flight < self._window:
            self.in_flight += 1
            return True
        heapq.heappush(self._line, (read.number, place, read))
        if self._timer is None:
            self._advance() if self._is_limited else self._wait_for_window()
        return False

    @property
    def is_throttling(self) -> bool:
        """True while requests wait in the line because the rate is limited."""
        is_throttling = self._is_limited and bool(self._line)
        return is_throttling or (self._bucket is not None and self._bucket.is_throttling)

    def holds(self, read: Read) -> bool:
        """Return whether a request of a read waits in the line."""
        return any(waiting is read for _, _, waiting in self._line) or bool(self._bucket and self._bucket.holds(read))

    def note_response(self, now: float) -> None:
        """Count a request that ended with a response."""
        self.answered_at = now
        self._has_answered = True
        if self._window < self._largest_window:
            self._window += self._widening
        counters = (self,) if self._bucket is None or self._is_limited else (self, self._bucket)
        for counter in counters:
            counter._served += 1
            if counter._served >= counter._shared_count and not counter.is_throttling:
                counter._advance()
        self.note_end()

    def note_refusal(self) -> None:
        """Count a request that ended with a refusal."""
        self._window = max(1.0, self._window - 1)
        self._refused += 1
        self._advance()
        if (bucket := self._bucket) is not None and not self._is_limited:
            if bucket.is_limited or self._evidence < FEW_REFUSALS:
                bucket._refused += 1
                bucket._advance()
            self.answered_at = max(self.answered_at, bucket.answered_at)
        self.note_end()

    def note_end(self) -> None:
        """Count a request that ended in any way."""
        self.in_flight -= 1
        self._send_window()

    def _send_window(self) -> None:
        while self._line and not self._is_limited and self.in_flight < self._window:
            self._send_oldest()

    def _send_oldest(self) -> None:
        _, place, read = heapq.heappop(self._line)
        read.limiter.in_flight += 1
        self._send(read, place)

    def _advance(self) -> None:
        """Share outcomes with the node, send the requests whose tickets are due, and set the time of the next call."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._line and self._line[0][2].over:
            heapq.heappop(self._line)
        exchanged = self._rates.change(self._name, self._new, self._exchange)
        num_due, seconds = (0, BUSY_SECONDS) if exchanged is None else exchanged
        for _ in range(num_due):
            self._send_oldest()
        self._send_window()
        if not self._line:
            self._num_tickets = 0  # others may limit a forgotten rate anew, whose tickets begin with 0
        if not (self._line and self._is_limited):
            self._counted_at = math.inf
        elif self._timer is None:
            self._timer = self._later(seconds, self._advance)

    def _widen(self) -> None:
        self._timer = None
        if self._has_answered or not self._is_fleet:  # of a fleet, most requests may be refused a second later
            self._window = min(2 * self._window, self._largest_window)
        self._has_answered = False
        self._send_window()
        self._wait_for_window()

    def _wait_for_window(self) -> None:
        if self._line and self._timer is None and self._window < self._largest_window:
            self._timer = self._later(WIDEN_SECONDS, self._widen)

    def _exchange(self, rate: RequestRate, now: float) -> tuple[int, float]:
        """Return how many requests are due, and the seconds until the next one is."""
        usual_share = self._bucket._refused_share if self._bucket is not None and self._bucket.is_limited else 0.0
        rate.note(now, self._served, self._refused, wall=self._wall_clock(), usual_share=usual_share)
        self._served = self._refused = 0
        self._is_limited, self._evidence, self._refused_share = rate.is_limited, rate.evidence, rate.refused_share
        self.answered_at = max(self.answered_at, rate.answered_at)
        if not rate.is_limited or self._ticket + self._num_tickets > rate.issued:
            self._num_tickets = 0
        num_due = 0
        self._count_waiting(rate, now)
        while rate.is_limited and num_due < len(self._line):
            if not self._num_tickets:
                self._num_tickets = min(len(self._line) - num_due, max(1, math.ceil(rate.limit * CHUNK_SECONDS)))
                self._ticket = rate.take(now, self._num_tickets)
            if (seconds := rate.seconds_until(self._ticket)) > 0:
                return num_due, min(seconds, LONGEST_SLEEP)
            num_due = min(num_due + self._num_tickets, len(self._line))
            self._num_tickets = 0
        return num_due, 0.0

    def _count_waiting(self, rate: RequestRate, now: float) -> None:
        """Count the time since the last call if requests waited in it, and log it when it becomes long."""
        if not (rate.is_limited and self._line):
            return
        _throttled_until[os.getpid()] = now + THROTTLED_SECONDS
        seconds = max(0.0, now - self._counted_at)
        self._waited = self._waited * math.exp(min(0.0, self._waited_at - now) / FADE_SECONDS) + seconds
        self._waited_at = self._counted_at = now
        add_usage(
            {
                "throttled_seconds": seconds,
                "throttled_allowed": rate.limit * seconds,
                "throttled_served": rate.goodput * seconds,
                "throttled_alone": 0.0 if self._rates.is_shared else seconds,
            }
        )
        if self._waited > LOG_AFTER_SECONDS and now - self._logged_at > LOG_SECONDS:
            self._logged_at = now
            sharing = "the processes of this node send" if self._rates.is_shared else "this process alone sends"
            logger.warning(
                "%s: throttled for %.1f of the last 10 s: serves %.0f requests/s, refuses %.1f %%; %s %.0f/s at most, "
                "and reads ahead no further. Fewer requests: BINIDX_CACHE_DIR, a baked run; the limit of a store: "
                "binidx plan --tokens-per-second",
                *(redacted(self._name), self._waited, rate.goodput, 100 * rate.refused_share),
                *(sharing, rate.limit),
            )
