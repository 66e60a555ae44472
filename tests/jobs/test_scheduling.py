"""The driver: any Executor, a bounded window, what fails in passing again, what fails for good at once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from binidx.errors import FormatError, StorageError, UnreachableError, WorkerError
from binidx.jobs import task_queue
from binidx.jobs.runner import run_tasks
from binidx.jobs.task_queue import ATTEMPTS, PoolLoss, TaskFailure, TaskQueue

JobEngine = partial(task_queue.JobEngine, pause=lambda failures: 0.001 * failures)


def threads(count: int) -> task_queue.JobEngine:
    return JobEngine(lambda: ThreadPoolExecutor(count), lambda executor: count)


def test_every_task_is_done_once_and_told() -> None:
    assert sorted(run_tasks(lambda task: task * 2, range(100), threads(3))) == [(task, task * 2) for task in range(100)]
    assert list(run_tasks(lambda task: task, [], threads(3))) == []


def test_tasks_are_submitted_only_as_fast_as_they_are_done() -> None:
    taken, done = 0, 0

    def tasks() -> Any:
        nonlocal taken
        for task in range(50):
            taken += 1
            assert taken - done <= 2 * 2
            yield task

    for _ in run_tasks(lambda task: task, tasks(), threads(2)):
        done += 1
    assert (taken, done) == (50, 50)


def test_what_fails_in_passing_is_tried_again_and_in_the_end_given_up() -> None:
    tries: dict[int, int] = {}

    def work(task: int) -> int | TaskFailure:
        tries[task] = tries.get(task, 0) + 1
        return TaskFailure(StorageError("503 SlowDown"), True) if tries[task] < task else task

    assert sorted(run_tasks(work, range(1, ATTEMPTS + 1), threads(2))) == [
        (task, task) for task in range(1, ATTEMPTS + 1)
    ]
    assert tries == {task: task for task in range(1, ATTEMPTS + 1)}
    with pytest.raises(StorageError, match=f"503 SlowDown; {ATTEMPTS + 1} failed {ATTEMPTS} times"):
        list(run_tasks(work, [ATTEMPTS + 1], threads(2)))


def test_a_full_window_is_waited_for_also_when_a_pause_is_over() -> None:
    tries: list[int] = []

    def work(task: int) -> int | TaskFailure:
        tries.append(task)
        if tries == [0]:
            return TaskFailure(StorageError("503 SlowDown"), True)
        time.sleep(0.4)
        return task

    began = time.thread_time()
    assert sorted(task for task, _ in run_tasks(work, range(3), threads(1))) == list(range(3))
    assert time.thread_time() - began < 0.3


def test_the_first_failure_for_good_stops_all() -> None:
    started = []

    def work(task: int) -> int | TaskFailure:
        started.append(task)
        time.sleep(0.001)
        return TaskFailure(FormatError("bad line"), False) if task == 10 else task

    with pytest.raises(FormatError, match="bad line"):
        list(run_tasks(work, range(1000), threads(2)))
    assert max(started) < 20


def test_who_stops_listening_stops_the_work() -> None:
    started = []
    found = run_tasks(started.append, range(1000), threads(2))
    next(found)
    found.close()
    assert len(started) < 20


def test_a_cluster_without_workers_is_waited_for_and_not_for_ever() -> None:
    begin, looks = threading.Event(), 0

    def work(task: int) -> int:
        begin.wait()
        return task

    def none_yet(executor: Executor) -> int:
        nonlocal looks
        looks += 1
        if looks == 200:
            begin.set()
        return 0

    assert sorted(
        run_tasks(work, range(4), JobEngine(lambda: ThreadPoolExecutor(2), none_yet, poll_seconds=0.001))
    ) == [(n, n) for n in range(4)]
    for answers in ([2, 2, 0], [2, 2]):  # then none: whoever was asked is gone, too
        counts = itertools.chain(answers, itertools.repeat(0) if 0 in answers else [])
        engine = JobEngine(Waiting, lambda _, counts=counts: next(counts), poll_seconds=0.001, no_worker_seconds=0.05)
        with pytest.raises(WorkerError, match=r"no worker for 0 s .*running: 0, 1, 2, 3; "):
            list(run_tasks(work, range(9), engine))


def test_workers_that_join_later_get_tasks() -> None:
    counts, together = iter([1]), threading.Barrier(8)
    engine = JobEngine(lambda: ThreadPoolExecutor(8), lambda executor: next(counts, 8), poll_seconds=0.001)

    def work(task: int) -> int:
        together.wait(300)
        return task

    assert len(list(run_tasks(work, range(16), engine))) == 16


class Waiting(ThreadPoolExecutor):
    """Does nothing."""

    def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        return Future()


class Breaking(Executor):
    """Breaks at its third task, and takes those in flight along."""

    def __init__(self) -> None:
        self.pending: list[Future[Any]] = []
        self.lock, self.given, self.closed = threading.Lock(), 0, False

    def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        if self.given == 3:
            raise BrokenExecutor("broken")
        future: Future[Any] = Future()
        self.given += 1
        self.pending.append(future)
        done = [future, work(*arguments)] if self.given < 3 else [future, None, BrokenExecutor("a worker was killed")]
        threading.Timer(0.02, self.end, done).start()
        return future

    def end(self, future: Future[Any], result: Any, error: BrokenExecutor | None = None) -> None:
        with self.lock:
            if error is not None:
                for each in self.pending:
                    each.set_exception(error)
                self.pending.clear()
            elif future in self.pending:
                self.pending.remove(future)
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.closed = True


def test_a_broken_executor_is_replaced_and_what_was_in_flight_is_done_again() -> None:
    opened: list[Any] = []

    def open_one() -> Executor:
        opened.append(Breaking() if len(opened) < 2 else ThreadPoolExecutor(2))
        return opened[-1]

    assert sorted(run_tasks(lambda task: task, range(20), JobEngine(open_one, lambda executor: 2))) == [
        (task, task) for task in range(20)
    ]
    assert len(opened) == 3
    assert all(each.closed for each in opened[:2])


def deadly(task: int) -> int:
    if task == 7:
        os._exit(9)
    time.sleep(0.2)
    return task


def test_the_error_names_the_task_that_kills_its_pool_and_none_of_its_neighbours() -> None:
    context = multiprocessing.get_context("fork")
    pools = JobEngine(lambda: ProcessPoolExecutor(4, context), lambda executor: 4)
    with pytest.raises(WorkerError, match=f"; 7 failed {ATTEMPTS} times"):
        list(run_tasks(deadly, range(8), pools))


def test_a_task_that_kills_its_worker_each_time_is_given_up() -> None:
    class Dead(Executor):
        def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(BrokenExecutor("a process was terminated abruptly"))
            return future

    with pytest.raises(WorkerError, match=f"a worker died .*out of memory.*; 7 failed {ATTEMPTS} times"):
        list(run_tasks(lambda task: task, [7], JobEngine(Dead, lambda executor: 1)))


def test_a_suspect_runs_alone_and_is_not_blamed_for_a_loss_that_others_may_have_caused() -> None:
    queue = TaskQueue(range(4), JobEngine(Waiting, lambda executor: 1), 1, now=0.0)
    loss = PoolLoss(WorkerError("a worker died"), True)
    for attempt in queue.take(0.0):
        queue.end(attempt, loss, 0.0)
    for task in (0, 1):  # the last suspect has no neighbour, too
        [suspect] = queue.take(0.0)
        assert (suspect.task, suspect.failures, queue.take(0.0)) == (task, 0, [])
        queue.end(suspect, None, 0.0)
    assert [attempt.task for attempt in queue.take(0.0)] == [2, 3]


def test_a_broken_executor_of_the_caller_is_an_error_with_its_reason() -> None:
    class Broken(ThreadPoolExecutor):
        def submit(self, work: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
            raise BrokenExecutor("a process was terminated abruptly")

    executor = Broken()
    with pytest.raises(WorkerError, match="a process was terminated abruptly"):
        list(run_tasks(lambda task: task, range(3), JobEngine(lambda: executor, lambda _: 1, owned=False)))


@pytest.mark.parametrize("answer", ["none", "gone"])
def test_a_cluster_that_is_gone_or_does_not_answer_is_one_error(answer: str) -> None:
    counted, never = iter([2]), threading.Event()

    def count(executor: Executor) -> int:
        for first in counted:
            return first
        if answer == "gone":
            raise UnreachableError("the scheduler is gone")
        never.wait()
        return 0

    try:
        with pytest.raises(UnreachableError, match="scheduler is gone" if answer == "gone" else "no answer"):
            list(
                run_tasks(lambda task: task, range(9), JobEngine(Waiting, count, poll_seconds=0.001, lost_seconds=0.0))
            )
    finally:
        never.set()


def test_results_do_not_prove_that_the_head_node_of_ray_lives() -> None:
    first, never = iter([2]), threading.Event()
    try:
        engine = JobEngine(
            lambda: ThreadPoolExecutor(2),
            lambda _: next(first, 0) or never.wait(),
            central=False,
            poll_seconds=0.01,
            lost_seconds=0.1,
        )
        with pytest.raises(UnreachableError, match="no answer of the cluster"):
            for _ in run_tasks(lambda task: task, itertools.count(), engine):
                pass
    finally:
        never.set()
