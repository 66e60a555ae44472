"""Queue of the tasks of a job and its count of workers: a machine, which `runner` carries out.

    event                              state                                    action
    turn                               room: window - running tasks             submit paused tasks (if due), new ones
    a task is done                     not running                              its result
    it failed in passing               failures + 1, paused                     none; at `ATTEMPTS` failures the error
    it failed permanently                                                       the error
    the pool was lost                  each running task is a suspect           suspects run first, one at a time
    the pool was lost with a suspect   failures + 1, paused: it is the cause    none; at `ATTEMPTS` failures the error
    the pool takes no task             the task is queued first; refusals + 1   open a pool; at `ATTEMPTS` the error
    a count of workers                 window: two tasks for each worker        none; without progress, as `look`

A worker that is lost alone is a failure in passing of its task. A suspect has no neighbours, not even while it is the
last one: a task that loses a pool would be taken for another.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Generic, TypeVar

from binidx import errors
from binidx.storage.requests.scheduler import pause

ATTEMPTS = 5
"""Most attempts of one task. If the worker pool is lost while it runs several tasks, none of these attempts counts."""

Task = TypeVar("Task")


@dataclass(frozen=True)
class JobEngine:
    """Engine on which tasks run, as two functions.

    Attributes:
        open: returns the Executor; called again after an executor broke.
        count: returns the number of tasks that an open executor runs at once; 0 if it has no worker at present. Raises
            WorkerError for a worker that can never carry out a task.
        owned: whether the executor is shut down at the end; False for an executor of the caller.
        central: whether results pass through the process that counts the workers, so that each proves that it lives.
        poll_seconds: interval between two counts of the workers while no task ends.
        no_worker_seconds: longest time without any worker.
        name: name of the engine, for messages.
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
    name: str = "engine"
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


class PoolLoss(TaskFailure):
    """The worker pool and all its running tasks were lost; usually one of the tasks caused it."""


@dataclass(eq=False)
class Attempt(Generic[Task]):
    """Task, and its number of failures so far.

    Attributes:
        due: end of its pause.
        alone: whether no other task runs at the same time, so if the pool is lost again, this task is the cause.
    """

    task: Task
    failures: int = 0
    due: float = -math.inf
    alone: bool = False


