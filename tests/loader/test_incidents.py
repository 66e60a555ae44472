"""Incidents that a process finds in its own counters, and a rank beside others: in virtual time, by brute force."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from binidx.loader.incidents import NUM_REQUESTS, RANK_BITS, REQUEST_SECONDS, TICK_SECONDS, OddRank, SlowReads
from binidx.storage.stats import BOUNDS

KINDS = ("local_read ", "cache_read ", "cache_write ", "next ", "request s3://b", "request s3://other")
START = 1_000.0


class Process:
    """Counters of a process, and the lines that were logged, with their time."""

    def __init__(self) -> None:
        self.reads, self.now, self.lines = SlowReads(), START, list[tuple[float, str]]()
        ends = (*BOUNDS, "seconds", "bytes")
        self.used: dict[str, float] = {f"{kind} {end}": 0.0 for kind in KINDS for end in ends}
        self.used["wait_seconds"] = 0.0
        self.share = 0.0

    def note(self, kind: str, seconds: float, num_bytes: float = 0) -> None:
        self.used[f"{kind} {next(bound for bound in BOUNDS if seconds <= bound)}"] += 1
        self.used[f"{kind} seconds"] += seconds
        self.used[f"{kind} bytes"] += num_bytes

    def run(self, seconds: float, tick: Callable[[], object]) -> list[str]:
        """Call `tick` before each look for some seconds; return the new lines."""
        first = len(self.lines)
        for _ in range(round(seconds / TICK_SECONDS)):
            self.now += TICK_SECONDS
            tick()
            lines, self.share = self.reads.look({**self.used}, self.now)
            self.lines += [(self.now, line) for line in lines]
        return [line for _, line in self.lines[first:]]

    def requests(self, count: int, seconds: Callable[[], float], bucket: str = "s3://b") -> Callable[[], None]:
        return lambda: [self.note(f"request {bucket}", seconds()) for _ in range(count)] and None


@pytest.mark.parametrize("known_seconds", [0, 60, 7_200])
def test_a_slow_store_is_named_once_within_ten_seconds_beside_a_usual_one(known_seconds: int) -> None:
    draw, process = random.Random(1), Process()
    fast = process.requests(50, lambda: draw.lognormvariate(-3.47, 0.3))  # 31 ms
    other = process.requests(50, lambda: draw.uniform(0.01, 0.1), "s3://other")
    assert process.run(known_seconds, lambda: (fast(), other())) == []
    slow = process.requests(9, lambda: draw.uniform(2.0, 2.2))
    [line] = process.run(300, lambda: (slow(), other()))
    usual = "(3[0-9]|4[0-5]) ms" if known_seconds else "less than 100 ms"
    assert re.fullmatch(rf"reads of s3://b take (2\.[01]|1\.[0-9]) s \(usual {usual}\)", line)
    assert process.lines[0][0] - START - known_seconds <= 10
    again = process.run(600, lambda: (slow(), other()))
    assert len(again) == 1, "it is logged again after ten minutes"
    assert process.run(3600, lambda: (fast(), other())) == []


@pytest.mark.parametrize("seed", range(4))
def test_stores_of_any_usual_time_with_stragglers_and_drift_are_not_named(seed: int) -> None:
    draw, process = random.Random(seed), Process()
    usual, count = draw.uniform(0.002, 0.4), draw.choice([4, 30])

    def seconds() -> float:
        drift = 1 + 3 * (process.now - START) / 20_000  # four times as slow within hours
        return draw.uniform(5, 10) if draw.random() < 0.04 else usual * drift * draw.uniform(0.5, 2)

    process.run(60, process.requests(count, lambda: usual))
    assert process.run(20_000, process.requests(count, seconds)) == []


def test_a_change_for_good_becomes_usual_within_hours() -> None:
    process = Process()
    process.run(600, process.requests(5, lambda: 0.03))
    lines = process.run(4 * 3600, process.requests(5, lambda: 0.6))
    assert 1 <= len(lines) <= 6
    assert process.run(3600, process.requests(5, lambda: 0.6)) == []


def test_the_share_of_waiting_is_of_the_last_10_s_and_none_is_known_of_the_start() -> None:
    process = Process()
    process.used["wait_seconds"] = 4.0
    process.run(TICK_SECONDS, lambda: None)
    assert process.share == 1.0, "as one that waits"
    process.run(TICK_SECONDS, lambda: None)
    assert process.share == 0.0
    process.used["wait_seconds"] += 2.5
    process.run(TICK_SECONDS, lambda: None)
    assert process.share == 0.25


def test_a_disk_is_named_by_the_bytes_that_it_gives_only_while_the_process_waits_for_it() -> None:
    process = Process()
    assert process.run(60, lambda: [process.note("cache_read ", 0.001, 65_536) for _ in range(500)]) == []
    assert process.run(60, lambda: process.note("cache_read ", 0.3, 65_536)) == [], "one read of 5 s is no load"
    [line] = process.run(60, lambda: [process.note("cache_write ", 0.33, 65_536) for _ in range(14)])
    assert line == "the disk of cache_dir gives 0.2 MB/s (waited 5 s of 10 s)"
    [line] = process.run(30, lambda: [process.note("local_read ", 5.0, 524_288) for _ in range(8)])
    assert line.startswith("the disk of local data gives 0.4 MB/s"), "eight threads wait at once"


class Group:
    """Ranks that look every 5 s, each at its own moment, and the counter of their store."""

    def __init__(self, num_ranks: int, draw: random.Random) -> None:
        self.offsets, self.tick = [draw.uniform(0, TICK_SECONDS) for _ in range(num_ranks)], itertools.count(1)
        self.odd, self.value, self.lines = [*map(OddRank, self.offsets)], 0, list[tuple[float, int, str]]()
        self.sent: list[list[float]] = [[] for _ in self.odd]

    def run(self, seconds: float, share: Callable[[int, float], float]) -> list[tuple[float, int, str]]:
        """Look for some seconds, with shares of waiting by rank and time; return when which rank logged which line."""
        first = len(self.lines)
        for number in itertools.islice(self.tick, round(seconds / TICK_SECONDS)):
            for rank in sorted(range(len(self.odd)), key=self.offsets.__getitem__):
                now = number * TICK_SECONDS + self.offsets[rank]
                if (addition := self.odd[rank].look(share(rank, now), now)) is not None:
                    self.value += addition
                    self.sent[rank].append(now)
                    if line := self.odd[rank].answered(self.value, now):
                        self.lines.append((now, rank, line))
        return self.lines[first:]

    def most_requests(self) -> int:
        """Return the most requests of a rank in any minute."""
        return max(sum(0 <= other - one < REQUEST_SECONDS for other in sent) for sent in self.sent for one in sent)


def recent_share(began: float, full: float, usual: float = 0.004) -> Callable[[float], float]:
    """Return the share of the last 10 s for a rank that waits from `began` on."""
    return lambda now: min(1.0, max(0.0, now - began) / 10) * (full - usual) + usual


def noisy_share(draw: random.Random, num_ranks: int, seconds: float, *, shared: bool) -> Callable[[int, float], float]:
    """Return shares of the last 10 s of ranks that wait for a little, and for up to 2.5 s once an hour.

    Args:
        shared: whether all ranks wait 5 to 40 s at about the same time, every 10 minutes, as for a store.
    """
    usual = [draw.lognormvariate(-5, 0.5) for _ in range(num_ranks)]
    waits = [[(draw.uniform(0, seconds), draw.uniform(0.5, 2.5), 1.0) for _ in range(round(seconds / 3600))]
             for _ in usual]  # fmt: skip
    for began in range(600, round(seconds) - 60, 600) if shared else ():
        length = draw.uniform(5, 40)
        for own in waits:
            later = draw.uniform(0, 3)
            own.append((began + later, length - later, draw.uniform(0.5, 0.99)))

    def share(rank: int, now: float) -> float:
        waited = sum(part * max(0.0, min(now, began + length) - max(now - 10, began))
                     for began, length, part in waits[rank])  # fmt: skip
        return min(1.0, waited / 10 + usual[rank] * draw.uniform(0.3, 3))

    return share


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_ranks", [2, 8, 1_000])
def test_one_odd_rank_is_named_within_30_s_and_by_itself_alone(seed: int, num_ranks: int) -> None:
    if num_ranks > 8 and seed:
        num_ranks = 16
    draw = random.Random(seed)
    group, odd, began = Group(num_ranks, draw), draw.randrange(num_ranks), draw.uniform(300, 400)
    waiting = recent_share(began, 0.99)

    def share(rank: int, now: float) -> float:
        return waiting(now) if rank == odd else draw.uniform(0.002, 0.006)

    assert group.run(295, share) == []
    [(now, rank, line)] = group.run(began - 295 + 200, share)
    assert rank == odd
    assert now - began <= 30
    assert line.startswith("waits 99 %, others 0.")
    assert group.most_requests() <= NUM_REQUESTS
    assert group.value >> RANK_BITS == num_ranks
    assert len(group.run(1200, share)) == 2, "again after ten minutes"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_ranks", [2, 8, 64])
@pytest.mark.parametrize("first_seconds", [0.5, 6])
def test_a_rank_that_is_slow_from_its_start_is_named_within_30_s(
    seed: int, num_ranks: int, first_seconds: float
) -> None:
    draw = random.Random(seed)
    group, odd = Group(num_ranks, draw), draw.randrange(num_ranks)
    firsts = [draw.uniform(0.3, 1) * first_seconds for _ in range(num_ranks)]  # of the first batch

    def share(rank: int, now: float) -> float:
        age = now - group.offsets[rank]
        if age < TICK_SECONDS + 1 or rank == odd:  # the first look has no share
            return 1.0 if age < TICK_SECONDS + 1 else 0.96
        waited = max(0.0, firsts[rank] - max(TICK_SECONDS, age - 10))
        return waited / min(10, age - TICK_SECONDS) + draw.uniform(0, 0.01)

    [(now, rank, line)] = group.run(300, share)
    assert rank == odd
    assert now - group.offsets[odd] <= 25
    assert line.startswith("waits 96 %, others ")
    assert group.most_requests() <= NUM_REQUESTS


@pytest.mark.parametrize("shared", [False, True])
def test_no_rank_is_odd_in_hours_of_usual_waits_and_of_ones_of_all(shared: bool) -> None:
    draw = random.Random(3)
    group = Group(50, draw)
    assert group.run(2 * 3600, noisy_share(draw, 50, 2 * 3600, shared=shared)) == []
    assert group.most_requests() <= NUM_REQUESTS
    num_requests = sum(map(len, group.sent)) / len(group.sent)
    assert num_requests < (60 if shared else 15), "in 120 minutes"


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_odd_if_all_begin_to_wait_within_seconds(seed: int) -> None:
    draw = random.Random(seed)
    group, begins = Group(16, draw), [draw.uniform(300, 303) for _ in range(16)]
    shares = [recent_share(began, draw.uniform(0.5, 0.99)) for began in begins]
    assert group.run(1500, lambda rank, now: shares[rank](now) if now < 1000 else 0.004) == []
    assert group.most_requests() <= NUM_REQUESTS


def test_ranks_whose_shares_stay_send_one_request_and_drift_one_in_ten_minutes() -> None:
    group = Group(8, random.Random(0))
    group.run(3600, lambda rank, now: 0.004 if rank else min(0.19, now / 10_000))
    assert {len(sent) for sent in group.sent[1:]} == {1}
    assert 3 < len(group.sent[0]) <= 7
    assert 150 < group.value % (1 << RANK_BITS) - 7 * 4 <= 190, "its usual share, a mean of 10 minutes"


def test_a_usual_share_that_has_changed_is_added_after_ten_minutes() -> None:
    rank = OddRank(0.0)
    added = [now for now in range(5, 800, 5) if rank.look(0.004 if now == 5 else 0.1, float(now)) is not None]
    assert added == [5, 605]


def test_a_rank_that_waits_as_others_do_asks_again_after_a_minute() -> None:
    rank, asked = OddRank(0.0), list[int]()
    for now in range(5, 305, 5):
        if rank.look(0.004 if now < 100 else 0.9, float(now)) is not None:
            asked.append(now)
            assert rank.answered((8 << RANK_BITS) + 8 * 900, float(now)) is None
    assert asked == [5, 100, 115, 175, 235, 295]


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_alone_is_not_odd_nor_one_that_waits_for_8_s_or_a_fourth_of_the_time(seed: int) -> None:
    draw = random.Random(seed)
    assert Group(1, draw).run(600, lambda rank, now: 0.99) == []
    began = draw.uniform(300, 310)

    def share(rank: int, now: float) -> float:
        return max(0.0, min(now, began + 8) - max(now - 10, began)) / 10 if rank == 3 else 0.004

    group = Group(8, draw)
    assert group.run(600, share) == []
    assert group.run(600, lambda rank, now: 0.25 if rank == 3 else 0.004) == []
    assert len(group.run(600, lambda rank, now: 0.35 if rank == 3 else 0.004)) == 1


def test_no_rank_is_odd_beside_the_counter_of_a_later_group() -> None:
    group = Group(8, random.Random(0))
    group.run(300, lambda rank, now: 0.4 if rank == 5 else 0.0)
    group.value = 0  # the same processes have made a new group
    assert group.run(1200, lambda rank, now: 0.3 if now < 600 else 0.9) == []


def flips(draw: random.Random) -> Iterator[float]:
    while True:
        yield draw.choice([0.0, 0.1, 0.3, 1.0])


@pytest.mark.parametrize("seed", range(10))
def test_any_shares_cost_two_requests_a_minute_and_the_counter_is_their_sum(seed: int) -> None:
    draw: Any = random.Random(seed)
    group, values = Group(8, draw), [flips(draw) for _ in range(8)]
    group.run(3600, lambda rank, now: next(values[rank]))
    assert group.most_requests() <= NUM_REQUESTS
    assert group.value % (1 << RANK_BITS) == sum(odd._added for odd in group.odd)
    group.run(700, lambda rank, now: 0.5)  # a rank that was named asks again after ten minutes
    assert group.value == (8 << RANK_BITS) + 8 * 500
