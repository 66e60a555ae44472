"""preprocess: whatever breaks off, the same call goes on, and the bytes are the same."""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conftest import Bucket
from helpers.preprocess_jobs import EOD, corpus, files_of, job_of, make_recorded, run, theirs, tokenizer_path
from servers.latency_proxy import latency_proxy
from servers.processes import is_running, wait_until_gone

from binidx.errors import ConfigError, ObjectExistsError, ObjectNotFoundError, StorageError
from binidx.jobs.parts import Shard
from binidx.jobs.progress import SilentWatcher
from binidx.prepare.preprocess.finish import finish
from binidx.prepare.preprocess.job import Job, plan_parts
from binidx.prepare.preprocess.job_files import JobFiles
from binidx.prepare.preprocess.preprocess import preprocess, read_finished_manifests
from binidx.prepare.text.inputs import find_inputs
from binidx.testing import ended_well, forked

MORE = [pytest.param(seed, 40, marks=pytest.mark.slow) for seed in range(1, 8)]


@pytest.mark.parametrize(("seed", "kills"), [(0, 12), *MORE])
def test_killed_at_any_moment_nothing_is_lost_and_nothing_doubled(seed: int, kills: int, tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=300)
    theirs(inputs, tmp_path / "en.needed")
    command = [sys.executable, "-m", "helpers.preprocess_crash", tmp_path / "en", kills, seed, *inputs]
    told = json.loads(subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE).stdout)
    assert set(told["statuses"]) <= {-signal.SIGKILL, 0}
    assert told["statuses"][-1] == 0
    assert len(told["statuses"]) > 3
    assert told["left"] == [f"en_text_document.{end}" for end in ("bin", "idx", "lineage.parquet", "manifest.json")]
    assert all(after >= before for before, after in zip(told["records"], told["records"][1:-2], strict=False))


