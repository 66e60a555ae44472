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
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from typing import Any

from binidx.storage.cancel import Scope, current_scope
from binidx.storage.lateness import Lateness
from binidx.storage.ranges import Range
from binidx.storage.retries import History, given_up, out_of_time, pause

Fetch = Callable[[int, int], Coroutine[Any, Any, bytes]]
"""The bytes from start to stop of one object, asked once; whoever makes it checks that they are as many."""

SLOWEST = 1_000_000
"""Bytes per second: a link that is slower is taken for one that stands still."""

WATCH_SECONDS = 0.1
"""Between two looks at what is late."""


class StalledError(TimeoutError):
    """A request that was given up because nothing came."""


class PendingRead:
    """One read: its requests, by their place in `ranges`, and what has come of them.

    Args:
        tries: how often a request may fail, where that is less than `retries` allow.
        opening: whether it is the first that is heard of a store, which may not exist.
    """

    def __init__(
        self,
        uri: str,
        fetch: Callable[[int, int], Coroutine[Any, Any, Any]],
        ranges: Sequence[Range],
        *,
        deadline_seconds: float,
        hedge: bool,
        tries: int = 0,
        opening: bool = False,
    ) -> None:
        self.uri = uri
        self.store = "/".join(uri.split("/", 3)[:3])  # s3://bucket, https://host
        self.tries, self.opening = tries, opening
        self.fetch = fetch
        self.ranges = ranges
        self.answers: list[Any] = [None] * len(ranges)
        self.unsent, self.unanswered = 0, len(ranges)  # the first place that was not asked yet; how many have no answer
        self.seconds = deadline_seconds + sum(stop - start for start, stop in ranges) / SLOWEST
        self.hedge = hedge
        self.sent = self.retries = self.hedges = 0
        self.troubles: dict[int, Trouble] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.outcome: Future[list[Any]] = Future()

    @property
    def over(self) -> bool:
        return self.outcome.done()

    def where(self, place: int) -> str:
        """Of a request, for people."""
        return "opening" if self.opening else "range {}-{}".format(*self.ranges[place])

    def end(self, error: BaseException | None = None) -> None:
        with suppress(InvalidStateError):
            self.outcome.set_exception(error) if error else self.outcome.set_result(self.answers)
        if self.timer is not None:
            self.timer.cancel()


class Trouble:
    """Of a request that failed or is late: what failed, how many are in flight beside it, whether it was hedged."""

    def __init__(self, read: PendingRead, sent: float) -> None:
        # Loops tell the time as time.monotonic does.
        self.history = History(sent, tries=read.tries, opening=read.opening)
        self.beside = 0
        self.hedged = False


