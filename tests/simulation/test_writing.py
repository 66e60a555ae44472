"""Background writing, simulated: whatever happens to processes and their store, rows are written once, and in time."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from simulation.writing_world import EXIT_SECONDS, play

from binidx.storage.task_schedule import TaskSchedule


@pytest.mark.parametrize("first", [0, 5, 10, 120])
def test_each_row_is_in_the_result_once_unless_a_kill_came_in_time(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 5):
        (folder := tmp_path / f"{seed}").mkdir()
        play(seed, folder)


def test_one_seed_is_one_trace(tmp_path: Path) -> None:
    first, second = (tmp_path / name for name in ("first", "second"))
    first.mkdir()
    second.mkdir()
    assert play(3, first).world.digest == play(3, second).world.digest


def task() -> Callable[[], object]:
    return lambda: None


def run_next(schedule: TaskSchedule, now: float) -> Callable[[], object] | None:
    scheduled = schedule.next(now)
    return None if scheduled is None else scheduled.task


def test_tasks_run_in_the_order_in_which_they_are_due() -> None:
    schedule, repeated, once, token = TaskSchedule(), task(), task(), task()
    schedule.add(repeated, repeated, 5.0, 0.0)
    schedule.add(once, once, inf, 0.0)
    assert schedule.wait(2.0) == 3.0
    assert run_next(schedule, 4.9) is None
    schedule.receive(once, 4.0)
    schedule.receive(token, 4.5)
    schedule.receive(token, 4.6)
    assert [run_next(schedule, 5.0) for _ in range(4)] == [once, token, repeated, None]
    assert schedule.wait(5.0) == 5.0


def test_a_repeated_task_leaves_with_its_object_when_it_has_succeeded() -> None:
    schedule, repeated = TaskSchedule(), task()
    schedule.add(repeated, repeated, 5.0, 0.0)
    schedule.receive(repeated, 1.0)
    failed = schedule.next(1.0)
    assert failed is not None
    assert not schedule.tasks
    schedule.fail(failed, 2.0)
    assert run_next(schedule, 6.9) is None
    assert run_next(schedule, 7.0) is repeated
    assert not schedule.tasks


def test_a_task_that_runs_once_is_not_run_again_when_it_fails() -> None:
    schedule, once = TaskSchedule(), task()
    schedule.receive(once, 1.0)
    failed = schedule.next(1.0)
    assert failed is not None
    schedule.fail(failed, 1.0)
    assert not schedule.tasks


def test_an_exit_runs_each_task_once_and_waits_from_its_first_call_on() -> None:
    schedule, repeated, once, done = TaskSchedule(), task(), task(), task()
    schedule.add(repeated, repeated, 5.0, 0.0)
    schedule.add(once, once, inf, 0.0)
    schedule.exit(done, 1.0)
    assert [run_next(schedule, 1.0) for _ in range(4)] == [repeated, once, done, None]
    assert schedule.exit_wait(1.0) == EXIT_SECONDS
    assert schedule.exit_wait(4.0) == EXIT_SECONDS - 3.0
    assert schedule.exit_wait(40.0) == 0.0


def test_a_task_that_is_always_due_holds_up_no_token() -> None:
    """Rounds that took longer than their interval did: an exit waited 10 s for tasks that were done."""
    schedule, repeated, done = TaskSchedule(), task(), task()
    schedule.add(repeated, repeated, 1.0, 0.0)
    assert run_next(schedule, 1.0) is repeated
    schedule.exit(done, 6.0)
    assert [run_next(schedule, 6.0), run_next(schedule, 11.0)] == [repeated, done]