def workers_of(pid: int) -> list[int]:
    """Processes that a driver's pool has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def wait_for(what: Any, process: subprocess.Popen[Any]) -> Any:
    deadline = time.monotonic() + 600
    while not (found := what()):
        assert process.poll() is None, f"ended with {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def driver_of(inputs: list[str], output: Path) -> list[str]:
    """The command, with many small parts and a slow engine."""
    command = [Path(sys.executable).parent / "binidx", "preprocess", *inputs, "--to", output]
    command += ["--tokenizer", tokenizer_path(), "--eod", EOD, "--append-eod", "--tokenizer-engine", "hf"]
    return list(map(str, [*command, "--workers", "2", "--part-bytes", "20000", "--json"]))


def test_a_driver_that_is_told_to_end_leaves_nothing_half_written(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=4000)
    text = driver_of(inputs, tmp_path / "en")
    with subprocess.Popen(text, stderr=subprocess.PIPE, text=True) as driver:
        wait_for(lambda: list((tmp_path / "en-parts").glob("?" * 32 + ".json")), driver)
        driver.terminate()
        said = driver.communicate()[1]
    assert (driver.returncode, said) == (130, "\nbinidx preprocess: interrupted; the same command resumes\n")
    assert not list((tmp_path / "en-parts").glob("*.tmp"))


def test_a_killed_worker_costs_nothing_and_a_killed_driver_takes_its_workers_along(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=4000)
    text = driver_of(inputs, tmp_path / "en")
    with subprocess.Popen(text) as driver:
        wait_for(lambda: list((tmp_path / "en-parts").glob("?" * 32 + ".json")), driver)
        workers = workers_of(driver.pid)
        driver.kill()
    for each in workers:
        wait_until_gone(each)
    made = len(list((tmp_path / "en-parts").glob("?" * 32 + ".json")))
    with subprocess.Popen(text, stdout=subprocess.PIPE) as driver:
        wait_for(lambda: len(list((tmp_path / "en-parts").glob("?" * 32 + ".json"))) > made, driver)
        killed = wait_for(lambda: workers_of(driver.pid), driver)[0]
        os.kill(killed, signal.SIGKILL)
        told = json.loads(driver.communicate()[0])
    assert driver.returncode == 0
    assert not is_running(killed)
    assert 0 < told["parts_made"] < told["parts"]
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")
    assert not (tmp_path / "en-parts").exists()


def test_a_full_disk_is_one_error_and_the_job_goes_on_when_there_is_room(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in", count=2000)
    job = job_of(inputs, tmp_path / "en", part_bytes=60_000)
    needed = theirs(inputs, tmp_path / "theirs")
    assert ended_well(forked(functools.partial(run_out_of_room, job)))
    assert not list(tmp_path.glob("en_text*"))
    assert not list((tmp_path / "en-parts").glob("*.tmp"))
    run(job)
    assert files_of(tmp_path / "en_text_document") == needed


def run_out_of_room(job: Any) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
    with pytest.raises(StorageError, match="File too large"):
        run(job)


def test_a_store_that_says_503_costs_only_time(s3: Bucket, tmp_path: Path) -> None:
    inputs, base = corpus(tmp_path / "in"), s3.fresh()
    fs, path = fsspec.url_to_fs(base)
    for name in inputs:
        fs.put(name, f"{path}/in/{Path(name).name}")
    weather = [None, None, "503", None, None, "503", None, None, "reset", None, None, "truncate"] * 100
    with latency_proxy(s3.server.endpoint, delay_ms=0, script=weather, only="all") as proxy, proxy.in_environment():
        run(job_of([f"{base}/in/*.jsonl"], f"{base}/en", part_bytes=30_000))
        assert proxy.counts().faults.keys() >= {"503", "reset"}
    assert files_of(f"{base}/en_text_document") == theirs(inputs, tmp_path / "theirs")


def test_an_input_that_changes_meanwhile_is_another_job(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    job = job_of(inputs, tmp_path / "en")
    preprocess(job, shard=Shard(0, 2), executor=ThreadPoolExecutor(1))
    Path(inputs[0]).write_bytes(Path(inputs[0]).read_bytes()[:-1] + b" \n")
    with pytest.raises(StorageError, match="parts of another job, of inputs that changed since"):
        run(job)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_shards_that_know_nothing_of_each_other_make_the_same_dataset(count: int, tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    job = job_of(inputs, tmp_path / "en")

    def one(number: int) -> Any:
        return run(job, shard=Shard(number, count))

    # Two of each, as a scheduler does that takes a slow one for dead.
    with ThreadPoolExecutor(2 * count) as threads:
        reports = list(threads.map(one, [*range(count)] * 2))
    assert any(report.finished for report in reports)
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")
    again = run(job, shard=Shard(None, 1))
    assert (again.finished, again.parts_made) == (True, 0)
    assert not (tmp_path / "en-parts").exists()


def test_a_shard_tells_what_is_missing_and_finish_ends_the_job(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    job = job_of(inputs, tmp_path / "en")
    first = run(job, shard=Shard(0, 2))
    assert (first.finished, first.parts_made + first.parts_missing) == (False, first.parts)
    assert not run(job, shard=Shard(None, 1)).finished
    assert run(job, shard=Shard(1, 2)).finished
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")
    with pytest.raises(ConfigError, match="shard: found 2/2, need a number from 0 to 1"):
        Shard(2, 2)
    with pytest.raises(ConfigError, match="shard, overwrite"):
        run(job, shard=Shard(0, 2), overwrite=True)


def test_who_finishes_after_another_has_finds_it_done(tmp_path: Path) -> None:
    inputs = corpus(tmp_path / "in")
    job = job_of(inputs, tmp_path / "en")
    parts = plan_parts(job, find_inputs(job.inputs))
    for number in range(2):
        assert not run(job, shard=Shard(number, 3)).finished
    for part in parts[2::3]:
        make_recorded(job, part)
    records = JobFiles(job).read_all(parts)
    before = run(job)
    assert before.finished
    with pytest.raises(ObjectNotFoundError):
        finish(job, parts, records, overwrite=False, watch=None)  # type: ignore[arg-type]
    assert read_finished_manifests(job, parts) == before.manifests
    assert files_of(tmp_path / "en_text_document") == theirs(inputs, tmp_path / "theirs")
    assert JobFiles(job).location.uri not in [str(each) for each in tmp_path.iterdir()]


class AnotherCall(SilentWatcher):
    """Lets another call of the job finish it after this one has found it unfinished."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def say(self, message: str) -> None:
        assert run(self.job).finished


def test_a_call_that_another_one_overtakes_finds_the_job_finished(tmp_path: Path) -> None:
    one = corpus(tmp_path / "in", files=1)[0]
    job = job_of([one, one], tmp_path / "en")  # an input that is named twice is reported between the two requests
    report = run(job, watch=AnotherCall(job))
    assert (report.finished, report.parts_made) == (True, 0)
    assert not (tmp_path / "en-parts").exists()
    other = job_of([one, one], tmp_path / "en", append_eod=False)
    with pytest.raises(ObjectExistsError, match=r"holds \.bin, \.idx, needed a free name"):
        run(other)
