"""Clusters whose workers have another binidx, or none, or that have no workers: an error or a notice names them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.crashing_task import kills_its_worker
from helpers.dask_cluster import dask_cluster, dask_worker

from binidx.errors import WorkerError
from binidx.jobs.engines import open_engine
from binidx.jobs.runner import run_tasks
from binidx.jobs.worker_calls import check_versions, describe_version, own_function

NUMBER = describe_version().split()[0]
NONE = 'raise ModuleNotFoundError("No module named binidx")\n'
OTHERS = {
    "old": ('__version__ = "0.0.9"\n', "0.0.9 of other modules"),
    "same number": (f'__version__ = "{NUMBER}"\n', f"{NUMBER} of other modules"),
    "none": (NONE, "none (ModuleNotFoundError: No module named binidx)"),
}
"""Text of a package `binidx` that a worker finds instead of this one, and what it is called."""


def other_binidx(folder: Path, kind: str) -> Path:
    (package := folder / kind / "binidx").mkdir(parents=True)
    (package / "__init__.py").write_text(OTHERS[kind][0])
    return package.parent


@pytest.fixture(scope="module")
def cluster_of_each(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, str]]:
    """A client of a Dask cluster with a worker of this binidx and one of each other, and its address."""
    from distributed import Client

    tmp_path = tmp_path_factory.mktemp("cluster")
    paths = [other_binidx(tmp_path, kind) for kind in OTHERS]
    with dask_cluster(tmp_path, num_workers=1, paths=paths) as (address, _), Client(address) as client:
        client.wait_for_workers(1 + len(OTHERS), timeout=600)
        yield client, address


def test_workers_with_another_binidx_are_named_before_the_first_task_and_none_is_lost(
    cluster_of_each: tuple[Any, str],
) -> None:
    client, address = cluster_of_each
    before, began = set(client.nthreads()), list[int]()

    def tasks() -> Iterator[int]:
        began.append(1)
        yield 1

    with pytest.raises(WorkerError, match=f"^dask={address}: workers with another binidx") as raised:
        list(run_tasks(str, tasks(), open_engine(f"dask={address}")))
    assert not began
    assert all(f"{found} on " in str(raised.value) for _, found in OTHERS.values())
    own = describe_version()
    assert str(raised.value).count("tcp://") == 1 + len(OTHERS)
    assert str(raised.value).endswith(f"needed {own}); install that one on them and give the same command again")
    assert set(client.nthreads()) == before


def test_a_task_itself_finds_another_binidx_and_leaves_the_worker_alive(cluster_of_each: tuple[Any, str]) -> None:
    client, address = cluster_of_each
    before = set(client.nthreads())
    engine = replace(open_engine(f"dask={address}"), count=lambda executor: 64)  # as of workers that have just joined
    with pytest.raises(WorkerError, match=r"^worker on .*: found binidx .*, needed .*; install that one$"):
        list(run_tasks(kills_its_worker(), range(10, 74), engine))
    assert set(client.nthreads()) == before


def test_a_worker_that_joins_later_with_another_binidx_is_named(tmp_path: Path) -> None:
    path = other_binidx(tmp_path, "old")
    with dask_cluster(tmp_path, num_workers=1) as (address, processes):

        def tasks() -> Iterator[int]:
            yield 10
            processes.append(dask_worker(tmp_path, path=path))
            yield from range(11, 1_000_000)

        engine = replace(open_engine(f"dask={address}"), poll_seconds=0.1)
        try:
            with pytest.raises(WorkerError, match=r"binidx .*0\.0\.9 of other modules"):
                list(run_tasks(kills_its_worker(), tasks(), engine))
        finally:
            processes[-1].kill()
            processes[-1].wait()


def test_a_cluster_without_workers_is_named_and_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with dask_cluster(tmp_path, num_workers=0) as (address, processes):
        engine = replace(open_engine(f"dask={address}"), poll_seconds=0.2)

        class Starts(logging.Handler):
            """Starts a worker as soon as the notice is logged."""

            def emit(self, record: logging.LogRecord) -> None:
                processes.append(dask_worker(tmp_path))

        logger, handler = logging.getLogger("binidx.jobs.runner"), Starts()
        logger.addHandler(handler)
        try:
            assert sorted(run_tasks(str, [7, 8, 9], engine)) == [(7, "7"), (8, "8"), (9, "9")]
        finally:
            logger.removeHandler(handler)
            for worker in processes[1:]:
                worker.kill()
                worker.wait()
    [notice] = [record.getMessage() for record in caplog.records if record.name == "binidx.jobs.runner"]
    assert notice.startswith(f"dask={address}: no worker for ")
    assert "waiting: 7, 8; start workers; this command waits for one for 900 s" in notice


def test_many_workers_of_a_version_are_named_by_some_hosts() -> None:
    found = {f"node{number}": "0.0.9 of other modules" for number in range(7)}
    with pytest.raises(WorkerError, match=r"found 0\.0\.9 of other modules on node0, node1, node2, node3 and 3 more;"):
        check_versions("ray", {**found, "own": describe_version()})
    check_versions("ray", {"own": describe_version()})


def test_equal_modules_are_one_binidx_whatever_their_installation_calls_them() -> None:
    wheel = describe_version().replace(NUMBER, "0.2.0.dev7+g1a2b3c4d5")
    check_versions("ray", {"node": wheel})
    payload = pickle.dumps((str, (7,)))
    assert own_function()(wheel, payload) == "7"
    with pytest.raises(ImportError, match=r"install that one$"):
        own_function()(f"{NUMBER} (modules 00000000)", payload)


@pytest.mark.slow
def test_a_node_of_ray_with_another_binidx_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    environment = {"env_vars": {"PYTHONPATH": str(other_binidx(tmp_path, "old"))}}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="WARNING", runtime_env=environment)
    try:
        with pytest.raises(WorkerError, match=r"binidx .*0\.0\.9 of other modules"):
            list(run_tasks(str, range(4), open_engine("ray")))
        engine = replace(open_engine("ray"), count=lambda executor: 2)
        with pytest.raises(WorkerError, match=r"^worker on .*: found binidx 0\.0\.9 of other modules, needed"):
            list(run_tasks(str, range(4), engine))
    finally:
        ray.shutdown()