class TaskQueue(Generic[Task]):
    """Tasks of a job: new, paused, suspected, and running ones; and the workers, as far as the engine counts them.

    Args:
        tasks: taken from the iterable only as fast as they run.
        engine: its limits are used, not its functions.
        num_workers: first count of the workers.
        now: time in seconds, as in all methods.

    Attributes:
        running: submitted attempts, in their order.
        window: most running tasks: two for each worker, so that no worker is idle.
        error: ends the job.
    """

    def __init__(self, tasks: Iterable[Task], engine: JobEngine, num_workers: int, now: float) -> None:
        self._new, self._engine = (Attempt(task) for task in tasks), engine
        self._paused: list[tuple[float, int, Attempt[Task]]] = []
        self._suspects = deque[Attempt[Task]]()
        self._numbers = itertools.count()
        self._is_exhausted, self._refusals = False, 0
        self._seen, self._asked, self._is_asking = now, -math.inf, False
        self._named = -math.inf  # `_seen` when a notice was returned
        self.running = dict[Attempt[Task], None]()
        self.window = 2 * max(1, num_workers)
        self.error: errors.BinidxError | None = None

    @property
    def is_over(self) -> bool:
        return self._is_exhausted and not (self.running or self._paused or self._suspects)

    @property
    def room(self) -> int:
        """Number of tasks that may be submitted now."""
        isolates = self._suspects or any(attempt.alone for attempt in itertools.islice(self.running, 1))
        return (1 if isolates else self.window) - len(self.running)

    def take(self, now: float) -> list[Attempt[Task]]:
        """Return the tasks to submit, none after an error; they run from now on."""
        taken = list[Attempt[Task]]()
        while self.error is None and self.room > 0 and (attempt := self._next(now)) is not None:
            self.running[attempt] = None
            taken.append(attempt)
        return taken

    def seconds(self, now: float) -> float:
        """Return the seconds until the next turn, unless a task ends before."""
        dues = [attempt.due for attempt in itertools.islice(self._suspects, 1)] or [due for due, *_ in self._paused[:1]]
        # With a full window, a task whose pause is over cannot be submitted: its pause must not end the wait.
        return min([self._engine.poll_seconds, *(max(0.0, due - now) for due in dues if self.room > 0)])

    def end(self, attempt: Attempt[Task], failure: TaskFailure | None, now: float) -> None:
        """Note the end of a running task, or its failure."""
        del self.running[attempt]
        self._refusals, is_lost = 0, isinstance(failure, PoolLoss)
        if failure is None:
            return
        if is_lost and not attempt.alone:
            attempt.alone = True
            self._suspects.append(attempt)
            return
        attempt.failures, attempt.alone = attempt.failures + 1, is_lost
        if not failure.transient:
            self.error = failure.error
        elif attempt.failures == ATTEMPTS:
            text = f"{failure.error}; {attempt.task} failed {ATTEMPTS} times"
            self.error = type(failure.error)(text)
        else:
            self._queue(attempt, now + self._engine.pause(attempt.failures))

    def refuse(self, attempt: Attempt[Task], failure: TaskFailure, now: float) -> None:
        """Note that the pool did not take a task, as it is lost."""
        del self.running[attempt]
        self._refusals += 1
        self._queue(attempt, now)
        if self._refusals == ATTEMPTS:
            self.error = failure.error

    def asks(self, progress: bool, now: float) -> bool:
        """Return whether to count the workers now.

        Args:
            progress: whether a task has ended in this turn.
        """
        if self._is_asking or (progress and now <= self._asked + self._engine.poll_seconds):
            return False
        self._asked, self._is_asking = now, True
        return True

    def look(self, progress: bool, answer: int | BaseException | None, now: float) -> str | None:
        """Note whether a task has ended in this turn, and a count of the workers; the job ends if all is silent.

        Args:
            answer: number of workers, or the error of the count; None: no answer has come.

        Returns:
            A notice that there has been no worker for `poll_seconds`, once until there is one.
        """
        engine, count = self._engine, answer if isinstance(answer, int) else 0  # other errors of an engine: no worker
        if answer is not None:
            self._is_asking = False
        if count:
            self.window = 2 * count
        if progress or count:
            self._seen = now
        silent_since, silence = max(self._asked, self._seen) if engine.central else self._asked, now - self._seen
        tasks = ", ".join(str(attempt.task) for attempt in itertools.islice(self.running, 4))
        if isinstance(answer, errors.WorkerError) or (isinstance(answer, errors.UnreachableError) and not progress):
            self.error = answer
        elif self._is_asking and now - silent_since > engine.lost_seconds:
            problem = f"no answer of the cluster for {engine.lost_seconds:.0f} s"
            self.error = errors.UnreachableError(f"{engine.name}: {problem}; give the same command when it is back")
        elif silence > engine.no_worker_seconds:
            problem = f"no worker for {engine.no_worker_seconds:.0f} s (killed, or out of memory?), running: {tasks}"
            self.error = errors.WorkerError(f"{engine.name}: {problem}; start workers and give the same command again")
        elif answer == 0 and silence >= engine.poll_seconds and self._named < self._seen:
            self._named = self._seen
            way = f"start workers; this command waits for one for {engine.no_worker_seconds:.0f} s"
            return f"{engine.name}: no worker for {silence:.0f} s, waiting: {tasks}; {way}"
        return None

    def _next(self, now: float) -> Attempt[Task] | None:
        """Return the first task that can run: a suspect, else one whose pause is over, else a new one."""
        if self._suspects:
            return self._suspects.popleft() if self._suspects[0].due <= now else None
        if self._paused and self._paused[0][0] <= now:
            return heapq.heappop(self._paused)[2]
        attempt = next(self._new, None)
        self._is_exhausted = attempt is None
        return attempt

    def _queue(self, attempt: Attempt[Task], due: float) -> None:
        """Queue a task again: a suspect before the others, as it is to run alone."""
        attempt.due = due
        if attempt.alone:
            self._suspects.appendleft(attempt)
        else:
            heapq.heappush(self._paused, (due, next(self._numbers), attempt))
