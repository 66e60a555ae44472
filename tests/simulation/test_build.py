"""Builds of indices in simulated fleets: one process builds, whatever is killed, stopped, lost or cut off."""

from __future__ import annotations

import pytest
from simulation.build_world import BuildWorld, Fault, Left, Setting
from simulation.elsewhere import printed_elsewhere

from binidx.index.cache.lease import (
    BUILDING,
    DEAD_SECONDS,
    FAILED,
    NO_LEASE,
    UNPUBLISHED,
    LeaseWait,
    poll_pause_seconds,
)

WORLDS, CHUNK = 200, 25


@pytest.mark.parametrize("first", range(0, WORLDS, CHUNK))
def test_every_process_gets_the_arrays_or_an_error_that_a_fault_explains(first: int) -> None:
    """And all else that `BuildWorld` checks: builders, takeovers, requests, the time until the end, what is left."""
    worlds = [BuildWorld(seed).run() for seed in range(first, first + CHUNK)]
    assert sum(world.num_builds.total() for world in worlds) >= CHUNK


PROGRAM = """
from simulation.build_world import BuildWorld
for seed in (3, 4, 5):
    print(BuildWorld(seed).run().world.digest)
"""


def test_one_seed_is_one_trace_in_processes_with_other_hash_seeds() -> None:
    printed = [printed_elsewhere(PROGRAM, seed) for seed in ("1", "2")]
    assert printed[0] == printed[1]
    assert len({*printed[0].split()}) == 3


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_waiting_process_that_was_stopped_takes_nothing_from_a_living_holder(seed: int) -> None:
    """It is stopped between a poll and its response, for longer than a lease lives: the lease has changed meanwhile."""
    world = BuildWorld(seed, [Fault("stop", 0, 0.0, 30.0, "ReadObject", 10)], Setting()).run()
    assert world.num_builds[0] == 1


def test_a_message_that_a_kill_has_cut_is_none() -> None:
    setting = Setting(num_nodes=1, num_processes=3, seconds=(1.0,), failing=frozenset({0}))
    kills = [Fault("kill", number, 1e-7, 0.0, "LeaveMessage", 2) for number in range(2)]
    failures = [BuildWorld(seed, kills, setting).run().num_failed[0] for seed in range(6)]
    assert max(failures) > 1, "a process that reads no message builds by itself"


def test_without_a_fault_one_process_of_a_large_fleet_builds_each_index() -> None:
    setting = Setting(num_nodes=20, num_processes=4, num_indices=4, seconds=(2.0,))
    world = BuildWorld(1, [], setting).run()
    assert world.num_builds == dict.fromkeys(range(4), 1)


def test_when_a_node_is_lost_another_one_goes_on_after_the_time_of_a_dead_lease() -> None:
    lost = [Fault("lost", number, 5.0) for number in range(2)]
    world = BuildWorld(1, lost[:1], Setting(num_nodes=4, seconds=(20.0,))).run()
    assert world.num_builds[0] <= 2
    ends = [event for event in world.world.trace if "returns 'arrays" in event]
    assert ends
    assert all(float(event.split()[0]) < 5 + 2 * DEAD_SECONDS + 20 for event in ends)


