"""Engines: the places where the tasks of a job run, each behind `concurrent.futures.Executor`.

    local             processes of this machine
    ray               Ray on this machine, or the cluster at RAY_ADDRESS
    ray:ADDRESS       a Ray cluster
    dask=ADDRESS      the scheduler of a Dask cluster

The workers need the same version of binidx. Other engines, such as MPI's or Parsl's, are passed as an Executor.

Local workers end with the process that started them, however it ends:

    driver ──── pipe ────► worker      the driver never writes: the end of the pipe is the signal to stop
                  └──────► worker

A thread of each worker waits for that end. The worker then stops between two batches (`check_stop`), so that no file
stays half written, and at the latest after `GRACE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import multiprocessing
import operator
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from multiprocessing import connection
from typing import Any

from binidx import errors
from binidx.jobs.runner import request_stop
from binidx.jobs.task_queue import JobEngine
from binidx.storage.effects import CallInThread
from binidx.storage.threads import available_cores

CLOSE_SECONDS = 10.0
"""Longest time for closing the client of a cluster."""

CONNECT_SECONDS = 5
"""Timeout of the connection to a Dask scheduler."""

GRACE_SECONDS = 5.0
"""Time for a worker to finish its writes after the driver has ended."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`. Source: glibc, malloc.h."""

TRIM_BYTES, MMAP_BYTES = 256 << 20, 32 << 20
"""Free memory that a worker keeps, and the size from which an allocation is its own mapping (glibc's maximum)."""


class RayExecutor(Executor):
    """Executor of Ray tasks. An existing connection to Ray is used and stays open; else one is opened.

    While an opened one exists, file descriptor 1 is that of stderr: Ray's C++ code and its processes print to stdout.
    """

    def __init__(self, address: str, count: int) -> None:
        self._ray = _import("ray", "ray")
        self._remote = functools.cache(self._ray.remote)
        self._connected = not self._ray.is_initialized()
        place: dict[str, Any] = {"num_cpus": count, "include_dashboard": False}
        if address or "RAY_ADDRESS" in os.environ:
            place = {"address": address or None}
        if self._connected:
            sys.stdout.flush()
            self._stdout = os.dup(1)
            os.dup2(2, 1)
            try:
                self._ray.init(**place, log_to_driver=False, logging_level="WARNING")
            except Exception as error:
                self._restore_stdout()
                if not isinstance(error, (ValueError, OSError)):
                    raise
                named = f"ray:{address}" if address else "RAY_ADDRESS"
                raise errors.UnreachableError(f"{named}: {error}; needed a cluster, as HOST:6379") from error

    def count_workers(self) -> int:
        """Return the number of cores that the cluster has now."""
        cores: float = self._ray.cluster_resources().get("CPU", 0.0)
        return math.ceil(cores)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # No retries by Ray: the driver counts the attempts.
        future: Future[Any] = self._remote(fn).options(max_retries=0).remote(*args, **kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        # A cluster that is lost may never answer. Then descriptor 1 stays as it is, as Ray goes on printing.
        if self._connected and futures.wait([CallInThread(self._ray.shutdown).perform()], CLOSE_SECONDS).done:
            self._restore_stdout()

    def _restore_stdout(self) -> None:
        sys.stdout.flush()
        os.dup2(self._stdout, 1)
        os.close(self._stdout)


class DaskExecutor(Executor):
    """Dask's executor together with its client."""

    def __init__(self, address: str) -> None:
        distributed = _import("distributed", "dask")
        way = "start one and give the same command again"
        self._lost = errors.UnreachableError(f"dask={address}: the scheduler is gone; {way}")
        # Both log tracebacks if the scheduler is lost.
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        logging.getLogger("tornado.application").addFilter(is_of_others)
        try:
            self.client = distributed.Client(address, timeout=CONNECT_SECONDS)
        except OSError as error:
            raise errors.UnreachableError(f"dask={address}: {error}; needed the address of a scheduler") from error
        self._executor: Executor = self.client.get_executor(pure=False)

    def count_workers(self) -> int:
        """Return the number of threads of all workers now; raise UnreachableError if the scheduler is lost."""
        if self.client.status == "closed":  # it has tried to connect again for CONNECT_SECONDS
            raise self._lost
        return sum(map(int, self.client.nthreads().values()))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return self._executor.submit(fn, *args, **kwargs)
        except Exception as error:
            if self.client.status == "running":
                raise
            raise self._lost from error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        def close() -> None:
            with contextlib.suppress(Exception):  # any type: of a scheduler that is gone
                self._executor.shutdown(wait=wait and not cancel_futures)
            self.client.close()

        futures.wait([CallInThread(close).perform()], CLOSE_SECONDS)


def is_of_others(record: logging.LogRecord) -> bool:
    """Return whether a log record is not of an error of Dask, which each future of its executor has."""
    error = record.exc_info[1] if record.exc_info else None
    return not type(error).__module__.startswith("distributed.")


def open_engine(name: str, count: int | None = None, *, remote_data: bool = False) -> JobEngine:
    """Return the engine of a name such as "local", "ray:HOST:6379" or "dask=tcp://HOST:8786".

    Args:
        count: number of tasks at once; by default the number of cores. A running cluster decides its own number.
        remote_data: whether texts or tokens are in an object store; the default count is doubled, as tasks wait for it.

    Raises:
        ConfigError: the name is not one of those in the module's table.
    """
    kind, separator, address = min((name.partition(":"), name.partition("=")), key=lambda parts: len(parts[0]))
    count_workers = operator.methodcaller("count_workers")
    local_count = count or available_cores() * (2 if remote_data else 1)
    if kind == "dask" and separator == "=" and address:
        return JobEngine(lambda: DaskExecutor(address), count_workers)
    if kind == "ray" and (address or not separator):
        return JobEngine(lambda: RayExecutor(address, local_count), count_workers, central=False)
    if name == "local":
        return JobEngine(lambda: LocalExecutor(local_count), lambda executor: local_count)
    raise errors.ConfigError(f"engine: found {name}, needed local, ray, ray:ADDRESS or dask=ADDRESS")


def _import(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise errors.MissingDriverError(f"engine: needs {name}; pip install 'binidx[{extra}]'") from error


class LocalExecutor(ProcessPoolExecutor):
    """Executor on `count` processes of this machine, spawned: forked ones would inherit threads and connections."""

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


def start_worker(driver: connection.Connection) -> None:
    """Prepare a new worker process; the process stops when the other end of the pipe `driver` closes."""
    # Ctrl-C reaches all processes of a terminal; only the driver handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_malloc()
    threading.Thread(target=_stop_with_driver, args=(driver,), daemon=True).start()


def configure_malloc() -> None:
    """Make glibc's malloc use one arena for all threads and reuse buffers of several megabytes.

    With an arena for each thread a worker grew by 60 MB within eight parts from S3 to S3, as each arena keeps its free
    memory. Buffers that are mapped one by one cost 5 % of the CPU time, as the kernel zeroes each buffer.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, TRIM_BYTES)):
            mallopt(name, value)


def _stop_with_driver(driver: connection.Connection) -> None:
    connection.wait([driver])
    request_stop()
    time.sleep(GRACE_SECONDS)
    os._exit(1)
