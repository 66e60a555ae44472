"""Run tasks on an engine: a bounded window of running tasks, retries, and a stop at the first permanent failure.

    queue ──submit──► running, at most `window` ──► result
      ▲                   │
      ├─ after a pause ───┼─ transient failure, or the worker died: at most `ATTEMPTS` attempts
      └─ one at a time ───┘  the whole pool died, so the task that killed it is unknown

`task_queue` decides. Tasks must be idempotent: a task may run twice, even at the same time. A lost worker or node
costs the attempts of its tasks. A cluster whose scheduler is gone, or does not answer for half a minute, ends the job
with one error; the same job continues on another cluster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Generic, TypeVar

from binidx import errors
from binidx.jobs.task_queue import Attempt, JobEngine, PoolLoss, Task, TaskFailure, TaskQueue
from binidx.registries import Registrations
from binidx.storage.effects import Call, CallInThread, Log, Now, Sleep, Steps, WaitForFutures, run
from binidx.storage.requests.cancellation import current_scope

Result = TypeVar("Result")

INFO, WARNING = 20, 30
"""Levels of `logging`, which machines do not import."""


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
        WorkerError: one task lost its worker `ATTEMPTS` times, there was no worker for `no_worker_seconds`, or a
            worker of a cluster has another binidx.
        UnreachableError: the cluster's scheduler is gone, or did not answer for `lost_seconds`.
    """
    runner = TaskRunner(work, tasks, engine)
    try:
        while (ended := run(runner.turn())) is not None:
            yield from ended
    finally:
        run(runner.close())


class TaskRunner(Generic[Task, Result]):
    """Shell of a `TaskQueue`: turns until all tasks have ended, then `close`, also after an error.

    Args:
        work, tasks, engine: as in `run_tasks`.
        estimate: of the tasks, for people; logged when the engine has been opened.
    """

    def __init__(
        self, work: Callable[[Task], Result | TaskFailure], tasks: Iterable[Task], engine: JobEngine, estimate: str = ""
    ) -> None:
        self._work, self._tasks, self._engine, self._estimate = work, tasks, engine, estimate
        self._queue: TaskQueue[Task] | None = None
        self._executor: Executor | None = None
        self._running = dict[Future[Result | TaskFailure], Attempt[Task]]()
        self._answer: Future[int] | None = None

    def turn(self) -> Steps[list[tuple[Task, Result]] | None]:
        """Submit tasks, and wait for the first one to end; return those that have ended, None if there is none left.

        Raises:
            BinidxError: as `run_tasks`.
        """
        if self._queue is None:
            self._executor = yield from Call(self._engine.open)
            if self._estimate:
                yield from Log(__name__, INFO, self._estimate)
            count = yield from Call(self._engine.count, (self._executor,))
            self._queue = TaskQueue(self._tasks, self._engine, count, (yield from Now()))
        queue = self._queue
        for attempt in queue.take((yield from Now())):
            yield from self._submit(queue, attempt)
        if queue.error is not None:
            raise queue.error
        if queue.is_over:
            return None
        seconds = queue.seconds((yield from Now()))
        if not self._running:
            yield from Sleep(seconds)
            return []
        done = yield from WaitForFutures([*self._running], seconds)
        yield from self._look(queue, bool(done))
        ended = [(self._running.pop(future), _collect(future)) for future in done]
        now = yield from Now()
        for attempt, result in ended:
            queue.end(attempt, result if isinstance(result, TaskFailure) else None, now)
        return [(attempt.task, result) for attempt, result in ended if not isinstance(result, TaskFailure)]

    def close(self) -> Steps[None]:
        """Stop all tasks, and the executor if it is the engine's."""
        if self._engine.owned and self._executor is not None:
            yield from Call(functools.partial(self._executor.shutdown, cancel_futures=True))
            return
        for future in self._running:
            future.cancel()

    def _submit(self, queue: TaskQueue[Task], attempt: Attempt[Task]) -> Steps[None]:
        """Submit a task; open another pool if this one is lost."""
        assert self._executor is not None
        try:
            arguments = call_work, Registrations(), self._work, attempt.task
            self._running[(yield from Call(self._executor.submit, arguments))] = attempt
        except BrokenExecutor as error:
            queue.refuse(attempt, _lost_worker(error), (yield from Now()))
            if self._engine.owned:
                yield from Call(functools.partial(self._executor.shutdown, wait=False, cancel_futures=True))
            self._executor = yield from Call(self._engine.open)

    def _look(self, queue: TaskQueue[Task], progress: bool) -> Steps[None]:
        """Count the workers now and then."""
        answer: int | BaseException | None = None
        if queue.asks(progress, (yield from Now())):
            self._answer = yield from CallInThread(self._engine.count, (self._executor,))
        if self._answer is not None and (yield from WaitForFutures([self._answer], 0.0 if progress else 1.0)):
            answer, self._answer = self._answer.exception() or self._answer.result(), None
        if notice := queue.look(progress, answer, (yield from Now())):
            yield from Log(__name__, WARNING, notice)


def _collect(future: Future[Result | TaskFailure]) -> Result | TaskFailure:
    """Return the result of a task. `work` returns its failures, so an exception means that the worker was lost."""
    try:
        return future.result()
    except ImportError as error:  # of `worker_calls`, in Ray's with a traceback before it; or of an executor's own
        text = str(error).splitlines()[-1].removeprefix("ImportError: ")
        return TaskFailure(errors.WorkerError(text), transient=False)
    except Exception as error:
        return _lost_worker(error)


def _lost_worker(error: Exception) -> TaskFailure:
    """Return the failure of a task whose worker, or pool, was lost."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    kind = PoolLoss if isinstance(error, BrokenExecutor) else TaskFailure
    return kind(errors.WorkerError(f"a worker died ({text}); killed, or out of memory?"), transient=True)


def call_work(_: Registrations, work: Callable[[Task], Result], task: Task) -> Result:
    """Return `work(task)` in a process that has unpickled the driver's registrations. Ray takes only functions."""
    return work(task)


_is_stopping = False


def request_stop() -> None:
    """Make every later `check_stop` in this process raise."""
    global _is_stopping
    _is_stopping = True


def check_stop() -> None:
    """Raise CancelledReadError if the task of this thread was stopped, or `request_stop` called in this process."""
    if _is_stopping or ((scope := current_scope()) is not None and scope.cancelled):
        raise errors.CancelledReadError("stopped: another part failed, or the job was interrupted")
