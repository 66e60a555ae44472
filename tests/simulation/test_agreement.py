"""Agreement of ranks: worlds of builds in which ranks fail, die, stop or come late, and the machine at its limits."""

from __future__ import annotations

import logging

import pytest
from simulation.agreement_claims import check_ranks
from simulation.agreement_world import Fault, Ranks, Request
from simulation.processes import Task

from binidx.dataset.rank_agreement import LEFT, OK, Agreement
from binidx.errors import PeerError

# The machine


def test_a_rank_is_dead_when_its_heartbeat_is_the_same_for_more_than_30_seconds_of_looks() -> None:
    agreement = Agreement(4)
    assert [agreement.look("1.0 rank 1 (a)", 3.0 * look) for look in range(11)] == [None] * 11
    found = agreement.look("1.0 rank 1 (a)", 30.5)
    assert found == "rank 1 (a): no heartbeat for 30 s; killed, or does not run: a hung file system?"
    assert agreement.look("2.0 rank 1 (a)", 34.0) is None
    assert agreement.look(LEFT, 1_000.0) is None
    assert [agreement.look(LEFT, 1_000.0 + 3 * look) for look in range(20)] == [None] * 20


def test_a_pause_of_the_watching_rank_counts_six_seconds() -> None:
    agreement = Agreement(4)
    assert [agreement.look("1.0 rank 1 (a)", 100.0 * look) for look in range(6)] == [None] * 6
    found = agreement.look("1.0 rank 1 (a)", 600.0)
    assert found is not None
    assert "no heartbeat for 36 s" in found


@pytest.mark.parametrize(("entered", "finished", "is_over"), [(3, 3, True), (3, 2, False), (4, 4, False), (3, 4, True)])
def test_a_wait_is_over_without_absent_ranks_if_all_that_entered_have_finished(
    entered: int, finished: int, is_over: bool
) -> None:
    """More may have finished than had entered a request before."""
    assert Agreement(4).is_over_without_absent(entered, finished) is is_over


@pytest.mark.parametrize(
    ("outcome", "rank", "waits"), [(None, 0, False), (OK, 0, True), (OK, 1, False), ("rank 2 failed", 1, True)]
)
def test_rank_0_and_failed_ranks_wait_five_seconds_until_the_others_are_informed(
    outcome: str | None, rank: int, waits: bool
) -> None:
    agreement = Agreement(4)
    agreement.outcome = outcome
    assert [agreement.must_inform(rank, waited) for waited in (0.0, 5.0, 5.01)] == [waits, waits, False]


def test_pauses_grow_with_the_time_waited_from_2_ms_to_a_second_and_many_ranks_poll_20_000_times_a_second() -> None:
    assert [Agreement(4).pause_seconds(waited) for waited in (0.0, 0.064, 0.32, 16.0, 32.0, 1e6)] == [
        0.002, 0.002, 0.01, 0.5, 1.0, 1.0,
    ]  # fmt: skip
    assert Agreement(1_000).pause_seconds(0.0) == 0.05


# Worlds


def run(seed: int, **options: object) -> Ranks:
    """Run a world, and check all claims."""
    ranks = Ranks(seed, **options)  # type: ignore[arg-type]
    ranks.run()
    check_ranks(ranks)
    return ranks


@pytest.mark.parametrize("seed", [224_371_687, 224_371_938])
def test_rank_0_keeps_the_store_for_ranks_at_work_whoever_else_is_informed(seed: int) -> None:
    """One that is interrupted before it enters, or enters late: they counted for the ranks at work."""
    run(seed)


def errors(ranks: Ranks, number: int = 0) -> list[str]:
    """Return the first line of the error of each rank; "" if it succeeded."""
    return [str(part.error or "").partition("\n")[0] for part in ranks.builds[number].parts]


# What the worlds showed: each of these failed before


@pytest.mark.parametrize("at", range(1, 16))
def test_a_rank_that_dies_at_any_effect_while_it_enters_holds_up_none(at: int) -> None:
    """It was counted before its first heartbeat: if it died in between, nothing missed it, and all waited for ever."""
    ranks = run(at, size=3, faults=[Fault("is killed", 1, at=at)], num_builds=1, seconds=1.0, holder=None)
    assert not ranks.processes[1].is_alive


