"""CPU that an engine takes for a task, of all its processes: empty tasks on Ray and Dask, beside a part of 64 MiB.

The same job with few and with many tasks that do nothing, each after the cluster has started; the difference is the
rate. The part is a copy of a dataset of 64 MiB from disk to disk by `convert`, which reads its copy back. Minutes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from helpers.dask_cluster import dask_cluster

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.jobs.engines import open_engine
from binidx.jobs.runner import run_tasks
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=0, size="2,000 empty tasks", cached="the cluster runs", workers=2)
FEW, MANY = 200, 2200
PART_BYTES = 64 << 20
TICKS = os.sysconf("SC_CLK_TCK")


def rows(directory: Path) -> list[Row]:
    """Milliseconds of CPU a task on each engine."""
    part = min(part_cpu(directory / str(number)) for number in range(3))
    found = []
    for name, cluster in (("Ray", ray_cluster), ("Dask", two_dask_workers)):
        with cluster(directory) as engine:
            whole, driver = task_cpu(engine)
        note = f"{1e3 * driver:.1f} ms of it in the driver"
        against = "`convert` of 64 MiB between disks"
        found.append(Row(f"an empty task on {name}", 1e3 * whole, 1e3 * part, "ms of CPU", False, note, against))
    return found


def part_cpu(folder: Path) -> float:
    """Return the CPU-seconds of a copy of 64 MiB by one process."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, 60_000, PART_BYTES // 2, np.uint16)
    with binidx.IndexedDatasetBuilder(f"{folder}/en.bin", np.uint16) as builder:
        for document in np.split(tokens, 1 << 15):
            builder.add_document(document, [len(document)])
        builder.finalize(f"{folder}/en.idx")
    return cpu_of(lambda: convert_dataset(f"{folder}/en", f"{folder}/copy"), time.process_time)


@contextmanager
def ray_cluster(directory: Path) -> Iterator[str]:
    """Start Ray with two workers on this machine."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    try:
        yield "ray"
    finally:
        ray.shutdown()


@contextmanager
def two_dask_workers(directory: Path) -> Iterator[str]:
    """Start a Dask scheduler and two workers of one thread on this machine."""
    from distributed import Client

    with dask_cluster(directory, num_workers=2) as (address, _), Client(address) as client:
        client.wait_for_workers(2, timeout=600)
        yield f"dask={address}"


def task_cpu(engine: str) -> tuple[float, float]:
    """Return the CPU-seconds that a task takes in all processes, and in this one."""

    def run(count: int) -> None:
        assert sum(1 for _ in run_tasks(str, range(count), open_engine(engine, 2))) == count

    clocks = (tree_cpu, time.process_time)
    few, many = ([cpu_of(lambda count=count: run(count), clock) for clock in clocks] for count in (FEW, MANY))
    whole, driver = ((most - least) / (MANY - FEW) for least, most in zip(few, many, strict=True))
    return whole, driver


def cpu_of(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Return the seconds of a clock that work takes."""
    before = clock()
    work()
    return clock() - before


def tree_cpu() -> float:
    """Return the CPU-seconds of this process and of all below it that run."""
    seconds, parents = dict[int, float](), dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        number = int(path.parent.name)
        parents[number], seconds[number] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    own = {os.getpid()}
    while more := {number for number, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(seconds[number] for number in own)
