"""Run tasks on an engine: a bounded window of running tasks, retries, and a stop at the first permanent failure.

    queue ──submit──► running, at most `window` ──► result
      ▲                   │
      ├─ after a pause ───┼─ transient failure, or the worker died: at most `ATTEMPTS` attempts
      └─ one at a time ───┘  the whole pool died, so the task that killed it is unknown

Tasks must be idempotent: a task may run twice, even at the same time. A lost worker or node costs the attempts of its
tasks. A cluster whose scheduler is gone, or does not answer for half a minute, ends the job with one error; the same
job continues on another cluster.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from binidx import errors
from binidx.registries import Registrations
from binidx.storage.requests.scheduler import pause

ATTEMPTS = 5
"""Most attempts of one task. If the worker pool is lost while it runs several tasks, none of these attempts counts."""

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class JobEngine:
    """Engine on which tasks run, as two functions.

    Attributes:
        open: returns the Executor; called again after an executor broke.
        count: returns the number of tasks that an open executor runs at once; 0 if it has no worker at present.
        owned: whether the executor is shut down at the end; False for an executor of the caller.
        central: whether results pass through the process that counts the workers, so that each proves that it lives.
        poll_seconds: interval between two counts of the workers while no task ends.
        no_worker_seconds: longest time without any worker.
        pause: returns the seconds between a failure of a task and its next attempt, from the number of its failures.
        lost_seconds: longest time to answer a count of workers. Ray ends a driver that has not reached its head node
            for 60 seconds, with a message of its own; until then its workers go on and return results.
    """

    open: Callable[[], Executor]
    count: Callable[[Executor], int]
    owned: bool = True
    central: bool = True
    poll_seconds: float = 10.0
    no_worker_seconds: float = 900.0
    lost_seconds: float = 30.0
    pause: Callable[[int], float] = pause


@dataclass(frozen=True)
class TaskFailure:
    """Failure of a task, returned instead of raised: pickling an exception drops its attributes.

    Attributes:
        error: the error to raise; only its message crosses processes.
        transient: whether another attempt may succeed.
    """

    error: errors.BinidxError
    transient: bool


class _BrokenPool(TaskFailure):
    """The worker pool and all its running tasks were lost; usually one of the tasks caused it."""


def run_tasks(
    work: Callable[[Task], Result | TaskFailure], tasks: Iterable[Task], engine: JobEngine
) -> Generator[tuple[Task, Result], None, None]:
    """Run `work` on each task and yield (task, result) in the order of completion.

    Args:
        work: called in the workers; returns its failures as `TaskFailure`.
        tasks: taken from the iterable only as fast as they run.
        engine: engine on which the tasks run.

    Raises:
        BinidxError: a task failed permanently, or `ATTEMPTS` times; the other tasks are stopped.
        WorkerError: one task lost its worker `ATTEMPTS` times, or there was no worker for `no_worker_seconds`.
        UnreachableError: the cluster's scheduler is gone, or did not answer for `lost_seconds`.
    """
    queue, running = _Queue(tasks, engine.pause), dict[Future[Result | TaskFailure], _Attempt[Task]]()
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
            timeout = engine.poll_seconds if seconds is None else min(seconds, engine.poll_seconds)
            done = futures.wait(running, timeout=timeout, return_when=futures.FIRST_COMPLETED).done
            pool.check_workers(bool(done))
            for future in done:
                attempt, result = running.pop(future), _collect(future)
                if isinstance(result, TaskFailure):
                    queue.put_back(attempt, result)
                else:
                    yield attempt.task, result


def _collect(future: Future[Result | TaskFailure]) -> Result | TaskFailure:
    """Return the result of a task. `work` returns its failures, so an exception means that the worker was lost."""
    try:
        return future.result()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        kind = _BrokenPool if isinstance(error, BrokenExecutor) else TaskFailure
        return kind(errors.WorkerError(f"a worker died ({text}); killed, or out of memory?"), transient=True)


@dataclass(frozen=True)
class _Attempt(Generic[Task]):
    """Task, and its number of failures so far.

    `alone`: no other task runs at the same time, so if the worker pool is lost again, this task is the cause.
    """

    task: Task
    failures: int = 0
    alone: bool = False


class _Queue(Generic[Task]):
    """Tasks to run: failed ones whose pause is over, then new ones.

    Attributes:
        suspects: tasks that ran when a worker pool was lost. They run before all others, one at a time.
    """

    def __init__(self, tasks: Iterable[Task], pause: Callable[[int], float]) -> None:
        self._new, self._pause = (_Attempt(task) for task in tasks), pause
        self._paused: list[tuple[float, int, _Attempt[Task]]] = []
        self._numbers = itertools.count()
        self._exhausted = False
        self.suspects = deque[_Attempt[Task]]()

    def take(self, count: int, *, idle: bool) -> Iterator[_Attempt[Task]]:
        """Yield up to `count` tasks; while there are suspects only one of them, and only if `idle`, as no task runs."""
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
        """Queue a failed task again; raise its error if it is permanent or the last attempt's."""
        broken, failures = isinstance(failure, _BrokenPool), attempt.failures + 1
        if broken and not attempt.alone:
            self.suspects.append(replace(attempt, alone=True))
            return
        if not failure.transient:
            raise failure.error
        if failures == ATTEMPTS:
            raise type(failure.error)(f"{failure.error}; {attempt.task} failed {failures} times")
        if broken:  # it ran alone, so no other task waits for this pause
            time.sleep(self._pause(failures))
            self.suspects.appendleft(replace(attempt, failures=failures))
        else:
            due = time.monotonic() + self._pause(failures)
            heapq.heappush(self._paused, (due, next(self._numbers), _Attempt(attempt.task, failures)))


