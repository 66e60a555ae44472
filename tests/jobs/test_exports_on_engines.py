"""order, read-plan, pack, bake, shuffle: the same bytes by threads, processes, shards, Ray and Dask, after kills."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.dask_cluster import dask_cluster
from helpers.pickling_executor import PicklingExecutor
from helpers.traceable_runs import random_config, write_source

import binidx
from binidx import RunOrder
from binidx.errors import ObjectChangedError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.jobs.parts import Shard, Workers
from binidx.packed.packed_convert import indexed_to_packed
from binidx.packed.packed_run import load_packed_run
from binidx.run.provenance.export import export, plan_by_rank, plan_by_steps
from binidx.run.stored import read_planning
from binidx.run.stored.read_planning import plan_reads, write_read_plan
from binidx.tools import main

BIN = Path(sys.executable).parent


def random_run_file(folder: Path, seed: int) -> binidx.Run:
    """A saved run of two ranks over one source or three, as a command loads it."""
    choose = random.Random(seed)
    prefixes = [write_source(folder / f"s{n}", choose, choose.random() < 0.5) for n in range(choose.choice([1, 3]))]
    weights = [choose.random() + 0.05 for _ in prefixes] if len(prefixes) > 1 else None
    config, sizes = random_config(choose, seed, prefixes, weights, f"{folder}/cache")
    binidx.Run(config, sizes, 1, 2, global_batch_size=4).save(f"{folder}/run.json")
    return binidx.Run.load(f"{folder}/run.json")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextlib.contextmanager
def all_workers() -> Iterator[dict[str, list[Workers]]]:
    """Ways to share the work: the calls that together make all parts."""
    with PicklingExecutor(2) as pickling:
        yield {
            "one": [Workers(count=1)],
            "threads": [Workers(count=3)],
            "pickled": [Workers(count=2, executor=pickling)],
            "shards": [Workers(executor=pickling, shard=Shard(number, 3)) for number in (2, 0, 1)],
        }


def assert_same_files(folder: Path, write: Callable[[str, Workers], object]) -> None:
    with all_workers() as ways:
        for name, calls in ways.items():
            for workers in calls:
                write(f"{folder}/{name}", workers)
        needed = files(folder / "one")
        assert needed
        for name in ways:
            assert files(folder / name) == needed, name


@pytest.mark.parametrize("seed", range(6))
def test_whoever_writes_an_order_or_a_plan_its_bytes_are_the_same(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_planning, "PART_SAMPLES", 7)
    run = random_run_file(tmp_path, seed)
    order = RunOrder.of(run) if seed % 2 else RunOrder.of_dataset(run.build()[0], run.reading_order)
    steps = range(order.num_steps() or 0)
    parts = plan_by_steps(steps, 3) if seed % 3 else plan_by_rank(2, steps)
    plan = plan_reads(order, steps)
    for tokens in (False, True):
        folder = tmp_path / f"order-{tokens}"
        assert_same_files(folder, lambda to, workers: export(order, to, parts, tokens=tokens, workers=workers))  # noqa: B023
    assert_same_files(tmp_path / "plan", lambda to, workers: write_read_plan(order, to, plan, workers=workers))
    assert binidx.PlannedDataset(f"{tmp_path}/plan/shards", run.config)[0]["tokens"].tolist()


def test_whoever_writes_the_order_of_packed_files_its_bytes_are_the_same(tmp_path: Path) -> None:
    make_packed_run(tmp_path)
    order = load_packed_run(f"{tmp_path}/packed.json")
    parts = plan_by_steps(range(10), 3)
    write = lambda to, workers: export(order, to, parts, tokens=True, workers=workers)  # noqa: E731
    assert_same_files(tmp_path / "order", write)


def test_a_worker_that_finds_other_data_ends_the_job(tmp_path: Path) -> None:
    order = RunOrder.of(random_run_file(tmp_path, 3))
    prefix = Path(order.sources[0].prefix)
    write_source(prefix, random.Random(77), False)
    parts = plan_by_rank(2, range(order.num_steps() or 0))
    with PicklingExecutor(1) as pickling, pytest.raises(ObjectChangedError, match="a worker opened other data"):
        export(order, f"{tmp_path}/out", parts, workers=Workers(executor=pickling))
    assert not list((tmp_path / "out").glob("*.parquet"))


def make_dataset(prefix: Path) -> None:
    rng = np.random.default_rng(1)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for length in rng.integers(0, 90, 400):
            builder.add_document(rng.integers(1, 999, length), [length])
        builder.finalize(f"{prefix}.idx")


def make_packed_run(folder: Path) -> None:
    make_dataset(folder / "web")
    names = indexed_to_packed(IndexedDataset(str(folder / "web")), str(folder / "packed"), "web", 300, 0)
    text = ", ".join(f'"{name}"' for name in names)
    (folder / "packed.json").write_text(
        '{"fork": "lit-gpt", "block_size": 9, "n_chunks": 2, "seed": 3, "num_ranks": 2, '
        f'"micro_batch_size": 2, "sets": [{{"name": "web", "files": [{text}]}}]}}'
    )


def commands(to: str) -> list[list[str]]:
    """The commands, with relative paths, and more files than workers."""
    return [
        ["order", "run.json", "--to", f"{to}/order", "--tokens", "--steps-per-file", "9"],
        ["prepare", "read-plan", "run.json", "--to", f"{to}/plan"],
        ["export", "litpkds", "web", "--to", f"{to}/packed", "--eod", "0", "--add-separator", "--chunk-size", "2000"],
        ["prepare", "bake", "run.json", "--to", f"{to}/baked"],
        ["shuffle", "web", "web", "--to", f"{to}/shuffled/new", "--seed", "1"],
        ["diff", "web", "web", "--records", f"{to}/records"],
    ]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory of the driver: a run with relative paths, a dataset, and the results of one process."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.chdir(folder)
    prefix = write_source(Path("en"), random.Random(2), True)
    config, _ = random_config(random.Random(5), 5, [prefix], None, "cache")
    binidx.Run(config, [120, 0, 0], 1, 2, global_batch_size=4).save("run.json")
    make_dataset(folder / "web")
    for command in commands("one"):
        assert main(command) == 0
    return folder


def assert_made(folder: Path) -> None:
    for name in ("order", "plan", "packed", "baked", "shuffled"):
        assert files(folder / name) == files(folder.parent / "one" / name)


@pytest.mark.slow
def test_processes_of_this_machine_write_the_same_bytes_also_when_one_is_killed(inputs: Path) -> None:
    for command in commands("local"):
        line = [str(BIN / "binidx"), *command, "--engine", "local", "--workers", "2"]
        with subprocess.Popen(line, stdout=subprocess.DEVNULL) as driver:
            killed = kill_a_worker(driver) if command[0] == "export" else True
        assert driver.returncode == 0
        assert killed
    assert_made(inputs / "local")


def kill_a_worker(driver: subprocess.Popen[bytes]) -> bool:
    """Kill the first worker process that the driver has started; return False if it ends before."""
    while driver.poll() is None:
        for each in Path(f"/proc/{driver.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in each.read_text().split():
                    if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                        os.kill(int(pid), signal.SIGKILL)
                        return True
        time.sleep(0.01)
    return False


@pytest.mark.slow
def test_ray_writes_the_same_bytes(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    script = f"from binidx.tools import main\nfor each in {commands('ray')}: main([*each, '--engine', 'ray'])"
    program = (
        "import ray; ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level='WARNING')\n"
    )
    subprocess.run([sys.executable, "-c", program + script], check=True, stdout=subprocess.DEVNULL)
    assert_made(inputs / "ray")


def test_dask_workers_of_another_directory_write_the_same_bytes(inputs: Path, tmp_path: Path) -> None:
    with dask_cluster(tmp_path) as (address, _):
        for command in commands("dask"):
            assert main([*command, "--engine", f"dask={address}"]) == 0
    assert_made(inputs / "dask")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir() and "dask" not in path.name) == ["driver"]
