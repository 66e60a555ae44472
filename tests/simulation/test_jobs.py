"""Jobs in parts, simulated: whatever happens to drivers, workers and the store, a job ends in the oracle's bytes."""

from __future__ import annotations

import pytest
from simulation import convert_world
from simulation.elsewhere import printed_elsewhere
from simulation.job_world import play
from simulation.queue_world import QueueWorld

PROGRAM = """
from simulation.job_world import play
world = play(5)
print(world.num_events, world.digest)
"""


@pytest.mark.parametrize("first", range(0, 150, 10))
def test_each_command_ends_in_the_bytes_of_the_oracle_or_the_right_error(first: int) -> None:
    for seed in range(first, first + 10):
        play(seed)


@pytest.mark.parametrize("seed", [5_000_038, 5_000_053])
def test_a_cancelled_task_of_a_lost_pool_and_the_loss_of_an_idle_worker_are_as_the_driver_sees_them(seed: int) -> None:
    play(seed)


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_a_queue_runs_all_that_may_run_and_nothing_else(first: int) -> None:
    for seed in range(first, first + 100):
        world = QueueWorld(seed)
        try:
            world.play()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("first", range(0, 100, 20))
def test_a_convert_that_is_given_again_ends_in_the_dataset_and_leaves_nothing(first: int) -> None:
    for seed in range(first, first + 20):
        convert_world.play(seed)


@pytest.mark.parametrize("seed", [7_000_153, 7_000_558, 7_000_807])
def test_a_call_that_goes_on_late_leaves_the_index_of_one_that_has_finished(seed: int) -> None:
    convert_world.play(seed)


def test_one_seed_is_one_trace_in_another_process() -> None:
    world = play(5)
    printed = printed_elsewhere(PROGRAM, "7")
    assert printed.split() == [str(world.num_events), world.digest]
