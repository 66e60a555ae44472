"""Run tasks on an engine: a bounded window of running tasks, retries, and a stop at the first permanent failure.

    queue ──submit──► running, at most `window` ──► result
      ▲                   │
      ├─ after a pause ───┼─ transient failure, or the worker died: at most `ATTEMPTS` attempts
      └─ one at a time ───┘  the whole pool died, so the task that killed it is unknown

An engine needs nothing but `concurrent.futures.Executor`. Tasks must be idempotent: a task may run twice, even at the
same time. `request_stop` and `check_stop` end the work inside a worker process between two batches, so that no file
stays half written.
"""

from __future__ import annotations

import contextlib
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
"""Attempts of one task. If a pool dies while it runs several tasks, no attempt of theirs is counted."""

POLL_SECONDS, NO_WORKER_SECONDS = 10.0, 900.0
"""Interval between two counts of a cluster's workers while no task ends; how long it may have none."""

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class JobEngine:
    """Place where tasks run.

    Attributes:
        open: returns the Executor; called again after an executor broke.
        count: returns how many tasks an open executor runs at once; 0 if it has no worker at present.
        owned: whether the executor is shut down at the end; False for an executor of the caller.
    """

    open: Callable[[], Executor]
    count: Callable[[Executor], int]
    owned: bool = True


@dataclass(frozen=True)
class TaskFailure:
    """Failure of a task, returned instead of raised: pickling an exception drops its attributes.

    Attributes:
        error: the error to raise; only its message crosses processes.
        transient: whether another attempt may succeed.
    """

    error: BinidxError
    transient: bool


class _BrokenPool(TaskFailure):
    """Death of the pool and of all running tasks; mostly, one of them caused it."""


def run_tasks(
    work: Callable[[Task], Result | TaskFailure], tasks: Iterable[Task], engine: JobEngine
) -> Generator[tuple[Task, Result], None, None]:
    """Run `work` on each task and yield (task, result) in the order of completion.

    Args:
        work: called in the workers; returns its failures as `TaskFailure`.
        tasks: taken from the iterable only as fast as they run.
        engine: where they run.

    Raises:
        BinidxError: a task failed permanently; the other tasks are stopped.
        WorkerError: the worker of one task died `ATTEMPTS` times, or there was no worker for `NO_WORKER_SECONDS`.
    """
    queue, running = _Queue(tasks), dict[Future[Result | TaskFailure], _Attempt[Task]]()
    with contextlib.closing(_Pool(engine, running)) as pool:
        while True:
            for attempt in queue.take(pool.window - len(running), idle=not running):
                running[pool.submit(work, attempt.task)] = attempt
            if not running:
                if queue.empty:
                    return
                time.sleep(queue.seconds or 0)
                continue
            # With a full window, a task whose pause is over cannot be submitted: its pause must not end the wait.
            seconds = queue.seconds if len(running) < pool.window and not queue.suspects else None
            timeout = POLL_SECONDS if seconds is None else min(seconds, POLL_SECONDS)
            done = wait(running, timeout=timeout, return_when=FIRST_COMPLETED).done
            pool.check_workers(bool(done))
            for future in done:
                attempt, result = running.pop(future), _collect(future)
                if isinstance(result, TaskFailure):
                    queue.put_back(attempt, result)
                else:
                    yield attempt.task, result


def _collect(future: Future[Result | TaskFailure]) -> Result | TaskFailure:
    """Return the result of a task. `work` returns its failures, so an exception means that the worker is gone."""
    try:
        return future.result()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        kind = _BrokenPool if isinstance(error, BrokenExecutor) else TaskFailure
        return kind(WorkerError(f"a worker died ({text}); killed, or out of memory?"), transient=True)


@dataclass(frozen=True)
class _Attempt(Generic[Task]):
    """A task and its failures so far; `alone`: no other task may run beside it, so that a death is its own."""

    task: Task
    failures: int = 0
    alone: bool = False


