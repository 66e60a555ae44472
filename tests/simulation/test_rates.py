"""Fleets whose nodes share a partition: the fault to mend, and claims that hold in any world."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from simulation.invariants import check_rate
from simulation.rate_alone import Fleet
from simulation.stores import Fault, Store
from simulation.world import World

from binidx.storage.requests.request_rate import RequestRate


@pytest.mark.parametrize("is_known", [False, True], ids=["nodes do not know their number", "nodes know it"])
def test_nodes_that_share_a_limit_are_served_alike_and_send_little_more(is_known: bool) -> None:
    """One seed of one fleet; `python -m simulation` has others: docs/contributing/decisions/simulation.md."""
    world, num_nodes = World(0), 10
    fleet = Fleet(world, Store(60.0), num_nodes, is_known=is_known)
    world.run(120.5)
    shares = sorted(node.served / 720 for node in fleet.nodes)
    assert shares[0] > 0.3
    assert fleet.sent / fleet.served < 1.15
    world.run(780.5)
    last = fleet.served_between(600, 780)
    median = statistics.median(last)
    assert last[0] >= 0.75 * median
    assert last[-1] <= 1.25 * median


def test_a_node_that_finds_refusals_indifferent_by_chance_learns_better_while_all_send_less() -> None:
    world, num_nodes = World(1), 8
    fleet = Fleet(world, Store(80.0), num_nodes)
    world.run(120.0)
    wrong = fleet.nodes[0].rate
    wrong.indifferent_until, wrong.indifferent_share = world.now + 600.0, 0.6
    wrong.limit_before = math.inf
    world.run(127.0)
    assert wrong.limit > 20.0, "it takes more than twice its part"
    world.run(131.0)
    assert wrong.indifferent_until <= world.now
    world.run(480.0)
    assert wrong.limit < 20.0


@pytest.mark.parametrize("is_known", [False, True], ids=["nodes do not know their number", "nodes know it"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_blip_of_a_second_costs_a_fleet_that_is_far_below_its_limit_little(share: float, is_known: bool) -> None:
    world, num_nodes = World(3), 16
    store = Store(5_500.0, faults=(Fault(40.0, 41.0, "random", share),))
    fleet = Fleet(world, store, num_nodes, demand=50.0, is_known=is_known)
    world.run(41.0)
    served = fleet.served
    world.run(61.0)
    assert fleet.served - served >= 0.8 * num_nodes * 50 * 20


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_a_node_is_served_what_a_store_that_refuses_at_random_gives(share: float) -> None:
    world = World(2)
    fleet = Fleet(world, Store(random_share=share), 1, demand=400.0)
    world.run(30.0)
    served = fleet.served
    world.run(90.0)
    assert fleet.served - served >= 0.85 * 400 * 60


def test_a_node_that_waits_for_slower_ones_returns_with_its_limit() -> None:
    rate = RequestRate(limit=5.0, updated=100.0, answered_at=100.0, waited_at=100.0)
    rate.note(200.0, 1)
    assert rate.is_limited


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
    num_nodes, limit = draw.choice([1, 2, 4, 8]), draw.choice([40.0, 100.0, 300.0])
    store = Store(
        limit, draw.choice([0.1, 1.0, 5.0]), round_trip=draw.choice([0.01, 0.03, 1.0]), faults=drawn_faults(draw)
    )
    fleet = Fleet(world, store, num_nodes, demand=draw.choice([3.0, 50.0, 1e9]), is_known=draw.choice([False, True]))
    for node in fleet.nodes:
        world.invariants.append(lambda rate=node.rate: check_rate(rate, world.now))  # type: ignore[misc]
    world.run(80.0)
    served = fleet.served
    world.run(100.0)
    wanted = min(limit, num_nodes * fleet.nodes[0].demand) * 20
    assert fleet.served - served >= 0.5 * wanted, "faults ended a minute ago"
