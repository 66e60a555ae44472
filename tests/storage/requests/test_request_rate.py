"""The rate of requests to a partition: transitions over given times, and fleets in simulated time."""

from __future__ import annotations

import math

import pytest
from simulation.fleet import Fleet, Steps
from simulation.stores import Store
from simulation.world import World

from binidx.storage.requests import request_rate
from binidx.storage.requests.request_rate import RequestRate


def limited(limit: float, **fields: float) -> RequestRate:
    return RequestRate(limit=limit, updated=100.0, **{"waited_at": 100.0, **fields})


def steady(rate: RequestRate, per_second: float, share: float, seconds: float) -> None:
    """Send at the rate that is allowed, at most `per_second`; a share of it is refused, evenly."""
    owed = refused = 0.0
    for _ in range(int(seconds * 100)):
        now = rate.updated + 0.01
        owed += min(per_second, rate.limit) / 100
        count, owed = int(owed), owed % 1
        refused += count * share
        rate.note(now, count - int(refused), int(refused))
        refused %= 1
        rate.waited_at = now if rate.limit <= per_second else rate.waited_at


def test_a_rate_without_refusals_is_unlimited() -> None:
    rate = RequestRate(updated=100.0)
    steady(rate, 1000.0, 0.0, 10.0)
    assert not rate.is_limited
    assert rate.goodput == pytest.approx(1000, rel=0.05)


def test_single_refusals_and_a_store_that_refuses_everything_limit_nothing() -> None:
    rate = RequestRate(updated=100.0)
    steady(rate, 100.0, 0.02, 10.0)
    assert not rate.is_limited
    out = RequestRate(updated=100.0)
    steady(out, 1000.0, 1.0, 10.0)
    assert not out.is_limited


def test_many_refusals_limit_the_rate_to_the_goodput() -> None:
    rate = RequestRate(updated=100.0)
    steady(rate, 1000.0, 0.0, 5.0)
    rate.note(105.1, 50, 50)
    assert rate.limit == pytest.approx(request_rate.TEST_RATES[0] * rate.test_goodput)
    rate.note(105.4)
    rate.note(106.4, 400, 0)
    assert rate.test_from == math.inf, "the lower rate is not refused: it is kept, and grows"
    assert rate.limit < 1000


def test_refusals_that_do_not_depend_on_the_rate_do_not_lower_it() -> None:
    rate = RequestRate(updated=100.0)
    steady(rate, 1000.0, 0.2, 10.0)
    assert rate.limit > 700


def test_a_limit_grows_without_refusals_only_while_requests_wait() -> None:
    waiting, idle = limited(100.0, waited_at=100.0), limited(100.0, waited_at=0.0, refused_at=100.0)
    for now in range(101, 111):
        waiting.waited_at = now
        waiting.note(now)
        idle.note(now)
    assert waiting.limit > 200
    assert idle.limit == 100


def test_a_calm_rate_is_unlimited_again() -> None:
    rate = limited(100.0, waited_at=100.0, refused_at=100.0)
    for second in range(1, int(request_rate.CALM_SECONDS)):
        rate.note(100.0 + second, 5)
        assert rate.is_limited
    rate.note(102 + request_rate.CALM_SECONDS, 5)
    assert not rate.is_limited


@pytest.mark.parametrize(("share", "is_limited"), [(0.2, False), (0.9, True)])
def test_a_folder_gets_a_limit_under_one_of_its_bucket_if_it_refuses_several_times_as_many(
    share: float, is_limited: bool
) -> None:
    rate = RequestRate(updated=100.0)
    for second in range(101, 161):
        rate.note(float(second), round(10 * (1 - share)), round(10 * share), usual_share=0.1)
    assert rate.is_limited == is_limited


def test_tickets_that_many_processes_hold_when_a_limit_falls_leave_a_possible_rate() -> None:
    rate = limited(2_000.0)
    rate.note(100.0)
    rate.take(100.0, 16 * 20)
    rate.limit = 1.0
    rate.note(100.1)
    assert rate.is_possible()


def test_tickets_are_due_in_order_at_the_limit() -> None:
    rate = limited(10.0)
    rate.note(100.0)
    tickets = [rate.take(100.0, 1) for _ in range(4)]
    assert [rate.seconds_until(ticket) for ticket in tickets] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    rate.limit = 20.0
    assert rate.seconds_until(tickets[3]) == pytest.approx(0.2), "all that wait gain by a higher limit"


def test_unused_tickets_are_kept_for_a_moment_only() -> None:
    rate = limited(100.0)
    rate.note(200.0)
    assert rate.clock - rate.issued == max(1.0, 100 * request_rate.BURST_SECONDS)


def test_beyond_a_ceiling_the_rate_doubles_in_its_time_and_below_it_nothing_is_limited() -> None:
    rate = RequestRate(updated=100.0, ceiling=5000.0, doubling_seconds=1200.0)
    steady(rate, 2400.0, 0.0, 20.0)
    assert (rate.is_limited, rate.ceiling) == (False, 5000.0)
    steady(rate, 20_000.0, 0.0, 1200.0)
    assert rate.limit == pytest.approx(10_000, rel=0.05)


@pytest.mark.parametrize("seed", range(3))
def test_eight_processes_use_the_granted_rate_and_send_little_more(seed: int) -> None:
    world = World(seed)
    fleet = Fleet(world, Store(500.0), 1, 8, steps=Steps(num_ranges=45, pause=45 * 8 / 1100))
    world.run(60.0)
    assert fleet.sent / fleet.served <= 1.05
    assert fleet.served >= 0.93 * 500 * 60
    num_steps = [process.num_steps for process in fleet.processes]
    assert min(num_steps) >= 0.85 * max(num_steps)
    assert max(wait for process in fleet.processes for wait in process.waits) <= 2.0


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2, 0.4])
def test_a_store_that_refuses_at_random_is_not_slowed_to_a_crawl(share: float) -> None:
    world = World(0)
    fleet = Fleet(world, Store(random_share=share), 1, 8, steps=Steps(num_ranges=45, pause=45 * 8 / 1100))
    world.run(30.0)
    assert fleet.served > 0.5 * (1 - share) * 1100 * 30 * 0.85, "requests that are refused several times pause"


def test_many_nodes_of_a_fleet_take_the_first_step_in_little_more_than_the_time_of_the_limit() -> None:
    world, seconds = World(0), 1.5 * 60 * 8 * 25 / 330
    fleet = Fleet(world, Store(330.0), 60, 8, steps=Steps(num_ranges=25, number=1), is_known=True)
    world.run(seconds)
    assert fleet.served == 60 * 8 * 25
