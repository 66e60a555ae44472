"""Schedule of the requests of a process: a machine that decides what is sent when, and when a read ends.

    submit ─► queue ─► limiter ─► in flight ─► answered ─► the last one: the read ends
                ▲                   │  │  └ late: a hedge is sent beside it, the first response wins
                └───── pause ◄──────┘  └ failed for good: the read ends
                       failed, or stalled

    event                         decision
    submit(read, limiter)         its requests queue behind those of older reads
    admit(read, index)            of its limiter: a request that waited for it may be sent
    answered(number, response)    a request ends, and its hedge is cancelled; the last one ends the read
    failed(number, failure)       it is sent again after a pause, or ends the read, as `retries` allow
    drop(read, error)             a read ends whose scope was cancelled, or whose caller was interrupted
    pass_time()                   pauses end; late requests are hedged, stalled ones fail; reads out of time end

After each event the carrier calls `next`, and sends the requests that it returns, until it returns None. At `wake_at`,
or later, it calls `pass_time`. A read ends once; its requests in flight are then cancelled, and no more are sent.

Requests to a store that refuses some wait between queue and flight for the rate that it grants: `rate_limiter`. No
hedges are sent then. A request is late after max(0.5 s, 4 x the median of the last 64 responses of its store and size).
Hedges are at most 5 % of the requests, so a store that is slow as a whole gets no more than that because of them.

A read ends at its deadline plus the time of its bytes on the slowest link; sooner if no response comes: then the time
of the bytes in flight counts, from the last response on. During an outage, each request that is sent again has the
deadline for itself, and the patience of the settings bounds the outage.

Source: Dean and Barroso, The Tail at Scale, 2013.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from binidx.storage.interfaces import Range
from binidx.storage.requests.retries import Failure, History, StoreTimes, given_up, longest_pause, out_of_time
from binidx.storage.settings import ReadSettings

WATCH_SECONDS = 0.1
"""Time between two checks while there are reads."""

TRIES_BY_RATE = 2
"""Refusals of one request after which it also pauses where the rate is limited: its object may be what is refused."""

SLOWEST = 1_000_000
"""Bytes per second; a slower link counts as stalled."""

MOST_MOVES = 250
"""Requests that one call of `next` moves into the lines of limiters, at 2 us each; the loop has other work, too."""

LATE_TIMES, SAMPLES = 4, 64
"""A request is late after so many times the median of so many responses."""

HEDGE_SHARE, LARGEST_BUDGET = 0.05, 16.0
"""Hedges that each response adds to the budget, and the largest budget."""

Request = tuple[int, Any, int, float]
"""Number of a request, its `Read`, its index in the ranges, and when it was sent. A class would cost 1 us."""


class StalledError(TimeoutError):
    """A request that was cancelled because no response came."""


class Limiter(Protocol):
    """Limiter of the requests to one part of a store: `rate_limiter.RateLimiter`.

    Attributes:
        in_flight: requests that were admitted, or are hedges, and have not ended.
        answered_at: when the store answered a process of the node last, as far as it is known.
        is_limited: whether requests wait for a rate.
        is_throttling: whether some do so now.
    """

    in_flight: int
    answered_at: float

    @property
    def is_limited(self) -> bool: ...
    @property
    def is_throttling(self) -> bool: ...
    def admits(self, read: Any, index: int) -> bool:
        """Return whether a request may be sent now; if not, it waits, and `RequestSchedule.admit` is called later."""

    def holds(self, read: Any) -> bool:
        """Return whether a request of a read waits."""

    def note_response(self, now: float) -> None:
        """Count a request that ended with a response."""

    def note_refusal(self) -> None:
        """Count a request that ended with a refusal."""

    def note_end(self) -> None:
        """Count a request that ended in any other way."""


class Carrier(Protocol):
    """Carrier of the decisions of a schedule: `scheduler.Scheduler`. None of its methods calls the schedule."""

    def cancel(self, number: int) -> None:
        """Cancel a request in flight."""

    def end(self, read: Any, error: BaseException | None) -> None:
        """Give a read's responses, or its error, to its caller."""

    def log(self, read: Any, index: int, num_tries: int, seconds: float, status: str, response: Any) -> None:
        """Log the end of a request of a read with `is_logged`."""


