"""Engines: the places where the tasks of a job run, each behind `concurrent.futures.Executor`.

    local             processes of this machine
    ray               Ray on this machine, or the cluster at RAY_ADDRESS
    ray:ADDRESS       a Ray cluster
    dask=ADDRESS      the scheduler of a Dask cluster

The workers need the same version of binidx, which those of a cluster are asked for before their first task, and by each
task (`worker_calls`). Other engines, such as MPI's or Parsl's, are passed as an Executor.

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
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

from binidx import errors
from binidx.jobs.runner import request_stop
from binidx.jobs.task_queue import JobEngine
from binidx.jobs.worker_calls import CALL, SOURCE, check_versions, describe_version, own_function
from binidx.storage.effects import CallInThread
from binidx.storage.requests.cancellation import Scope, cancellable
from binidx.storage.threads import available_cores

ANSWER_SECONDS = 8.0
"""Longest time for workers to name their versions; later answers count at the next count of workers."""

CLOSE_SECONDS = 10.0
"""Longest time for closing the client of a cluster."""

CONNECT_SECONDS = 5
"""Timeout of the connection to a Dask scheduler, and to the head of a Ray cluster."""

GRACE_SECONDS = 5.0
"""Time for a worker to finish its writes after the driver has ended."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of glibc's `mallopt`. Source: glibc, malloc.h."""

TRIM_BYTES, MMAP_BYTES = 256 << 20, 32 << 20
"""Free memory that a worker keeps, and the size from which an allocation is its own mapping (glibc's maximum)."""


@dataclass(frozen=True)
class TaskNeeds:
    """Needs of each task of a job.

    Attributes:
        memory: bytes; 0: not known.
        resources: amounts of resources that workers of a cluster declare.
        is_estimate: whether `memory` is an estimate, which workers with less memory do without.
    """

    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    is_estimate: bool = True

    def fit(self, cluster: str, unit: str, offers: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], int]:
        """Return what to reserve for a task, and the number of tasks that workers hold at once.

        Args:
            cluster: as the user named it.
            unit: resource of which a task takes one, unless `resources` say more.
            offers: resources of each worker, "memory" among them.

        Raises:
            WorkerError: there are workers, and none can hold a task.
        """
        most = max((offer.get("memory", 0) for offer in offers), default=math.inf)
        memory = min(self.memory, most) if self.is_estimate else self.memory
        needs = {unit: 1.0, **self.resources, "memory": float(memory)}
        fits = [
            min(int(min(offer.get(name, 0) / need, sys.maxsize)) for name, need in needs.items() if need)
            for offer in offers
        ]
        if offers and not any(fits):
            most_of_each = {name: max(offer.get(name, 0) for offer in offers) for name in needs}
            found, needed = (
                ", ".join(f"{name} {each[name]:,.12g}" for name in needs) for each in (most_of_each, needs)
            )
            problem = f"no worker can hold a part (found at most {found}; needed {needed})"
            raise errors.WorkerError(
                f"{cluster}: {problem}; start larger ones, or lower --task-memory, --task-resources"
            )
        return needs, sum(fits)