class Scheduler:
    """Sends requests; all but `run` happens on its loop.

    What is kept for a request is one tuple: each object more is 1 us, and one more for the collector to look at.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop = loop
        self.limit = limit
        self.lateness = Lateness()
        self._queue: deque[PendingRead] = deque()
        self._again: deque[tuple[PendingRead, int]] = deque()
        # task -> read, place, time sent; in the order in which they were sent.
        self._running: dict[asyncio.Task[Any], tuple[PendingRead, int, float]] = {}
        self._watching = False

    def run(self, read: PendingRead) -> list[Any]:
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
        self._queue.append(read)
        self._pump()

    def _pump(self) -> None:
        while len(self._running) < self.limit:
            if self._again:
                read, place = self._again.popleft()
                read.retries += not read.over
            elif self._queue:
                read = self._queue[0]
                place = read.unsent
                read.unsent += 1
                if read.over or read.unsent >= len(read.ranges):
                    self._queue.popleft()
            else:
                return
            if not read.over:
                self._send(read, place)

    def _send(self, read: PendingRead, place: int) -> None:
        task = self.loop.create_task(read.fetch(*read.ranges[place]))
        task.add_done_callback(self._ended)
        self._running[task] = read, place, self.loop.time()
        read.sent += 1
        if read.timer is None:
            read.timer = self.loop.call_later(read.seconds, self._expire, read)
        if not self._watching:
            self._watch_again()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        found = self._running.pop(task, None)
        if found is None:
            return  # cancelled by us
        read, place, sent = found
        if task.cancelled():
            error = ConnectionAbortedError("the driver cancelled the request")
        if error is not None:
            self._failed(read, place, sent, error)
        else:
            self._answered(read, place, task.result())
            self.lateness.note(read.store, _size(read, place), self.loop.time() - sent)
        self._pump()

    def _answered(self, read: PendingRead, place: int, answer: Any) -> None:
        read.answers[place] = answer
        read.unanswered -= 1
        if place in read.troubles and read.troubles.pop(place).beside:
            self._cancel(lambda each, where: each is read and where == place)
        if read.unanswered == 0:
            read.end()

    def _failed(self, read: PendingRead, place: int, sent: float, error: BaseException) -> None:
        if not isinstance(error, Exception):
            self._drop(read, error)
            return
        trouble = read.troubles.setdefault(place, Trouble(read, sent))
        trouble.history.note(error)
        if trouble.history.hopeless():
            self._drop(read, given_up(read.uri, trouble.history, read.where(place)))
        elif trouble.beside:
            trouble.beside -= 1  # the other one may still bring it
        else:
            self.loop.call_later(pause(len(trouble.history.failures)), self._ask_again, read, place)

    def _ask_again(self, read: PendingRead, place: int) -> None:
        read.troubles[place].hedged = False
        self._again.append((read, place))
        self._pump()

    def _expire(self, read: PendingRead) -> None:
        place = next(iter(read.troubles), None) or read.answers.index(None)
        history = read.troubles[place].history if place in read.troubles else History(time.monotonic())
        self._drop(read, out_of_time(read.uri, read.where(place), history, read.seconds))

    def _drop(self, read: PendingRead, error: BaseException) -> None:
        read.end(error)
        self._cancel(lambda each, _: each is read)
        self._pump()

    def _cancel(self, wanted: Callable[[PendingRead, int], bool]) -> None:
        for task in [task for task, (read, place, _) in self._running.items() if wanted(read, place)]:
            del self._running[task]
            task.cancel()

    def _watch_again(self) -> None:
        self._watching = bool(self._running)
        if self._watching:
            self.loop.call_later(WATCH_SECONDS, self._watch, self.loop.time() + WATCH_SECONDS)

    def _watch(self, due: float) -> None:
        """Ask again for what is late, give up what stands still."""
        # Where this thread got no core for a while, the answers may have come and were not looked at yet.
        if self.loop.time() < due + WATCH_SECONDS:
            self._judge(self.loop.time())
        self._watch_again()

    def _judge(self, now: float) -> None:
        oldest = list(self._running.items())
        in_flight = sum(_size(read, place) for read, place, _ in self._running.values())
        for task, (read, place, sent) in oldest:
            age = now - sent
            if age < self.lateness.FLOOR:
                break  # and all that follow are younger
            if task not in self._running:
                continue  # dropped just now, with its read
            if age > self.lateness.patience(in_flight / SLOWEST):
                self._give_up(task, age)
            elif read.hedge and self._may_hedge(read, place, age, in_flight):
                self._hedge(read, place, sent)

    def _may_hedge(self, read: PendingRead, place: int, age: float, in_flight: int) -> bool:
        if place in read.troubles and read.troubles[place].hedged:
            return False
        return self.lateness.is_late(read.store, _size(read, place), age, in_flight / SLOWEST) and self.lateness.take()

    def _hedge(self, read: PendingRead, place: int, sent: float) -> None:
        trouble = read.troubles.setdefault(place, Trouble(read, sent))
        trouble.hedged = True
        trouble.beside += 1
        read.hedges += 1
        self._send(read, place)

    def _give_up(self, task: asyncio.Task[Any], age: float) -> None:
        read, place, sent = self._running.pop(task)
        task.cancel()
        self._failed(read, place, sent, StalledError(f"nothing came for {age:.1f} s"))
        self._pump()


def _size(read: PendingRead, place: int) -> int:
    start, stop = read.ranges[place]
    return stop - start


def scheduler(loop: asyncio.AbstractEventLoop, limit: int) -> Scheduler:
    """The process's own for a loop and a bound; never one of a process it was forked from."""
    key = os.getpid(), loop, limit
    found = _schedulers.get(key)
    # setdefault is one step, so two threads get the same one.
    return found or _schedulers.setdefault(key, Scheduler(loop, limit))


# Those of the parents stay, unused: to collect their tasks would close the connections they are on.
_schedulers: dict[tuple[int, asyncio.AbstractEventLoop, int], Scheduler] = {}
