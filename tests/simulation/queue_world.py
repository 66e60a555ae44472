"""Worlds of a queue of tasks alone: each event is compared with a model of what may run, and of what ends the job."""

from __future__ import annotations

import math
import random

from binidx.errors import BinidxError, FormatError, StorageError, UnreachableError, WorkerError
from binidx.jobs.task_queue import ATTEMPTS, Attempt, JobEngine, PoolLoss, TaskFailure, TaskQueue

PAUSE_SECONDS = 2.0
"""Pause after the first failure; the n-th is n times as long."""


class QueueWorld:
    """Queue of one seed, and its model.

    Attributes:
        failures, due: of each task, as the model counts them.
        suspects: tasks that ran when the pool was lost, until they have run alone.
        named: `seen` of the last notice that there is no worker.
        seen, asked: last sign of life of the workers, and begin of the last count; `is_asking`: it has no answer yet.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.num_tasks, self.now = self.draw.randrange(1, 12), self.draw.choice([0.0, 1e6])
        self.engine = JobEngine(
            *(None, None),  # type: ignore[arg-type]
            central=self.draw.random() < 0.5,
            pause=lambda failures: PAUSE_SECONDS * failures,
        )
        count = self.draw.randrange(4)
        self.window, self.seen, self.asked, self.is_asking = 2 * max(1, count), self.now, -math.inf, False
        self.failures, self.due = [0] * self.num_tasks, [-math.inf] * self.num_tasks
        self.suspects, self.done, self.new = set[int](), set[int](), set(range(self.num_tasks))
        self.num_refused, self.refused_share = 0, self.draw.choice([0.0, 0.05, 0.7])
        self.named: float | None = None
        self.is_dead = self.draw.random() < 0.2
        self.queue = TaskQueue(range(self.num_tasks), self.engine, count, self.now)
        self.running = list[Attempt[int]]()
        self.error: type[BinidxError] | None = None

    def play(self) -> None:
        """Do turns until the job has ended, and check it."""
        for _ in range(2_000):
            self.turn()
            if self.queue.error is not None or self.queue.is_over:
                break
        found = self.queue.error
        assert type(found) is (self.error or type(None)), f"{found!r}, needed {self.error}"
        assert found is not None or self.done == {*range(self.num_tasks)}
        assert found is None or self.queue.take(self.now + 1_000.0) == []

    def turn(self) -> None:
        """Take tasks, wait, let some of the running ones end, and count the workers."""
        queue, draw = self.queue, self.draw
        self.check_taken(queue.take(self.now))
        if queue.is_over:
            assert not self.running
            return None
        if self.running and draw.random() < self.refused_share:
            return self.refuse()
        seconds = queue.seconds(self.now)
        is_full = len(self.running) >= (1 if self.suspects else self.window)
        waiting = [due for task, due in enumerate(self.due) if due > self.now and self.is_free(task)]
        assert is_full or math.isclose(seconds, min([10.0, *(due - self.now for due in waiting)], default=10.0))
        assert not is_full or seconds == 10.0
        self.now += seconds if not self.running else draw.choice([0.0, 0.1, seconds, 3 * seconds])
        ended = (
            [attempt for attempt in self.running if draw.random() < 0.5]
            if draw.random() < 0.8 and not self.is_dead
            else []
        )
        self.look(bool(ended))
        is_lost = bool(ended) and draw.random() < 0.15
        alone = len(self.running) == 1 and self.running[0].task in self.suspects
        for attempt in [*self.running] if is_lost else ended:
            self.end(attempt, is_lost, alone)
        return None

    def is_free(self, task: int) -> bool:
        """Return whether a task may run next: suspects come before all others."""
        return (task in self.suspects or not self.suspects) and task not in self.done

    def check_taken(self, taken: list[Attempt[int]]) -> None:
        """Check that as many tasks run as may, and none that may not."""
        before = len(self.running)
        self.running += taken
        self.new -= {attempt.task for attempt in taken}
        for attempt in taken:
            assert attempt.task not in self.done
            assert self.due[attempt.task] <= self.now, "its pause is not over"
            assert attempt.failures == self.failures[attempt.task], "blamed for a failure of others"
        running = [attempt.task for attempt in self.running]
        assert len({*running}) == len(running)
        assert [attempt.task for attempt in self.queue.running] == running
        if self.suspects & {*running}:
            assert len(running) == 1, "a suspect has neighbours"
        if self.suspects and taken:
            assert before == 0
            assert running[0] in self.suspects
        assert len(running) <= max(before, self.window)
        ready = [
            task for task, due in enumerate(self.due) if due <= self.now and self.is_free(task) and task not in running
        ]
        if self.suspects:
            first = not running and [task for task in ready if task == self.next_suspect]
            assert not first, "a suspect could run"
        else:
            assert not ready or len(running) >= self.window, "more tasks could run"

    @property
    def next_suspect(self) -> int | None:
        """Return the suspect that has failed last: it stays the first one until its pause is over."""
        return max(self.suspects, key=lambda task: self.due[task], default=None)

    def refuse(self) -> None:
        """Let the pool take no task."""
        attempt = self.running.pop()
        self.num_refused += 1
        self.due[attempt.task] = -math.inf
        if self.num_refused == ATTEMPTS:
            self.error = WorkerError
        self.queue.refuse(attempt, TaskFailure(WorkerError("broken"), True), self.now)

    def end(self, attempt: Attempt[int], is_lost: bool, alone: bool) -> None:
        """End a running task in one of the ways."""
        draw, task = self.draw, attempt.task
        self.running.remove(attempt)
        self.num_refused = 0
        if is_lost:
            failure: TaskFailure | None = PoolLoss(WorkerError("lost"), True)
        else:
            kinds = [None, None, TaskFailure(StorageError("503"), True), TaskFailure(FormatError("bad"), False)]
            failure = draw.choices(kinds, [50, 50, 100 if task == 3 else 20, 1])[0]
        self.queue.end(attempt, failure, self.now)
        if failure is None:
            self.done.add(task)
            self.suspects.discard(task)
        elif is_lost and not alone:
            self.suspects.add(task)
        else:
            self.failures[task] += 1
            self.due[task] = self.now + PAUSE_SECONDS * self.failures[task]
            if not is_lost:
                self.suspects.discard(task)
            if not failure.transient:
                self.error = FormatError
            elif self.failures[task] == ATTEMPTS:
                self.error = type(failure.error)
                assert f"; {task} failed {ATTEMPTS} times" in str(self.queue.error)

    def look(self, progress: bool) -> None:
        """Count the workers now and then; the cluster may not answer."""
        draw, answer = self.draw, None
        must_ask = not self.is_asking and (not progress or self.now > self.asked + 10.0)
        assert self.queue.asks(progress, self.now) == must_ask
        if must_ask:
            self.is_asking, self.asked = True, self.now
        if self.is_asking and draw.random() < (0.97 if self.is_dead else 0.7):
            counts = [0, 0, OSError("no")] if self.is_dead else [0, 0, 1, 2, 3, OSError("no")]
            answer = draw.choice([*counts, UnreachableError("gone") if progress else 0])
            answer = UnreachableError("gone") if draw.random() < 0.01 else answer
            self.is_asking = False
        self.now += draw.choice([0.0, 1.0])
        notice = self.queue.look(progress, answer, self.now)
        count = answer if isinstance(answer, int) else 0
        self.window = 2 * count or self.window
        self.seen = self.now if progress or count else self.seen
        alive = max(self.asked, self.seen) if self.engine.central else self.asked
        is_silent = self.is_asking and self.now - alive > 30.0
        if is_silent or (isinstance(answer, UnreachableError) and not progress):
            self.error = UnreachableError
        elif self.now - self.seen > 900.0:
            self.error = WorkerError
            assert all(str(attempt.task) in str(self.queue.error) for attempt in self.running[:4])
        assert self.queue.window == self.window
        must_name = (
            self.queue.error is None and answer == 0 and self.now - self.seen >= 10.0 and self.named != self.seen
        )
        self.named = self.seen if must_name else self.named
        assert (notice is not None) == must_name
        assert all(str(attempt.task) in (notice or str(attempt.task)) for attempt in self.running[:4])
