"""One process builds an index, whichever dies: real processes of two nodes, on a disk and on S3."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.build_lock_process import FINGERPRINT, NAME, request_index
from helpers.forked import Child

from binidx.index.cache import build_lock
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.build_lock import Lease, lock_path, new_lease_record
from binidx.index.cache.index_cache import BuildContext, IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.lease import NO_LEASE, poll_pause_seconds
from binidx.storage import steps
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.publish import delete_object

SUM = 99_999 * 100_000 // 2


class Run:
    """Processes that request one index; those of a node share a directory."""

    def __init__(self, tmp_path: Path, cache: str) -> None:
        self.path, self.cache = tmp_path, cache
        self.log = tmp_path / "log"
        self.log.touch()
        self.processes: list[Child] = []

    def start(self, node: str, **how: Any) -> Child:
        code, place = (
            "from helpers.build_lock_process import start; start()",
            {"BINIDX_INDEX_DIR": f"{self.path}/{node}"},
        )
        with (self.path / f"{node}-{len(self.processes)}.err").open("w") as errors:
            process = Child(code, self.cache, self.log, json.dumps(how), environment=place, errors=errors)
        self.processes.append(process)
        return process

    def ready(self) -> None:
        for process in self.processes:
            assert process.stdout.readline() == "ready\n"

    def go(self) -> None:
        """Let all that were started with start=run.gate request the index at once."""
        self.ready()
        (self.path / "gate").touch()

    @property
    def gate(self) -> str:
        return f"{self.path}/gate"

    def builders(self) -> list[int]:
        return [int(line.split()[0]) for line in self.log.read_text().splitlines()]

    def rounds(self, seconds: float) -> int:
        """The number of builds of this length that went one after another, not at the same time."""
        free, count = 0.0, 0
        for began in sorted(float(line.split()[1]) for line in self.log.read_text().splitlines()):
            if began >= free:
                free, count = began + seconds, count + 1
        return count

    def builder(self, count: int = 1) -> int:
        """Wait for the process that begins to build as the count-th one."""
        until = time.monotonic() + 300
        while len(self.builders()) < count:
            assert time.monotonic() < until, "no process builds"
            time.sleep(0.01)
        return self.builders()[count - 1]

    def results(self, processes: Sequence[Child] | None = None) -> list[dict[str, Any]]:
        return [json.loads(each.communicate()[0].splitlines()[-1]) for each in processes or self.processes]

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


def lease_of(run: Run) -> Lease:
    return Lease(Location.of(f"{run.cache}/{NAME}-binidx.json-claim"))


def test_of_eight_processes_on_two_nodes_one_builds(run: Run) -> None:
    for number in range(8):
        run.start(f"node{number % 2}", start=run.gate, build=0.5)
    run.go()
    assert [each["sum"] for each in run.results()] == [SUM] * 8
    assert len(run.builders()) == 1
    assert steps.run(lease_of(run).read()) == NO_LEASE


def test_when_the_builder_is_killed_its_node_goes_on_at_once(run: Run) -> None:
    """And with it the other node, before it finds the lease expired."""
    end = run.path / "end"
    for number in range(6):
        run.start(f"node{number % 2}", start=run.gate, until=str(end), dead=1000)
    run.go()
    victim = run.builder()
    os.kill(victim, signal.SIGKILL)
    end.touch()
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
    assert len(run.builders()) == 2, "one took the lease over"


def test_an_error_of_the_builder_is_raised_by_all_waiting_processes_within_seconds(run: Run) -> None:
    waits, end = run.path / "waits", run.path / "end"
    for number in range(5):
        how = {"until": str(end), "waits": str(waits), "fail": "a split without tokens"}
        run.start(f"node{number % 3}", start=run.gate, **how)
    run.go()
    builder = run.builder()
    while not waits.exists() or len(waits.read_text().splitlines()) < 4:
        time.sleep(0.01)
    end.touch()
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


def test_a_lease_that_failed_in_an_earlier_run_is_taken_over(run: Run) -> None:
    run.start("node0", fail="a disk was full")
    assert run.results()[0]["error"] == "ValueError"
    again = [run.start(f"node{number % 2}") for number in range(4)]
    assert [each["sum"] for each in run.results(again)] == [SUM] * 4
    assert len(run.builders()) == 2
    assert steps.run(lease_of(run).read()) == NO_LEASE


def test_a_process_that_died_while_it_took_over_a_lease_does_not_block_a_later_run(run: Run) -> None:
    dead, lease = steps.run(new_lease_record("a node that is gone")), lease_of(run)
    steps.run(lease.write(dead))
    marker = Lease(Location.of(f"{lease.location}-after-{dead.holder}"))
    steps.run(marker.write(steps.run(new_lease_record("another"))))
    how = {"dead": 1, "beat": 0.2}
    assert run.results([run.start("node0", **how)])[0]["sum"] == SUM, "alone, when the second one is found dead, too"
    delete_object(Location.of(lease.location.uri.removesuffix("-claim")))
    assert run.results([run.start("node0", **how)])[0]["sum"] == SUM
    assert steps.run(lease.read()) == NO_LEASE, "taken over, and released"


def test_a_lease_whose_holder_died_in_an_earlier_run_costs_its_node_nothing(here: Run) -> None:
    here.start("node0", build=6000)
    os.kill(here.builder(), signal.SIGKILL)
    # Else it is found dead after this time, when `results` has given up.
    found = here.results([here.start("node0", dead=6000) for _ in range(2)])
    assert [each["sum"] for each in found] == [SUM] * 2
    assert steps.run(lease_of(here).read()) == NO_LEASE


def test_the_others_wait_for_a_holder_at_work_however_long_it_takes(here: Run) -> None:
    """Its lease changes, by whatever clock: the build takes twice the time after which a lease expires."""
    how = {"build": 8, "dead": 4, "beat": 0.1, "start": here.gate}
    for number in range(4):
        here.start(f"node{number % 2}", **how)
    here.go()
    assert [each["sum"] for each in here.results()] == [SUM] * 4
    assert len(here.builders()) == 1


def test_a_holder_that_was_stopped_and_goes_on_does_no_harm(here: Run) -> None:
    end, how = here.path / "end", {"dead": 0.6, "beat": 0.1}
    stopped = here.start("node0", until=str(end), **how)
    victim = here.builder()
    os.kill(victim, signal.SIGSTOP)
    other = here.start("node1", **how)
    assert here.results([other])[0]["sum"] == SUM
    end.touch()
    os.kill(victim, signal.SIGCONT)
    assert here.results([stopped])[0]["sum"] == SUM
    third = here.start("node2")
    assert here.results([third])[0]["sum"] == SUM
    assert len(here.builders()) == 2


def test_in_a_store_that_cannot_be_written_to_every_process_builds_and_warns_once(tmp_path: Path, web: Any) -> None:
    with running(tmp_path, f"{web.endpoint}/cache") as run:
        for number in range(4):
            run.start(f"node{number % 2}", start=run.gate, build=3)
        run.go()
        found = run.results()
        assert [each["sum"] for each in found] == [SUM] * 4
        assert len(run.builders()) == 4
        assert run.rounds(3) <= 3, "at the same time, not one after the other"
        said = {each.stem: each.read_text().count("so each node builds its own") for each in tmp_path.glob("*.err")}
        assert max(said.values()) == 1, "once a process"
        for node in ("node0", "node1"):
            assert any(said[each] for each in said if each.startswith(node)), (
                "the others of a node may learn it from one"
            )


@pytest.mark.parametrize("stands", ["nothing", "an index of other options"])
def test_when_the_index_cannot_be_published_no_process_waits_for_the_next_one(here: Run, stands: str) -> None:
    if stands != "nothing":
        IndexCache(IndexFiles(Location.of(here.cache), NAME)).build("described", {"option": False}, lambda writer: None)
    (Path(here.cache) / f"{NAME}-a.npy" / "taken").mkdir(parents=True)
    for number in range(8):
        here.start(f"node{number % 2}", start=here.gate, build=3)
    here.go()
    assert [each["sum"] for each in here.results()] == [SUM] * 8
    assert here.rounds(3) <= 3, "two builds one after the other, not four or eight"


def test_a_process_that_a_check_ends_does_not_fail_those_of_other_runs_on_its_node(here: Run) -> None:
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


def test_one_of_several_threads_of_a_process_builds(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    (tmp_path / "log").touch()
    with ThreadPoolExecutor(6) as threads:
        found = list(
            threads.map(lambda _: request_index(f"{tmp_path}/cache", f"{tmp_path}/log", {"build": 0.2}), range(6))
        )
    assert [each["sum"] for each in found] == [SUM] * 6
    assert len((tmp_path / "log").read_text().splitlines()) == 1


def test_a_check_ends_the_wait_of_a_process(here: Run) -> None:
    here.start("node0", build=6000)
    here.builder()
    began = time.monotonic()

    def check(_: bool) -> None:
        if time.monotonic() - began > 0.5:
            raise TimeoutError("another rank failed")

    def build(writer: ArrayWriter) -> None:
        raise AssertionError("another process builds")

    cache = IndexCache(IndexFiles(Location.of(here.cache), NAME), context=BuildContext().with_check(check))
    with pytest.raises(TimeoutError, match="another rank failed"):
        cache.load_or_build("described", FINGERPRINT, ["a"], build)
    assert time.monotonic() - began < 300


@pytest.mark.parametrize("waits", [1, 5, 15, 128])
def test_a_process_polls_a_lease_every_two_seconds_however_many_it_waits_for(waits: int) -> None:
    assert waits / poll_pause_seconds(1000, waits) == max(0.5, waits / 30)
    assert poll_pause_seconds(0, waits, remote=False) == 0.01
    assert poll_pause_seconds(0, waits) == 0.2
    assert poll_pause_seconds(2, waits) == 0.25


def test_one_path_has_one_lock_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        lock_path(Location.of("a/m.json"))
        == lock_path(Location.of(f"{tmp_path}/a/m.json"))
        != lock_path(Location.of("b/m.json"))
    )
    assert lock_path(Location.of("a/m.json", {"binidx": {"index_dir": "off"}})) is None


def test_no_lease_is_acquired_for_a_cached_index(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    request_index(run.cache, str(run.log), {})
    monkeypatch.setattr(build_lock, "Lease", None)
    assert request_index(run.cache, str(run.log), {})["sum"] == SUM
    assert not object_exists(lease_of(run).location)
