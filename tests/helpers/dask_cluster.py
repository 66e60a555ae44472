"""A Dask cluster of processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def dask_cluster(
    folder: Path, *options: str, num_workers: int = 2, paths: Sequence[Path] = ()
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and some workers; its address, and all processes in this order.

    Args:
        options: of the workers.
        paths: of further workers, each of which finds modules there first.
    """
    place = folder / "scheduler.json"
    run = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([*run, "--scheduler-file", str(place)], cwd=folder, stderr=subprocess.DEVNULL)
            )
        ]
        processes += [stack.enter_context(dask_worker(folder, *options)) for _ in range(num_workers)]
        processes += [stack.enter_context(dask_worker(folder, *options, path=path)) for path in paths]
        for each in processes:
            stack.callback(each.kill)
        deadline = time.monotonic() + 600
        while not place.exists() or not place.read_text():
            assert time.monotonic() < deadline
            assert processes[0].poll() is None
            time.sleep(0.05)
        yield json.loads(place.read_text())["address"], processes


def dask_worker(folder: Path, *options: str, path: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a worker of the cluster of a folder, which finds modules in `path` first."""
    work = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard"]
    work += [
        "--scheduler-file",
        str(folder / "scheduler.json"),
        *(options if "--nanny" in options else ("--no-nanny", *options)),
    ]
    paths = [*([str(path)] if path else ()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(work, cwd=folder, stderr=subprocess.DEVNULL, env=environment)
