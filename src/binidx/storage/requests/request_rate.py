"""Rate of requests to one partition of a store: a value, and its changes over time; no I/O and no clock.

    start ── enough responses ──► unlimited
    unlimited ── many refusals ──► test at 0.9, then 0.45 x the goodput
        ▲                            │ fewer refusals at either             │ as many: they do not depend on the rate
        │                            ▼                                      ▼
        └── 30 s without waiting ── limited ── more than usual ──► test     indifferent: the rate before, for a minute

**Start** of a node of a known fleet: each response returns its ticket and a third of one more, a refusal none. So few
requests are in flight when the first refusals come, however many processes a node has.

**Limited.** Of requests at x a second, as many are refused as of those of all other clients of the store. A limit grows
by 1 / memory a second, and each refusal divides it by exp(1 / (usual(x) memory)); both cancel out at

    usual(x) = USUAL x / (x + FEW)    refusals a second; of 100 requests 0.04 at 500 a second, 3.5 at 5.5, and 12 at 1.5

so a client above its part shrinks, and one below it grows. What a client knows of its part are the refusals that it
saw, so the memory is a share of the limit's age: the gain of stochastic approximation. 40 clients differ by a tenth
after 10 minutes, which is what 100 refusals can tell.

**More than usual**: the cumulative sum of the log-likelihood that refusals are `EXCESS` times the usual ones, >= 0.

**Test.** Two shares of refusals are compared as they come: are they equal, or is the one at the lower rate a quarter?
At 0.9 x the goodput refusals of a store with a limit end, and nothing is lost. Where they go on, the rate is halved.

**All at once.** A client with a small part of the load sees as many refusals at any rate of its own. So for 2 of 64
seconds of the wall clock all limited clients send at half of their limits: refusals that depend on the rate are fewer
then, and who found them indifferent by chance learns better.

Requests get tickets, in order. `clock` is the number of tickets that may be used so far, and advances at the limit.

    tickets   0 1 2 3 4 5 6 7 8 9
                    │clock      │issued      6 requests wait; ticket 4 is due 1 / limit after the last change

Source: ours, after AIMD (Chiu and Jain 1989), stochastic approximation (Robbins and Monro 1951), CUSUM (Page 1954) and
sequential tests (Wald 1945); docs/contributing/decisions/simulation.md has the worlds in which the figures were chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

USUAL, FEW = 0.2, 0.2
"""Refusals a second at which a limit stays, and requests a second below which these become fewer."""

SHORTEST_MEMORY, LONGEST_MEMORY, MEMORY_SHARE = 13.0, 500.0, 0.7
"""Seconds in which a limit grows e-fold without refusals: a share of its age."""

CALM_TIMES, FASTER, FASTEST = 8.0, 2.0, 0.2
"""Usual times between two refusals after which a limit without them grows faster, by how much with each further one,
and growth a second at most."""

LEAST = 0.05
"""Least limit in requests a second: the part of each of 1,000 clients in 50 a second."""

EXCESS, EXCESS_OF_KNOWN, EVIDENCE, EVIDENCE_AT_FIRST, FREE_SHARE = 3.0, 1.5, 16.0, 5.0, 0.03
"""Refusals in usual ones that are looked for; the same where a share does not depend on the rate; the log-likelihood
that begins a test, of a limited and of an unlimited rate; and the share of refusals that is usual without a limit."""

LARGEST_CUT = 0.5
"""Part of a limit that is left at least until refusals are usual again, or a test has begun."""

AVERAGE_SECONDS, AVERAGE_COUNT = 1.0, 20.0
"""Time over which outcomes are averaged: so many seconds, and at least so many requests."""

SHORTEST_SECONDS = 0.1
"""Time that the first outcomes are assumed to have taken, at least."""

START_GROWTH, START_END, START_LOST, START_EVIDENCE, START_LOOKS = 0.33, 128.0, 0.25, 16.0, 100.0
"""Of the start of a node: requests by which a response widens it while none is refused (with 1, 20 nodes that share 220
requests a second have sent 450 when the first refusals come), and in flight at its end; the part of the first limit at
which tickets of requests without a response return; the evidence of a second after a refusal, as a limit that many
nodes meet refuses few of each; and looks a second of a process that waits for a ticket."""

BURST_SECONDS = 0.05
"""Unused time of a limited rate that may be made up for at once."""

CALM_SECONDS, IDLE_SECONDS = 30.0, 10.0
"""Time without refusals and waiting after which a rate is unlimited again, and the one without responses that does not
count as such: a node that waits for slower ones must not return without a limit."""

SOME = 0.5
"""Responses without which an unlimited rate stays so: a store that refuses all is out, at whatever rate."""

TEST_RATES, SETTLE_SECONDS, LONGEST_TEST, FIRST_SECONDS = (0.9, 0.45), 1.0, 120.0, 5.0
"""Rates of a test in goodputs, the time until the outcomes of earlier requests have come, the longest time of one rate,
and the time of a new rate in which its goodput tells little, as that of a burst that all nodes send."""

FEWER, SURE_SAME, SURE_FEWER, MORE, SURE_MORE = 0.25, 5.0, 8.0, 0.6, 5.0
"""Share of refusals, in the one before, that shows that they depend on the rate; log-likelihoods that decide; and what
part of the responses must become refusals to show that others cause them."""

LEAST_REFUSALS, MAX_INDIFFERENT, UNEXPLAINED = 20.0, 0.6, 3.0
"""Refusals that are counted before they can be indifferent, the largest share of such ones, and how many usual ones
they must be at the lower rate: fewer are what a client with a small part sees."""

GIVEN_BACK = 0.7
"""Limit in goodputs after a test whose lower rate had fewer refusals."""

REMEMBERED_TIMES = 10.0
"""Usual times between two refusals in which the next test goes on to remember the limit before the first one."""

INDIFFERENT_SECONDS, LONGEST_INDIFFERENT, INDIFFERENT_GROWTH = 60.0, 600.0, 0.5
"""Time for which refusals are assumed not to depend on the rate; twice as long if they are found so again, at most the
longest; and the growth a second of a rate that was unlimited before."""

TOGETHER_SECONDS, TOGETHER_LENGTH, TOGETHER_RATE, SURE_TOGETHER = 64.0, 2.0, 0.5, 2.0
"""Period and length of the time in which all clients send less, how much less, and the log-likelihood that decides."""

MAX_VALUE, LONGEST_WAIT_SECONDS = 1e15, 256.0
"""Values of a rate beyond which no client can have brought it: a count that loses units when one is added, and the wait
of a ticket if 256 processes hold one each at a limit of 1 a second; at a lower one, as many tickets."""


@dataclass
class RequestRate:
    """Rate of one partition. All times are seconds of one clock.

    Attributes:
        limit: requests a second; inf: unlimited.
        ceiling: rate above which it is limited even if nothing is refused; inf: none.
        doubling_seconds: time in which a ceiling that is used doubles; inf: never.
        first_limit: largest goodput that a test assumes at first: the part of a node in what a fleet sends.
        start: requests of a starting node that may be in flight; inf: its start has ended.
        began: when the first outcome came; inf: none has.
        clock, issued: tickets that may be used, and that were issued.
        updated: time of the last change.
        served, refused, counted: responses, refusals, and seconds, all fading with time.
        answered_at, refused_at, waited_at: when a response came, a request was refused, and one had to wait.
        limited_at: since when the memory ages: the first refusal under a limit; inf: none yet.
        evidence, usual_limit: log-likelihood that refusals are more than usual, and the limit when they were usual.
        test_number, test_from: number of the rate that is tested, and when outcomes begin to count; inf: no test.
        test_served, test_refused, known_served, known_refused: outcomes that are compared: at this rate, and before.
        test_goodput: goodput before the test.
        limit_before, sent_before: limit before the test, and requests that were sent a second then.
        remembered_until: until when another test keeps these two.
        indifferent_until, indifferent_share, indifferent_seconds: until when refusals cut nothing, up to which share,
            and for how long it was assumed.
        together_served, together_refused: outcomes since all clients send less.
    """

    limit: float = math.inf
    ceiling: float = math.inf
    doubling_seconds: float = math.inf
    first_limit: float = math.inf
    start: float = math.inf
    began: float = math.inf
    clock: float = 0.0
    issued: float = 0.0
    updated: float = 0.0
    served: float = 0.0
    refused: float = 0.0
    counted: float = 0.0
    answered_at: float = -math.inf
    refused_at: float = -math.inf
    waited_at: float = -math.inf
    limited_at: float = math.inf
    evidence: float = 0.0
    usual_limit: float = math.inf
    test_number: float = 0.0
    test_from: float = math.inf
    test_served: float = 0.0
    test_refused: float = 0.0
    known_served: float = 0.0
    known_refused: float = 0.0
    test_goodput: float = 0.0
    limit_before: float = math.inf
    sent_before: float = 0.0
    remembered_until: float = -math.inf
    indifferent_until: float = -math.inf
    indifferent_share: float = 0.0
    indifferent_seconds: float = INDIFFERENT_SECONDS
    together_served: float = 0.0
    together_refused: float = 0.0

    def is_possible(self) -> bool:
        """Return whether clients can have brought a rate to these values; others raise errors, or let requests wait."""
        counts = (
            *(self.clock, self.issued, self.served, self.refused, self.counted, self.evidence, self.sent_before),
            *(self.test_served, self.test_refused, self.known_served, self.known_refused, self.test_goodput),
            *(self.together_served, self.together_refused),
        )
        past = (self.answered_at, self.refused_at, self.waited_at, self.indifferent_until - LONGEST_INDIFFERENT)
        limits = (self.limit, self.usual_limit, self.limit_before)
        return (
            all(LEAST <= limit <= MAX_VALUE or limit == math.inf for limit in limits)
            and (self.test_from <= self.updated + 1 + SETTLE_SECONDS or self.test_from == math.inf)
            and self.test_number in range(len(TEST_RATES))
            and (self.known_refused >= 1 or self.test_from == math.inf)
            and (self.limited_at <= self.updated + 1 or self.limited_at == math.inf)
            and self.remembered_until <= self.updated + 1 + REMEMBERED_TIMES / _usual(LEAST)
            and self.doubling_seconds >= 1
            and min(self.ceiling, self.first_limit, self.start) >= LEAST
            and (self.start <= START_END or self.start == math.inf)
            and (self.began <= self.updated + 1 or self.began == math.inf)
            and all(0 <= count <= MAX_VALUE for count in counts)
            and all(time <= self.updated + 1 for time in past)
            and (1 / MAX_VALUE <= self.indifferent_share <= 1 or self.indifferent_until == -math.inf)
            and INDIFFERENT_SECONDS <= self.indifferent_seconds <= LONGEST_INDIFFERENT
            and self.issued - self.clock <= max(1.0, self.limit) * LONGEST_WAIT_SECONDS
        )

    @property
    def is_limited(self) -> bool:
        return self.limit < math.inf

    @property
    def has_tickets(self) -> bool:
        """True if requests need tickets: of a limit, or of the start."""
        return min(self.limit, self.start) < math.inf

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
        if self.issued > self.clock and self.is_limited:
            self.waited_at = now
        return self.issued - count

    def seconds_until(self, ticket: float) -> float:
        """Return the seconds from the last change until a ticket may be used, if the limit stays; 0 or less: now."""
        return (ticket + 1 - self.clock) / (self.limit if self.is_limited else START_LOOKS)

    def note(
        self,
        now: float,
        served: int = 0,
        refused: int = 0,
        *,
        wall: float = TOGETHER_LENGTH,
        usual_share: float = 0.0,
    ) -> None:
        """Advance to the present time, and count outcomes of requests.

        Args:
            wall: present time of the clock that all clients share; without one this client never sends less with them.
            usual_share: share of refusals that a limit of more than this partition explains.
        """
        seconds = max(0.0, now - self.updated)
        self.updated += seconds
        phase = wall % TOGETHER_SECONDS
        self._count(seconds, served, refused)
        if self.is_limited:
            burst, part = max(1.0, self.limit * BURST_SECONDS), TOGETHER_RATE if phase < TOGETHER_LENGTH else 1.0
            self.clock = min(self.clock + self.limit * seconds * part, self.issued + burst)
            # Of a limit that fell: who holds a later ticket takes a new one.
            self.issued = min(self.issued, self.clock + LONGEST_WAIT_SECONDS * max(1.0, self.limit))
        elif self.start < math.inf:
            self._start(now, seconds, served)
        if self.test_from < math.inf:
            self._test(now, served, refused)
        else:
            self._compare_together(now, phase, served, refused)
            if self._is_unusual(now, served, refused, usual_share):
                self._begin_test(now)
            elif self.is_limited:
                self._adapt(now, seconds, served, refused)
        if served or refused:
            self.began = min(self.began, now)
        if served:
            self.answered_at = now
        if refused:
            self.refused_at = now
        self._respect_ceiling(seconds)

    def _count(self, seconds: float, served: int, refused: int) -> None:
        period = max(AVERAGE_SECONDS, AVERAGE_COUNT / self.limit)
        fade = math.exp(-seconds / period)
        self.served = self.served * fade + served
        self.refused = self.refused * fade + refused
        self.counted = self.counted * fade + period * (1 - fade)

    def _start(self, now: float, seconds: float, served: int) -> None:
        growth = 0.0 if self.evidence else START_GROWTH * served
        self.evidence += START_EVIDENCE * seconds if self.evidence else 0.0
        lost = START_LOST * self.first_limit * seconds if self.evidence or self.began == math.inf else 0.0
        self.start += growth
        self.clock = min(self.clock + served + growth + lost, self.issued + self.start)
        if self.start >= START_END or (now > self.began + FIRST_SECONDS and not self.evidence):
            self.start = math.inf

    def _is_indifferent(self, now: float) -> bool:
        return now < self.indifferent_until

    def _is_unusual(self, now: float, served: int, refused: int, usual_share: float) -> bool:
        """Return whether there is evidence enough that refusals are more than usual."""
        share, excess = _usual(self.limit) / self.limit if self.is_limited else FREE_SHARE + usual_share, EXCESS
        if self._is_indifferent(now):
            share, excess = share + self.indifferent_share, EXCESS_OF_KNOWN
        if not self.evidence:
            self.usual_limit = self.limit
        gained = refused * math.log(excess) - share * (served + refused) * (excess - 1)
        self.evidence = max(0.0, self.evidence + gained)
        enough = EVIDENCE if self.is_limited else EVIDENCE_AT_FIRST
        return (refused > 0 or self.start < math.inf) and self.evidence > enough and self.served >= SOME

    def _begin_test(self, now: float) -> None:
        sent = (self.served + self.refused) / max(self.counted, SHORTEST_SECONDS)
        if now >= self.remembered_until or not self.is_limited:
            self.limit_before, self.sent_before = max(self.usual_limit, self.limit), sent
        first = self.first_limit if now < self.began + FIRST_SECONDS else math.inf
        is_first = first < math.inf and not self.is_limited
        self._begin_limit()
        self.known_served, self.known_refused = self.served, max(1.0, self.refused)
        self.test_goodput = max(min(self.goodput, first), LEAST)
        self.indifferent_until = min(self.indifferent_until, now)
        self._test_rate(now, 0)
        if is_first:  # the burst of a fleet tells little: two responses end the test, and the store recovers before
            self.known_served, self.clock = 0.0, max(0.0, self.clock - SETTLE_SECONDS * self.limit)

    def _begin_limit(self) -> None:
        if not self.is_limited:
            self.clock, self.limited_at, self.start = self.issued, math.inf, math.inf

    def _test_rate(self, now: float, number: int) -> None:
        self.test_number, self.test_from = number, now + SETTLE_SECONDS
        self.limit = max(TEST_RATES[number] * self.test_goodput, LEAST)
        self.test_served = self.test_refused = 0.0
        self.served = self.refused = self.counted = self.evidence = 0.0

    def _test(self, now: float, served: int, refused: int) -> None:
        """Decide whether refusals depend on the rate, once there are enough outcomes under the lower one."""
        if now < self.test_from:
            return
        self.test_served += served
        self.test_refused += refused
        known = min(self.known_refused / (self.known_served + self.known_refused), 0.99)
        outcomes = self.test_served, self.test_refused
        same = _likelihood(*outcomes, known, FEWER * known)
        is_more = _likelihood(*outcomes, known, known + MORE * (1 - known)) <= -SURE_MORE
        if same <= -SURE_FEWER or is_more or now > self.test_from + LONGEST_TEST:
            self._end_test(now)
        elif same >= SURE_SAME and self.test_refused >= LEAST_REFUSALS:
            share = self.test_refused / (self.test_served + self.test_refused)
            if known > MAX_INDIFFERENT or share <= UNEXPLAINED * _usual(self.limit) / self.limit:
                self._end_test(now)
            elif self.test_number + 1 < len(TEST_RATES):
                self.known_served, self.known_refused = self.test_served, self.test_refused
                self._test_rate(now, int(self.test_number) + 1)
            else:
                self._assume_indifferent(now)

    def _end_test(self, now: float) -> None:
        """Refusals depend on the rate: it stays limited."""
        if self.test_number:
            self.limit = max(self.limit, GIVEN_BACK * self.test_goodput)
        self.test_from, self.evidence = math.inf, 0.0
        self.remembered_until = now + REMEMBERED_TIMES / _usual(self.limit)

    def _assume_indifferent(self, now: float) -> None:
        refused = self.known_refused + self.test_refused
        self.indifferent_share = refused / (refused + self.known_served + self.test_served)
        is_again = now < self.indifferent_until + 2 * self.indifferent_seconds
        seconds = 2 * self.indifferent_seconds if is_again else INDIFFERENT_SECONDS
        self.indifferent_seconds = min(seconds, LONGEST_INDIFFERENT)
        self.indifferent_until = now + self.indifferent_seconds
        self.limit = max(self.sent_before, LEAST) if self.limit_before == math.inf else self.limit_before
        self.test_from, self.evidence, self.remembered_until = math.inf, 0.0, -math.inf
        self.served = self.refused = self.counted = 0.0

    def _compare_together(self, now: float, phase: float, served: int, refused: int) -> None:
        """Stop to assume that refusals do not depend on the rate if they were fewer while all clients sent less."""
        if TOGETHER_LENGTH / 2 <= phase < TOGETHER_LENGTH:  # requests of before have ended
            self.together_served += served
            self.together_refused += refused
            return
        if self._is_indifferent(now) and self.together_served + self.together_refused:
            known = min(self.indifferent_share, 0.99)
            if _likelihood(self.together_served, self.together_refused, known, FEWER * known) <= -SURE_TOGETHER:
                self.limit, self.limit_before = max(min(self.limit, self.goodput), LEAST), self.limit
                self.indifferent_until, self.limited_at, self.evidence = -math.inf, now, 0.0
        self.together_served = self.together_refused = 0.0

    def _adapt(self, now: float, seconds: float, served: int, refused: int) -> None:
        if refused:
            self.limited_at = min(self.limited_at, now)
        if self.issued > self.clock:
            self.waited_at = now
        usual, indifferent = _usual(self.limit), self._is_indifferent(now)
        age = now - self.limited_at if self.limited_at < math.inf else 0.0
        memory = min(max(MEMORY_SHARE * age, SHORTEST_MEMORY), LONGEST_MEMORY)
        growth, troubled_at = 0.0, max(self.refused_at, self.waited_at)
        if self.waited_at > now - 1.0:
            times = (now - max(self.refused_at, self.limited_at)) * usual if age else 0.0
            growth = min((1 + FASTER * max(0.0, times - CALM_TIMES)) / memory, FASTEST)
            if indifferent and self.limit_before == math.inf:
                growth = INDIFFERENT_GROWTH
        elif served and now < self.answered_at + IDLE_SECONDS and now > troubled_at + CALM_SECONDS:
            self.limit = math.inf
            return
        cut = 0.0 if indifferent else refused / (usual * memory)
        self.limit = max(self.limit * math.exp(growth * min(seconds, 1.0) - cut), LARGEST_CUT * self.usual_limit, LEAST)
        if indifferent:
            self.limit = min(self.limit, self.limit_before)

    def _respect_ceiling(self, seconds: float) -> None:
        if self.goodput > self.ceiling / 2:
            self.ceiling *= 2 ** (seconds / self.doubling_seconds)
        if self.goodput > self.ceiling or (self.is_limited and self.limit > self.ceiling):
            self._begin_limit()
            self.limit = min(self.limit, self.ceiling)
            self.usual_limit = min(self.usual_limit, self.limit)


def _usual(limit: float) -> float:
    """Return the refusals a second at which a limit stays."""
    return USUAL * limit / (limit + FEW) if limit < math.inf else USUAL


def _likelihood(served: float, refused: float, share: float, other: float) -> float:
    """Return the logarithm of how much likelier outcomes are if one share of requests is refused than if another is."""
    return refused * math.log(share / other) + served * math.log((1 - share) / (1 - other))
