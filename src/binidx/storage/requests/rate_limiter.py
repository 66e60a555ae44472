"""Limiter of the requests of one process to one partition of a store: the line of requests that wait for the rate.

    start          of a node of a known fleet: requests wait for tickets, which responses return
    slow start     at most `window` requests in flight: FIRST_WINDOW; more with each response, one fewer with each
                   refusal, and twice as many after WIDEN_SECONDS with a response
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

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from binidx.storage.requests.request_rate import LEAST, RequestRate
from binidx.storage.requests.request_schedule import Read

Result = TypeVar("Result")

FIRST_WINDOW, FLEET_WINDOW, FLEET_GROWTH = 16, 64, 0.25
"""Requests that a process sends at first, those of all nodes of a fleet, and by how many a response widens the window
of a process of a fleet: with 1 a limit that all of them meet is exceeded by as much as was sent before."""

FLEET_RATE = 200.0
"""Requests a second that all nodes of a fleet send at most if a store refuses some of their first requests."""

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

LOG_AFTER_SECONDS, FADE_SECONDS, LOG_SECONDS = 1.5, 10.0, 60.0
"""Time of waiting after which a throttling store is logged, the one in which it fades, and the time between two lines:
a store for which requests wait two fifths of the time is logged within 5 s."""


@dataclass(frozen=True)
class FirstLimits:
    """Limits of a process for a partition that is new to it.

    Args:
        start: requests of its node in flight at first; inf: no bound beside the window.
        widening: by how many a response widens the window.
        rate: requests a second of its node once a store refuses some of the first ones.
        ceiling, doubling_seconds: rate at which the store begins to grow, as its prices say, for this node.
    """

    start: float = math.inf
    widening: float = 1.0
    rate: float = math.inf
    ceiling: float = math.inf
    doubling_seconds: float = math.inf

    @classmethod
    def of_fleet(cls, num_nodes: int, ceiling: float = math.inf, doubling_seconds: float = math.inf) -> FirstLimits:
        """Divide the limits of a fleet over its nodes; 1: their number is not known."""
        ceiling = max(ceiling / num_nodes, LEAST) if doubling_seconds < math.inf else math.inf
        if num_nodes == 1:
            return cls(ceiling=ceiling, doubling_seconds=doubling_seconds)
        start, rate = max(FLEET_WINDOW / num_nodes, 1.0), max(FLEET_RATE / num_nodes, LEAST)
        return cls(start, FLEET_GROWTH, rate, ceiling, doubling_seconds)

    def new_rate(self) -> RequestRate:
        """Return the rate of a partition without one."""
        clock = self.start if self.start < math.inf else 0.0
        return RequestRate(math.inf, self.ceiling, self.doubling_seconds, self.rate, self.start, clock=clock)


class SharedRates(Protocol):
    """Rates of the node's processes, by partition, and the clocks."""

    def change(
        self, partition: str, new: Callable[[], RequestRate], change: Callable[[RequestRate, float, float], Result]
    ) -> Result | None:
        """Return `change(rate, now, wall time)`; None if another process is changing one."""

    def note_waiting(self, now: float, seconds: float, rate: RequestRate) -> None:
        """Count seconds in which requests of this process waited for a rate."""

    def log_throttling(self, partition: str, waited_seconds: float, rate: RequestRate) -> None:
        """Log that a store throttles this process."""