class _Pool:
    """The current executor of an engine.

    Args:
        running: future -> attempt, of the submitted tasks; they are cancelled at the end.

    Attributes:
        window: most tasks submitted and not done: two for each worker, so that no worker is idle.
    """

    def __init__(self, engine: JobEngine, running: Mapping[Future[Any], _Attempt[Any]]) -> None:
        self._engine, self._running = engine, running
        self._executor = engine.open()
        self.window = 2 * max(1, engine.count(self._executor))
        self._last_seen = time.monotonic()
        self._answer: Future[int] | None = None
        self._asked = 0.0

    def close(self) -> None:
        if self._engine.owned:
            self._executor.shutdown(cancel_futures=True)
            return
        for future in self._running:
            future.cancel()

    def submit(self, work: Callable[[Task], Result | TaskFailure], task: Task) -> Future[Result | TaskFailure]:
        registered = Registrations()
        try:
            return self._executor.submit(call_work, registered, work, task)
        except BrokenExecutor:
            if self._engine.owned:
                self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = self._engine.open()
            return self._executor.submit(call_work, registered, work, task)

    def check_workers(self, progress: bool) -> None:
        """Count the workers now and then; raise the errors of `run_tasks` if there was no progress for too long."""
        if self._answer is None and (not progress or time.monotonic() > self._asked + self._engine.poll_seconds):
            self._answer, self._asked = run_in_thread(lambda: self._engine.count(self._executor)), time.monotonic()
        if self._answer is not None and futures.wait([self._answer], timeout=0 if progress else 1).done:
            error = self._answer.exception()
            if isinstance(error, errors.UnreachableError) and not progress:
                raise error
            count = 0 if error else self._answer.result()  # other errors of an engine: no worker
            if count:
                self.window, progress = 2 * count, True
            self._answer = None
        now, engine = time.monotonic(), self._engine
        if progress:
            self._last_seen = now
        silent_since = max(self._asked, self._last_seen) if engine.central else self._asked
        if self._answer is not None and now - silent_since > engine.lost_seconds:
            problem = f"no answer of the cluster for {engine.lost_seconds:.0f} s"
            raise errors.UnreachableError(f"engine: {problem}; give the same command when it is back")
        if now - self._last_seen > engine.no_worker_seconds:
            tasks = ", ".join(str(attempt.task) for attempt in itertools.islice(self._running.values(), 4))
            problem = f"no worker for {engine.no_worker_seconds:.0f} s (killed, or out of memory?), running: {tasks}"
            raise errors.WorkerError(f"engine: {problem}; start workers and give the same command again")


def call_work(_: Registrations, work: Callable[[Task], Result], task: Task) -> Result:
    """Return `work(task)` in a process that has unpickled the driver's registrations. Ray takes only functions."""
    return work(task)


def run_in_thread(call: Callable[[], Result]) -> Future[Result]:
    """Run a call that may never return in a thread that does not keep the process alive; return its future."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


_stop_requested = threading.Event()


def request_stop() -> None:
    """Make every later `check_stop` in this process raise."""
    _stop_requested.set()


def check_stop() -> None:
    """Raise CancelledReadError if `request_stop` was called in this process."""
    if _stop_requested.is_set():
        raise errors.CancelledReadError("stopped: another part failed, or the job was interrupted")
