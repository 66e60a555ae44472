"""Rates that processes share through a file: who may open it, and what killed, stopped and forked processes leave."""

from __future__ import annotations

import dataclasses
import fcntl
import itertools
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from binidx.storage.requests import node_rates, request_rate
from binidx.storage.requests.node_rates import LAYOUT, RECORD, SLOTS, NodeRates, default_path
from binidx.storage.requests.rate_limiter import CHUNK_SECONDS
from binidx.storage.requests.request_rate import RequestRate

NAME = f"request-rates-v4-{os.uname().nodename}"

CHILD = """
import json, os, sys
from binidx.storage.requests.node_rates import NodeRates
from binidx.storage.requests.request_rate import RequestRate
rates = NodeRates(sys.argv[1])
def change(rate, now, wall):
    rate.limit, rate.issued = 7.0, rate.issued + 1
    if len(sys.argv) > 2:
        os.kill(os.getpid(), 9)
    return rate.issued
print(rates.is_shared, rates.change("x", RequestRate, change))
"""


def issued(rates: NodeRates, partition: str = "x") -> float | None:
    return rates.change(partition, RequestRate, lambda rate, now, wall: rate.issued)


def take(rates: NodeRates, partition: str = "x") -> None:
    rates.change(partition, RequestRate, lambda rate, now, wall: rate.take(now, 1))


