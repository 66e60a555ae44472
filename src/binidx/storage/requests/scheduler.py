"""Scheduler of the requests of all reads of a process, with a bound on those in flight; runs on the stores' event loop.

    read ─► its requests ─► queue ─► in flight (at most `limit`) ─► response ─► the last one: the read returns
                              ▲           │ late: a hedge is sent, the first response wins
                              └── pause ──┘ failed, or stalled: sent again, as `retries` allow

Requests to a store that refuses some wait between queue and flight for the rate that it grants: `rate_limiter`. No
hedges are sent then.

A thread hands over a whole read and waits once; tasks take one request after the other. This costs 5 to 10 us of CPU
beside the 50 us of a bare request. A read ends with its last response, its first request that failed for good, its
deadline, or its scope; its requests in flight are then cancelled.

A request is late after max(0.5 s, 4 x the median of the last 64 responses of its store and size), and is then hedged.
Hedges are at most 5 % of the requests, so a store that is slow as a whole gets no more than that because of them.

The logger `binidx.requests` gets a line at DEBUG when a request ends. Whether it is on is looked up once for each read.

Source: Dean and Barroso, The Tail at Scale, 2013.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

from binidx.errors import StorageError, redacted
from binidx.storage.interfaces import Range
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import Scope, current_scope
from binidx.storage.requests.node_rates import node_rates
from binidx.storage.requests.rate_limiter import FirstLimits, RateLimiter
from binidx.storage.requests.retries import (
    ANSWERED,
    History,
    given_up,
    is_outage,
    is_refusal,
    out_of_time,
    patience_of,
    pause,
    shortly,
    warn_of_outage,
)
from binidx.storage.settings import ReadSettings, fleet_size
from binidx.storage.stores.driver_errors import retry_after
from binidx.storage.threads import io_loop

logger = logging.getLogger("binidx.requests")
WATCH_SECONDS = 0.1
"""Seconds between two checks for late requests."""


TRIES_BY_RATE = 2
"""Refusals of one request after which it also pauses where the rate is limited: its object may be what is refused."""

SLOWEST = 1_000_000
"""Bytes per second; a slower link counts as stalled."""


class ReadRequests:
    """One read: its requests, numbered as in `ranges`, and their responses.

    Args:
        fetch: sends the request for bytes start to stop.
        opening: whether the read looks for an object, whose store may not exist.

    Attributes:
        number, limiter: order of the read, and limiter of its requests; the scheduler sets both.
    """

    limiter: RateLimiter

    def __init__(
        self,
        location: Location,
        fetch: Callable[[int, int], Coroutine[Any, Any, Any]],
        ranges: Sequence[Range],
        settings: ReadSettings,
        *,
        opening: bool = False,
    ) -> None:
        self.location, self.uri, self.store = location, location.uri, location.place
        self.number = 0
        self.fetch, self.ranges, self.opening = fetch, ranges, opening
        self.answers: list[Any] = [None] * len(ranges)
        self.unsent, self.unanswered = 0, len(ranges)  # number of the next request; requests without a response
        self.settings, self.seconds, self.hedge = settings, settings.deadline_seconds, settings.hedge
        # By the loop's clock: when its first request was sent, its last response came, and it ended.
        self.began = self.answered_at = self.ended = 0.0
        self.sent = self.retries = self.hedges = self.refused = 0
        self.is_logged = logger.isEnabledFor(logging.DEBUG)
        self.histories: dict[int, History] = {}  # of requests that failed or are late
        # When refusals began, and an outage; when a request of either is sent again.
        self.refusals_began, self.outage_began, self.resumes = math.inf, math.inf, -math.inf
        self.timer: asyncio.TimerHandle | None = None
        self.outcome: Future[list[Any]] = Future()
        self.over = False  # once `outcome` is set, whose lock costs more

    def size(self, place: int) -> int:
        """Return the bytes of the range of a request."""
        start, stop = self.ranges[place]
        return stop - start

    def history(self, place: int, sent: float) -> History:
        """Return the history of a request; a new one that begins at `sent` if the request has none yet.

        Args:
            place: number of the request in `ranges`.
            sent: when it was sent, by the loop's clock.
        """
        unknown = self.opening and self.store not in ANSWERED
        return self.histories.setdefault(place, History(sent, opening=unknown))

    def where(self, place: int) -> str:
        """Return the name of a request in messages."""
        return "opening" if self.opening else "range {}-{}".format(*self.ranges[place])

    def log(self, place: int, seconds: float, status: str, answer: Any = None) -> None:
        """Log the end of a request, unless the log is off; call it before its failure is noted.

        Args:
            seconds: time since it was sent.
            answer: its response, if it succeeded.
        """
        if self.is_logged:
            failures = self.histories[place].failures if place in self.histories else ()
            num_bytes = len(answer) if isinstance(answer, bytes | bytearray | memoryview) else 0
            what = redacted(self.uri), self.where(place), 1 + len(failures)
            logger.debug("%s: %s, try %d: %s, %.1f ms, %d bytes", *what, status, seconds * 1e3, num_bytes)

    def due(self, bytes_in_flight: int) -> float:
        """Return when the read fails, by the loop's clock: its deadline plus the time of its bytes on the slowest link.

        A long read fails sooner if no response comes: then the time of the bytes in flight counts, from the last
        response on. During an outage, each request that is sent again has the deadline for itself.
        """
        in_all = sum(stop - start for start, stop in self.ranges)
        due = min(self.began + in_all / SLOWEST, self.answered_at + bytes_in_flight / SLOWEST)
        return self.seconds + max(due, self.resumes)

    def pause(self, history: History, now: float) -> float | None:
        """Return the seconds until a failed request is sent again; None: its store is out for too long.

        Args:
            now: present time by the loop's clock.
        """
        seconds, error = pause(len(history.failures)), history.failures[-1][1]
        if not is_outage(error):
            return seconds
        if is_refusal(error):
            began = self.refusals_began = min(self.refusals_began, now)
            self.outage_began = math.inf  # it answers
            if self.limiter.is_limited:  # it waits for its ticket
                seconds = pause(len(history.failures) - TRIES_BY_RATE) if len(history.failures) > TRIES_BY_RATE else 0.0
        else:
            began = self.outage_began = min(self.outage_began, now)
        began, patience = patience_of(self.store, history, began, self.settings)
        if (left := began + patience - now) <= 0:
            return None
        warn_of_outage(self.store, error, began, patience)
        if now > self.limiter.answered_at + (demanded := retry_after(error)) or not self.limiter.is_limited:
            seconds = max(seconds, demanded)  # it answers no others, which its rate would take care of
        seconds = min(seconds, left)  # the last try is at the end of the patience
        self.resumes = max(self.resumes, now + seconds)
        return seconds

    def end(self, error: BaseException | None = None) -> None:
        if not self.over:
            self.over, self.ended = True, time.monotonic()  # the clock of event loops
            self.outcome.set_exception(error) if error else self.outcome.set_result(self.answers)
        if self.timer is not None:
            self.timer.cancel()


class StalledError(TimeoutError):
    """A request that was cancelled because no response came."""


class Scheduler:
    """Scheduler of requests; all methods but `run` and `sending` are called on its loop.

    The state of a request is one tuple: each further object costs 1 us, and work of the garbage collector.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self.limit = limit
        self.hedges = HedgeTimer()
        self._queue: deque[ReadRequests] = deque()
        self._again: deque[tuple[ReadRequests, int]] = deque()
        self._admitted: deque[tuple[ReadRequests, int]] = deque()
        self._limiters: dict[str, RateLimiter] = {}
        self._numbers = itertools.count()
        # task -> read, place, time sent; in the order in which they were sent.
        self._running: dict[asyncio.Task[None], tuple[ReadRequests, int, float]] = {}
        self._watching = False

    def run(self, read: ReadRequests) -> list[Any]:
        """Return the responses to a read's requests; the calling thread, any but the loop's, waits for them.

        Raises:
            StorageError: a request failed for good, or the deadline passed.
            CancelledReadError: the scope of the caller was cancelled.
        """
        with self.sending(read):
            return read.outcome.result()

    @contextmanager
    def sending(self, read: ReadRequests) -> Iterator[None]:
        """Send a read for the duration of the block, which may wait for its outcome; leaving the block cancels it.

        Raises:
            StorageError: this is the thread of the loop.
            CancelledReadError: the scope of the caller is cancelled already.
        """
        if asyncio._get_running_loop() is self.loop:
            raise StorageError(f"{read.uri}: read on the event loop that would have to answer; read in another thread")
        scope = current_scope()
        try:
            with scope.watched_by(lambda: self._stop(read, scope)) if scope else nullcontext():
                self.loop.call_soon_threadsafe(self._submit, read)
                yield
        finally:
            if not read.over:  # interrupted, or one begun beside it could not be
                self.loop.call_soon_threadsafe(self._drop, read, InterruptedError())

    def _stop(self, read: ReadRequests, scope: Scope) -> None:
        try:
            scope.check()
        except Exception as error:
            self.loop.call_soon_threadsafe(self._drop, read, error)

    def _submit(self, read: ReadRequests) -> None:
        read.number = next(self._numbers)
        read.limiter = self._limiters.get(read.location.partitions[0]) or self._open_limiter(read.location)
        self._queue.append(read)
        self._pump()

    def _open_limiter(self, location: Location) -> RateLimiter:
        """Return the limiter of an object's folder, which is opened after that of its bucket."""
        prices, names = location.store.prices(), location.partitions
        first = FirstLimits.of_fleet(*fleet_size(), prices.reads_per_second, prices.doubling_seconds)
        above: RateLimiter | None = None
        for name in reversed(names):
            if name not in self._limiters:
                own = name, first, node_rates(), self.loop, self._admit, self.limit
                self._limiters[name] = RateLimiter(*own, bucket=above, is_above=name != names[0])
            above = self._limiters[name]
        return self._limiters[names[0]]

    def _admit(self, read: ReadRequests, place: int) -> None:
        """Queue a request that waited for its limiter."""
        if not self._admitted:
            self.loop.call_soon(self._pump)
        self._admitted.append((read, place))

    def _pump(self) -> None:
        while (request := self._next()) is not None:
            self._start(*request)

    def _next(self) -> tuple[ReadRequests, int] | None:
        """Return the next request, if fewer than `limit` are in flight: one to retry, else one of the oldest read."""
        while len(self._running) < self.limit and (self._admitted or self._again or self._queue):
            if self._admitted:
                read, place = self._admitted.popleft()
                if not read.over:
                    return read, place
                read.limiter.note_end()
                continue
            if self._again:
                read, place = self._again.popleft()
                read.retries += not read.over
            else:
                read = self._queue[0]
                place = read.unsent
                read.unsent += 1
                if read.over or read.unsent >= len(read.ranges):
                    self._queue.popleft()
            if not read.over and read.limiter.admits(read, place):
                return read, place
        return None

    def _start(self, read: ReadRequests, place: int) -> None:
        task = self.loop.create_task(self._work(read, place))
        self._sends(task, read, place)

    def _sends(self, task: asyncio.Task[None], read: ReadRequests, place: int) -> None:
        now = self.loop.time()
        self._running[task] = read, place, now
        read.sent += 1
        if read.timer is None:
            read.began = read.answered_at = now
            read.timer = self.loop.call_later(read.seconds, self._expire, read)
        if not self._watching:
            self._watch_again()

    async def _work(self, read: ReadRequests, place: int) -> None:
        """Send a request, then the next one of any read: a task for each would take two more rounds of the loop."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            answer: Any = None
            error: Exception | None = None
            try:
                answer = await read.fetch(*read.ranges[place])
            except asyncio.CancelledError:
                error = ConnectionAbortedError("the driver cancelled the request")
            except Exception as raised:
                error = raised
            if task not in self._running:
                return  # cancelled by us
            self._ended(*self._running.pop(task), answer, error)
            if (request := self._next()) is None:
                return
            read, place = request
            self._sends(task, read, place)

    def _ended(self, read: ReadRequests, place: int, sent: float, answer: Any, error: Exception | None) -> None:
        if error is not None:
            self._failed(read, place, sent, error)
        else:
            now = ANSWERED[read.store] = read.answered_at = self.loop.time()
            read.log(place, now - sent, "ok", answer)
            read.limiter.note_response(now)
            self.hedges.note(read.store, read.size(place), now - sent)
            read.answers[place] = answer
            read.unanswered -= 1
            if place in read.histories and read.histories.pop(place).hedges_in_flight:
                self._cancel(lambda other, where: other is read and where == place)
            if read.unanswered == 0:
                read.end()

    def _failed(self, read: ReadRequests, place: int, sent: float, error: Exception) -> None:
        history = read.history(place, sent)
        read.log(place, self.loop.time() - sent, shortly(error))
        history.note(error)
        if is_refusal(error):
            read.refused += 1
            read.limiter.note_refusal()
            if read.limiter.answered_at > ANSWERED.get(read.store, -math.inf):
                ANSWERED[read.store] = read.limiter.answered_at  # to another process of this node
        else:
            read.limiter.note_end()
        if history.is_final():
            self._drop(read, given_up(read.uri, history, read.where(place)))
        elif history.hedges_in_flight:
            history.hedges_in_flight -= 1  # the other one may still succeed
        elif (seconds := read.pause(history, now := self.loop.time())) is None:
            setting = "deadline_seconds" if history.is_of_unknown_store() else "outage_seconds"
            self._drop(read, out_of_time(read.uri, read.where(place), history, now - read.began, setting))
        else:
            self.loop.call_later(seconds, self._ask_again, read, place)

    def _ask_again(self, read: ReadRequests, place: int) -> None:
        read.histories[place].hedged = False
        self._again.append((read, place))
        self._pump()

    def _expire(self, read: ReadRequests) -> None:
        now, due = self.loop.time(), read.due(self._bytes_in_flight())
        if now >= due and read.limiter.holds(read):
            due = ANSWERED.get(read.store, -math.inf) + read.seconds  # it waits for others, and not for the store
        if now < due:
            read.timer = self.loop.call_later(due - now, self._expire, read)
            return
        place = next(iter(read.histories), None) or read.answers.index(None)
        history = read.history(place, time.monotonic())
        self._drop(read, out_of_time(read.uri, read.where(place), history, now - read.began))

    def _drop(self, read: ReadRequests, error: BaseException) -> None:
        read.end(error)
        self._cancel(lambda other, _: other is read)
        self._pump()

    def _cancel(self, wanted: Callable[[ReadRequests, int], bool]) -> None:
        for task in [task for task, (read, place, _) in self._running.items() if wanted(read, place)]:
            read, place, sent = self._running.pop(task)
            task.cancel()
            read.limiter.note_end()
            read.log(place, self.loop.time() - sent, "cancelled")

    def _watch_again(self) -> None:
        self._watching = bool(self._running)
        if self._watching:
            self.loop.call_later(WATCH_SECONDS, self._watch, self.loop.time() + WATCH_SECONDS)

    def _watch(self, due: float) -> None:
        """Hedge late requests, and cancel stalled ones."""
        # If this thread had no core for a while, responses may have come that were not processed yet.
        if self.loop.time() < due + WATCH_SECONDS:
            self._judge(self.loop.time())
        self._watch_again()

    def _bytes_in_flight(self) -> int:
        return sum(read.size(place) for read, place, _ in self._running.values())

    def _judge(self, now: float) -> None:
        oldest = list(self._running.items())
        in_flight = self._bytes_in_flight()
        for task, (read, place, sent) in oldest:
            age = now - sent
            if age < self.hedges.FLOOR:
                break  # and all that follow are younger
            if task not in self._running:
                continue  # dropped just now, with its read
            if age > self.hedges.STALLED + in_flight / SLOWEST:
                self._give_up(task, age)
            elif read.hedge and not read.limiter.is_throttling and self._may_hedge(read, place, age, in_flight):
                self._hedge(read, place, sent)

    def _may_hedge(self, read: ReadRequests, place: int, age: float, in_flight: int) -> bool:
        if place in read.histories and read.histories[place].hedged:
            return False
        return self.hedges.is_late(read.store, read.size(place), age, in_flight / SLOWEST) and self.hedges.take()

    def _hedge(self, read: ReadRequests, place: int, sent: float) -> None:
        history = read.history(place, sent)
        history.hedged = True
        history.hedges_in_flight += 1
        read.hedges += 1
        read.limiter.in_flight += 1
        self._start(read, place)

    def _give_up(self, task: asyncio.Task[None], age: float) -> None:
        read, place, sent = self._running.pop(task)
        task.cancel()
        self._failed(read, place, sent, StalledError(f"nothing came for {age:.1f} s"))
        self._pump()


def scheduler(limit: int) -> Scheduler:
    """Return this process's scheduler for at most `limit` requests in flight; never one of a parent process."""
    key = os.getpid(), limit
    # setdefault is one step, so two threads get the same one.
    return _schedulers.get(key) or _schedulers.setdefault(key, Scheduler(io_loop(), limit))