@pytest.mark.parametrize("seconds", [40.0, 1_000.0])
def test_ranks_that_are_all_stopped_and_go_on_succeed(seconds: float) -> None:
    """Ctrl-Z, a suspended job, a checkpoint: each found the heartbeat of the next as old as its own pause."""
    ranks = run(1, size=5, faults=[Fault("all stop", 0, at=4.0, seconds=seconds)], num_builds=1, seconds=20.0)
    assert errors(ranks) == [""] * 5


def test_a_rank_that_hangs_for_40_seconds_is_named_with_its_host() -> None:
    ranks = Ranks(1, size=8, faults=[Fault("stops", 6, at=1.0, seconds=40.0)], num_builds=1, seconds=1.0)
    ranks.builds[0].seconds[6] = 2.0
    ranks.run()
    check_ranks(ranks)
    text = "rank 6 (node 1 process 106): no heartbeat for 3"
    assert all(error.startswith(text) for error in errors(ranks))
    assert all(error.endswith(" s; killed, or does not run: a hung file system?") for error in errors(ranks))
    assert all(28 < part.ended - part.called < 50 for part in ranks.builds[0].parts)  # type: ignore[operator]


def test_a_rank_at_work_raises_the_error_that_it_knows_though_the_store_has_gone() -> None:
    """Rank 0 ends five seconds after the failure, and the store with it; rank 1 computes for a minute."""
    ranks = Ranks(1, size=3, faults=[Fault("fails", 2, at=1.0)], num_builds=1, holder=0, seconds=2.0)
    ranks.builds[0].seconds[1], ranks.builds[0].checks[1] = 60.0, False
    ranks.run()
    check_ranks(ranks)
    assert all("no tokens in the data of node 0 process 102" in error for error in errors(ranks))
    assert ranks.builds[0].parts[1].ended > 60.0  # type: ignore[operator]


@pytest.mark.parametrize("at", range(6, 30))
def test_a_rank_that_waits_for_the_values_of_a_killed_one_sends_heartbeats(at: int) -> None:
    """The first rank that compares dies between its digest and its values; torch's `wait` held up all requests."""
    faults = [Fault("is killed", 1, at=at), Fault("disagrees", 0)]
    ranks = Ranks(2, size=2, faults=faults, num_builds=1, holder=None)
    build = ranks.builds[0]
    build.builder, build.compares, build.seconds = None, True, [0.5, 0.0]
    ranks.run()
    check_ranks(ranks)
    assert isinstance(build.parts[0].error, PeerError | None)


def test_the_last_rank_does_not_wait_for_those_that_went_on_without_it() -> None:
    """They had read no outcome, and were waited for in vain, for five seconds."""
    faults = [Fault("is late", 0, seconds=30.0)]
    ranks = run(3, size=3, faults=faults, num_builds=1, seconds=0.5)
    parts = ranks.builds[0].parts
    assert errors(ranks) == [""] * 3
    assert all(10.0 < part.ended - part.worked < 11.0 for part in parts[1:])  # type: ignore[operator]
    assert parts[0].ended - parts[0].worked < 0.5  # type: ignore[operator]


def test_a_rank_that_works_long_after_the_others_went_on_without_it_misses_none() -> None:
    """They have left: that their heartbeats have stopped means nothing."""
    ranks = Ranks(3, size=3, faults=[Fault("is late", 0, seconds=20.0)], num_builds=1, seconds=0.5)
    ranks.builds[0].seconds[0] = 90.0
    ranks.run()
    check_ranks(ranks)
    assert errors(ranks) == [""] * 3


def test_a_rank_that_is_stopped_between_its_counts_does_not_leave_one_at_work() -> None:
    """Rank 2 entered and finished after two ranks were counted as entered: its end was taken for that of rank 1."""
    faults = [Fault("is late", 2, seconds=12.0), Fault("is absent", 3)]
    ranks = Ranks(1, size=4, faults=faults, num_builds=1, seconds=1.0, holder=None)
    build, [process, *_], served = ranks.builds[0], ranks.processes, ranks.clients[0].on_served
    build.seconds, counts = [0.1, 60.0, 0.1, 0.0], list[str]()

    def stop_after_the_first_count(request: Request, result: object, task: Task) -> None:
        served(request, result, task)
        if request.arguments == (0,) and not counts:
            counts.append(request.key)
            process.stop(18.0)

    ranks.clients[0].on_served = stop_after_the_first_count
    ranks.run()
    check_ranks(ranks)
    assert counts
    assert build.parts[1].worked < build.parts[0].ended  # type: ignore[operator]


