"""Memory and resources of the parts of a job: what runs at once, and an error where no worker can hold a part."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.dask_cluster import dask_cluster

from binidx.errors import ConfigError, WorkerError
from binidx.jobs.engines import TaskNeeds
from binidx.jobs.parts import Shard, Workers, make_parts
from binidx.jobs.runner import run_tasks
from binidx.tools._options import resources

GIB = 1 << 30


def test_as_many_tasks_are_counted_as_each_worker_holds() -> None:
    offers = [{"CPU": 8.0, "memory": 4.5 * GIB, "fast": 1.0}, {"CPU": 2.0, "memory": 64.0 * GIB}, {"CPU": 0.5}]
    for needs, count in (
        (TaskNeeds(), 10),
        (TaskNeeds(GIB), 6),
        (TaskNeeds(0, {"CPU": 0.5}), 21),
        (TaskNeeds(0, {"fast": 1}), 1),
        (TaskNeeds(GIB, {"CPU": 2, "GPU": 0}), 5),
        (TaskNeeds(100 * GIB), 1),  # an estimate: the largest worker makes a part
    ):
        assert needs.fit("ray", "CPU", offers)[1] == count
    assert TaskNeeds(GIB, is_estimate=False).fit("ray", "CPU", []) == ({"CPU": 1.0, "memory": GIB}, 0)
    assert TaskNeeds(GIB).fit("dask", "threads", [{"threads": 3, "memory": math.inf}])[1] == 3


def test_a_part_that_no_worker_can_hold_is_an_error_that_names_what_was_found() -> None:
    offers = [{"threads": 4, "memory": GIB}, {"threads": 1, "memory": 3 * GIB, "fast": 1}]
    expected = (
        r"^dask=a: no worker can hold a part \(found at most threads 4, memory 3,221,225,472; needed threads 1, memory "
    )
    with pytest.raises(WorkerError, match=expected):
        TaskNeeds(4 * GIB, is_estimate=False).fit("dask=a", "threads", offers)
    with pytest.raises(WorkerError, match="needed threads 1, fast 2, memory"):
        TaskNeeds(GIB, {"fast": 2}).fit("dask=a", "threads", offers)
    with pytest.raises(WorkerError, match="needed threads 1, fast 1, memory"):  # one has the memory, another the rest
        TaskNeeds(GIB, {"fast": 1}, is_estimate=False).fit("a", "threads", [offers[0], {"fast": 1, "memory": 9 * GIB}])


def test_memory_and_resources_without_an_engine_that_has_them_are_refused() -> None:
    with pytest.raises(ConfigError, match="task_memory: needs an engine"):
        Workers(count=2, task_memory=GIB)
    with pytest.raises(ConfigError, match="task_resources: needs an engine that is a cluster"):
        Workers("local", task_resources={"CPU": 2})
    assert resources("CPU=2,fast=0.5") == {"CPU": 2.0, "fast": 0.5}


@dataclass(frozen=True)
class SizedPart:
    size: int

    @property
    def name(self) -> str:
        return f"part-{self.size}"


def test_a_job_on_an_engine_logs_its_parts_and_their_memory_before_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "binidx.jobs")
    parts = [SizedPart(number << 20) for number in (200, 300)]
    lines_before = list[int]()

    def make(part: SizedPart) -> int:
        lines_before.append(len(caplog.messages))
        return part.size

    with ThreadPoolExecutor(1) as threads:
        make_parts(make, parts, Workers(executor=threads), unit="bytes", task_bytes=3 * GIB)
        make_parts(make, parts, Workers(executor=threads, shard=Shard(1, 2)), unit="samples", task_bytes=GIB)
        make_parts(make, parts[:1], Workers(executor=threads))
    make_parts(make, parts, Workers(count=1), unit="bytes")
    assert caplog.messages == [
        "2 parts of about 250.0 MiB, 3,072 MiB of memory each",
        "1 part of about 314,572,800 samples, 1,024 MiB of memory each",
        "1 part, 512 MiB of memory each",
    ]
    assert lines_before == [1, 1, 2, 3, 3, 3]


def records_its_time(folder: Path) -> Callable[[int], tuple[float, float]]:
    def work(task: int) -> tuple[float, float]:
        began = time.monotonic()
        time.sleep(0.2)
        return began, time.monotonic()

    return work


def most_at_once(spans: list[tuple[float, float]]) -> int:
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


def test_a_dask_worker_makes_as_many_parts_at_once_as_fit_its_memory(tmp_path: Path) -> None:
    options = "--memory-limit", "4GiB", "--nthreads", "4", "--resources", "fast=3"
    with dask_cluster(tmp_path, *options, num_workers=1) as (address, _):
        for place, most in (
            (Workers(f"dask={address}", task_memory=2 * GIB - 1), 2),
            (Workers(f"dask={address}", task_memory=GIB // 4), 4),
            (Workers(f"dask={address}", task_resources={"fast": 1}), 3),
        ):
            spans = [span for _, span in run_tasks(records_its_time(tmp_path), range(9), place.open())]
            assert len(spans) == 9
            assert most_at_once(spans) <= most
        with pytest.raises(WorkerError, match="no worker can hold a part"):
            list(run_tasks(str, range(2), Workers(f"dask={address}", task_memory=5 * GIB).open()))
        assert list(run_tasks(str, [1], Workers(f"dask={address}").open(task_bytes=5 * GIB))) == [(1, "1")]


@pytest.mark.slow
def test_ray_holds_memory_and_resources_for_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=4, resources={"fast": 2}, _memory=4 * GIB, include_dashboard=False, log_to_driver=False)
    try:
        for place, most in (
            (Workers("ray", task_memory=2 * GIB), 2),
            (Workers("ray", task_resources={"CPU": 0.5, "fast": 1}), 2),
            (Workers("ray", task_resources={"CPU": 4}), 1),
        ):
            spans = [span for _, span in run_tasks(records_its_time(tmp_path), range(6), place.open())]
            assert most_at_once(spans) <= most
        with pytest.raises(WorkerError, match=r"^ray: no worker can hold a part"):
            list(run_tasks(str, range(2), Workers("ray", task_memory=5 * GIB).open()))
    finally:
        ray.shutdown()