def run_child(path: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", CHILD, path, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "binidx" / "rates")


def test_another_process_continues_a_rate(path: str) -> None:
    rates = NodeRates(path)
    take(rates)
    assert run_child(path) == "True 2.0"
    assert issued(rates) == 2
    assert rates.change("x", RequestRate, lambda rate, now, wall: rate.limit) == 7.0


def test_the_file_and_its_directory_are_private(path: str) -> None:
    take(NodeRates(path))
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("open_to_others", ["directory", "file", "link"])
def test_what_others_could_change_is_not_shared(path: str, tmp_path: Path, open_to_others: str) -> None:
    Path(path).parent.mkdir(mode=0o700)
    if open_to_others == "link":
        (tmp_path / "elsewhere").touch(0o600)
        Path(path).symlink_to(tmp_path / "elsewhere")
    else:
        Path(path).touch(0o600)
        (Path(path) if open_to_others == "file" else Path(path).parent).chmod(0o777)
    rates = NodeRates(path)
    take(rates)
    assert not rates.is_shared
    assert issued(rates) == 1
    assert issued(NodeRates(path)) == 0


def test_a_process_killed_while_it_changes_a_rate_holds_no_lock(path: str) -> None:
    rates = NodeRates(path)
    take(rates)
    assert run_child(path, "killed") == ""
    assert issued(rates) == 1


def test_a_lock_that_stays_held_makes_a_process_go_on_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = NodeRates(path)
    take(rates)
    holder = os.open(path, os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert issued(rates) is None
    assert rates.is_shared
    monkeypatch.setattr(node_rates, "STUCK_SECONDS", -1.0)
    assert issued(rates) is None
    assert not rates.is_shared
    assert issued(rates) == 0
    os.close(holder)


def test_a_forked_child_keeps_no_lock_of_its_parent(path: str) -> None:
    code = """
import os, sys
from binidx.storage.requests import node_rates
node_rates.default_path = lambda: sys.argv[1]
rates = node_rates.node_rates()
child = os.fork()
found = rates.is_shared, node_rates.node_rates().is_shared, node_rates.node_rates() is rates
if child:
    os.waitpid(child, 0)  # its line first: both write to one pipe
print(*found, flush=True)
if not child:
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["False True False", "True True True"]


def test_rates_of_an_earlier_boot_or_hour_are_forgotten(path: str) -> None:
    rates = NodeRates(path)
    for shift in (-2 * node_rates.FORGET_SECONDS, 1e6):
        rates.forget()
        rates.change(
            "x", RequestRate, lambda rate, now, wall, shift=shift: vars(rate).update(issued=5.0, updated=now + shift)
        )
        assert issued(rates) == 0


def test_more_partitions_than_slots_replace_the_oldest(path: str) -> None:
    rates = NodeRates(path)
    for number in range(4 * node_rates.SLOTS):
        take(rates, str(number))
        assert issued(rates, str(number)) == 1


def test_garbage_in_the_file_is_a_new_rate_and_no_error(path: str) -> None:
    rates = NodeRates(path)
    take(rates)
    with open(path, "r+b") as file:
        file.write(os.urandom(os.path.getsize(path)))
    assert json.dumps(issued(rates, "y"))


ODD = [math.nan, math.inf, -math.inf, -1.0, -1e300, 0.0, 5e-324, 1e-9, 0.5, 2.0, 1e6, 1e12, 1e20, 1e300]
FIELDS = [field.name for field in dataclasses.fields(RequestRate)]
CASES = [(name, value) for name in FIELDS for value in ODD]


def odd_records() -> Iterator[dict[str, float]]:
    """Yield one odd value in each field of a limited, an unlimited and a tested rate, then pairs of odd values."""
    states = [{"limit": 50.0}, {}, {"limit": 50.0, "test_from": 0.0, "known_served": 90.0, "known_refused": 10.0}]
    for state, (name, value) in itertools.product(states, CASES):
        yield {**state, name: value}
    chosen = random.Random(0)
    for _ in range(2_000):
        yield dict([*states[0].items(), *chosen.sample(CASES, 2)])


def put(rates: NodeRates, record: Mapping[str, float]) -> None:
    def change(rate: RequestRate, now: float, wall: float) -> None:
        for name, value in record.items():
            setattr(rate, name, value)

    rates.change("x", RequestRate, change)


@pytest.mark.parametrize(("served", "refused"), [(0, 0), (20, 0), (10, 10)])
def test_an_odd_record_raises_nothing_and_lets_no_request_wait_for_ever(path: str, served: int, refused: int) -> None:
    def use(rate: RequestRate, now: float, wall: float) -> float:
        """Return the tickets before a new one, or the seconds until it is due: what is less."""
        rate.note(now, served, refused)
        return rate.seconds_until(rate.take(now, 1)) * min(1.0, rate.limit) if rate.is_limited else 0.0

    rates = NodeRates(path)
    for record in odd_records():
        rates.forget()
        put(rates, record)
        wait = rates.change("x", RequestRate, use)
        assert wait is not None, record
        assert wait <= request_rate.LONGEST_WAIT_SECONDS + 1, record
        assert rates.change("x", RequestRate, lambda rate, now, wall: rate.is_possible()), record


@pytest.mark.parametrize("seed", range(20))
def test_values_that_clients_bring_about_are_possible(seed: int) -> None:
    chosen = random.Random(seed)
    rate = RequestRate(ceiling=chosen.choice([math.inf, 5_000.0]), doubling_seconds=chosen.choice([math.inf, 1_200.0]))
    rate.updated = now = chosen.choice([0.0, 1e6])
    for _ in range(5_000):
        now += chosen.choice([0.0, 0.001, 0.1, 5.0])
        rate.note(now, chosen.randrange(129), chosen.choice([0, 0, 1, chosen.randrange(129)]))
        if rate.is_limited and rate.issued - rate.clock < 128 * max(1.0, rate.limit * CHUNK_SECONDS):
            rate.take(now, max(1, int(rate.limit * CHUNK_SECONDS)))
        assert rate.is_possible(), rate


def test_a_layout_has_a_file_of_its_own() -> None:
    """Other fields, or another meaning of one, need another LAYOUT: an older release on the node has its own file."""
    assert (LAYOUT, RECORD.size) == (4, 280)
    assert [
        *("limit", "ceiling", "doubling_seconds", "first_limit", "start", "began"),
        *("clock", "issued", "updated", "served", "refused", "counted"),
        *("answered_at", "refused_at", "waited_at", "limited_at", "evidence", "usual_limit"),
        *("test_number", "test_from", "test_served", "test_refused", "known_served", "known_refused"),
        *("test_goodput", "limit_before", "sent_before", "remembered_until"),
        *("indifferent_until", "indifferent_share", "indifferent_seconds", "together_served", "together_refused"),
    ] == FIELDS
    assert Path(default_path() or "").name == NAME


def test_an_older_release_on_the_node_keeps_its_records(path: str) -> None:
    """The file of version 1 had no version in its name, and records of the same size."""
    older = Path(path).with_name(f"request-rates-{os.uname().nodename}")
    older.parent.mkdir(mode=0o700)
    older.write_bytes(b"\xff" * SLOTS * RECORD.size)
    older.chmod(0o600)
    rates = NodeRates(str(older.with_name(NAME)))
    take(rates)
    assert (issued(rates), rates.is_shared) == (1.0, True)
    assert older.read_bytes() == b"\xff" * SLOTS * RECORD.size
