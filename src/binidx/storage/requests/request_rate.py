"""Rate of requests to one partition of a store: a value, and its changes over time; no I/O and no clock.

    unlimited ── many refusals ──► test: 0.9 x the goodput for a moment
        ▲                            │ fewer refusals                      │ as many: they do not depend on the rate
        │                            ▼                                     ▼
        └── 30 s without waiting ── limited ── more than usual ──► test    indifferent: the rate before, for 60 s

The goodput is the number of responses a second that were not refused. A limit grows by GROWTH a second, faster with
the time without refusals; each refusal beyond FREE_SHARE divides it by 1 + CUT / sqrt(limit). All clients of a store
see the same share of refusals. Growth and cuts cancel out at

    usual share = FREE_SHARE + GROWTH / (CUT sqrt(limit))           4 % at 500 a second, 13 % at 5

so a client above its part shrinks and one below it grows. The limit never falls far below the goodput: a burst of
refusals cuts it once, not fifty times.

Requests get tickets, in order. `clock` is the number of tickets that may be used so far, and advances at the limit.

    tickets   0 1 2 3 4 5 6 7 8 9
                    │clock      │issued      6 requests wait; ticket 4 is due 1 / limit after the last change

Source: ours, after AIMD (Chiu and Jain 1989) and Scalable TCP (Kelly 2003).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GROWTH, FASTER_SECONDS, FASTEST = 0.2, 2.0, 5.0
"""Relative growth of a limit a second; time without refusals after which it is twice that, three times, ..., at most
`FASTEST` times."""

CUT, FREE_SHARE = 0.9, 0.03
"""Size of the cut by one refusal, and the share of refusals that cut nothing."""

FLOOR, STEEPEST, LEAST = 0.9, 0.1, 1.0
"""Least limit: in goodputs, in rates before the cut, and in requests a second."""

AVERAGE_SECONDS, AVERAGE_COUNT = 1.0, 20.0
"""Time over which outcomes are averaged: so many seconds, and at least so many requests."""

SHORTEST_SECONDS = 0.1
"""Time that the first outcomes are assumed to have taken, at least."""

BURST_SECONDS = 0.05
"""Unused time of a limited rate that may be made up for at once."""

CALM_SECONDS = 30.0
"""Time without refusals and waiting after which a rate is unlimited again."""

MANY, UNUSUAL, SOME = 8, 2.5, 0.5
"""Refusals in the averaged time that begin a test, if their share is so many times the one that growth explains; and
responses without which an unlimited rate stays so: a store that refuses all is out, at whatever rate."""

SETTLE_SECONDS, TEST_REFUSALS = 0.5, 12.0
"""Of a test: time until the outcomes of earlier requests have come, and refusals that are then expected if they do not
depend on the rate."""

MOST_COUNT = 0.6
"""Outcomes that decide a test at most, in those of the averaged time: more fade before they are counted."""

MAX_INDIFFERENT, INDIFFERENT_SECONDS, SAME_MARGIN = 0.6, 60.0, 0.05
"""Largest share of refusals that can be found not to depend on the rate, the time for which this is assumed, and the
excess of the share that ends it before: if they do depend on it, the share grows with the rate."""

MAX_VALUE, LONGEST_WAIT_SECONDS = 1e15, 256.0
"""Values of a rate beyond which no client can have brought it: a count that loses units when one is added, and the wait
of a ticket if 256 processes hold one each at the least limit."""


@dataclass
class RequestRate:
    """Rate of one partition. All times are seconds of one clock.

    Attributes:
        limit: requests a second; inf: unlimited.
        ceiling: rate above which it is limited even if nothing is refused; inf: none.
        doubling_seconds: time in which a ceiling that is used doubles; inf: never.
        clock, issued: tickets that may be used, and that were issued.
        updated: time of the last change.
        served, refused, counted: responses, refusals, and seconds, all fading with time.
        answered_at, refused_at, waited_at: when a response came, a request was refused, and one had to wait.
        test_from, tested_share, tested_limit: when outcomes of a test begin to count, and share of refusals and rate
            before it; inf: no test.
        indifferent_until, indifferent_share: until when refusals cut nothing, and up to which share.
    """

    limit: float = math.inf
    ceiling: float = math.inf
    doubling_seconds: float = math.inf
    clock: float = 0.0
    issued: float = 0.0
    updated: float = 0.0
    served: float = 0.0
    refused: float = 0.0
    counted: float = 0.0
    answered_at: float = -math.inf
    refused_at: float = -math.inf
    waited_at: float = -math.inf
    test_from: float = math.inf
    tested_share: float = 0.0
    tested_limit: float = 0.0
    indifferent_until: float = -math.inf
    indifferent_share: float = 0.0

    def is_possible(self) -> bool:
        """Return whether clients can have brought a rate to these values; others raise errors, or let requests wait."""
        counts = (self.clock, self.issued, self.served, self.refused, self.counted, self.tested_limit)
        past = (self.answered_at, self.refused_at, self.waited_at, self.indifferent_until - INDIFFERENT_SECONDS)
        return (
            (LEAST <= self.limit <= MAX_VALUE or self.limit == math.inf)
            and (self.test_from <= self.updated + 1 + SETTLE_SECONDS or self.test_from == math.inf)
            and (self.tested_share > 0 or self.test_from == math.inf)
            and all(figure >= 1 for figure in (self.ceiling, self.doubling_seconds))
            and all(0 <= count <= MAX_VALUE for count in counts)
            and all(time <= self.updated + 1 for time in past)
            and all(0 <= share <= 1 for share in (self.tested_share, self.indifferent_share))
            and self.issued - self.clock <= self.limit * LONGEST_WAIT_SECONDS
        )

    @property
    def is_limited(self) -> bool:
        return self.limit < math.inf

    @property
    def goodput(self) -> float:
        """Responses a second that were not refused."""
        return self.served / max(self.counted, SHORTEST_SECONDS)

    @property
    def refused_share(self) -> float:
        """Share of refusals among all outcomes."""
        return self.refused / (self.served + self.refused) if self.refused else 0.0

    def take(self, now: float, count: int) -> float:
        """Return the first of `count` new tickets, after `note` was called at the same time."""
        self.issued += count
        if self.issued > self.clock:
            self.waited_at = now
        return self.issued - count

    def seconds_until(self, ticket: float) -> float:
        """Return the seconds from the last change until a ticket may be used, if the limit stays; 0 or less: now."""
        return (ticket + 1 - self.clock) / self.limit

    def note(self, now: float, served: int = 0, refused: int = 0) -> None:
        """Advance to the present time, and count outcomes of requests."""
        seconds = max(0.0, now - self.updated)
        self.updated += seconds
        self._count(seconds, served, refused)
        if self.is_limited:
            burst = max(1.0, self.limit * BURST_SECONDS)
            self.clock = min(self.clock + self.limit * seconds, self.issued + burst)
        if served:
            self.answered_at = now
        if refused:
            self.refused_at = now
        if self.test_from < math.inf:
            self._test(now)
        elif now < self.indifferent_until and self.refused_share <= self.indifferent_share:
            self._adapt(now, seconds, -FREE_SHARE * (served + refused))
        elif refused and self._is_unusual():
            self._begin_test(now)
        elif self.is_limited:
            self._adapt(now, seconds, refused - FREE_SHARE * (served + refused))
        self._respect_ceiling(seconds)

    def _count(self, seconds: float, served: int, refused: int) -> None:
        period = max(AVERAGE_SECONDS, AVERAGE_COUNT / self.limit)
        fade = math.exp(-seconds / period)
        self.served = self.served * fade + served
        self.refused = self.refused * fade + refused
        self.counted = self.counted * fade + period * (1 - fade)

    def _is_unusual(self) -> bool:
        explained = GROWTH / (CUT * math.sqrt(self.limit))
        has_answered = self.is_limited or self.served >= SOME
        return has_answered and self.refused >= MANY and self.refused_share > FREE_SHARE + UNUSUAL * explained

    def _begin_test(self, now: float) -> None:
        self._begin_limit()
        self.tested_share = self.refused_share
        self.tested_limit = min(self.limit, (self.served + self.refused) / max(self.counted, SHORTEST_SECONDS))
        self.limit = max(FLOOR * self.goodput, STEEPEST * self.tested_limit, LEAST)
        self.test_from, self.indifferent_until = now + SETTLE_SECONDS, -math.inf
        self.served = self.refused = self.counted = 0.0

    def _begin_limit(self) -> None:
        if not self.is_limited:
            self.clock = self.issued

    def _test(self, now: float) -> None:
        """Decide whether refusals depend on the rate, once there are enough outcomes under the lower one."""
        period = max(AVERAGE_SECONDS, AVERAGE_COUNT / self.limit)
        if now < self.test_from:
            self.served = self.refused = self.counted = 0.0
        elif self.served + self.refused >= min(TEST_REFUSALS / self.tested_share, MOST_COUNT * self.limit * period):
            self.test_from = math.inf
            is_same = abs(self.refused_share - self.tested_share) < self.tested_share / 2
            if is_same and self.tested_share <= MAX_INDIFFERENT:
                self.limit = max(self.limit, 1.2 * self.tested_limit)
                self.indifferent_until = now + INDIFFERENT_SECONDS
                self.indifferent_share = self.tested_share + SAME_MARGIN

    def _adapt(self, now: float, seconds: float, excess: float) -> None:
        if self.waited_at > now - 1.0:
            faster = min(1 + max(0.0, now - self.refused_at) / FASTER_SECONDS, FASTEST)
            self.limit *= math.exp(GROWTH * faster * seconds)
        else:
            excess = max(0.0, excess)
        if excess:
            self.limit /= (1 + CUT / math.sqrt(self.limit)) ** excess
        elif now - max(self.refused_at, self.waited_at) > CALM_SECONDS:
            self.limit = math.inf
        self.limit = max(self.limit, FLOOR * self.goodput, LEAST)

    def _respect_ceiling(self, seconds: float) -> None:
        if self.goodput > self.ceiling / 2:
            self.ceiling *= 2 ** (seconds / self.doubling_seconds)
        if self.goodput > self.ceiling or (self.is_limited and self.limit > self.ceiling):
            self._begin_limit()
            self.limit = min(self.limit, self.ceiling)