class _Queue(Generic[Task]):
    """Tasks to run: failed ones whose pause is over, then new ones.

    Attributes:
        suspects: tasks that ran when a pool died. They go before all others, one at a time.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._new = (_Attempt(task) for task in tasks)
        self._paused: list[tuple[float, int, _Attempt[Task]]] = []
        self._numbers = itertools.count()
        self._exhausted = False
        self.suspects = deque[_Attempt[Task]]()

    def take(self, count: int, *, idle: bool) -> Iterator[_Attempt[Task]]:
        """Yield up to `count` tasks; while there are suspects, one of them and only if `idle`: nothing else runs."""
        if self.suspects:
            yield from [self.suspects.popleft()] if idle else []
            return
        for _ in range(count):
            if self._paused and self._paused[0][0] <= time.monotonic():
                yield heapq.heappop(self._paused)[2]
            elif attempt := next(self._new, None):
                yield attempt
            else:
                self._exhausted = True
                return

    @property
    def seconds(self) -> float | None:
        """Seconds until the next pause is over; None if no task is paused."""
        return max(0.0, self._paused[0][0] - time.monotonic()) if self._paused else None

    @property
    def empty(self) -> bool:
        return self._exhausted and not self._paused and not self.suspects

    def put_back(self, attempt: _Attempt[Task], failure: TaskFailure) -> None:
        """Queue a failed task again, or raise its error."""
        broken, failures = isinstance(failure, _BrokenPool), attempt.failures + 1
        if broken and not attempt.alone:
            self.suspects.append(replace(attempt, alone=True))
            return
        if not failure.transient:
            raise failure.error
        if failures == ATTEMPTS:
            raise type(failure.error)(f"{failure.error}; {attempt.task} failed {failures} times")
        if broken:  # it ran alone, so no other task waits for this pause
            time.sleep(pause(failures))
            self.suspects.appendleft(replace(attempt, failures=failures))
        else:
            due = time.monotonic() + pause(failures)
            heapq.heappush(self._paused, (due, next(self._numbers), _Attempt(attempt.task, failures)))


class _Pool:
    """The current executor of an engine.

    Args:
        running: attempts that run, by their futures; cancelled at the end.

    Attributes:
        window: tasks submitted and not done: two for each worker, so that none is idle and few start needlessly.
    """

    def __init__(self, engine: JobEngine, running: Mapping[Future[Any], _Attempt[Any]]) -> None:
        self._engine, self._running = engine, running
        self._executor = engine.open()
        self.window = 2 * max(1, engine.count(self._executor))
        self._last_seen = time.monotonic()

    def close(self) -> None:
        for future in self._running:
            future.cancel()
        self._shutdown(wait=True)

    def _shutdown(self, *, wait: bool) -> None:
        if self._engine.owned:
            self._executor.shutdown(wait, cancel_futures=True)

    def submit(self, work: Callable[[Task], Result | TaskFailure], task: Task) -> Future[Result | TaskFailure]:
        try:
            return self._executor.submit(work, task)
        except BrokenExecutor:
            self._shutdown(wait=False)
            self._executor = self._engine.open()
            return self._executor.submit(work, task)

    def check_workers(self, progress: bool) -> None:
        """WorkerError if there has been neither progress nor a worker for `NO_WORKER_SECONDS`."""
        if not progress:
            with contextlib.suppress(Exception):  # any type, as engines raise their own: no answer, no workers
                progress = self._engine.count(self._executor) > 0
        if progress:
            self._last_seen = time.monotonic()
        elif time.monotonic() - self._last_seen > NO_WORKER_SECONDS:
            tasks = ", ".join(str(each.task) for each in itertools.islice(self._running.values(), 4))
            raise WorkerError(
                f"engine: no worker for {NO_WORKER_SECONDS:.0f} s (killed, or out of memory?), running: {tasks}; "
                "start workers and give the same command again"
            )


_stop_requested = threading.Event()


def request_stop() -> None:
    """Make every later `check_stop` in this process raise."""
    _stop_requested.set()


def check_stop() -> None:
    """CancelledReadError if `request_stop` was called in this process."""
    if _stop_requested.is_set():
        raise CancelledReadError("stopped: another part failed, or the job was interrupted")
