"""A Dask cluster of processes of this machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def dask_cluster(
    folder: Path, nanny: str = "--no-nanny", num_workers: int = 2
) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and some workers; its address, and all processes in this order."""
    place = folder / "scheduler.json"
    run = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--port", "0", "--no-dashboard"]
    work = [sys.executable, "-m", "distributed.cli.dask_worker", "--nthreads", "1", "--no-dashboard", nanny]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen([*each, "--scheduler-file", str(place)], cwd=folder, stderr=subprocess.DEVNULL)
            )
            for each in (run, *[work] * num_workers)
        ]
        for each in processes:
            stack.callback(each.kill)
        deadline = time.monotonic() + 600
        while not place.exists() or not place.read_text():
            assert time.monotonic() < deadline
            assert processes[0].poll() is None
            time.sleep(0.05)
        yield json.loads(place.read_text())["address"], processes
