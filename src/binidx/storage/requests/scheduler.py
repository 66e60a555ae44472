"""Scheduler of the requests of a process: carries out `request_schedule` on the stores' event loop.

A thread hands over a whole read and waits once; tasks take one request after the other. This costs 5 to 10 us of CPU
beside the 50 us of a bare request. `retried` sends the requests of stores that block, in the thread of the caller.

Each read that is handed over ends once. An error in a callback of the loop, which would let reads wait for ever, ends
all of them; later ones begin anew.

The logger `binidx.requests` gets a line at DEBUG when a request ends. Whether it is on is looked up once for each read.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import random
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from binidx.errors import StorageError, redacted
from binidx.storage.interfaces import Range
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import current_scope
from binidx.storage.requests.node_rates import NodeRates, node_rates
from binidx.storage.requests.rate_limiter import FirstLimits, RateLimiter
from binidx.storage.requests.request_schedule import HedgeTimer, Read, Request, RequestSchedule
from binidx.storage.requests.retries import Failure, History, StoreTimes, given_up, longest_pause
from binidx.storage.settings import ReadSettings, fleet_size
from binidx.storage.stats import note_request
from binidx.storage.stores.driver_errors import driver_text, retry_after
from binidx.storage.threads import io_loop

logger = logging.getLogger("binidx.requests")
Result = TypeVar("Result")

Fetch = Callable[[int, int], Coroutine[Any, Any, Any]]

STORE_TIMES = StoreTimes(logging.getLogger(__name__).warning)
"""Times of the stores of this process. A forked child begins with those of its parent."""


class ReadRequests(Read):
    """A read that is sent: its requests, and the future of their responses.

    Args:
        fetch: sends the request for bytes start to stop.
        opening: whether the read looks for an object, whose store may not exist.
    """

    def __init__(
        self, location: Location, fetch: Fetch, ranges: Sequence[Range], settings: ReadSettings, opening: bool = False
    ) -> None:
        super().__init__(location.uri, location.place, ranges, settings, opening, logger.isEnabledFor(logging.DEBUG))
        self.location, self.fetch = location, fetch
        self.outcome: Future[list[Any]] = Future()


class Scheduler:
    """Scheduler of requests; all methods but `run` and `sending` are called on its loop.

    Args:
        limit: most requests in flight.
        hedges: decides which requests are late.
        rates: of the partitions of stores; None: those that the processes of this node share.
    """

    def __init__(
        self, loop: AbstractEventLoop, limit: int, hedges: HedgeTimer | None = None, rates: NodeRates | None = None
    ) -> None:
        self.loop, self.limit, self._hedges, self._rates = loop, limit, hedges or HedgeTimer(), rates
        self._numbers = itertools.count()  # a task that ends late must not find a request of a new schedule
        self._begin()

    def _begin(self) -> None:
        self.schedule = RequestSchedule(self.limit, self, STORE_TIMES, random.uniform, self._hedges, self._numbers)
        self.limiters: dict[str, RateLimiter] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._wakes_at = math.inf

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
            with scope.watched_by(lambda: self._drop_soon(read, scope.error())) if scope else nullcontext():
                self.loop.call_soon_threadsafe(self._submit, read)
                yield
        finally:
            if not read.over:  # interrupted, or one begun beside it could not be
                self._drop_soon(read, InterruptedError())

    def _drop_soon(self, read: ReadRequests, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(lambda: self._give(self.schedule.drop, read, error))

    def _submit(self, read: ReadRequests) -> None:
        try:
            limiter = self.limiters.get(read.location.partitions[0]) or self._open_limiter(read.location)
        except Exception as error:
            self._give(self.schedule.drop, read, error)
        else:
            self._give(self.schedule.submit, read, limiter)

    def _open_limiter(self, location: Location) -> RateLimiter:
        """Return the limiter of an object's folder, which is made after that of its bucket."""
        prices, names = location.store.prices(), location.partitions
        first = FirstLimits.of_fleet(fleet_size()[1], prices.reads_per_second, prices.doubling_seconds)
        above: RateLimiter | None = None
        for name in reversed(names):
            if name not in self.limiters:
                own = name, first, self._rates or node_rates(), self._later, self.schedule.admit, self.limit
                self.limiters[name] = RateLimiter(*own, bucket=above, is_above=name != names[0])
            above = self.limiters[name]
        return self.limiters[names[0]]

    def _later(self, seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, self._give, lambda now: callback())

    def _wake(self, wakes_at: float) -> None:
        if wakes_at == self._wakes_at:  # no earlier call was set since
            self._wakes_at = math.inf
            self._give(self.schedule.pass_time)

    def _give(self, event: Callable[..., None], *arguments: Any) -> None:
        """Give the schedule an event, and send what may be sent then."""
        self._start(self._next(event, *arguments))

    def _start(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._tasks[request[0]] = self.loop.create_task(self._work(request))

    def _next(self, event: Callable[..., None], *arguments: Any) -> list[Request]:
        """Give the schedule an event, and return the requests that may be sent then."""
        try:
            now = self.loop.time()
            event(*arguments, now)
            requests = list[Request]()
            while (request := self.schedule.next(now)) is not None:
                requests.append(request)
            if self.schedule.wake_at < self._wakes_at:
                self._wakes_at = self.schedule.wake_at
                self.loop.call_at(self._wakes_at, self._wake, self._wakes_at)
            return requests
        except Exception as error:
            self._break(error)
            return []

    async def _work(self, request: Request) -> None:
        """Send a request, then the next one of any read: a task for each would take two more rounds of the loop."""
        while True:
            number, read, index, sent = request
            error: Exception | None = None
            try:
                response = await read.fetch(*read.ranges[index])
            except asyncio.CancelledError:
                error = ConnectionAbortedError("the driver cancelled the request")
            except Exception as raised:
                error = raised
            if (task := self._tasks.pop(number, None)) is None:
                return  # cancelled by us
            if error is None:
                note_request(read.store, self.loop.time() - sent, read.size(index))
                requests = self._next(self.schedule.answered, number, response)
            else:
                requests = self._next(self.schedule.failed, number, failure_of(error))
            if not requests:
                return
            request = requests.pop(0)
            self._tasks[request[0]] = task
            if requests:
                self._start(requests)

    def _break(self, error: Exception) -> None:
        """End all reads after an unexpected error, and begin anew."""
        logger.error("the scheduler of requests begins anew", exc_info=error)
        reads, tasks = self.schedule.reads, self._tasks
        self._begin()
        for task in tasks.values():
            task.cancel()
        for read in reads:
            reason = StorageError(f"{read.uri}: its requests were stopped by {driver_text(error)}; read it again")
            reason.__cause__ = error
            read.over = True
            self.end(read, reason)

    def cancel(self, number: int) -> None:
        """Cancel a request in flight."""
        self._tasks.pop(number).cancel()

    def end(self, read: Any, error: BaseException | None) -> None:
        """Give a read's responses, or its error, to its caller."""
        read.outcome.set_exception(error) if error else read.outcome.set_result(read.responses)

    def log(self, read: Read, index: int, num_tries: int, seconds: float, status: str, response: Any) -> None:
        """Log the end of a request."""
        num_bytes = len(response) if isinstance(response, bytes | bytearray | memoryview) else 0
        what = redacted(read.uri), read.where(index), num_tries
        logger.debug("%s: %s, try %d: %s, %.1f ms, %d bytes", *what, status, seconds * 1e3, num_bytes)


def scheduler(limit: int) -> Scheduler:
    """Return this process's scheduler for at most `limit` requests in flight; never one of a parent process."""
    key = os.getpid(), limit
    # setdefault is one step, so two threads get the same one.
    return _schedulers.get(key) or _schedulers.setdefault(key, Scheduler(io_loop(), limit))


# Schedulers of parent processes stay, unused: collecting their tasks would close the parents' connections.
_schedulers: dict[tuple[int, int], Scheduler] = {}


def failure_of(error: Exception) -> Failure:
    """Return the failure of a request by what its driver raised; a final one if not even its text can be read."""
    try:
        return Failure(error, retry_after(error))
    except Exception as unreadable:
        return Failure(StorageError(f"{type(error).__name__}, whose text is unreadable: {type(unreadable).__name__}"))


def pause(num_failures: int) -> float:
    """Return the seconds to wait after `num_failures` failed tries: random, up to a bound that doubles with each."""
    # Jitter is what must differ between processes, so no seed of ours holds here.
    return random.uniform(0.0, longest_pause(num_failures))


def send_blocking(location: Location, request: Callable[[], Result], *, patient: bool) -> Result:
    """Return the result of a request of a small object, which may be the first one to its store.

    Args:
        patient: whether it is sent again as in `retried`; if not, its driver alone may do so: for callers that have
            deadlines of their own.
    """
    return retried(location, request, opening=True) if patient else request()


def retried(
    location: Location, request: Callable[[], Result], settings: ReadSettings | None = None, *, opening: bool = False
) -> Result:
    """Call `request` until it succeeds, with pauses in this thread after transient failures; return its result.

    Args:
        location: object of the request, for error messages and default settings.
        request: blocking function without arguments, which can be called again after a failure.
        settings: time limits of the retries; None for those of the location.
        opening: True if the request may be the first to a store, which may not exist. As long as the store has sent no
            good response to this process, the fourth transient failure without an HTTP status is then final. If False,
            such failures are retried within the time limits.

    Raises:
        CancelledReadError: the scope of the caller was cancelled between two tries.
        BinidxError: the failure is not transient, or the tries or the time are used up. After more than one try, the
            message lists the tries.
    """
    store, settings, scope = location.place, settings or location.settings, current_scope()
    history = History(time.monotonic(), opening=opening and store not in STORE_TIMES.answered)
    while True:
        try:
            response = request()
        except Exception as error:
            failure, now = failure_of(error), time.monotonic()
            wait = max(pause(len(history.failures) + 1), failure.retry_after)
            history.note(failure, now)
            left = history.began + settings.deadline_seconds - now
            if failure.is_outage:
                left = STORE_TIMES.patience_left(store, history, history.began, now, settings)
                wait = min(wait, left)  # the last try is at the end of the patience
            if history.is_final() or wait > left or left <= 0:
                raise given_up(location.uri, history, "this", now)  # noqa: B904 (it has its cause)
        else:
            STORE_TIMES.answered[store] = time.monotonic()
            return response
        scope.pause(wait) if scope else time.sleep(wait)
