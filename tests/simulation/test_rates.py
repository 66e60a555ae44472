"""Fleets whose nodes share a partition: the fault to mend, and claims that hold in any world."""

from __future__ import annotations

import random

import pytest
from simulation.invariants import check_rate
from simulation.rate_alone import Fleet
from simulation.stores import Fault, Store
from simulation.world import World


def test_the_fault_to_mend_is_reproduced() -> None:
    """Nodes that share a limit are served unequally, with many refusals: docs/contributing/decisions/simulation.md."""
    world = World(0)
    fleet = Fleet(world, Store(220.0), 40)
    world.run(120.5)
    shares = sorted(node.served / 660 for node in fleet.nodes)
    assert shares[0] < 0.5
    assert shares[-1] > 2
    assert fleet.sent / fleet.served > 1.5


def drawn_faults(draw: random.Random) -> tuple[Fault, ...]:
    """Return up to three faults in the first 20 s."""
    kinds = {"out": 0.0, "tenant": 60.0, "rate": 15.0, "random": 0.3}
    begins = [draw.uniform(0, 15) for _ in range(draw.randrange(4))]
    return tuple(
        Fault(begin, begin + draw.uniform(0.5, 5), kind, kinds[kind])
        for begin, kind in ((begin, draw.choice([*kinds])) for begin in begins)
    )


@pytest.mark.parametrize("seed", range(30))
def test_any_world_keeps_the_invariants_and_goes_on_when_its_faults_end(seed: int) -> None:
    world, draw = World(seed), random.Random(seed)
    num_nodes, limit = draw.choice([1, 2, 4, 8]), draw.choice([40.0, 100.0])
    store = Store(
        limit, draw.choice([0.1, 1.0, 5.0]), round_trip=draw.choice([0.01, 0.03, 1.0]), faults=drawn_faults(draw)
    )
    fleet = Fleet(world, store, num_nodes, demand=draw.choice([3.0, 50.0, 1e9]))
    for node in fleet.nodes:
        world.invariants.append(lambda rate=node.rate: check_rate(rate, world.now))  # type: ignore[misc]
    world.run(40.0)
    served = fleet.served
    world.run(60.0)
    wanted = min(limit, num_nodes * fleet.nodes[0].demand) * 20
    assert fleet.served - served >= 0.5 * wanted, "faults ended 20 s ago"