class RayExecutor(Executor):
    """Executor of Ray tasks. An existing connection to Ray is used and stays open; else one is opened.

    While an opened one exists, file descriptor 1 is that of stderr: Ray's C++ code and its processes print to stdout.
    """

    def __init__(self, address: str, count: int, needs: TaskNeeds) -> None:
        self._needs, self._reserved = needs, dict[str, Any]()
        self._ray = _import("ray", "ray")
        address = address or os.environ.get("RAY_ADDRESS", "")
        self._cluster = f"ray:{address}" if address else "ray"
        self._run = self._ray.remote(max_retries=0)(own_function())  # the driver counts the attempts
        self._asked = dict[str, Any]()
        self._connected = not self._ray.is_initialized()
        place: dict[str, Any] = {"address": address} if address else {"num_cpus": count, "include_dashboard": False}
        if self._connected:
            sys.stdout.flush()
            self._stdout = os.dup(1)
            os.dup2(2, 1)
            try:
                host, colon, port = address.rpartition("/")[2].rpartition(":")
                if colon:  # else Ray tries for more than a minute, without a word
                    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
                self._ray.init(**place, log_to_driver=False, logging_level="WARNING")
            except Exception as error:
                self._restore_stdout()
                if not isinstance(error, (ValueError, OSError)):
                    raise
                raise errors.UnreachableError(f"{self._cluster}: {error}; needed a cluster, as HOST:6379") from error

    def count_workers(self) -> int:
        """Return the number of tasks that the cluster holds now; raise WorkerError if a node has another binidx."""
        nodes = {node["NodeID"]: node for node in self._ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
        strategies = self._ray.util.scheduling_strategies
        for node in nodes.keys() - self._asked.keys():
            place = {"num_cpus": 0, "scheduling_strategy": strategies.NodeAffinitySchedulingStrategy(node, soft=False)}
            self._asked[node] = self._run.options(**place, name="binidx: version").remote(describe_version())
        asked = {self._asked[node]: nodes[node]["NodeManagerHostname"] for node in nodes}
        found = dict[str, str]()
        for answer in self._ray.wait([*asked], num_returns=len(asked), timeout=ANSWER_SECONDS)[0] if asked else ():
            with contextlib.suppress(self._ray.exceptions.RayError):  # of a node that is lost
                found[asked[answer]] = self._ray.get(answer)[1]
        check_versions(self._cluster, found)
        reserved, count = self._needs.fit(self._cluster, "CPU", [node["Resources"] for node in nodes.values()])
        memory, cores, gpus = (reserved.pop(name, 0) for name in ("memory", "CPU", "GPU"))
        self._reserved = {"num_cpus": cores, "num_gpus": gpus, "memory": int(memory), "resources": reserved}
        return count

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        payload = self._ray.cloudpickle.dumps((functools.partial(fn, **kwargs), args))
        run = self._run.options(name=f"binidx: {args[-1]}", **self._reserved)
        future: Future[Any] = run.remote(describe_version(), payload).future()
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

    def __init__(self, address: str, needs: TaskNeeds) -> None:
        self._needs = needs
        distributed = _import("distributed", "dask")
        self._cluster, self._checked = f"dask={address}", set[str]()
        way = "start one and give the same command again"
        self._dumps = _import("cloudpickle", "dask").dumps
        self._lost = errors.UnreachableError(f"dask={address}: the scheduler is gone; {way}")
        # Both log tracebacks if the scheduler is lost.
        logging.getLogger("distributed.client").setLevel(logging.CRITICAL)
        logging.getLogger("tornado.application").addFilter(is_of_others)
        try:
            self.client = distributed.Client(address, timeout=CONNECT_SECONDS)
        except OSError as error:
            raise errors.UnreachableError(f"dask={address}: {error}; needed the address of a scheduler") from error
        self._executor: Any = self.client.get_executor(pure=False, resources=dict(needs.resources) or None)

    def count_workers(self) -> int:
        """Return the number of tasks that all workers hold now, in a thread each.

        Raises:
            UnreachableError: the scheduler is lost.
            WorkerError: a worker has another binidx, or none can hold a task.
        """
        if self.client.status == "closed":  # it has tried to connect again for CONNECT_SECONDS
            raise self._lost
        workers: dict[str, dict[str, Any]] = self.client.scheduler_info(n_workers=-1)["workers"]
        if new := [address for address in workers if address not in self._checked]:
            ask = functools.partial(self.client.run, workers=new, on_error="ignore")  # the event loop answers
            answer = CallInThread(ask, (eval, CALL, _names(describe_version()))).perform()
            if futures.wait([answer], ANSWER_SECONDS).done:
                found = answer.result()
                check_versions(self._cluster, {f"{host} ({address})": text for address, (host, text) in found.items()})
                self._checked.update(found)
        offers = [
            {"threads": worker["nthreads"], **worker["resources"], "memory": worker["memory_limit"] or math.inf}
            for worker in workers.values()
        ]
        return self._needs.fit(self._cluster, "threads", offers)[1]

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        names = _names(
            describe_version(), self._dumps((functools.partial(call_within, self._needs.memory, fn, **kwargs), args))
        )
        try:
            future: Future[Any] = self._executor.submit(eval, CALL, names, key=f"binidx-{args[-1]}-{uuid.uuid4().hex}")
        except Exception as error:
            if self.client.status == "running":
                raise
            raise self._lost from error
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        def close() -> None:
            with contextlib.suppress(Exception):  # any type: of a scheduler that is gone
                self._executor.shutdown(wait=wait and not cancel_futures)
            self.client.close()

        futures.wait([CallInThread(close).perform()], CLOSE_SECONDS)


threads_of_process = functools.cache(ThreadPoolExecutor)
"""Return the pool of so many threads of this process."""


def call_within(memory: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function for a task of a Dask worker, once the calls of `memory` bytes beside it leave room for it."""
    limit = _import("distributed", "dask").get_worker().memory_manager.memory_limit
    if not (limit and memory):
        return fn(*args, **kwargs)
    return threads_of_process(max(1, int(limit // memory))).submit(fn, *args, **kwargs).result()


def _names(*arguments: Any) -> dict[str, Any]:
    """Return the globals of `CALL`."""
    return {"source": SOURCE, "arguments": arguments}


def is_of_others(record: logging.LogRecord) -> bool:
    """Return whether a log record is not of an error of Dask, which each future of its executor has."""
    error = record.exc_info[1] if record.exc_info else None
    return not type(error).__module__.startswith("distributed.")


def open_engine(
    name: str, count: int | None = None, *, remote_data: bool = False, needs: TaskNeeds | None = None
) -> JobEngine:
    """Return the engine of a name such as "local", "ray:HOST:6379" or "dask=tcp://HOST:8786".

    Args:
        count: number of tasks at once; by default the number of cores. A running cluster decides its own number.
        remote_data: whether texts or tokens are in an object store; the default count is doubled, as tasks wait for it.
        needs: needs of a task, for clusters.

    Raises:
        ConfigError: the name is not one of those in the module's table.
    """
    kind, separator, address = min((name.partition(":"), name.partition("=")), key=lambda parts: len(parts[0]))
    needs, count_workers = needs or TaskNeeds(), operator.methodcaller("count_workers")
    local_count = count or available_cores() * (2 if remote_data else 1)
    if kind == "dask" and separator == "=" and address:
        return JobEngine(lambda: DaskExecutor(address, needs), count_workers, name=name)
    if kind == "ray" and (address or not separator):
        return JobEngine(lambda: RayExecutor(address, local_count, needs), count_workers, central=False, name=name)
    if name == "local":
        return JobEngine(lambda: LocalExecutor(local_count), lambda executor: local_count)
    raise errors.ConfigError(f"engine: found {name}, needed local, ray, ray:ADDRESS or dask=ADDRESS")


def _import(name: str, extra: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise errors.MissingDriverError(f"engine: needs {name}; pip install 'binidx[{extra}]'") from error


class ThreadExecutor(ThreadPoolExecutor):
    """Executor on `count` threads of this process."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._scope = Scope()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a task in a scope of this executor: other calls in this process have others."""
        return super().submit(cancellable(self._scope)(function), *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down; with `cancel_futures`, running tasks are stopped, too: at `check_stop`, or while they read."""
        if cancel_futures:
            self._scope.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)


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
