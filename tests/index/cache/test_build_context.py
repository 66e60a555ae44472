"""Threads of a build: never more than its budget, idle ones lent, short work one at a time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from binidx.index.cache.build_context import BuildContext, ThreadBudget


def test_without_a_budget_the_configured_threads_are_used() -> None:
    with BuildContext().threads(5) as threads:
        assert threads == 5


def test_a_single_worker_gets_all_threads_and_gives_them_back() -> None:
    budget = ThreadBudget(4)
    for _ in range(2):
        with budget.worker() as worker, BuildContext(worker=worker).threads(99) as threads:
            assert threads == 4
            with worker.borrow_threads() as nested:
                assert nested == 1


def test_workers_that_wait_work_beside_each_other_within_the_number() -> None:
    """Each waits for all four to be there: if they ran one at a time, they would wait for ever."""
    budget, together = ThreadBudget(4), threading.Barrier(4, timeout=300)

    def work(_: int) -> int:
        with budget.worker() as worker:
            together.wait()
            with worker.borrow_threads() as threads:
                together.wait()
                return threads

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(8))) == [1] * 8


def test_of_many_waiting_workers_no_more_build_than_there_are_threads() -> None:
    budget, waiting, at_work, most = ThreadBudget(3), threading.Barrier(16, timeout=300), [0], [0]

    def work(_: int) -> None:
        worker = budget.waiter()
        waiting.wait()
        with worker.borrow_threads() as threads:
            at_work[0] += threads
            most[0] = max(most[0], at_work[0])
            time.sleep(0.001)
            with worker.borrow_threads() as nested:
                assert nested >= 1
            at_work[0] -= threads

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(32)))
    assert most[0] == 3
    with budget.worker() as worker, worker.borrow_threads() as threads:
        assert threads == 3


def test_short_work_is_done_one_at_a_time() -> None:
    """Of 300 turns of about no time none meets another, unless the machine stops one for a millisecond."""
    budget, at_work, met = ThreadBudget(8), [0], [0]

    def work(_: int) -> None:
        with budget.worker():
            at_work[0] += 1
            met[0] += at_work[0] > 1
            time.sleep(0)
            at_work[0] -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(300)))
    assert met[0] < 150


def test_an_error_gives_all_threads_back() -> None:
    budget = ThreadBudget(2)
    for _ in range(3):
        try:
            with budget.worker() as worker, worker.borrow_threads():
                raise KeyError
        except KeyError:
            pass
    with budget.worker() as worker, worker.borrow_threads() as threads:
        assert threads == 2