def test_a_process_that_finds_the_index_removes_the_lease_of_one_of_its_node_that_was_killed() -> None:
    """Its release may arrive all the same. A process of another node leaves it."""
    kill, left = Fault("kill", 0, 0.0, 0.0, "DeleteObject", 1), dict[int, list[int]]()
    for num_nodes in (1, 2):
        setting = Setting(num_nodes=num_nodes, num_processes=2 // num_nodes, seconds=(1.0,), starts=(0.0, 10.0))
        worlds = [BuildWorld(seed, [kill], setting).run() for seed in range(6)]
        assert all(world.num_builds[0] == 1 for world in worlds)
        left[num_nodes] = [sum("-claim" in uri for uri in world.objects.data) for world in worlds]
    assert max(left[1]) == 0
    assert max(left[2]) == 1


@pytest.mark.parametrize("has_marker", [False, True])
def test_a_lease_that_a_killed_process_of_this_node_has_left_costs_nothing(has_marker: bool) -> None:
    """Nor one whose takeover it had begun."""
    left = Left(node="boot 0.0:0", has_marker=has_marker)
    world = BuildWorld(1, [], Setting(num_nodes=1, num_processes=3, seconds=(1.0,), earlier=(left,))).run()
    assert world.num_builds[0] == 1
    assert all(ended < 3.0 for ended in world.ended_at)
    assert not [uri for uri in world.objects.data if "-claim" in uri]


@pytest.mark.parametrize("state", [BUILDING, FAILED, UNPUBLISHED, ""])
def test_of_nodes_that_find_a_lease_of_an_earlier_run_one_takes_it_over(state: str) -> None:
    """At once if that run has ended, after `DEAD_SECONDS` if it may be at work."""
    for seed in range(4):
        world = BuildWorld(seed, [], Setting(num_nodes=4, seconds=(5.0,), earlier=(Left(state, "another"),))).run()
        assert world.num_builds[0] == 1
        longest = 10.0 if state in (FAILED, UNPUBLISHED) else DEAD_SECONDS + 15.0
        assert all(ended < longest for ended in world.ended_at)
        assert not [uri for uri in world.objects.data if "-claim" in uri]


def test_when_the_node_that_takes_over_dies_too_each_of_the_others_builds_alone() -> None:
    left = Left(BUILDING, "another", has_marker=True)
    world = BuildWorld(1, [], Setting(num_nodes=3, seconds=(5.0,), earlier=(left,))).run()
    assert world.num_builds[0] == 3
    assert all(2 * DEAD_SECONDS < ended < 2 * DEAD_SECONDS + 20.0 for ended in world.ended_at)


def test_an_error_of_the_builder_is_raised_by_all_that_saw_it_at_work() -> None:
    setting = Setting(num_nodes=4, num_processes=2, seconds=(10.0,), failing=frozenset({0}))
    world = BuildWorld(1, [], setting).run()
    assert world.num_failed[0] == 1
    assert sorted(type(task.error).__name__ for _, _, task in world.tasks) == ["PeerError"] * 7 + ["ValueError"]


def test_when_the_index_cannot_be_published_all_build_at_the_same_time() -> None:
    setting = Setting(num_nodes=4, num_processes=2, seconds=(10.0,), unpublishable=frozenset({0}))
    world = BuildWorld(1, [], setting).run()
    assert world.num_builds[0] == 8
    assert all(ended < 25.0 for ended in world.ended_at), "two builds one after the other"


def test_of_two_nodes_that_remove_the_marker_of_a_dead_takeover_one_takes_over() -> None:
    left = Left(FAILED, "boot 0.0:0", has_marker=True)
    for seed in range(6):
        setting = Setting(
            num_nodes=12, seconds=(2.0,), starts=tuple(0.005 * node for node in range(12)), earlier=(left,)
        )
        assert BuildWorld(seed, [], setting).run().num_builds[0] == 1


def test_a_lease_whose_last_renewal_is_late_is_left_to_expire() -> None:
    setting = Setting(seconds=(10.0,), slow_share=0.5, slow_factor=400.0)
    worlds = [BuildWorld(seed, [], setting).run() for seed in range(6)]
    assert max(sum("-claim" in uri for uri in world.objects.data) for world in worlds) == 1


def test_a_waiting_node_finds_the_arrays_after_an_eighth_of_its_wait() -> None:
    for seed in range(6):
        world = BuildWorld(seed, [], Setting(num_nodes=3, seconds=(1.0,), starts=(0.0, 0.0, 0.0))).run()
        assert all(ended < 1.6 for ended in world.ended_at)


def test_a_released_lease_is_acquired_if_the_arrays_are_still_missing() -> None:
    wait = LeaseWait("")
    wait.polled(NO_LEASE, 5.0)
    assert wait.must_load
    assert wait.next_step() == "acquire"


def test_polls_of_a_lease_pause_a_fifth_of_a_second_at_first_and_a_hundredth_on_a_disk() -> None:
    assert poll_pause_seconds(0.0, 1) == 0.2
    assert poll_pause_seconds(0.0, 1, remote=False) == 0.01
    assert poll_pause_seconds(8.0, 1) == 1.0
    assert poll_pause_seconds(80.0, 1) == 2.0
    assert poll_pause_seconds(1e6, 1_000) == 30.0
