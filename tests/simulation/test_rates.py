"""Fleets whose nodes share a partition: the fault to mend, and claims that hold in any world."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest
from simulation.fleet import LARGEST_WINDOW, WAKE_SECONDS, Fleet, Rates, Read, Steps, Timer
from simulation.invariants import check_fleet
from simulation.stores import Fault, Store
from simulation.world import World

from binidx.storage.requests.rate_limiter import FirstLimits, RateLimiter
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


def test_a_simulated_store_without_a_rate_refuses_nothing_but_the_share_of_its_fault() -> None:
    store, draw = Store(faults=(Fault(1.0, 2.0, "random", 0.5),)), random.Random(0)
    granted = [store.grants("", number / 100, draw) for number in range(300)]
    assert all(granted[:100])
    assert 30 < sum(granted[100:200]) < 70
    assert all(granted[200:])


@pytest.mark.parametrize(("num_nodes", "round_trip"), [(20, 0.03), (20, 1.0), (4, 0.03)])
def test_a_fleet_sends_in_its_first_second_at_most_twice_what_its_store_grants(
    num_nodes: int, round_trip: float
) -> None:
    world = World(1)
    fleet = Fleet(world, Store(220.0, round_trip=round_trip), num_nodes, 8, is_known=True)
    world.run(1.0)
    check_fleet(fleet)
    assert fleet.sent <= 2 * 220
    world.run(10.0)
    assert fleet.served >= 0.8 * 220 * 10


def test_a_fleet_whose_store_has_no_limit_soon_sends_as_many_requests_as_it_has() -> None:
    world = World(1)
    fleet = Fleet(world, Store(), 20, 8, steps=Steps(num_ranges=50, wait_for_others=True), is_known=True)
    world.run(0.65)
    assert fleet.num_arrived >= 160
    assert not any(node.rate.has_tickets for node in fleet.nodes)


def test_a_start_goes_on_though_its_first_requests_end_without_a_response() -> None:
    rate = FirstLimits.of_fleet(20).new_rate()
    ticket = rate.take(0.0, 3)
    assert rate.seconds_until(ticket + 2) <= 0
    ticket = rate.take(0.0, 1)
    assert rate.seconds_until(ticket) > 0
    waiting = rate.take(0.0, 6)
    rate.note(1.0)
    assert rate.seconds_until(ticket) <= 0
    assert rate.seconds_until(waiting + 2) > 0, "tickets return at a quarter of the first limit of 10 a second"
    rate.note(1.1, served=9)
    rate.note(7.0, served=1)
    assert not rate.has_tickets


@pytest.mark.parametrize("begin", [1.0, 6.0])
def test_nodes_that_all_stand_still_for_five_seconds_send_no_more_than_before(begin: float) -> None:
    """Some were testing whether refusals depend on their rate: the store has recovered meanwhile."""
    steps, num_sent, num_served = Steps(num_ranges=10), list[int](), list[int]()
    for pause in [(math.inf, math.inf), (begin, begin + 5.0)]:
        fleet = Fleet(World(0), Store(50.0), 16, steps=steps, is_known=True, pause=pause)
        fleet.world.run(60.0)
        check_fleet(fleet)
        num_sent.append(fleet.sent)
        num_served.append(fleet.served)
    assert num_served[1] >= num_served[0] - 4.5 * 50
    assert num_sent[1] <= num_sent[0] <= 1.25 * num_served[0]


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
    assert all(node.rates.by_partition["*"].served > 0 for node in fleet.nodes), "their bucket counts responses, too"


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4])
def test_a_node_is_served_what_a_store_that_refuses_at_random_gives(share: float) -> None:
    world = World(2)
    fleet = Fleet(world, Store(random_share=share), 1, demand=400.0)
    world.run(30.0)
    served = fleet.served
    check_fleet(fleet)
    world.run(90.0)
    check_fleet(fleet)
    assert fleet.served - served >= 0.85 * 400 * 60


def test_nodes_of_a_store_with_a_ceiling_send_no_more_and_double_it_in_its_time() -> None:
    world = World(6)
    fleet = Fleet(world, Store(100_000.0, round_trip=1.0), 4, is_known=True, ceiling=(40.0, 60.0))
    world.run(10.0)
    sent = fleet.sent
    world.run(20.0)
    assert fleet.sent - sent <= 40 * 10 * 2 ** (20 / 60) * 1.1
    world.run(130.0)
    sent = fleet.sent
    world.run(140.0)
    assert 40 * 10 * 2 <= fleet.sent - sent <= 40 * 10 * 2 ** (140 / 60) * 1.1


def test_a_test_begins_without_outcomes_of_before() -> None:
    rate = RequestRate()
    rate.note(1.0, served=10, refused=20)
    assert rate.test_from < math.inf
    assert (rate.served, rate.refused, rate.counted, rate.evidence) == (0.0, 0.0, 0.0, 0.0)


def test_a_rate_whose_tickets_are_not_due_yet_is_one_that_requests_wait_for() -> None:
    rate = RequestRate(limit=1.0)
    rate.note(1.0)
    rate.take(1.0, 5)
    rate.note(2.0)
    assert rate.waited_at == 2.0


def test_a_limit_ages_from_its_first_refusal_on() -> None:
    rate = RequestRate(limit=10.0)
    rate.note(1.0, served=5)
    assert rate.limited_at == math.inf
    rate.note(2.0, refused=1)
    rate.note(3.0, served=5)
    assert rate.limited_at == 2.0


def test_a_test_of_a_store_that_refuses_nearly_all_ends_when_it_is_sure() -> None:
    rate = RequestRate(limit=10.0, test_from=0.0, known_served=10.0, known_refused=90.0, test_goodput=10.0)
    rate.note(5.0, served=10, refused=90)
    assert rate.test_from == math.inf


def test_refusals_that_are_gone_while_all_nodes_send_less_depend_on_the_rate() -> None:
    rate = RequestRate(limit=50.0, refused_at=0.0, indifferent_until=1_000.0, indifferent_share=0.6)
    rate.note(1.5, served=30, wall=1.5)
    rate.note(3.0, served=1, wall=3.0)
    assert rate.indifferent_until == -math.inf
    assert rate.limit <= rate.usual_limit < 30.0, "it goes on at what it was served"


@pytest.mark.parametrize(("seconds", "holds"), [(4.9, True), (5.0, False)])
def test_the_first_limit_of_a_fleet_holds_for_refusals_in_its_first_five_seconds(seconds: float, holds: bool) -> None:
    rate = RequestRate(first_limit=10.0, began=0.0, updated=seconds - 1.0)
    rate.note(seconds, served=30, refused=60)
    assert (rate.test_goodput == 10.0) is holds


def test_two_responses_under_the_first_limit_of_a_fleet_end_its_test() -> None:
    """The share of refusals in the burst of the start tells little."""
    rate = FirstLimits.of_fleet(20).new_rate()
    rate.note(0.1, served=3, refused=8)
    assert rate.test_from < math.inf
    rate.note(rate.test_from, served=2)
    assert rate.test_from == math.inf


def test_a_test_whose_lower_rate_has_fewer_refusals_gives_back_most_of_the_goodput() -> None:
    rate = RequestRate(
        limit=4.5, test_number=1.0, test_from=0.0, known_served=50.0, known_refused=50.0, test_goodput=10.0
    )
    rate.note(5.0, served=20)
    assert rate.test_from == math.inf
    assert rate.limit == 7.0


def test_a_rate_that_has_met_its_ceiling_among_refusals_falls_with_further_ones() -> None:
    rate = RequestRate(ceiling=40.0)
    rate.note(0.1, served=30, refused=3)
    assert rate.limit == 40.0
    rate.note(0.2, served=2, refused=2)
    assert rate.limit < 40.0


def test_a_start_that_meets_the_ceiling_of_its_store_goes_on_at_it_without_a_burst() -> None:
    rate = RequestRate(ceiling=40.0, first_limit=10.0, start=3.0)
    rate.take(0.0, 5)
    rate.note(0.1, served=30)
    assert rate.limit == 40.0
    assert rate.seconds_until(rate.take(0.1, 1)) > 0


@pytest.mark.parametrize("num_nodes", [1, 40, 100_000])
def test_the_first_rate_of_a_fleet_of_any_size_is_possible(num_nodes: int) -> None:
    first = FirstLimits.of_fleet(num_nodes, ceiling=3_500.0, doubling_seconds=1_200.0)
    assert first.new_rate().is_possible()


@pytest.mark.parametrize(
    ("values", "is_possible"),
    [
        ({"limit": 0.05}, True),
        ({"limit": 0.04}, False),
        ({"limit": 1e15}, True),
        ({"limit": 2e15}, False),
        ({"served": 1e15}, True),
        ({"served": 2e15}, False),
        ({"served": -1.0}, False),
        ({"indifferent_until": 1.0, "indifferent_share": 1e-15}, True),
        ({"indifferent_until": 1.0, "indifferent_share": 1.0}, True),
        ({"indifferent_until": 1.0, "indifferent_share": 0.0}, False),
        ({"indifferent_until": 1.0, "indifferent_share": 1.1}, False),
        ({"indifferent_seconds": 60.0}, True),
        ({"indifferent_seconds": 59.0}, False),
        ({"indifferent_seconds": 600.0}, True),
        ({"indifferent_seconds": 601.0}, False),
        ({"test_from": 2.0, "known_refused": 1.0}, True),
        ({"test_from": 2.1, "known_refused": 1.0}, False),
        ({"test_from": 2.0, "known_refused": 0.9}, False),
        ({"test_number": 2.0}, False),
        ({"limited_at": 1.0}, True),
        ({"limited_at": 1.1}, False),
        ({"answered_at": 1.0}, True),
        ({"answered_at": 1.1}, False),
        ({"began": 1.0}, True),
        ({"began": 1.1}, False),
        ({"start": 128.0}, True),
        ({"start": 129.0}, False),
        ({"doubling_seconds": 1.0}, True),
        ({"doubling_seconds": 0.9}, False),
        ({"issued": 256.0, "limit": 1.0}, True),
        ({"issued": 257.0, "limit": 1.0}, False),
    ],
)
def test_values_at_the_bound_of_what_clients_bring_about_are_believed_and_those_beyond_are_not(
    values: dict[str, float], is_possible: bool
) -> None:
    """The file of the rates of a node may have been written by anyone."""
    assert RequestRate(**values).is_possible() is is_possible


def test_a_node_that_waits_for_slower_ones_returns_with_its_limit() -> None:
    rate = RequestRate(limit=5.0, updated=100.0, answered_at=100.0, waited_at=100.0)
    rate.note(200.0, 1)
    assert rate.is_limited


def drawn_faults(draw: random.Random, limit: float) -> tuple[Fault, ...]:
    """Return up to three faults in the first 20 s of a store with a limit."""
    kinds = {"out": 0.0, "tenant": 0.6 * limit, "rate": 0.2 * limit, "random": 0.3}
    begins = [draw.uniform(0, 15) for _ in range(draw.randrange(4))]
    return tuple(
        Fault(begin, begin + draw.uniform(0.5, 5), kind, kinds[kind])
        for begin, kind in ((begin, draw.choice([*kinds])) for begin in begins)
    )


@pytest.mark.parametrize("seed", range(16))
def test_any_world_keeps_the_invariants_and_goes_on_when_its_faults_end(seed: int) -> None:
    world, draw = World(seed), random.Random(seed)
    num_nodes, num_processes, num_folders = draw.choice([1, 2, 4]), draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 12])
    limit, is_of_folder = draw.choice([40.0, 100.0, 300.0]), draw.random() < 0.3
    limit /= num_folders if is_of_folder else 1
    store = Store(
        limit,
        max(draw.choice([0.1, 1.0, 5.0]), 2 / limit),
        round_trip=draw.choice([0.01, 0.03, 1.0]),
        faults=drawn_faults(draw, limit),
        partition_of=str if is_of_folder else lambda folder: "",
    )
    demand = draw.choice([3.0, 50.0, math.inf])
    fleet = Fleet(
        world,
        store,
        num_nodes,
        num_processes,
        demand=demand,
        is_known=draw.choice([False, True]),
        num_folders=num_folders,
    )
    world.invariants.append(lambda: check_fleet(fleet))
    world.run(80.0)
    served = fleet.served
    world.run(95.0)
    wanted = min(demand, LARGEST_WINDOW / store.round_trip / 1.1) * num_nodes * num_processes
    wanted = min(wanted, limit * (num_folders if is_of_folder else 1)) * 15
    assert fleet.served - served >= 0.5 * wanted, "faults ended a minute ago"


def test_folders_that_a_store_limits_together_are_limited_as_one() -> None:
    """60 folders for 8 requests at once: each folder by itself is refused too rarely to notice."""
    world = World(4)
    fleet = Fleet(world, Store(100.0), 4, steps=Steps(num_ranges=8), num_folders=60)
    world.run(60.0)
    sent, served = fleet.sent, fleet.served
    world.run(180.0)
    assert fleet.served - served >= 0.9 * 100 * 120
    assert (fleet.sent - sent) / (fleet.served - served) < 1.15


def test_a_process_logs_within_five_seconds_that_its_store_throttles_it() -> None:
    world = World(5)
    fleet = Fleet(world, Store(300.0, faults=(Fault(20.0, 60.0, "rate", 20.0),)), 2, demand=100.0)
    world.run(60.0)
    for node in fleet.nodes:
        assert 20.0 < node.rates.lines[0] < 25.0
        assert node.rates.waited > 20.0


class Alone:
    """One process with one limiter; its requests end as a test says."""

    def __init__(self, first: FirstLimits, limit: float = math.inf) -> None:
        self.world, self.sent = World(0), list[int]()
        self.rates = Rates(self.world)
        self.rates.by_partition["x"] = RequestRate(limit)
        self.limiter = RateLimiter("x", first, self.rates, self.later, lambda read, place: self.sent.append(place), 128)
        self.request = Read(1, "x", self.limiter, 100, 0.0)

    def later(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer()
        self.world.later(seconds + WAKE_SECONDS, "x", "timer", lambda: None if timer.is_cancelled else function())
        return timer

    def submit(self, place: int) -> None:
        if self.limiter.admits(self.request, place):
            self.sent.append(place)


def test_a_store_is_logged_when_a_request_has_waited_for_a_second_and_a_half() -> None:
    process = Alone(FirstLimits(), limit=0.1)
    process.submit(0)
    process.limiter.note_refusal()
    process.submit(1)
    process.world.run(5.0)
    [logged_at] = process.rates.lines
    assert 1.5 < logged_at <= 1.8


def test_a_ticket_that_is_due_now_is_used_now() -> None:
    process = Alone(FirstLimits(), limit=1.0)
    process.submit(0)
    process.limiter.note_refusal()
    rate = process.rates.by_partition["x"]
    rate.clock = rate.issued + 1.0
    process.submit(1)
    assert process.sent == [0, 1]


def test_a_process_of_a_fleet_sends_more_at_once_only_after_a_response() -> None:
    process = Alone(FirstLimits(widening=0.25))
    for place in range(40):
        process.submit(place)
    process.world.run(1.0)
    assert len(process.sent) == 16
    process.limiter.note_response(1.0)
    process.world.run(2.0)
    assert process.limiter.in_flight == 33, "its window has doubled once"


def test_a_process_takes_one_ticket_for_each_of_single_requests() -> None:
    process = Alone(FirstLimits(), limit=1_000.0)
    process.submit(0)
    process.limiter.note_refusal()
    for place in range(1, 20):
        process.submit(place)
        process.world.run(0.01 * place)
        assert process.sent[-1] == place
        process.limiter.note_response(process.world.now)
    assert process.rates.by_partition["x"].issued == 19
