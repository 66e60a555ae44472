"""One process builds, whoever dies: real processes of two nodes, on a disk and on S3."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.build_lock_process import FINGERPRINT, NAME, ask
from servers.latency_proxy import latency_proxy

from binidx.index.cache import build_lock
from binidx.index.cache import index_cache as index_cache
from binidx.index.cache.build_context import BuildContext
from binidx.index.cache.build_lock import lock_path, lock_pause_seconds
from binidx.index.cache.building import Building
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.lease import Lease, new_lease_record
from binidx.storage.writing.publish import delete_object, object_exists

SUM = 99_999 * 100_000 // 2


class Run:
    """Processes that ask for one index; those of a node share a directory."""

    def __init__(self, tmp_path: Path, cache: str) -> None:
        self.path, self.cache = tmp_path, cache
        self.log = tmp_path / "log"
        self.log.touch()
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, node: str, **how: Any) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-m", "helpers.build_lock_process", self.cache, str(self.log)]
        with (self.path / f"{node}-{len(self.processes)}.err").open("w") as errors:
            process = subprocess.Popen(
                [*arguments, json.dumps(how)],
                env={**os.environ, "BINIDX_INDEX_DIR": f"{self.path}/{node}"},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.processes.append(process)
        return process

    def ready(self) -> None:
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"

    def go(self) -> None:
        """All that were started with start=run.gate ask at once."""
        self.ready()
        (self.path / "gate").touch()

    @property
    def gate(self) -> str:
        return f"{self.path}/gate"

    def builders(self) -> list[int]:
        return [int(line) for line in self.log.read_text().split()]

    def builder(self, count: int = 1) -> int:
        """The process that began to build as the count-th one, once it did."""
        until = time.monotonic() + 300
        while len(self.builders()) < count:
            assert time.monotonic() < until, "nobody builds"
            time.sleep(0.01)
        return self.builders()[count - 1]

    def results(self, processes: Sequence[subprocess.Popen[str]] | None = None) -> list[dict[str, Any]]:
        return [json.loads(each.communicate(timeout=900)[0].splitlines()[-1]) for each in processes or self.processes]

    def logged(self) -> str:
        return "".join(path.read_text() for path in self.path.glob("*.err"))


@contextlib.contextmanager
def running(tmp_path: Path, cache: str) -> Iterator[Run]:
    run = Run(tmp_path, cache)
    try:
        yield run
    finally:
        for process in run.processes:
            process.kill()
            process.communicate()


@pytest.fixture(params=["local", "s3"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    cache = f"{tmp_path}/cache" if request.param == "local" else request.getfixturevalue("s3").fresh()
    with running(tmp_path, cache) as found:
        yield found


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Run]:
    with running(tmp_path, f"{tmp_path}/cache") as found:
        yield found


def claim_of(run: Run) -> Lease:
    return Lease(f"{run.cache}/{NAME}-binidx.json-claim")


def test_of_eight_processes_on_two_nodes_one_builds(run: Run) -> None:
    for number in range(8):
        run.start(f"node{number % 2}", start=run.gate, build=0.5)
    run.go()
    assert [each["sum"] for each in run.results()] == [SUM] * 8
    assert len(run.builders()) == 1
    assert claim_of(run).read() is None


def test_a_node_that_waits_fetches_arrays_while_the_others_are_built(
    tmp_path: Path, s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_cache, "TOLD_BYTES", 0)
    monkeypatch.setenv("BINIDX_INDEX_DIR", f"{tmp_path}/node0")
    monkeypatch.setenv("BINIDX_INDEX_BYTES", "100000000")  # however full the disk is
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment(), running(tmp_path, s3.fresh()) as run:

        def fetched() -> list[str]:
            return [
                each.path.rpartition("-")[2] for each in proxy.log() if each.method == "GET" and ".npy" in each.path
            ]

        def build(building: Building) -> None:
            run.start("node1")
            run.ready()
            with building.array("a", (100_000,), np.int64) as array:
                array[:] = np.arange(100_000)
            until = time.monotonic() + 300
            while not fetched():
                assert time.monotonic() < until, "nobody fetches it before all is built"
                time.sleep(0.05)

        IndexCache(run.cache, NAME).load_or_build("described", FINGERPRINT, ["a"], build)
        assert [found["sum"] for found in run.results()] == [SUM]
        assert fetched() == ["a.npy"]
    assert run.builders() == []


@pytest.mark.parametrize("said", [1, ["a"], {"a": 1}, {"a": {"bytes": 1}}, {"b": {}}, "a"])
def test_what_a_claim_says_is_done_may_be_anything(tmp_path: Path, said: Any) -> None:
    fetch = index_cache.FetchDone(IndexCache(f"{tmp_path}", NAME).files, ["a"])
    fetch(said)
    fetch(said)


def test_when_the_builder_is_killed_its_node_goes_on_at_once(run: Run) -> None:
    """And with it the other node, which never gets so far as to find the claim dead."""
    for number in range(6):
        run.start(f"node{number % 2}", start=run.gate, build=1, dead=1000)
    run.go()
    victim = run.builder()
    os.kill(victim, signal.SIGKILL)
    left = [each for each in run.processes if each.pid != victim]
    assert [each["sum"] for each in run.results(left)] == [SUM] * 5
    assert len(run.builders()) == 2


def test_when_a_whole_node_dies_one_of_the_others_goes_on(run: Run) -> None:
    dead = run.start("node0", build=6000)
    victim = run.builder()
    for number in range(4):
        run.start(f"node{1 + number % 2}", build=0.3, dead=5, beat=0.3, start=run.gate)
    run.go()
    time.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    left = [each for each in run.processes if each is not dead]
    assert [each["sum"] for each in run.results(left)] == [SUM] * 4
    assert len(run.builders()) == 2, "one took the claim over"


def test_what_the_builder_raises_is_raised_by_all_that_wait_within_seconds(run: Run) -> None:
    for number in range(5):
        run.start(f"node{number % 3}", start=run.gate, build=1, fail="a split without tokens")
    run.go()
    builder = run.builder()
    found = run.results()
    assert sorted(each["error"] for each in found) == ["PeerError"] * 4 + ["ValueError"]
    failed = next(each["ended"] for each in found if each["pid"] == builder)
    assert run.builders() == [builder]
    for each in found:
        assert "a split without tokens" in each["text"]
        assert each["ended"] - failed < 100
        if each["error"] == "PeerError":
            assert f"process {builder}" in each["text"]
            assert "Traceback (most recent call last)" in each["text"]
            assert 'raise ValueError(how["fail"])' in each["text"]


def test_a_claim_that_failed_in_an_earlier_run_is_no_trouble(run: Run) -> None:
    run.start("node0", fail="a disk was full")
    assert run.results()[0]["error"] == "ValueError"
    again = [run.start(f"node{number % 2}") for number in range(4)]
    assert [each["sum"] for each in run.results(again)] == [SUM] * 4
    assert len(run.builders()) == 2
    assert claim_of(run).read() is None


def test_who_died_while_he_took_a_claim_over_keeps_no_later_run_from_it(run: Run) -> None:
    dead, claim = new_lease_record("a node that is gone"), claim_of(run)
    claim.write(dead)
    Lease(f"{claim.uri}-after-{dead.holder}").write(new_lease_record("another"))
    how = {"dead": 1, "beat": 0.2}
    assert run.results([run.start("node0", **how)])[0]["sum"] == SUM, "alone, when the second one is found dead, too"
    delete_object(claim.uri.removesuffix("-claim"))
    assert run.results([run.start("node0", **how)])[0]["sum"] == SUM
    assert claim.read() is None, "taken over, and let go"


def test_a_claim_whose_holder_died_in_an_earlier_run_costs_its_node_nothing(here: Run) -> None:
    here.start("node0", build=6000)
    os.kill(here.builder(), signal.SIGKILL)
    # Else it is found dead after this time, when `results` has given up.
    found = here.results([here.start("node0", dead=6000) for _ in range(2)])
    assert [each["sum"] for each in found] == [SUM] * 2
    assert claim_of(here).read() is None


def test_a_holder_that_works_on_is_waited_for_however_long(here: Run) -> None:
    """His claim changes, by whatever clock: it is twice as old as what is taken for dead."""
    how = {"build": 8, "dead": 4, "beat": 0.1, "start": here.gate}
    for number in range(4):
        here.start(f"node{number % 2}", **how)
    here.go()
    assert [each["sum"] for each in here.results()] == [SUM] * 4
    assert len(here.builders()) == 1


def test_a_holder_that_was_stopped_and_goes_on_does_no_harm(here: Run) -> None:
    how = {"build": 1, "dead": 0.6, "beat": 0.1}
    stopped = here.start("node0", **how)
    victim = here.builder()
    os.kill(victim, signal.SIGSTOP)
    other = here.start("node1", **how)
    assert here.results([other])[0]["sum"] == SUM
    os.kill(victim, signal.SIGCONT)
    assert here.results([stopped])[0]["sum"] == SUM
    third = here.start("node2")
    assert here.results([third])[0]["sum"] == SUM
    assert len(here.builders()) == 2


def test_where_nothing_can_be_written_everybody_builds_and_says_so_once(tmp_path: Path, web: Any) -> None:
    with running(tmp_path, f"{web.endpoint}/cache") as run:
        for number in range(4):
            run.start(f"node{number % 2}", start=run.gate, build=3)
        run.go()
        found = run.results()
        assert [each["sum"] for each in found] == [SUM] * 4
        assert len(run.builders()) == 4
        ended = [each["ended"] for each in found]
        assert max(ended) - min(ended) < 3 * 3, "at the same time, not one after the other"
        said = {each.stem: each.read_text().count("so each node builds its own") for each in tmp_path.glob("*.err")}
        assert max(said.values()) == 1, "once a process"
        for node in ("node0", "node1"):
            assert any(said[each] for each in said if each.startswith(node)), "the others of a node may be told by it"


@pytest.mark.parametrize("stands", ["nothing", "an index of other options"])
def test_when_the_index_cannot_be_published_nobody_waits_for_the_next_one(here: Run, stands: str) -> None:
    if stands != "nothing":
        IndexCache(here.cache, NAME).build("described", {"option": False}, lambda building: None)
    (Path(here.cache) / f"{NAME}-a.npy" / "taken").mkdir(parents=True)
    for number in range(8):
        here.start(f"node{number % 2}", start=here.gate, build=3)
    here.go()
    found = here.results()
    assert [each["sum"] for each in found] == [SUM] * 8
    assert max(each["seconds"] for each in found) < 3 + 3 + 5, "two builds one after the other, not four or eight"


def test_a_process_that_is_called_away_does_not_fail_those_of_other_runs_on_its_node(here: Run) -> None:
    finish = Path(f"{here.path}/finish")
    builds = here.start("node0", until=str(finish))
    here.builder()
    leaves = here.start("node1", away=2)
    time.sleep(1.2)  # so that it is the first one of its node
    waits = here.start("node1")
    [away] = here.results([leaves])
    finish.touch()
    builder, other = here.results([builds, waits])
    assert away["text"] == "another rank of its run failed"
    assert builder["sum"] == other["sum"] == SUM


def test_threads_of_a_process_take_turns(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    (tmp_path / "log").touch()
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: ask(f"{tmp_path}/cache", f"{tmp_path}/log", {"build": 0.2}), range(6)))
    assert [each["sum"] for each in found] == [SUM] * 6
    assert len((tmp_path / "log").read_text().split()) == 1


def test_who_waits_is_called_away_by_a_check(here: Run) -> None:
    here.start("node0", build=6000)
    here.builder()
    began = time.monotonic()

    def check() -> None:
        if time.monotonic() - began > 0.5:
            raise TimeoutError("another rank failed")

    def build(building: Building) -> None:
        raise AssertionError("somebody else is at it")

    cache = IndexCache(here.cache, NAME, context=BuildContext().with_check(check))
    with pytest.raises(TimeoutError, match="another rank failed"):
        cache.load_or_build("described", FINGERPRINT, ["a"], build)
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("waits", [1, 5, 15, 128])
def test_a_process_asks_for_a_claim_every_two_seconds_however_many_it_waits_for(waits: int) -> None:
    assert np.mean([waits / lock_pause_seconds(1000, waits) for _ in range(1000)]) == pytest.approx(
        max(0.5, waits / 30), rel=0.1
    )
    assert lock_pause_seconds(0, waits, remote=False) < 0.02
    assert 0.1 < lock_pause_seconds(0, waits) < 0.3
    assert lock_pause_seconds(2, waits) < 0.5


def test_one_path_has_one_lock_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert lock_path("a/m.json", None) == lock_path(f"{tmp_path}/a/m.json", None) != lock_path("b/m.json", None)
    assert lock_path("a/m.json", {"binidx": {"index_dir": "off"}}) is None


def test_no_claim_is_taken_where_the_index_is_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(run.cache, str(run.log), {})
    monkeypatch.setattr(build_lock, "Claim", None)
    assert ask(run.cache, str(run.log), {})["sum"] == SUM
    assert not object_exists(claim_of(run).uri)
