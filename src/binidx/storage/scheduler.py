"""Requests of all reads of a process, so many in flight at once, on the event loop of their filesystems.

    read ─► its requests ─► queue ─► in flight (at most `limit`) ─► answer ─► all there: the read returns
                              ▲           │ late: asked again beside it, the first answer wins
                              └── pause ──┘ failed, or stalled: asked again, while there is hope

A thread hands over a whole read and waits once. A request is one task, the driver's own coroutine: around it this costs
10 us. Nothing here knows a store; what is asked and what fails for good is `fetch` and `retries`.

A read ends by its last answer, by the first request that is given up, by its deadline or by its scope, and takes what
it has in flight with it.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from typing import Any

from binidx.errors import ShortReadError
from binidx.storage.cancel import Scope, current_scope
from binidx.storage.lateness import Lateness
from binidx.storage.ranges import Range
from binidx.storage.retries import History, given_up, out_of_time, pause

Fetch = Callable[[int, int], Coroutine[Any, Any, bytes]]
"""The bytes from start to stop of one object, asked once."""

SLOWEST = 1_000_000
"""Bytes per second: a link that is slower is taken for one that stands still."""

WATCH_SECONDS = 0.1
"""Between two looks at what is late."""


class StalledError(TimeoutError):
    """A request that was given up because nothing came."""


class PendingRead:
    """One read's requests, and what has come of them."""

    def __init__(self, uri: str, fetch: Fetch, ranges: Sequence[Range], *, deadline_seconds: float, hedge: bool):
        self.uri = uri
        self.fetch = fetch
        self.requests = [Request(self, place, *where) for place, where in enumerate(ranges)]
        self.answers = [b""] * len(ranges)
        self.left = len(ranges)
        self.seconds = deadline_seconds + sum(stop - start for start, stop in ranges) / SLOWEST
        self.hedge = hedge
        self.sent = self.retries = self.hedges = 0
        self.timer: asyncio.TimerHandle | None = None
        self.outcome: Future[list[bytes]] = Future()

    @property
    def over(self) -> bool:
        return self.outcome.done()

    def end(self, error: BaseException | None = None) -> None:
        with suppress(InvalidStateError):
            self.outcome.set_exception(error) if error else self.outcome.set_result(self.answers)
        if self.timer is not None:
            self.timer.cancel()


class Request:
    """One range of a read: answered once, asked once or more."""

    __slots__ = ("answered", "history", "in_flight", "place", "read", "start", "stop")

    def __init__(self, read: PendingRead, place: int, start: int, stop: int) -> None:
        self.read, self.place, self.start, self.stop = read, place, start, stop
        self.in_flight = 0
        self.answered = False
        self.history: History | None = None  # from its first failure on