class Read:
    """One read: its requests, numbered as in `ranges`, and their responses.

    Args:
        store: name of the store of its object, `uri`.
        opening: whether it looks for an object, whose store may not exist.
        is_logged: whether the end of each request is logged.

    Attributes:
        number, limiter: order of the read, and limiter of its requests; the schedule sets both.
        responses: those that came; None for others.
        over: whether it has ended.
        began, answered_at, ended: when its first request was sent, its last response came, and it ended.
        due: it is not out of time before.
        resumes: when a request that failed in an outage is sent again.
        histories: those of requests that failed or were hedged, by index.
    """

    number: int
    limiter: Limiter

    def __init__(
        self, uri: str, store: str, ranges: Sequence[Range], settings: ReadSettings, opening: bool, is_logged: bool
    ) -> None:
        self.uri, self.store, self.ranges, self.settings = uri, store, ranges, settings
        self.opening, self.is_logged, self.over = opening, is_logged, False
        self.responses: list[Any] = [None] * len(ranges)
        self.next_index, self.num_unanswered = 0, len(ranges)
        self.sent = self.retries = self.hedges = self.refused = 0
        self.began = self.answered_at = self.ended = 0.0
        self.due, self.resumes = math.inf, -math.inf
        self.histories: dict[int, History] = {}

    def where(self, index: int) -> str:
        """Return the name of a request in messages."""
        return "opening" if self.opening else "range {}-{}".format(*self.ranges[index])

    def size(self, index: int) -> int:
        """Return the bytes of the range of a request."""
        return self.ranges[index][1] - self.ranges[index][0]


