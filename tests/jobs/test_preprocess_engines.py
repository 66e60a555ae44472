"""preprocess: processes of this machine, Ray, Dask: the same bytes, also when a worker is killed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.crashing_task import kills_its_worker, local_work
from helpers.dask_cluster import dask_cluster
from helpers.preprocess_jobs import EOD, corpus, files_of, job_of, theirs, tokenizer_path

from binidx.errors import ConfigError, UnreachableError, WorkerError
from binidx.jobs.engines import open_engine
from binidx.jobs.runner import run_tasks
from binidx.jobs.task_queue import ATTEMPTS
from binidx.prepare.preprocess.preprocess import preprocess

BIN = Path(sys.executable).parent


def command(inputs: list[str], output: Path, *options: str) -> list[str]:
    made = [str(BIN / "binidx"), "preprocess", *inputs, "--to", str(output), "--tokenizer", tokenizer_path()]
    return [
        *made,
        "--eod",
        EOD,
        "--append-eod",
        "--part-bytes",
        "20000",
        "--json",
        "--tokenizer-engine",
        "hf",
        *options,
    ]


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    """What it printed: its own JSON, and nothing of Ray's or Dask's."""
    out, _ = process.communicate(timeout=1200)
    assert process.returncode == 0
    found: dict[str, object] = json.loads(out)
    return found


def pids(name: str, folder: Path) -> list[int]:
    """Processes whose command line has this, and whose environment names the folder of the test."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (
                name.encode() in (each / "cmdline").read_bytes()
                and str(folder).encode() in (each / "environ").read_bytes()
            ):
                found.append(int(each.name))
    return found


def test_ray_makes_the_same_bytes_also_when_a_worker_is_killed(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=3000)
    environment = {**os.environ, "RAY_TMPDIR": "/tmp", "BINIDX_TEST": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    line = command(inputs, tmp_path / "en", "--engine", "ray", "--workers", "2")
    killed: list[int] = []
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        deadline = time.monotonic() + 900
        while not killed and driver.poll() is None and time.monotonic() < deadline:
            if list((tmp_path / "en-parts").glob("?" * 32 + ".json")):
                killed = pids("ray::binidx: part", tmp_path)[:1]
            time.sleep(0.01)
        for each in killed:
            os.kill(each, signal.SIGKILL)
        report = told(driver)
    assert killed
    assert report["parts_made"] == report["parts"]
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")


def test_dask_makes_the_same_bytes_also_when_a_worker_is_killed(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=3000)
    with dask_cluster(tmp_path) as (address, (_, worker, _)):
        line = command(inputs, tmp_path / "en", "--engine", f"dask={address}")
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as driver:
            deadline = time.monotonic() + 900
            while not list((tmp_path / "en-parts").glob("?" * 32 + ".json")):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            worker.kill()
            report = told(driver)
    assert report["parts_made"] == report["parts"]
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")


@pytest.mark.slow
def test_a_lost_head_node_of_ray_is_one_line_or_none_if_the_job_ends_before(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=120_000)
    environment = {**os.environ, "RAY_TMPDIR": "/tmp", "BINIDX_TEST": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    environment["RAY_AUTH_MODE"] = "disabled"  # else Ray prints a line about tokens
    line = command(inputs, tmp_path / "en", "--engine", "ray", "--workers", "2")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    try:
        with subprocess.Popen(line, env=environment, **pipes) as driver:
            while driver.poll() is None and not list((tmp_path / "en-parts").glob("?" * 32 + ".json")):
                time.sleep(0.01)
            killed = pids("gcs_server", tmp_path)
            for each in killed:
                os.kill(each, signal.SIGKILL)
            _, said = driver.communicate(timeout=1200)
    finally:
        for each in pids("ray", tmp_path):
            os.kill(each, signal.SIGKILL)
    assert len(killed) == 1
    lost = "binidx preprocess: ray: no answer of the cluster for 30 s; give the same command when it is back\n"
    problems = "".join(line for line in said.splitlines(True) if ": tokenize: " not in line)  # a line each half minute
    assert (driver.returncode, problems) in ((2, lost), (0, ""))


def names_the_task(found: BaseException, times: int = ATTEMPTS) -> bool:
    return bool(re.search(rf"a worker died .*killed, or out of memory\?; 3 failed {times} times$", str(found)))


def test_a_part_that_kills_its_worker_each_time_ends_the_job() -> None:
    with pytest.raises(WorkerError, check=names_the_task):
        list(run_tasks(local_work, range(8), open_engine("local", 2)))


@pytest.mark.slow
def test_a_part_that_kills_its_worker_each_time_ends_the_job_under_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(WorkerError, check=names_the_task):
        list(run_tasks(kills_its_worker(), range(8), open_engine("ray", 2)))


@pytest.mark.slow
def test_a_part_that_kills_its_worker_each_time_ends_the_job_under_dask(tmp_path: Path) -> None:
    with dask_cluster(tmp_path, "--nanny") as (address, _), pytest.raises(WorkerError, check=names_the_task):
        list(run_tasks(kills_its_worker(), range(8), open_engine(f"dask={address}")))


def test_a_cluster_whose_last_worker_a_part_has_killed_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with dask_cluster(tmp_path) as (address, _):
        engine = replace(open_engine(f"dask={address}"), poll_seconds=0.1, no_worker_seconds=1.0)
        with pytest.raises(WorkerError, match=r"no worker for .*: 3; ") as raised:
            list(run_tasks(kills_its_worker(), [3], engine))
    assert "killed, or out of memory?" in str(raised.value)


@pytest.mark.parametrize("lost", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=["killed", "ended", "hung"])
def test_a_lost_scheduler_is_one_error(lost: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from distributed.comm.core import CommClosedError

    with dask_cluster(tmp_path, num_workers=0) as (address, processes):
        engine = replace(open_engine(f"dask={address}"), poll_seconds=0.1, lost_seconds=1.0)

        def tasks() -> Iterator[int]:
            yield 1
            processes[0].send_signal(lost)  # while the first one is submitted and no worker runs it
            yield 2

        # The client notices a closed connection, or a request of it stays unanswered.
        said = "no answer" if lost == signal.SIGSTOP else r"dask=tcp://.*: the scheduler is gone; start one|no answer"
        with pytest.raises(UnreachableError, match=said):
            list(run_tasks(str, tasks(), engine))
    for error in (CommClosedError("of Dask's own"), ValueError("of the user's")):
        logging.getLogger("tornado.application").error("%s", error, exc_info=error)
    shown = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert shown == ["of the user's"]


def test_engines_that_are_none_are_refused(tmp_path: Path) -> None:
    for name in ("spark", "dask", "dask=", "ray:", "local:1"):
        with pytest.raises(ConfigError, match="needed local, ray, ray:ADDRESS or dask=ADDRESS"):
            open_engine(name)
    with pytest.raises(UnreachableError, match=r"dask=tcp://127.0.0.1:1: .*needed the address of a scheduler"):
        preprocess(job_of(corpus(tmp_path / "in"), tmp_path / "en"), engine="dask=tcp://127.0.0.1:1")


def test_an_address_that_ray_does_not_read_is_one_error() -> None:
    with pytest.raises(UnreachableError, match=r"^ray:127\.0\.0\.1: .*needed a cluster, as HOST:6379$"):
        open_engine("ray:127.0.0.1").open()


def test_a_ray_cluster_that_does_not_answer_is_an_error_before_ray_waits_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(UnreachableError, match=rf"^ray:{address}: .*refused; needed a cluster, as HOST:6379$"):
        open_engine(f"ray:{address}").open()
