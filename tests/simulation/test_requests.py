"""Requests of processes whose stores have faults: any world keeps the invariants; and worlds that show one claim."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from simulation.elsewhere import printed_elsewhere
from simulation.request_world import BareSchedule, Plan, RequestWorld, SimulatedRead, caused, drawn_plan
from simulation.shrink import shrink
from simulation.stores import Fault, Store
from simulation.world import World

from binidx.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError, UnreachableError
from binidx.storage.requests.request_schedule import Read
from binidx.storage.requests.retries import FEW_TRIES
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.driver_errors import HTTPStatusError

ALWAYS = 1e6


@pytest.mark.parametrize("seed", range(40))
def test_any_world_keeps_the_invariants_and_all_reads_end_when_its_faults_do(seed: int) -> None:
    world = World(seed)
    requests = RequestWorld(world, drawn_plan(random.Random(seed)))
    world.run(requests.plan.settled_at)
    requests.check_idle()


PROGRAM = """
import random
from simulation.request_world import RequestWorld, drawn_plan
from simulation.world import World
for seed in (3, 36):
    world = World(seed)
    RequestWorld(world, drawn_plan(random.Random(seed))).world.run(20.0)
    print(world.num_events, world.digest)
"""


def test_one_seed_is_one_trace_in_processes_with_other_hash_seeds() -> None:
    printed = [printed_elsewhere(PROGRAM, seed) for seed in ("1", "2")]
    assert printed[0] == printed[1]
    assert int(printed[0].split()[0]) > 500


def fails(faults: list[Fault]) -> bool:
    """Return whether a read fails in a world with these faults."""
    plan = Plan(store=Store(), faults=tuple(faults), num_reads=9, settings=ReadSettings(outage_seconds=3.0))
    return any(read.error for read in run(plan).reads)


def test_a_failing_world_is_shrunk_to_the_fault_that_causes_it() -> None:
    harmless = [Fault(float(begin), begin + 0.5, "slow", 1.0) for begin in range(6)]
    faults = [*harmless[:4], Fault(2.0, 9.0, "unreachable", 1.0), *harmless[4:]]
    assert [str(fault) for fault in shrink(faults, lambda some: fails([*some]))] == ["unreachable 1 from 2.0 to 9.0 s"]


def run(plan: Plan, seconds: float = 1_000.0, seed: int = 0) -> RequestWorld:
    """Return a world after some time."""
    world = World(seed)
    requests = RequestWorld(world, plan)
    world.run(seconds)
    return requests


def only_read(plan: Plan, seconds: float = 1_000.0) -> SimulatedRead:
    """Return the only read of a world after some time."""
    (read,) = run(plan, seconds).reads
    return read


def seconds_of(read: SimulatedRead) -> float:
    return read.ended - read.began


def always(kind: str, share: float = 1.0) -> Plan:
    """Return a plan for one read of a store whose requests always fail in one way."""
    return Plan(store=Store(), faults=(Fault(0.0, ALWAYS, kind, share),))


def settings_of(deadline: float, outage: float, *, hedge: bool = False) -> ReadSettings:
    return ReadSettings(deadline_seconds=deadline, outage_seconds=outage, hedge=hedge)


# What ends a read


@pytest.mark.parametrize("kind", ["absent", "changed", "denied", "fault", "certificate", "defect"])
def test_a_failure_for_good_ends_a_read_at_once(kind: str) -> None:
    read = only_read(replace(always(kind), num_ranges=9, limit=2))
    assert read.error is not None
    assert seconds_of(read) < 0.1
    assert read.retries == 0
    kinds = {"absent": ObjectNotFoundError, "changed": ObjectChangedError, "fault": ShortReadError}
    assert isinstance(read.error, kinds.get(kind, StorageError))


def test_wrong_responses_are_tried_a_few_times() -> None:
    read = only_read(always("short"))
    assert isinstance(read.error, ShortReadError)
    assert read.sent == FEW_TRIES
    assert f"failed {FEW_TRIES} times in" in str(read.error)


@pytest.mark.parametrize("kind", ["unreachable", "error", "refused", "reset", "hidden", "wrapped"])
def test_an_outage_ends_a_read_at_the_end_of_its_patience(kind: str) -> None:
    read = only_read(replace(always(kind), settings=settings_of(3.0, 7.0)))
    assert "outage_seconds" in str(read.error)
    assert isinstance(read.error, UnreachableError) == (kind == "unreachable")
    assert 7.0 <= seconds_of(read) < 7.2
    assert read.refused == (read.sent if kind == "refused" else 0)


def test_an_outage_that_ends_before_the_patience_is_outlasted() -> None:
    plan = Plan(store=Store(), faults=(Fault(0.0, 6.5, "unreachable", 1.0),), settings=settings_of(3.0, 7.0))
    read = only_read(plan)
    assert read.error is None
    assert read.retries == read.sent - 1 > 3
    assert 6.0 < seconds_of(read) < 7.2


@pytest.mark.parametrize("kind", ["silent", "false absence"])
def test_other_failures_are_tried_again_until_the_deadline(kind: str) -> None:
    read = only_read(replace(always(kind), settings=settings_of(5.0, 100.0)))
    assert "deadline_seconds" in str(read.error)
    assert 5.0 <= seconds_of(read) < 5.2
    assert read.sent > 4


@pytest.mark.parametrize(("size", "least"), [(10, 5.0), (4_000_000, 6.0)])
def test_a_silent_store_ends_a_read_at_its_deadline_plus_the_time_of_its_bytes_on_the_slowest_link(
    size: int, least: float
) -> None:
    read = only_read(replace(always("stall"), size=size, settings=settings_of(5.0, 100.0)))
    in_all = read.size(0) / 1e6
    assert "no answer came; deadline_seconds" in str(read.error)
    assert least <= 5.0 + in_all <= seconds_of(read) < 5.2 + in_all


def test_a_long_read_ends_sooner_if_no_response_comes() -> None:
    plan = replace(always("stall"), num_ranges=500, size=1_000_000, settings=settings_of(5.0, 100.0))
    plan = replace(plan, faults=(Fault(3.0, ALWAYS, "stall", 1.0),), speed=1e7)
    read = only_read(plan)
    in_all = sum(map(read.size, range(len(read.ranges)))) / 1e6
    assert in_all > 50
    assert "range" in str(read.error)
    assert 8.0 < seconds_of(read) < 13.0


@pytest.mark.parametrize(
    ("kind", "least", "most", "setting", "sent"),
    [
        ("unreachable", 0.0, 1.0, "check the endpoint", FEW_TRIES),
        ("error", 3.0, 3.2, "deadline_seconds", None),
        ("refused", 7.0, 7.2, "outage_seconds", None),
    ],
)
def test_a_store_that_never_answered_may_not_exist(
    kind: str, least: float, most: float, setting: str, sent: int | None
) -> None:
    read = only_read(replace(always(kind), settings=settings_of(3.0, 7.0), opening=1.0))
    assert setting in str(read.error)
    assert "opening" in str(read.error)
    assert least <= seconds_of(read) < most
    assert sent in (None, read.sent)


def test_a_store_that_answered_before_is_waited_for_also_by_its_next_opening() -> None:
    plan = Plan(
        store=Store(), faults=(Fault(1.0, ALWAYS, "unreachable", 1.0),), num_reads=9, opening=1.0, num_callers=1,
        settings=settings_of(3.0, 7.0),
    )  # fmt: skip
    requests = run(plan)
    assert requests.reads[0].error is None
    failed = next(read for read in requests.reads if read.error)
    assert 7.0 <= seconds_of(failed) < 7.2


def test_a_store_that_refuses_some_and_answers_others_is_not_out() -> None:
    """Patience counts from the last response to any read."""
    plan = Plan(
        store=Store(), faults=(Fault(0.0, 60.0, "refused", 0.5),), num_callers=6, num_reads=60, limit=64,
        num_ranges=9, settings=settings_of(30.0, 3.0),
    )  # fmt: skip
    requests = run(plan, 200.0)
    assert not [read.error for read in requests.reads if read.error]
    assert max(map(seconds_of, requests.reads)) > 3.0, "one took longer than the patience"


def test_a_minute_of_an_outage_is_logged_once() -> None:
    requests = run(replace(always("unreachable"), num_callers=5, settings=settings_of(3.0, 100.0)))
    lines = requests.processes[0].warnings
    assert len(lines) == 1
    assert 60 <= lines[0][0] < 70
    assert "memory://b: out for 6" in lines[0][1]


def test_a_second_outage_of_a_long_read_has_a_patience_of_its_own() -> None:
    """A connection that is lost at the beginning, and another one ten minutes later, are no outage of ten minutes."""
    faults = Fault(0.0, 2.0, "reset", 1.0), Fault(20.0, 22.0, "reset", 1.0)
    plan = Plan(store=Store(), faults=faults, num_ranges=900, size=100_000, speed=1e6, limit=1)
    read = only_read(replace(plan, settings=settings_of(60.0, 7.0)))
    assert seconds_of(read) > 22.0
    assert read.error is None


# When a request is sent again


def test_pauses_grow_and_then_stay() -> None:
    requests = run(replace(always("unreachable"), settings=settings_of(3.0, 300.0), num_callers=5, limit=64))
    for read in requests.reads:
        assert 300 / 8 < read.sent < 300 / 4 + 30
    quick = run(replace(always("unreachable"), settings=settings_of(3.0, 1.0), num_callers=20, limit=64))
    assert 5 < sum(read.sent for read in quick.reads) / 20 < 9, "0.05, 0.1, 0.2, 0.4 ... s in the mean"


def test_retry_after_is_obeyed_up_to_the_end_of_patience() -> None:
    plan = Plan(store=Store(), faults=(Fault(0.0, 0.5, "error", 1.0),), retry_after=5.0)
    read = only_read(replace(plan, settings=settings_of(3.0, 30.0)))
    assert (read.sent, read.error) == (2, None)
    assert 5.0 <= seconds_of(read) < 5.3
    read = only_read(replace(plan, settings=settings_of(3.0, 2.0)))
    assert (read.sent, read.error) == (2, None)
    assert 2.0 <= seconds_of(read) < 2.3


def test_requests_to_send_again_come_before_those_never_sent() -> None:
    plan = Plan(store=Store(), faults=(Fault(0.0, 0.25, "reset", 0.3),), num_ranges=400, limit=1)
    read = only_read(replace(plan, settings=settings_of(60.0, 7.0)))
    assert read.retries > 0
    assert read.sent == len(read.ranges) + read.retries


def test_reads_are_served_in_the_order_in_which_they_came() -> None:
    requests = run(Plan(store=Store(), num_callers=4, num_ranges=200, limit=2))
    ends = [read.ended for read in sorted(requests.reads, key=lambda read: read.number)]
    assert ends == sorted(ends)


def test_a_stalled_request_is_sent_again() -> None:
    plan = Plan(store=Store(), faults=(Fault(0.0, 0.3, "stall", 1.0),), settings=settings_of(60.0, 7.0))
    read = only_read(plan)
    assert (read.sent, read.retries, read.hedges, read.error) == (2, 1, 0, None)
    assert 10.0 < seconds_of(read) < 10.5


# Hedges


def test_a_late_request_is_hedged_and_the_first_response_wins() -> None:
    plan = Plan(store=Store(), faults=(Fault(30.0, 30.4, "stall", 1.0),), num_reads=60, num_callers=6)
    requests = run(replace(plan, settings=settings_of(60.0, 7.0, hedge=True)))
    hedged = [read for read in requests.reads if read.hedges]
    assert hedged
    for read in hedged:
        assert 0.5 < seconds_of(read) < 0.8
        assert (read.sent, read.retries, read.hedges) == (2, 0, 1)


@pytest.mark.parametrize("size", [10, 4_000_000])
def test_without_enough_responses_a_request_is_late_after_five_seconds_and_the_time_of_its_bytes(size: int) -> None:
    plan = Plan(store=Store(), faults=(Fault(0.0, 0.3, "stall", 1.0),), settings=settings_of(60.0, 7.0, hedge=True))
    read = only_read(replace(plan, size=size))
    late_after = 5.0 + read.size(0) / 1e6
    assert (read.sent, read.hedges) == (2, 1)
    assert late_after < seconds_of(read) < late_after + 0.3


def test_a_slow_store_gets_few_hedges() -> None:
    plan = Plan(
        store=Store(round_trip=0.02), faults=(Fault(20.0, ALWAYS, "slow", 1.0),), num_callers=4, num_reads=300,
        size=1_000_000, speed=1e7, settings=settings_of(60.0, 7.0, hedge=True), num_ranges=4,
    )  # fmt: skip
    requests = run(plan, 400.0)
    (process,) = requests.processes
    assert process.num_hedges > 0
    assert process.num_hedges <= 2 + 0.05 * process.num_responses


def test_a_process_that_stood_still_sends_no_hedges_because_of_that() -> None:
    """Responses have come meanwhile, and were not processed yet."""
    plan = Plan(
        store=Store(), stops=((1.0, 3.0), (9.0, 40.0)), num_callers=4, num_reads=40, num_ranges=9, limit=64,
        settings=settings_of(60.0, 7.0, hedge=True),
    )  # fmt: skip
    requests = run(plan)
    assert requests.processes[0].num_hedges == 0
    assert not [read.error for read in requests.reads if read.error]


def test_the_limit_holds_for_all_reads_of_a_process_together() -> None:
    requests = run(Plan(store=Store(round_trip=1.0), num_callers=9, num_ranges=20, limit=5), 3.0)
    assert len(requests.processes[0].sent) == 5


def test_a_read_of_many_requests_is_moved_to_the_line_of_its_limiter_in_parts() -> None:
    """A call of `next` takes less than a millisecond, so that the loop can do other work."""
    plan = Plan(store=Store(round_trip=5.0), num_ranges=4_000, limit=128, settings=settings_of(600.0, 7.0))
    world = World(1)
    moved = list[int]()
    requests = RequestWorld(world, plan)
    world.invariants.append(lambda: moved.extend(read.next_index for read in requests.reads))
    world.run(0.3)
    (read,) = requests.reads
    assert len(read.ranges) > 2_000
    moves = sorted({*moved} - {0, len(read.ranges)})
    assert moves == [*range(moves[0], len(read.ranges), 250)], "16 are sent, and 250 wait in the line"


# One request, step by step


@pytest.mark.parametrize(
    ("is_limited", "answered_at", "seconds"),
    [(True, 75.0, 0.0), (True, 60.0, 30.0), (False, 75.0, 30.0)],
    ids=["it answers others", "it answers none", "nothing is limited"],
)
def test_a_limited_rate_decides_while_a_store_with_retry_after_answers_others(
    is_limited: bool, answered_at: float, seconds: float
) -> None:
    bare = BareSchedule(ReadSettings())
    bare.now = 100.0
    (number,) = bare.send()
    bare.limiter.is_limited, bare.limiter.answered_at = is_limited, answered_at
    bare.fail(number, HTTPStatusError(503), retry_after=30.0)
    bare.wait()
    assert bare.now - 100 == seconds


def test_a_request_that_waits_for_a_rate_pauses_from_its_third_refusal_on() -> None:
    bare = BareSchedule(ReadSettings(outage_seconds=ALWAYS))
    bare.limiter.is_limited = True
    (number,), pauses = bare.send(), []
    for _ in range(10):
        failed_at = bare.now
        bare.fail(number, HTTPStatusError(503))
        (number,) = bare.wait()
        pauses.append(round(bare.now - failed_at, 9))
    assert pauses == [0.0, 0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 8.0]


def test_a_stalled_request_is_sent_again_after_the_first_pause() -> None:
    bare = BareSchedule(ReadSettings(hedge=False))
    sent = bare.send()
    while not bare.cancelled:
        bare.now = bare.schedule.wake_at
        bare.schedule.pass_time(bare.now)
    stalled_at = bare.now
    bare.wait()
    assert bare.cancelled == sent
    assert bare.now - stalled_at == pytest.approx(0.1)


def test_patience_of_refusals_counts_from_the_last_response_to_any_process_of_the_node() -> None:
    bare = BareSchedule(ReadSettings(outage_seconds=10.0))
    (number,) = bare.send()
    while not bare.ended and bare.now < 100:
        bare.limiter.answered_at = min(bare.now, 50.0)
        bare.fail(number, HTTPStatusError(503))
        if not bare.ended:
            (number,) = bare.wait()
    assert bare.now == 60.0
    assert bare.times.answered == {"memory://b": pytest.approx(50.0, abs=8.0)}


def test_a_refusal_ends_an_outage() -> None:
    """A connection that is lost before and after a time of refusals was lost twice; the store answered between."""
    bare = BareSchedule(ReadSettings(outage_seconds=10.0))
    (number,) = bare.send()
    bare.fail(number, ConnectionResetError())
    (number,) = bare.wait()
    while bare.now < 30.0:
        bare.limiter.answered_at = bare.now
        bare.fail(number, HTTPStatusError(503))
        (number,) = bare.wait()
    bare.fail(number, ConnectionResetError())
    assert not bare.ended


def test_each_try_of_a_request_can_be_hedged_once() -> None:
    bare = BareSchedule(ReadSettings())
    for number in range(8):
        bare.schedule._hedges.note("memory://b", 10, 0.01 * number)
    (number,) = bare.send()
    for _ in range(2):
        began = bare.now
        (hedge,) = bare.wait()
        assert 0.5 < bare.now - began < 0.7
        bare.now += 1.0
        bare.schedule.pass_time(bare.now)
        assert not bare.send(), "it has a hedge"
        for failed in (number, hedge):
            bare.fail(failed, TimeoutError())
        (number,) = bare.wait()
    assert bare.read.hedges == 2
    assert bare.read.retries == 2
    assert bare.limiter.in_flight == 1


def test_after_a_response_its_hedge_is_cancelled() -> None:
    bare = BareSchedule(ReadSettings())
    (number,) = bare.send()
    (hedge,) = bare.wait()
    bare.schedule.answered(number, b"1", bare.now)
    assert bare.cancelled == [hedge]
    assert (bare.ended, bare.read.responses, bare.limiter.in_flight) == ([bare.read], [b"1"], 0)


def test_requests_are_judged_only_if_time_did_not_jump() -> None:
    bare = BareSchedule(ReadSettings(deadline_seconds=ALWAYS))
    bare.send()
    bare.schedule.pass_time(0.05)
    bare.schedule.pass_time(1_000.0)  # and not at 0.1
    assert not bare.cancelled
    bare.schedule.pass_time(1_000.0 + 2 * 0.1)
    assert not bare.cancelled
    bare.now = bare.schedule.wake_at
    bare.schedule.pass_time(bare.now)
    assert len(bare.cancelled) == 1


@pytest.mark.parametrize(("median", "late_after"), [(0.01, 0.5), (0.125, 0.5), (0.25, 1.0), (2.0, 8.0)])
def test_a_request_is_late_after_four_medians_and_at_least_half_a_second(median: float, late_after: float) -> None:
    bare = BareSchedule(ReadSettings())
    for seconds in (*[100.0] * 40, *[median] * 33, *[50.0] * 31):  # of 64, the 33rd is the median
        bare.schedule._hedges.note("memory://b", 1 << 18, seconds)
        bare.schedule._hedges.note("memory://b", (1 << 18) + 1, 1.0)
        bare.schedule._hedges.note("memory://far", 10, 1.0)
    assert len(bare.send()) == 1
    bare.wait()
    assert late_after < bare.now <= late_after + 0.2


def test_hedges_are_a_share_of_responses_with_a_largest_budget() -> None:
    bare = BareSchedule(ReadSettings(), num_ranges=100, limit=100)
    for _ in range(1_000):
        bare.schedule._hedges.note("memory://b", 10, 0.01)
    assert len(bare.send()) == 100
    assert len(bare.wait()) == 16
    assert bare.limiter.in_flight == 116
    bare = BareSchedule(ReadSettings(), num_ranges=100, limit=100)
    for _ in range(59):
        bare.schedule._hedges.note("memory://b", 10, 0.01)
    bare.send()
    assert len(bare.wait()) == 4, "2 at first, and 0.05 of each response"


def test_a_read_that_was_dropped_before_it_came_is_not_sent() -> None:
    bare = BareSchedule(ReadSettings())
    other = Read("memory://b/k", "memory://b", [(0, 10)], ReadSettings(), False, False)
    bare.schedule.drop(other, InterruptedError(), 0.0)
    bare.schedule.submit(other, bare.limiter, 0.0)
    assert [*bare.schedule.reads] == [bare.read]
    assert (len(bare.send()), bare.ended) == (1, [other])


def test_requests_that_stall_together_end_their_read_once() -> None:
    """The store never answered: the fourth stalled try is one too many."""
    bare = BareSchedule(ReadSettings(deadline_seconds=ALWAYS, hedge=False), num_ranges=2, opening=True)
    assert len(bare.send()) == 2
    for _ in range(3):
        bare.wait()
        bare.send()
    while not bare.ended:
        bare.now = bare.schedule.wake_at
        bare.schedule.pass_time(bare.now)
    assert (bare.ended, len(bare.cancelled), bare.limiter.in_flight) == ([bare.read], 8, 0)
    assert not bare.schedule.in_flight


def test_a_read_that_waits_for_a_rate_has_time_while_its_store_answers() -> None:
    bare = BareSchedule(ReadSettings(deadline_seconds=5.0, hedge=False))
    bare.send()
    bare.limiter.is_holding = True
    bare.times.answered["memory://b"] = 3.0
    while not bare.ended:
        bare.now = bare.schedule.wake_at
        bare.schedule.pass_time(bare.now)
    assert 8.0 <= bare.now < 8.2


def test_responses_to_ranges_of_one_size_tell_when_a_request_is_late() -> None:
    bare = BareSchedule(ReadSettings(), num_ranges=9)
    for number in bare.send()[:8]:
        bare.schedule.answered(number, b"", 0.01)
    bare.wait()
    assert 0.5 < bare.now < 0.7, "and not after five seconds"


def test_a_request_that_was_admitted_and_not_sent_leaves_its_place_when_its_read_is_dropped() -> None:
    bare = BareSchedule(ReadSettings(), limit=1)
    (number,) = bare.send()
    other = Read("memory://b/k", "memory://b", [(0, 10)], ReadSettings(), False, False)
    bare.schedule.submit(other, bare.limiter, 0.0)
    bare.schedule._queue.clear()
    bare.limiter.in_flight += 1
    bare.schedule.admit(other, 0)
    bare.schedule.drop(other, InterruptedError(), 0.0)
    assert not bare.send()
    bare.schedule.answered(number, b"", 0.01)
    assert not bare.send()
    assert (bare.limiter.in_flight, bare.limiter.num_ends) == (0, 1)


@pytest.mark.parametrize(("num_failures", "middle"), [(6, ", 0.7 s "), (8, ", ... 2 more ..., 3.1 s ")])
def test_the_error_of_a_read_tells_its_tries_and_has_the_last_cause(num_failures: int, middle: str) -> None:
    bare = BareSchedule(ReadSettings(outage_seconds=ALWAYS))
    (number,), last = bare.send(), HTTPStatusError(416)
    lost = caused(StorageError("memory://b/k: lost"), ConnectionResetError("by peer"))
    for error in (lost, *[HTTPStatusError(500)] * (num_failures - 2)):
        bare.fail(number, error)
        (number,) = bare.wait()
    bare.fail(number, last)
    (reason,) = bare.errors
    assert reason is not None
    assert str(reason).startswith(
        f"memory://b/k: HTTPStatusError: 416; {bare.read.where(0)} failed {num_failures} times in {bare.now:.1f} s: "
        f"0.0 s ConnectionResetError, 0.1 s HTTPStatusError 500, 0.3 s HTTPStatusError 500{middle}HTTPStatusError 500, "
    )
    assert str(reason).endswith(f", {bare.now:.1f} s HTTPStatusError 416")
    assert reason.__cause__ is last


def test_the_error_of_one_try_has_no_history_and_an_own_error_stays_what_it_is() -> None:
    for error in (ObjectChangedError("memory://b/k: changed"), FileNotFoundError("no such key")):
        bare = BareSchedule(ReadSettings())
        (number,) = bare.send()
        bare.now = 3.0
        bare.fail(number, error)
        (reason,) = bare.errors
        assert (reason is error) == isinstance(error, ObjectChangedError)
        assert str(reason) == ("memory://b/k: changed" if reason is error else "memory://b/k: no such object")
        assert reason is error or (reason is not None and reason.__cause__ is error)


def test_the_tries_of_a_request_count_from_its_first() -> None:
    bare = BareSchedule(ReadSettings(), num_ranges=2, limit=1)
    bare.now = 7.0
    (first,) = bare.send()
    bare.schedule.answered(first, b"", 8.0)
    bare.now = 8.0
    (number,) = bare.send()
    bare.now = 9.0
    bare.fail(number, TimeoutError())
    (number,) = bare.wait()
    bare.fail(number, HTTPStatusError(403))
    assert "failed 2 times in 1.1 s: 1.0 s TimeoutError, 1.1 s HTTPStatusError 403" in str(bare.errors[0])
