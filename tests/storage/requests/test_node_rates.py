"""Rates that processes share through a file: who may open it, and what killed, stopped and forked processes leave."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from binidx.storage.requests import node_rates
from binidx.storage.requests.node_rates import NodeRates
from binidx.storage.requests.request_rate import RequestRate

CHILD = """
import json, os, sys
from binidx.storage.requests.node_rates import NodeRates
from binidx.storage.requests.request_rate import RequestRate
rates = NodeRates(sys.argv[1])
def change(rate, now):
    rate.limit, rate.issued = 7.0, rate.issued + 1
    if len(sys.argv) > 2:
        os.kill(os.getpid(), 9)
    return rate.issued
print(rates.is_shared, rates.change("x", RequestRate, change))
"""


def issued(rates: NodeRates, partition: str = "x") -> float | None:
    return rates.change(partition, RequestRate, lambda rate, now: rate.issued)


def take(rates: NodeRates, partition: str = "x") -> None:
    rates.change(partition, RequestRate, lambda rate, now: rate.take(now, 1))


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
    assert rates.change("x", RequestRate, lambda rate, now: rate.limit) == 7.0


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
            "x", RequestRate, lambda rate, now, shift=shift: vars(rate).update(issued=5.0, updated=now + shift)
        )
        assert issued(rates) == 0


def test_more_partitions_than_slots_replace_the_oldest(path: str) -> None:
    rates = NodeRates(path)
    for number in range(4 * node_rates.SLOTS):
        take(rates, str(number))
        assert issued(rates, str(number)) == 1


def test_garbage_in_the_file_is_a_new_rate_or_an_odd_one_and_no_error(path: str) -> None:
    rates = NodeRates(path)
    take(rates)
    with open(path, "r+b") as file:
        file.write(os.urandom(os.path.getsize(path)))
    assert json.dumps(issued(rates, "y"))