@pytest.mark.parametrize("seed", [6_000_032])
def test_a_rank_that_enters_while_one_that_went_on_leaves_does_not_hold_it_up(seed: int) -> None:
    run(seed)


# Limits


def test_ranks_that_wait_end_within_seconds_when_the_process_with_the_store_dies() -> None:
    ranks = Ranks(9, size=3, faults=[Fault("is killed", 0, at=60)], num_builds=1, holder=0)
    build = ranks.builds[0]
    build.builder, build.seconds, build.checks = None, [500.0] * 3, [True] * 3
    ranks.run()
    check_ranks(ranks)
    assert build.parts[0].failed < 30.0  # type: ignore[operator]
    for part in build.parts[1:]:
        assert "does not answer" in str(part.error)
        assert part.ended - build.parts[0].failed < 5.0  # type: ignore[operator]


def test_an_error_is_raised_by_ranks_that_have_finished_within_a_second() -> None:
    ranks = run(4, size=6, faults=[Fault("fails", 5, at=9.0)], num_builds=1, seconds=0.1)
    parts = ranks.builds[0].parts
    assert all(parts[5].failed < part.ended < parts[5].failed + 1.0 for part in parts)  # type: ignore[operator]
    assert all(isinstance(part.error, PeerError) for part in parts[:5])
    assert all(error.startswith("rank 5 (node 1 process 105) failed: ValueError: no") for error in errors(ranks)[:5])


def test_ranks_without_an_outcome_wait_ten_seconds_for_absent_ranks_and_for_entered_ones_until_they_finish() -> None:
    ranks = Ranks(5, size=4, faults=[Fault("is absent", 3)], num_builds=1)
    build = ranks.builds[0]
    build.builder, build.seconds = None, [0.0, 2.0, 25.0, 0.0]
    ranks.run()
    check_ranks(ranks)
    waits = [part.ended - part.worked for part in build.parts[:3]]  # type: ignore[operator]
    assert 24.5 < waits[0] < 26.0
    assert 22.5 < waits[1] < 24.0
    assert 10.0 < waits[2] < 10.6
    assert "0/outcome" not in ranks.store.data
    assert [(log.logger, log.level) for log in ranks.logged] == [("binidx.dataset.rank_agreement", logging.WARNING)] * 3
    assert all(log.message.startswith("1 of 4 ranks have not entered build(); continuing") for log in ranks.logged)


def test_an_interrupted_rank_ends_at_once_and_the_others_raise_within_a_second() -> None:
    ranks = run(8, size=3, faults=[Fault("is interrupted", 1, at=80)], num_builds=1, seconds=40.0)
    parts = ranks.builds[0].parts
    assert isinstance(parts[1].error, KeyboardInterrupt)
    assert parts[1].ended - parts[1].failed < 0.3  # type: ignore[operator]
    for part in (parts[0], parts[2]):
        assert "rank 1 (node 0 process 101) failed: KeyboardInterrupt" in str(part.error)


@pytest.mark.parametrize("size", [64, 256])
def test_many_ranks_send_the_store_no_more_than_it_serves(size: int) -> None:
    faults = [Fault("fails", size // 2, at=3.0)]
    ranks = run(6, size=size, faults=faults, num_builds=1, seconds=1.0, rate=20_000.0)
    assert all("no tokens" in error for error in errors(ranks))
    assert max(ranks.store.arrivals.values()) > 10 * size


def test_a_slow_store_delays_ranks_and_fails_none() -> None:
    ranks = run(7, size=24, faults=[], num_builds=1, seconds=5.0, rate=60.0)
    assert errors(ranks) == [""] * 24


@pytest.mark.parametrize("first", range(0, 45, 15))
def test_ranks_agree_in_any_world(first: int) -> None:
    """A failing seed is in the message, with its faults and last events: `Ranks(seed)` runs it again."""
    for seed in range(first, first + 15):
        run(seed)


def test_one_seed_is_one_trace() -> None:
    digests = [run(seed).world.digest for seed in (5, 5, 6)]
    assert digests[0] == digests[1] != digests[2]