class Scheduler:
    """Sends requests; all but `run` happens on its loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self.limit = limit
        self.lateness = Lateness()
        self._queue: deque[Request] = deque()
        # In the order in which they were sent: the oldest first.
        self._running: dict[asyncio.Task[bytes], tuple[Request, float]] = {}
        self._bytes_in_flight = 0
        self._watching = False

    def run(self, read: PendingRead) -> list[bytes]:
        """The answers to a read's requests; the calling thread, any but the loop's, waits for them.

        Raises:
            StorageError: a request failed for good, or the deadline passed.
            CancelledReadError: the scope of the caller was cancelled.
        """
        scope = current_scope()
        try:
            with scope.watched_by(lambda: self._stop(read, scope)) if scope else nullcontext():
                self.loop.call_soon_threadsafe(self._submit, read)
                return read.outcome.result()
        finally:
            if not read.over:  # the thread was interrupted
                self.loop.call_soon_threadsafe(self._drop, read, InterruptedError())

    def _stop(self, read: PendingRead, scope: Scope) -> None:
        try:
            scope.check()
        except Exception as error:
            self.loop.call_soon_threadsafe(self._drop, read, error)

    def _submit(self, read: PendingRead) -> None:
        self._queue.extend(read.requests)
        self._pump()

    def _pump(self) -> None:
        while self._queue and len(self._running) < self.limit:
            request = self._queue.popleft()
            if not request.read.over:
                self._send(request)

    def _send(self, request: Request) -> None:
        read, now = request.read, self.loop.time()
        if read.timer is None:
            read.timer = self.loop.call_later(read.seconds, self._expire, read)
        task = self.loop.create_task(read.fetch(request.start, request.stop))
        task.add_done_callback(self._ended)
        self._running[task] = request, now
        self._bytes_in_flight += request.stop - request.start
        request.in_flight += 1
        read.sent += 1
        if not self._watching:
            self._watching = True
            self.loop.call_later(WATCH_SECONDS, self._watch)

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        error = None if task.cancelled() else task.exception()
        if task not in self._running:
            return
        request, began = self._forget(task)
        if task.cancelled():
            error = ConnectionAbortedError("the driver cancelled the request")
        if error is None and len(task.result()) != request.stop - request.start:
            error = wrong_length(request.read.uri, (request.start, request.stop), len(task.result()))
        if error is not None:
            self._failed(request, error)
        else:
            self._answered(request, task.result(), self.loop.time() - began)
        self._pump()

    def _forget(self, task: asyncio.Task[bytes]) -> tuple[Request, float]:
        request, began = self._running.pop(task)
        request.in_flight -= 1
        self._bytes_in_flight -= request.stop - request.start
        return request, began

    def _answered(self, request: Request, answer: bytes, seconds: float) -> None:
        read = request.read
        request.answered = True
        read.answers[request.place] = answer
        read.left -= 1
        self.lateness.note(len(answer), seconds)
        if request.in_flight:
            self._cancel(lambda each: each is request)
        if read.left == 0:
            read.end()

    def _failed(self, request: Request, error: BaseException) -> None:
        read = request.read
        if not isinstance(error, Exception):
            self._drop(read, error)
            return
        request.history = request.history or History()
        request.history.note(error)
        if request.history.hopeless():
            self._drop(read, given_up(read.uri, request.history, (request.start, request.stop)))
        elif not request.in_flight:  # else the other one may still bring it
            self.loop.call_later(pause(len(request.history.failures)), self._again, request)

    def _again(self, request: Request) -> None:
        if not request.read.over:
            request.read.retries += 1
            self._queue.appendleft(request)
            self._pump()

    def _expire(self, read: PendingRead) -> None:
        request = next(each for each in read.requests if not each.answered)
        failed = next((each for each in read.requests if each.history and not each.answered), request)
        self._drop(read, out_of_time(read.uri, (failed.start, failed.stop), failed.history or History(), read.seconds))

    def _drop(self, read: PendingRead, error: BaseException) -> None:
        read.end(error)
        self._cancel(lambda request: request.read is read)
        self._pump()

    def _cancel(self, wanted: Callable[[Request], bool]) -> None:
        for task in [task for task, (request, _) in self._running.items() if wanted(request)]:
            self._forget(task)
            task.cancel()

    def _watch(self) -> None:
        """Ask again for what is late, give up what stands still."""
        now = self.loop.time()
        still = self.lateness.patience(self._bytes_in_flight / SLOWEST)
        for task, (request, began) in list(self._running.items()):
            age = now - began
            if age < self.lateness.FLOOR:
                break  # and all that follow are younger
            if age > still:
                self._give_up(task, age)
            elif request.read.hedge and request.in_flight == 1 and self._may_hedge(request, age):
                request.read.hedges += 1
                self._send(request)
        self._watching = bool(self._running)
        if self._watching:
            self.loop.call_later(WATCH_SECONDS, self._watch)

    def _may_hedge(self, request: Request, age: float) -> bool:
        late = self.lateness.is_late(request.stop - request.start, age, self._bytes_in_flight / SLOWEST)
        return late and self.lateness.take()

    def _give_up(self, task: asyncio.Task[bytes], age: float) -> None:
        request, _ = self._forget(task)
        task.cancel()
        self._failed(request, StalledError(f"nothing came for {age:.1f} s"))
        self._pump()


def wrong_length(uri: str, where: Range, found: int) -> ShortReadError:
    return ShortReadError(
        f"{uri}: {found} bytes for range {where[0]}-{where[1]}, needed {where[1] - where[0]}; "
        f"the store or a proxy before it does not honour ranges"
    )


def scheduler(loop: asyncio.AbstractEventLoop, limit: int) -> Scheduler:
    """The process's own for a loop and a bound; never one of a process it was forked from."""
    key = os.getpid(), loop, limit
    found = _schedulers.get(key)
    # setdefault is one step, so two threads get the same one.
    return found or _schedulers.setdefault(key, Scheduler(loop, limit))


# Those of the parents stay, unused: to collect their tasks would close the connections they are on.
_schedulers: dict[tuple[int, asyncio.AbstractEventLoop, int], Scheduler] = {}
