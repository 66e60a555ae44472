"""Engines that run the parts of a job: processes of this machine, Ray, or Dask; `--engine` names one.

    local             processes of this machine
    ray               Ray on this machine, or the cluster at RAY_ADDRESS
    ray:ADDRESS       a Ray cluster
    dask=ADDRESS      the scheduler of a Dask cluster

The workers need the same version of binidx. Other engines, such as MPI's or Parsl's, are passed as an Executor:
`preprocess(job, executor=...)`.

Local workers end with the process that started them, however it ends:

    driver ──── pipe ────► worker      the driver never writes: the end of the pipe is the signal to stop
                  └──────► worker

A thread of each worker waits for that end. The worker then stops between two batches, and at the latest after
`GRACE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any

from binidx.errors import ConfigError, MissingDriverError, UnreachableError
from binidx.jobs.scheduling import JobEngine, request_stop

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}

CONNECT_SECONDS = 5
"""Timeout of the connection to a Dask scheduler."""

GRACE_SECONDS = 5.0
"""Time for a worker to finish its writes after the driver has gone."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`. Source: glibc, malloc.h."""

TRIM_BYTES, MMAP_BYTES = 256 << 20, 32 << 20
"""Free memory that a worker keeps, and the size from which an allocation is its own mapping (glibc's maximum)."""


class RayExecutor(Executor):
    """Ray tasks as futures. An existing connection to Ray is used and stays open."""

    def __init__(self, address: str, count: int) -> None:
        self._ray = _import("ray", "ray")
        self._remote = functools.cache(self._ray.remote)
        self._connected = not self._ray.is_initialized()
        cluster: dict[str, Any] | None = (
            {"address": address or None} if address or "RAY_ADDRESS" in os.environ else None
        )
        if self._connected:
            try:
                self._ray.init(**(cluster or {"num_cpus": count, "include_dashboard": False}), **QUIET)
            except (ValueError, OSError) as error:
                named = f"ray:{address}" if address else "RAY_ADDRESS"
                raise UnreachableError(f"{named}: {error}; needed the address of a cluster, as HOST:6379") from error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # No retries by Ray: the driver counts the attempts.
        future: Future[Any] = self._remote(fn).options(max_retries=0).remote(*args, **kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._connected:
            self._ray.shutdown()


class DaskExecutor(Executor):
    """Dask's executor together with its client."""

    def __init__(self, address: str) -> None:
        distributed = _import("distributed", "dask")
        try:
            self.client = distributed.Client(address, timeout=CONNECT_SECONDS)
        except OSError as error:
            raise UnreachableError(f"dask={address}: {error}; needed the address of a scheduler") from error
        self._executor = self.client.get_executor(pure=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = self._executor.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._executor.shutdown(wait=wait and not cancel_futures)
        self.client.close()


def open_engine(name: str, count: int | None = None, *, remote_data: bool = False) -> JobEngine:
    """Return the engine of a name such as "local", "ray:HOST:6379" or "dask=tcp://HOST:8786".

    Args:
        count: tasks at once; by default the number of cores. A cluster has its own number.
        remote_data: texts or tokens are in an object store: twice as many by default, as half of the tasks wait.

    Raises:
        ConfigError: the name is none of those above.
    """
    kind, separator, address = min((name.partition(":"), name.partition("=")), key=lambda found: len(found[0]))
    local_count = count or available_cores() * (2 if remote_data else 1)
    if kind == "dask" and separator == "=" and address:
        return JobEngine(lambda: DaskExecutor(address), _count_dask_threads)
    if kind == "ray" and (address or not separator):
        return JobEngine(lambda: RayExecutor(address, local_count), _count_ray_cores)
    if name == "local":
        return JobEngine(lambda: LocalExecutor(local_count), lambda executor: local_count)
    raise ConfigError(f"engine: found {name}, needed local, ray, ray:ADDRESS or dask=ADDRESS")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count_dask_threads(executor: Executor) -> int:
    assert isinstance(executor, DaskExecutor)
    return sum(map(int, executor.client.nthreads().values()))


def _count_ray_cores(executor: Executor) -> int:
    cores: float = _import("ray", "ray").cluster_resources().get("CPU", 0.0)
    return math.ceil(cores)


def _import(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise MissingDriverError(f"engine: needs {name}; pip install 'binidx[{extra}]'") from error


class LocalExecutor(ProcessPoolExecutor):
    """`count` processes, spawned: forked ones would inherit threads and connections."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        worker_end, self._driver_end = context.Pipe(duplex=False)
        super().__init__(count, context, start_worker, (worker_end,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down; with `cancel_futures`, running tasks are stopped, too."""
        if cancel_futures:
            self._driver_end.close()
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._driver_end.close()


def start_worker(driver: Connection) -> None:
    """Prepare a new worker process; it stops when the other end of the pipe `driver` closes."""
    # Ctrl-C reaches all processes of a terminal; only the driver handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_malloc()
    threading.Thread(target=_stop_with_driver, args=(driver,), daemon=True).start()


def configure_malloc() -> None:
    """Make glibc's malloc use one arena for all threads and reuse buffers of several megabytes.

    With an arena for each thread a worker grew by 60 MB within eight parts from S3 to S3, as each keeps its free
    memory. Buffers mapped one by one cost 5 % of the CPU time, as the kernel zeroes each.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, TRIM_BYTES)):
            mallopt(name, value)


def _stop_with_driver(driver: Connection) -> None:
    wait([driver])
    request_stop()
    time.sleep(GRACE_SECONDS)
    os._exit(1)
