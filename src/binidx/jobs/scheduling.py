"""Tasks over an Executor: a bounded window of them, some tried again, all stopped by the first that failed for good.

    waiting ──submit──► in flight, at most `window` ──► done
       ▲                    │
       ├─ after a pause ────┼─ failed in passing, or the worker died: `ATTEMPTS` times in all
       └─ one at a time ────┘  the whole pool died, and nobody knows of which

All that is asked of an engine is `concurrent.futures.Executor`. Tasks must be idempotent: one may run twice, also at
the same time.

How work in another process is told to stop: between two batches, so that it leaves nothing half written behind.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from binidx.errors import BinidxError, CancelledReadError, WorkerError
from binidx.storage.requests.retries import pause

ATTEMPTS = 5


"""Of one task, whatever it was that failed in passing. A pool that died of one of many counts for none of them."""


POLL_SECONDS, NO_WORKER_SECONDS = 10.0, 900.0


"""Between two looks whether a cluster has workers, while nothing is done; and without any, before it is given up."""


Task = TypeVar("Task")


Result = TypeVar("Result")


@dataclass(frozen=True)
class Engine:
    """Where tasks run.

    Attributes:
        open: makes the Executor; called again when one broke.
        count: asked of an open one: tasks that it runs at once; 0: it has no worker, now.
    """

    open: Callable[[], Executor]
    count: Callable[[Executor], int]


@dataclass(frozen=True)
class TaskFailure:
    """What a task returns that could not be done: between processes, an exception loses what it carried.

    Attributes:
        error: for whoever asked; its message alone comes along.
        passing: the same task may succeed in a moment.
    """

    error: BinidxError
    passing: bool


class _Broken(TaskFailure):
    """The pool is gone, and with it all that was in flight: of one of them, mostly."""


def run_tasks(
    work: Callable[[Task], Result | TaskFailure], tasks: Iterable[Task], workers: Engine
) -> Generator[tuple[Task, Result], None, None]:
    """What `work` returned of each task, as they are done.

    Raises:
        BinidxError: a task failed for good; the others are stopped.
        WorkerError: the worker of a task died, `ATTEMPTS` times; or there are no workers, for `NO_WORKER_SECONDS`.
    """
    queue, pending = _Queue(tasks), dict[Future[Result | TaskFailure], _Try[Task]]()
    with _Pool(workers, pending) as pool:
        while True:
            for each in queue.due(pool.window - len(pending), idle=not pending):
                pending[pool.submit(work, each.task)] = each
            if not pending:
                if queue.empty:
                    return
                time.sleep(queue.seconds or 0)
                continue
            # A full window has no room for what is due: were its pause to end the wait, this would never wait.
            seconds = queue.seconds if len(pending) < pool.window and not queue.suspects else None
            timeout = POLL_SECONDS if seconds is None else min(seconds, POLL_SECONDS)
            done = wait(pending, timeout=timeout, return_when=FIRST_COMPLETED).done
            pool.look(bool(done))
            for future in done:
                each, found = pending.pop(future), pool.outcome(future)
                if isinstance(found, _Broken) and not each.alone:
                    queue.suspects.append(replace(each, alone=True))
                elif isinstance(found, TaskFailure):
                    queue.again(each, found)
                else:
                    yield each.task, found


@dataclass(frozen=True)
class _Try(Generic[Task]):
    """A task and how often it has failed; `alone`: it is to run without others, that its death be its own."""

    task: Task
    failures: int = 0
    alone: bool = False


class _Queue(Generic[Task]):
    """Tasks to be done: those that failed when their pause is over, then the next.

    Attributes:
        suspects: were in flight when a pool died: they go before all others, one at a time.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks = (_Try(task) for task in tasks)
        self._paused: list[tuple[float, int, _Try[Task]]] = []
        self._numbers = itertools.count()
        self._all_given = False
        self.suspects = deque[_Try[Task]]()

    def due(self, count: int, *, idle: bool) -> Iterator[_Try[Task]]:
        """Up to `count` of them. While there are suspects, one, and only when nothing else runs: `idle`."""
        if self.suspects:
            yield from [self.suspects.popleft()] if idle else []
            return
        for _ in range(count):
            if self._paused and self._paused[0][0] <= time.monotonic():
                yield heapq.heappop(self._paused)[2]
            elif each := next(self._tasks, None):
                yield each
            else:
                self._all_given = True
                return

    @property
    def seconds(self) -> float | None:
        """Until the next pause is over; None: there is none."""
        return max(0.0, self._paused[0][0] - time.monotonic()) if self._paused else None

    @property
    def empty(self) -> bool:
        return self._all_given and not self._paused and not self.suspects

    def again(self, each: _Try[Task], failed: TaskFailure) -> None:
        """Put it back, or raise what it failed of."""
        failures = each.failures + 1
        if not failed.passing:
            raise failed.error
        if failures == ATTEMPTS:
            raise type(failed.error)(f"{failed.error}; {each.task} failed {failures} times")
        if isinstance(failed, _Broken):  # alone: nothing else waits
            time.sleep(pause(failures))
            self.suspects.appendleft(replace(each, failures=failures))
            return
        heapq.heappush(
            self._paused, (time.monotonic() + pause(failures), next(self._numbers), _Try(each.task, failures))
        )


class _Pool:
    """The executor of the moment.

    Args:
        pending: what is in flight; at the end it is called off.

    Attributes:
        window: tasks submitted and not done: no worker waits for the next, and few are begun in vain.
    """

    def __init__(self, workers: Engine, pending: Mapping[Future[Any], _Try[Any]]) -> None:
        self._workers, self._pending = workers, pending
        self._executor = workers.open()
        self.window = 2 * max(1, workers.count(self._executor))
        self._last_seen = time.monotonic()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *error: object) -> None:
        for future in self._pending:
            future.cancel()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, work: Callable[[Task], Result | TaskFailure], task: Task) -> Future[Result | TaskFailure]:
        try:
            return self._executor.submit(work, task)
        except BrokenExecutor:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = self._workers.open()
            return self._executor.submit(work, task)

    def look(self, alive: bool) -> None:
        """WorkerError if there are no workers for too long: what has killed the last of them waits for others."""
        if alive or self._is_there():
            self._last_seen = time.monotonic()
        elif time.monotonic() - self._last_seen > NO_WORKER_SECONDS:
            under_way = ", ".join(str(each.task) for each in itertools.islice(self._pending.values(), 4))
            raise WorkerError(
                f"no worker is there, for {NO_WORKER_SECONDS:.0f} s; killed, or out of memory? Start some, and give the "
                f"same command. Under way: {under_way}"
            )

    def _is_there(self) -> bool:
        try:
            return self._workers.count(self._executor) > 0
        except Exception:  # an engine's own: who does not answer has no workers
            return False

    def outcome(self, future: Future[Result | TaskFailure]) -> Result | TaskFailure:
        """What came of it. `work` returns its failures, so an exception is the engine's: the worker is gone."""
        try:
            return future.result()
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            kind = _Broken if isinstance(error, BrokenExecutor) else TaskFailure
            return kind(WorkerError(f"a worker died ({text}); killed, or out of memory?"), passing=True)


_told = threading.Event()


def request_stop() -> None:
    """From now on `check_stop` stops whoever asks in this process."""
    _told.set()


def check_stop() -> None:
    """CancelledReadError if this process was told to stop."""
    if _told.is_set():
        raise CancelledReadError("told to stop: another part failed, or the job was interrupted")