class RequestSchedule:
    """Schedule of requests.

    Args:
        limit: most requests in flight; hedges may exceed it.
        carrier: carries out what is decided.
        times: of the stores; other schedules of the process may share them.
        draw: returns a number between two others, at random: `random.uniform`.
        hedges: decides which requests are late.

    Attributes:
        in_flight: requests by their numbers, in the order in which they were sent.
        reads: those that are not over.
        wake_at: when to call `pass_time`; inf: not before another event.
        watch_seconds: time between two checks of requests in flight.
    """

    def __init__(
        self,
        limit: int,
        carrier: Carrier,
        times: StoreTimes,
        draw: Callable[[float, float], float],
        hedges: HedgeTimer,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._limit, self._carrier, self._times, self._draw, self._hedges = limit, carrier, times, draw, hedges
        self.in_flight: dict[int, Request] = {}
        self.reads: dict[Read, None] = {}
        self._queue = deque[Read]()
        self._hedged, self._admitted, self._again = (deque[tuple[Read, int]]() for _ in range(3))
        self._paused: list[tuple[float, int, Read, int]] = []
        self._numbers = numbers or itertools.count()
        self.wake_at = self._watch_at = math.inf
        self.watch_seconds = WATCH_SECONDS

    def submit(self, read: Read, limiter: Limiter, now: float) -> None:
        """Queue the requests of a read, unless it was dropped before."""
        if not read.over:
            read.number, read.limiter = next(self._numbers), limiter
            self.reads[read] = None
            self._queue.append(read)
            self._watch_at = min(self._watch_at, now + self.watch_seconds)
            self.wake_at = min(self.wake_at, self._watch_at)

    def admit(self, read: Read, index: int) -> None:
        """Queue a request that waited for its limiter."""
        self._admitted.append((read, index))

    def next(self, now: float) -> Request | None:
        """Return the request to send now, and count it as sent; None if there is none.

        Hedges come first; then requests that their limiters let wait, those to send again, and then those of
        the oldest read.
        """
        num_moved = 0
        while self._hedged or (len(self.in_flight) < self._limit and (self._admitted or self._again or self._queue)):
            is_admitted = bool(self._hedged or self._admitted)
            if is_admitted:
                read, index = (self._hedged or self._admitted).popleft()
            elif self._again:
                read, index = self._again.popleft()
                read.retries += not read.over
            else:
                read = self._queue[0]
                index = read.next_index
                read.next_index += 1
                if read.over or read.next_index == len(read.ranges):
                    self._queue.popleft()
            if read.over:
                if is_admitted:
                    read.limiter.note_end()  # another one may be sent
            elif is_admitted or read.limiter.admits(read, index):
                request = next(self._numbers), read, index, now
                self.in_flight[request[0]] = request
                if not read.sent:
                    read.began = read.answered_at = read.due = now
                read.sent += 1
                return request
            elif (num_moved := num_moved + 1) == MOST_MOVES:
                self.wake_at = now
                break
        return None

    def answered(self, number: int, response: Any, now: float) -> None:
        """End a request with its response."""
        _, read, index, sent = self.in_flight.pop(number)
        start, stop = read.ranges[index]
        if read.is_logged:
            self._log(read, index, now - sent, "ok", response)
        self._times.answered[read.store] = read.answered_at = now
        read.limiter.note_response(now)
        self._hedges.note(read.store, stop - start, now - sent)
        read.responses[index] = response
        read.num_unanswered -= 1
        if index in read.histories and read.histories.pop(index).num_hedges:
            self._cancel((other for other in self.in_flight.values() if other[1] is read and other[2] == index), now)
        if not read.num_unanswered:
            self._end(read, None, now)

    def failed(self, number: int, failure: Failure, now: float) -> None:
        """End a try of a request with its failure."""
        _, read, index, sent = self.in_flight.pop(number)
        self._log(read, index, now - sent, failure.name)
        history = self._history(read, index, sent)
        history.note(failure, now)
        if failure.is_refusal:
            read.refused += 1
            read.limiter.note_refusal()
            if read.limiter.answered_at > self._times.answered.get(read.store, -math.inf):
                self._times.answered[read.store] = read.limiter.answered_at  # to another process of this node
        else:
            read.limiter.note_end()
        if history.is_final():
            self.drop(read, given_up(read.uri, history, read.where(index), now), now)
        elif history.num_hedges:
            history.num_hedges -= 1  # the other one may still succeed
        elif (seconds := self._pause(read, history, now)) is None:
            setting = "deadline_seconds" if history.is_of_unknown_store() else "outage_seconds"
            self.drop(read, out_of_time(read.uri, read.where(index), history, read.began, now, setting), now)
        else:
            heapq.heappush(self._paused, (now + seconds, number, read, index))
            self.wake_at = min(self.wake_at, now + seconds)

    def drop(self, read: Read, error: BaseException, now: float) -> None:
        """End a read with an error, unless it is over."""
        if not read.over:
            self._end(read, error, now)
            self._cancel((request for request in self.in_flight.values() if request[1] is read), now)

    def pass_time(self, now: float) -> None:
        """Do what is due."""
        while self._paused and self._paused[0][0] <= now:
            _, _, read, index = heapq.heappop(self._paused)
            read.histories[index].is_hedged = False
            self._again.append((read, index))
        if now >= self._watch_at:
            # If this thread had no core for a while, responses may have come that were not processed yet.
            if now < self._watch_at + self.watch_seconds:
                self._check_requests(now)
            self._check_reads(now)
            self._watch_at = now + self.watch_seconds if self.reads else math.inf
        self.wake_at = min(self._watch_at, self._paused[0][0] if self._paused else math.inf)

    def _check_requests(self, now: float) -> None:
        """Hedge late requests, and fail stalled ones."""
        seconds_in_flight = self._seconds_in_flight()
        for number, read, index, sent in [*self.in_flight.values()]:
            if now - sent < self._hedges.floor:
                break  # and all that follow are younger
            if number not in self.in_flight:
                continue  # its read has ended just now
            if now - sent > self._hedges.stalled + seconds_in_flight:
                self._carrier.cancel(number)
                self.failed(number, Failure(StalledError(f"nothing came for {now - sent:.1f} s")), now)
            elif self._may_hedge(read, index, now - sent, seconds_in_flight):
                history = self._history(read, index, sent)
                history.is_hedged = True
                history.num_hedges += 1
                read.hedges += 1
                read.limiter.in_flight += 1
                self._hedged.append((read, index))

    def _may_hedge(self, read: Read, index: int, age: float, seconds_in_flight: float) -> bool:
        if not read.settings.hedge or read.limiter.is_throttling:
            return False
        if index in read.histories and read.histories[index].is_hedged:
            return False
        return self._hedges.is_late(read.store, read.size(index), age, seconds_in_flight) and self._hedges.take()

    def _check_reads(self, now: float) -> None:
        """End the reads whose time is over."""
        for read in [read for read in self.reads if read.due <= now]:
            read.due = self._due(read, now)
            if read.due <= now:
                index = next(iter(read.histories), read.responses.index(None))
                history = self._history(read, index, now)
                self.drop(read, out_of_time(read.uri, read.where(index), history, read.began, now), now)

    def _due(self, read: Read, now: float) -> float:
        """Return when a read is out of time."""
        in_all = sum(map(read.size, range(len(read.ranges)))) / SLOWEST
        due = min(read.began + in_all, read.answered_at + self._seconds_in_flight())
        due = max(due, read.resumes) + read.settings.deadline_seconds
        if due <= now and read.limiter.holds(read):  # it waits for others, and not for the store
            return self._times.answered.get(read.store, -math.inf) + read.settings.deadline_seconds
        return due

    def _pause(self, read: Read, history: History, now: float) -> float | None:
        """Return the seconds until a failed request is sent again; None: its store is out for too long."""
        failure, num_pauses = history.last, len(history.failures)
        if not failure.is_outage:
            return self._draw(0.0, longest_pause(num_pauses))
        if failure.is_refusal:
            began = history.refusals_began = min(history.refusals_began, now)
            history.outage_began = math.inf  # it answers
            num_pauses -= TRIES_BY_RATE if read.limiter.is_limited else 0  # it waits for its ticket
        else:
            began = history.outage_began = min(history.outage_began, now)
        if (left := self._times.patience_left(read.store, history, began, now, read.settings)) <= 0:
            return None
        seconds = self._draw(0.0, longest_pause(num_pauses)) if num_pauses > 0 else 0.0
        if now > read.limiter.answered_at + failure.retry_after or not read.limiter.is_limited:
            seconds = max(seconds, failure.retry_after)  # it answers no others, which its rate would take care of
        seconds = min(seconds, left)  # the last try is at the end of the patience
        read.resumes = max(read.resumes, now + seconds)
        return seconds

    def _history(self, read: Read, index: int, sent: float) -> History:
        """Return the history of a request; a new one that begins at `sent` if it has none yet."""
        is_unknown = read.opening and read.store not in self._times.answered
        return read.histories.setdefault(index, History(sent, opening=is_unknown))

    def _log(self, read: Read, index: int, seconds: float, status: str, response: Any = None) -> None:
        """Log the end of a request, before its failure is noted."""
        if read.is_logged:
            num_failures = len(read.histories[index].failures) if index in read.histories else 0
            self._carrier.log(read, index, 1 + num_failures, seconds, status, response)

    def _cancel(self, requests: Iterable[Request], now: float) -> None:
        for number, read, index, sent in [*requests]:
            del self.in_flight[number]
            self._log(read, index, now - sent, "cancelled")
            self._carrier.cancel(number)
            read.limiter.note_end()

    def _end(self, read: Read, error: BaseException | None, now: float) -> None:
        read.over, read.ended = True, now
        self.reads.pop(read, None)
        self._carrier.end(read, error)

    def _seconds_in_flight(self) -> float:
        """Return the time of all bytes in flight on the slowest link."""
        num_bytes: int = sum(read.size(index) for _, read, index, _ in self.in_flight.values())
        return num_bytes / SLOWEST


@dataclass
class HedgeTimer:
    """Times of recent responses, and the budget of hedges.

    Args:
        floor: seconds before which no request is late.
        enough: responses of a median, at least.
        unknown: seconds after which a request is late while there are too few responses for a median.
        stalled: seconds, plus those of the bytes in flight on the slowest link, after which a request is stalled.
        budget: hedges that may be sent now.
    """

    floor: float = 0.5
    enough: int = 8
    unknown: float = 5.0
    stalled: float = 10.0
    budget: float = 2.0

    def __post_init__(self) -> None:
        self._seconds = defaultdict[tuple[str, int], deque[float]](lambda: deque(maxlen=SAMPLES))

    def note(self, store: str, size: int, seconds: float) -> None:
        """Count a response."""
        self._seconds[store, _size_class(size)].append(seconds)
        self.budget = min(LARGEST_BUDGET, self.budget + HEDGE_SHARE)

    def is_late(self, store: str, size: int, age: float, seconds_in_flight: float) -> bool:
        """Return whether a request is late."""
        known = self._seconds[store, _size_class(size)]
        if len(known) < self.enough:
            return age > self.unknown + seconds_in_flight
        return age > max(self.floor, LATE_TIMES * sorted(known)[len(known) // 2])

    def take(self) -> bool:
        """Take one hedge from the budget; return whether there was one."""
        has_one = self.budget >= 1
        self.budget -= has_one
        return has_one


def _size_class(size: int) -> int:
    """Return the class of sizes that take the same time: all up to 256 KiB, then one for every doubling."""
    return max(18, (size - 1).bit_length())
