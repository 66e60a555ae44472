"""Jobs in parts, simulated: whatever happens to drivers, workers and the store, a job ends in the oracle's bytes."""

from __future__ import annotations

import pytest
from simulation import convert_world
from simulation.elsewhere import printed_elsewhere
from simulation.job_world import SimulatedPart, play
from simulation.processes import Node, Objects, Process, Task
from simulation.queue_world import QueueWorld
from simulation.world import World

from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Shard, Workers
from binidx.jobs.progress import SilentWatcher
from binidx.jobs.stages import make_recorded_parts_steps
from binidx.storage.location import Location

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


@pytest.mark.parametrize("seed", [8_001_095, 8_001_106])
def test_of_two_calls_of_a_job_the_slow_one_finds_it_finished_by_the_other(seed: int) -> None:
    """It had read that the job is not finished, and then no job.json, but the other call's dataset."""
    assert {command.outcome for command in play(seed).commands} == {"finished"}


@pytest.mark.parametrize("first", range(0, 800, 100))
def test_a_queue_runs_all_that_may_run_and_nothing_else(first: int) -> None:
    for seed in range(first, first + 100):
        world = QueueWorld(seed)
        try:
            world.play()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise


def test_findings_that_are_kept_are_removed_by_a_whole_call_and_those_that_are_not_final_by_a_shard() -> None:
    world = World(0)
    objects = Objects(world)
    process, folder = Process(world, Node("node"), objects), JobFolder(Location("s3://bucket/kept"), {"job": "x"})
    parts = [SimulatedPart(name, b"", 1.0) for name in ("a", "b")]

    def findings(some: list[SimulatedPart], records: Location | None, shard: Shard | None) -> Task:
        steps = make_recorded_parts_steps(
            *(len, some, Workers(shard=shard), records, {"job": "x"}, SilentWatcher()),
            is_final=lambda found: found["n"] > 1,
        )
        task = process.start(steps, "findings")
        world.run(world.now + 60.0)
        return task

    process.start(folder.claim_steps(), "claim")
    for number, part in enumerate(parts, 1):
        process.start(folder.write_steps(part, {"n": number}), "write")
    world.run(60.0)
    assert findings(parts, folder.location, Shard(1, 2)).result == {"a": {"n": 1}, "b": {"n": 2}}
    assert {*objects.data} == {folder.job_file.uri, folder.file(parts[1]).uri}
    assert findings(parts[1:], folder.location, None).result == {"b": {"n": 2}}
    assert not objects.data
    assert findings([], None, None).result == {}
    assert "a shard needs a folder" in str(findings([], None, Shard(0, 2)).error)


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