class RateLimiter:
    """Limiter of one partition. All methods must be called on one event loop.

    Args:
        name: of the partition.
        later: calls a function after some seconds, unless the timer that it returns is cancelled.
        send: is called with a read and the number of its request that may be sent now.
        largest_window: requests in flight at which the slow start ends.
        bucket: limiter of the bucket above it.
        is_above: whether this is the limiter of a bucket above those of its folders.

    Attributes:
        in_flight: requests that were admitted or sent beside others, and have not ended; of a bucket not counted.
        answered_at: when the store answered a process of the node last, as far as it is known.
    """

    def __init__(
        self,
        name: str,
        first: FirstLimits,
        rates: SharedRates,
        later: Callable[[float, Callable[[], None]], Any],
        send: Callable[[Any, int], None],
        largest_window: int,
        *,
        bucket: RateLimiter | None = None,
        is_above: bool = False,
    ) -> None:
        self._name, self._first, self._rates, self._later, self._send = name, first, rates, later, send
        self._bucket = bucket
        self._line: list[tuple[int, int, Read]] = []
        self._window, self._largest_window = float(min(FIRST_WINDOW, largest_window)), largest_window
        self._served, self._refused, self._shared_count = 0, 0, SHARED_COUNT
        if is_above:
            self._window, self._shared_count = math.inf, SHARED_COUNT_OF_BUCKET  # folders have windows of their own
            self._first = first = replace(first, start=math.inf)
        self._has_answered = False
        self._ticket, self._num_tickets = 0.0, 0
        self._timer: Any = None  # of tickets; that of the window goes on beside it
        self._window_timer: Any = None
        self._waited, self._waited_at, self._counted_at, self._logged_at = 0.0, math.inf, math.inf, -math.inf
        self._is_limited, self._has_tickets = False, first.start < math.inf
        self._evidence, self._refused_share = 0.0, 0.0
        self.in_flight, self.answered_at = 0, -math.inf

    @property
    def is_limited(self) -> bool:
        """True if requests wait for tickets, of this partition or of its bucket."""
        return self._is_limited or (self._bucket is not None and self._bucket._is_limited)

    def admits(self, read: Read, place: int) -> bool:
        """Return whether a request may be sent now; if not, it waits in the line."""
        if self._bucket is not None and self._bucket._is_limited and not self._is_limited:
            return self._bucket.admits(read, place)
        if not self._has_tickets and self.in_flight < self._window:
            self.in_flight += 1
            return True
        heapq.heappush(self._line, (read.number, place, read))
        if not self._has_tickets:
            self._wait_for_window()
        elif self._timer is None:
            self._advance()
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
            self._window += self._first.widening
        counters = (self,) if self._bucket is None or self._is_limited else (self, self._bucket)
        for counter in counters:
            counter._served += 1
            is_starting = counter._has_tickets and not counter._is_limited
            if counter._served >= (1 if is_starting else counter._shared_count) and not counter.is_throttling:
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
        while self._line and not self._has_tickets and self.in_flight < self._window:
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
        exchanged = self._rates.change(self._name, self._first.new_rate, self._exchange)
        num_due, seconds = (0, BUSY_SECONDS) if exchanged is None else exchanged
        for _ in range(num_due):
            self._send_oldest()
        self._send_window()
        if not self._line:
            self._num_tickets = 0  # others may limit a forgotten rate anew, whose tickets begin with 0
        if not (self._line and self._has_tickets):
            self._counted_at = math.inf
            self._wait_for_window()
        elif self._timer is None:
            self._timer = self._later(seconds, self._advance)

    def _widen(self) -> None:
        self._window_timer = None
        if self._has_tickets:
            return
        if self._has_answered or self._first.widening == 1:  # of a fleet, most requests may be refused a second later
            self._window = min(2 * self._window, self._largest_window)
        self._has_answered = False
        self._send_window()
        self._wait_for_window()

    def _wait_for_window(self) -> None:
        if self._line and self._window_timer is None and self._window < self._largest_window:
            self._window_timer = self._later(WIDEN_SECONDS, self._widen)

    def _exchange(self, rate: RequestRate, now: float, wall: float) -> tuple[int, float]:
        """Return how many requests are due, and the seconds until the next one is."""
        usual_share = self._bucket._refused_share if self._bucket is not None and self._bucket.is_limited else 0.0
        rate.note(now, self._served, self._refused, wall=wall, usual_share=usual_share)
        self._served = self._refused = 0
        self._is_limited, self._has_tickets = rate.is_limited, rate.has_tickets
        self._evidence, self._refused_share = rate.evidence, rate.refused_share
        self.answered_at = max(self.answered_at, rate.answered_at)
        if not rate.has_tickets or self._ticket + self._num_tickets > rate.issued:
            self._num_tickets = 0
        num_due = 0
        self._count_waiting(rate, now)
        while rate.has_tickets and num_due < len(self._line):
            if not self._num_tickets:
                chunk = math.ceil(rate.limit * CHUNK_SECONDS) if rate.is_limited else 1
                self._num_tickets = min(len(self._line) - num_due, max(1, chunk))
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
        seconds = max(0.0, now - self._counted_at)
        self._waited = self._waited * math.exp(min(0.0, self._waited_at - now) / FADE_SECONDS) + seconds
        self._waited_at = self._counted_at = now
        self._rates.note_waiting(now, seconds, rate)
        if self._waited > LOG_AFTER_SECONDS and now - self._logged_at > LOG_SECONDS:
            self._logged_at = now
            self._rates.log_throttling(self._name, self._waited, rate)