# Schedulers of parent processes stay, unused: collecting their tasks would close the parents' connections.
_schedulers: dict[tuple[int, int], Scheduler] = {}


class HedgeTimer:
    """Times of recent responses, and the budget of hedges. Only one thread may use it."""

    FLOOR = 0.5
    """Seconds before which no request is late."""

    TIMES = 4
    """A request is late after so many times the median."""

    SAMPLES = 64
    ENOUGH = 8
    """Responses of a median, at most and at least."""

    UNKNOWN = 5.0
    """Seconds after which a request is late while there are too few responses for a median."""

    STALLED = 10.0
    """Seconds, plus those of the bytes in flight on the slowest link, after which a request counts as stalled."""

    SHARE, AT_ONCE, AT_FIRST = 0.05, 16.0, 2.0
    """Hedges that each response adds to the budget; the largest budget; the budget at the start."""

    def __init__(self) -> None:
        self._seconds: defaultdict[tuple[str, int], deque[float]] = defaultdict(lambda: deque(maxlen=self.SAMPLES))
        self._budget = self.AT_FIRST

    def note(self, store: str, size: int, seconds: float) -> None:
        self._seconds[store, _size_class(size)].append(seconds)
        self._budget = min(self.AT_ONCE, self._budget + self.SHARE)

    def is_late(self, store: str, size: int, age: float, needed: float) -> bool:
        known = self._seconds[store, _size_class(size)]
        if len(known) < self.ENOUGH:
            return age > self.UNKNOWN + needed
        return age > max(self.FLOOR, self.TIMES * sorted(known)[len(known) // 2])

    def take(self) -> bool:
        """Take one hedge from the budget; return whether there was one."""
        if self._budget < 1:
            return False
        self._budget -= 1
        return True


def _size_class(size: int) -> int:
    """Return the class of sizes that take the same time: all up to 256 KiB, then one for every doubling."""
    return max(18, (size - 1).bit_length())
