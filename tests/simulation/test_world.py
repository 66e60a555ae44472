"""The simulator itself: one seed is one world, in any process; a failure is replayed, read, and shrunk."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from simulation.elsewhere import printed_elsewhere
from simulation.fleet import Fleet
from simulation.shrink import shrink
from simulation.stores import Fault, Store
from simulation.world import World

PROGRAM = """
from simulation.fleet import Fleet
from simulation.stores import Fault, Store
from simulation.world import World
world = World(5)
Fleet(world, Store(50.0, faults=(Fault(2.0, 4.0, "random", 0.3),)), 5)
world.run(10.0)
print(world.num_events, world.digest)
"""


def test_one_seed_is_one_trace_in_processes_with_other_hash_seeds() -> None:
    printed = [printed_elsewhere(PROGRAM, seed) for seed in ("1", "2")]
    assert printed[0] == printed[1]
    assert int(printed[0].split()[0]) > 1_000


def test_other_seeds_are_other_worlds() -> None:
    digests = set()
    for seed in range(4):
        world = World(seed)
        Fleet(world, Store(50.0), 3)
        world.run(3.0)
        digests.add(world.digest)
    assert len(digests) == 4


def counting_world(faults: Sequence[Fault], most: int) -> World:
    """Return a world that must see fewer refusals at once than `most` while its store has faults."""
    world = World(3)
    store = Store(100.0, faults=tuple(faults))
    Fleet(world, store, 3, demand=20.0)

    def check() -> None:
        assert store.refused < most, f"{store.refused} requests were refused"

    world.invariants.append(check)
    return world


def fails(faults: Sequence[Fault]) -> bool:
    try:
        counting_world(faults, 30).run(20.0)
    except AssertionError:
        return True
    return False


def test_a_failure_names_its_seed_and_its_last_events_and_is_shrunk_to_the_fault_that_causes_it() -> None:
    harmless = [Fault(float(begin), begin + 0.5, "tenant", 1.0) for begin in range(6)]
    faults = [*harmless[:4], Fault(8.0, 12.0, "out"), *harmless[4:]]
    with pytest.raises(AssertionError) as caught:
        counting_world(faults, 30).run(20.0)
    trace = caught.value.__notes__[0].splitlines()
    assert trace[0] == "seed 3"
    assert "arrive -> refused" in "\n".join(trace)
    assert [str(fault) for fault in shrink(faults, fails)] == ["out 0 from 8.0 to 12.0 s"]
