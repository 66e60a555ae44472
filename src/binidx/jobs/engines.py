"""Where parts are made: on this machine, by Ray, or by Dask. `--engine` names them.

    local             processes of this machine
    ray               Ray of this machine, or the cluster that RAY_ADDRESS names
    ray:ADDRESS       a Ray cluster
    dask=ADDRESS      the scheduler of a Dask cluster

binidx must be installed where the work is done, in the same version. All others, MPI's or Parsl's, come as an Executor:
`preprocess(job, executor=...)`.

Worker processes of this machine, which end with the process that began them, however that ends.

    driver ──── pipe ────► worker      the driver never writes: the pipe's end is the sign to stop
                  └──────► worker

A worker waits for that end in a thread. Then it stops between two batches, and in any case some seconds later.
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
from binidx.jobs.scheduling import Engine, request_stop

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "WARNING"}


CONNECT_SECONDS = 5


"""For the scheduler of a Dask cluster to answer."""


class RayExecutor(Executor):
    """Ray's tasks as futures. A connection that was there before stays."""

    def __init__(self, address: str, count: int) -> None:
        self._ray = _import("ray", "ray")
        self._remote = functools.cache(self._ray.remote)
        self._ours = not self._ray.is_initialized()
        if self._ours and (address or "RAY_ADDRESS" in os.environ):
            self._join(address)
        elif self._ours:
            self._ray.init(num_cpus=count, include_dashboard=False, **QUIET)

    def _join(self, address: str) -> None:
        try:
            self._ray.init(address or None, **QUIET)
        except (ValueError, OSError) as error:
            named = f"ray:{address}" if address else "RAY_ADDRESS"
            raise UnreachableError(f"{named}: {error}; needed the address of a cluster, as HOST:6379") from error

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        # Without tries of its own: the driver counts them.
        future: Future[Any] = self._remote(fn).options(max_retries=0).remote(*args, **kwargs).future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._ours:
            self._ray.shutdown()


class DaskExecutor(Executor):
    """Dask's own executor, and the client that it is of."""

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


class BorrowedExecutor(Executor):
    """Somebody's executor, which stays open."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._executor.submit(fn, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """It is theirs."""


def open_engine(engine: str, count: int | None = None, *, far: bool = False) -> Engine:
    """Where `engine` says; `count` tasks at once, by default as many as there are cores; a cluster has its own count.

    Args:
        far: texts or tokens lie in a store: by default twice as many, as half of them wait for it.

    Raises:
        ConfigError: it is none of them.
    """
    name, separator, address = min((engine.partition(":"), engine.partition("=")), key=lambda found: len(found[0]))
    here = count or available_cores() * (2 if far else 1)
    if name == "dask" and separator == "=" and address:
        return Engine(lambda: DaskExecutor(address), count_dask)
    if name == "ray" and (address or not separator):
        return Engine(lambda: RayExecutor(address, here), count_ray)
    if engine == "local":
        return Engine(lambda: LocalExecutor(here), lambda executor: here)
    raise ConfigError(f"engine: found {engine}, needed local, ray, ray:ADDRESS or dask=ADDRESS")


def available_cores() -> int:
    """Of this process: those of its machine that it may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def count_dask(executor: Executor) -> int:
    """Threads of all of its workers now."""
    assert isinstance(executor, DaskExecutor)
    return sum(map(int, executor.client.nthreads().values()))


def count_ray(executor: Executor) -> int:
    """Cores of the cluster now."""
    cores: float = _import("ray", "ray").cluster_resources().get("CPU", 0.0)
    return math.ceil(cores)


def _import(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise MissingDriverError(f"engine: needs {name}; pip install 'binidx[{extra}]'") from error


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


"""Source: glibc, malloc.h."""


TRIM_BYTES, LARGEST_BYTES = 256 << 20, 32 << 20


"""Free memory that a worker does not give back, and what is asked of the kernel alone: at most that, says glibc."""


GRACE_SECONDS = 5.0


"""For a worker to end what it writes."""


class LocalExecutor(ProcessPoolExecutor):
    """`count` processes; fresh ones, as a fork would take threads and connections of this one along."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, self._end = context.Pipe(duplex=False)
        super().__init__(count, context, start_worker, (ours,))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """With `cancel_futures` what is under way is stopped, too."""
        if cancel_futures:
            self._end.close()
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._end.close()


def start_worker(end: Connection) -> None:
    """What each worker does first."""
    # A Ctrl-C reaches all processes of a terminal; the driver alone decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_malloc()
    threading.Thread(target=_stop_at_end, args=(end,), daemon=True).start()


def configure_malloc() -> None:
    """Have glibc's malloc use one arena for all threads, and buffers of megabytes again.

    Arenas of their own would each keep what they freed: from S3 to S3 a worker grew by 60 MB within eight parts. And
    buffers that the kernel is asked for, one by one, come as zeros and go: a twentieth of the CPU.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, LARGEST_BYTES), (M_TRIM_THRESHOLD, TRIM_BYTES)):
            mallopt(name, value)


def _stop_at_end(end: Connection) -> None:
    wait([end])
    request_stop()
    time.sleep(GRACE_SECONDS)
    os._exit(1)
