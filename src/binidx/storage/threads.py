"""The thread pools of the package: one for computing, three for waiting.

    CPU        "binidx-cpu"        computes without the interpreter (zstd, C); waits for nothing
    REQUESTS   "binidx-request"    waits for single requests: HEADs, pages of lists, deletes
    READS      "binidx-read"       reads objects through their layers, checksums at the same time; may wait for REQUESTS
                                   and CPU
    OPENS      "binidx-open"       opens and lists whole datasets and indices; may wait for all others

A task may wait only for pools above its own in this table, so no cycle of waiting tasks can fill a pool. A task that
submits to its own pool gets a second one of the same kind ("binidx-read-2"), for the same reason. Pools are made at the
first task of a process, and again after a fork. `executor` gives threads of one kind to one caller.

Besides there are daemon threads of one extent each (`storage.cache.memory`), and four long-lived kinds: groups of
batches that are read ahead (`loader.readahead`), extents that fill a disk cache (`storage.cache.filling`), the
heartbeat of a lease (`index.cache.lease`) and the agreement of ranks (`dataset.rank_agreement`). Four threads of
`Background` run tasks now and then: "binidx-cleanup", "binidx-losses" (`loader.losses`), "binidx-incidents" and
"binidx-ranks" (`loader.monitoring`).
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import gc
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from types import MappingProxyType
from typing import TypeVar, cast

from binidx.forks import ProcessLock
from binidx.storage.task_schedule import Task, TaskSchedule

Result = TypeVar("Result")
Item = TypeVar("Item")
First = TypeVar("First")
Second = TypeVar("Second")

logger = logging.getLogger("binidx")

WAITING_THREADS = 32
OPENING_THREADS = 128
MAX_COMPUTING_THREADS = 8


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_count() -> int:
    """Return how many threads compute at once: one for each core of this process, 8 at most."""
    return min(MAX_COMPUTING_THREADS, available_cores())


@dataclass(frozen=True)
class Threads:
    """Thread pool of one kind of work.

    Args:
        name: name of the threads.
        count: returns the number of threads; called once in each process.
    """

    name: str
    count: Callable[[], int] = lambda: WAITING_THREADS

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Run work in a thread, in a copy of this thread's context, so that its cancellation scope holds there too."""
        depth = _depths.get().get(self.name, 0) + 1
        context = contextvars.copy_context()
        context.run(_depths.set, {**_depths.get(), self.name: depth})
        return _pool(os.getpid(), self, depth).submit(context.run, work)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results for all items, computed at the same time.

        Raises:
            The first error in the order of the items, after all calls have ended.
        """
        pending = [self.submit(functools.partial(function, item)) for item in items]
        wait(pending)
        return [future.result() for future in pending]

    def executor(self, count: int) -> ThreadPoolExecutor:
        """Return a pool of `count` threads for one caller: for long work, or work that must not queue."""
        return ThreadPoolExecutor(count, thread_name_prefix=self.name)


CPU = Threads("binidx-cpu", thread_count)
REQUESTS = Threads("binidx-request")
READS = Threads("binidx-read")
"""Pool that reads objects through their layers."""
OPENS = Threads("binidx-open", lambda: OPENING_THREADS)
"""Pool that opens and lists whole datasets; its tasks may wait for those of `READS`."""


def map_over_cores(function: Callable[[Item], Result], items: Sequence[Item], *, items_per_thread: int) -> list[Result]:
    """Return the results for all items, computed by this thread and others.

    Args:
        items_per_thread: items for which another thread pays off; to hand work to a thread costs 20 us.

    Raises:
        The function's first error; errors of this thread's items come first.
    """
    count = min(thread_count(), len(items) // items_per_thread)
    if count < 2:
        return list(map(function, items))
    bounds = [len(items) * part // count for part in range(count + 1)]
    here, *others = (items[start:stop] for start, stop in pairwise(bounds))
    pending = [CPU.submit(lambda part=part: list(map(function, part))) for part in others]  # type: ignore[misc]
    results = list(map(function, here))
    return [*results, *(result for part in pending for result in part.result())]


def map_in_flight(
    function: Callable[[Item], Result], items: Iterable[Item], count: int, stop: Callable[[], object] = lambda: None
) -> Generator[Result, None, None]:
    """Yield `function(item)` for all items, in order, computed in `count` threads at most `count` items ahead.

    Each call has a copy of this thread's context, so that its cancellation scope holds there too.

    Close the generator: until then threads may use the items, which must stay open.

    Args:
        count: threads, and most results that wait to be taken.
        stop: called before the threads are waited for if they may be at work although no more results are taken.
    """
    pending: deque[Future[Result]] = deque()
    pool = READS.executor(count)
    try:
        for item in items:
            if len(pending) == count:
                yield pending.popleft().result()
            pending.append(pool.submit(contextvars.copy_context().run, function, item))
        while pending:
            yield pending.popleft().result()
    except BaseException:
        stop()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def run_both(
    here: Callable[[], First], elsewhere: Callable[[], Second], pool: Threads | None = None
) -> tuple[First, Second]:
    """Return the results of two functions that run at the same time, the second in a thread of `pool`, or of READS.

    Raises:
        The first's error, else the second's, after both have ended.
    """
    pending = (pool or READS).submit(elsewhere)
    try:
        result = here()
    finally:
        wait([pending])
    return result, pending.result()


class Background:
    """Thread that runs a task for each of some objects: when the object is gone, at exit, and every few seconds.

    A finalizer runs inside any allocation of any thread, under any lock: it only puts a token into the queue.

    Attributes:
        schedule: decides which task runs next.
        tokens: keys of the tasks whose objects are gone, and further tasks.
    """

    def __init__(self, name: str, *, is_early: bool = False) -> None:
        self.schedule, self.tokens = TaskSchedule(), queue.SimpleQueue[Task]()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends: tasks only run when they are called
            self._thread.start()
            atexit.register(self.finish)
            if is_early:
                threading._register_atexit(self.finish)  # type: ignore[attr-defined]

    def add(self, owner: object, task: Task, seconds: float = inf) -> Task:
        """Run a task when its owner is gone; return a function that runs it at once, unless it has run.

        Args:
            seconds: time between two runs of the task; inf: it runs once.
        """
        key = functools.partial(bool)  # a new object, which does nothing once its task has run
        self.schedule.add(key, task, seconds, time.monotonic())
        weakref.finalize(owner, self.tokens.put, key).atexit = False  # `finish` does it then
        self.tokens.put(bool)  # the thread may wait for a later task
        return lambda: (scheduled := self.schedule.tasks.pop(key, None)) and scheduled.task()

    def _work(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                token = self.tokens.get(timeout=self.schedule.wait(time.monotonic()))
                self.schedule.receive(token, time.monotonic())
            if scheduled := self.schedule.next(time.monotonic()):
                try:
                    scheduled.task()
                except Exception as error:
                    logger.warning("%s: %s: %s", self._thread.name, type(error).__name__, error)
                    self.schedule.fail(scheduled, time.monotonic())

    def finish(self) -> None:
        """Run all tasks, and wait for them at most 10 s after the first call; called at exit."""
        if not self._thread.is_alive():  # of the parent process
            return
        done, schedule = queue.SimpleQueue[None](), self.schedule
        self.tokens.put(lambda: schedule.exit(lambda: done.put(None), time.monotonic()))
        try:
            done.get(timeout=schedule.exit_wait(time.monotonic()))
        except queue.Empty:
            name, seconds = self._thread.name, schedule.exit_seconds
            logger.warning("%s: not done within %d s at exit; the rest is lost", name, seconds)


@functools.cache
def _background(pid: int, name: str, is_early: bool) -> Background:
    return Background(name, is_early=is_early)


def background(name: str = "binidx-cleanup", *, is_early: bool = False) -> Background:
    """Return the thread of this name of this process, which is made at the first call.

    Args:
        is_early: whether it also ends its tasks before the other threads: afterwards none can be started, as to look up
            a host.
    """
    return _background(os.getpid(), name, is_early)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python's garbage collector run less often in the block, of this and of other threads.

    A start makes hundreds of objects a prefix, all of which stay. The collector looked at them, and at those of all
    imported modules, again and again: 0.4 s of the 1.5 s of CPU of 1,000 prefixes.
    """
    global _rare, _usual
    with _gc_lock():
        _rare += 1
        if _rare == 1:
            _usual = gc.get_threshold()
            if _usual[0]:
                gc.set_threshold(*map(max, _usual, RARE))
    try:
        yield
    finally:
        with _gc_lock():
            _rare = max(_rare - 1, 0)  # 0 already in a child that was forked within the block
            if _rare == 0:
                gc.set_threshold(*_usual)


def _forget_collections() -> None:
    """Restore the thresholds in a forked child, which lacks the threads that would."""
    global _rare
    if _rare:
        _rare = 0
        gc.set_threshold(*_usual)


os.register_at_fork(after_in_child=_forget_collections)

RARE = (50_000, 50, 1000)
"""Least thresholds of the generations of the collector within `rare_collections`."""

_gc_lock, _rare, _usual = ProcessLock(), 0, gc.get_threshold()
"""Lock, number of running blocks of `rare_collections`, and the thresholds outside."""


def io_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop on which all stores of this process send requests: fsspec's, so drivers share it."""
    from fsspec.asyn import get_loop

    return cast(asyncio.AbstractEventLoop, get_loop())


@functools.cache
def _pool(pid: int, threads: Threads, depth: int) -> ThreadPoolExecutor:
    name = threads.name if depth == 1 else f"{threads.name}-{depth}"
    return ThreadPoolExecutor(threads.count(), thread_name_prefix=name)


_depths = contextvars.ContextVar[Mapping[str, int]]("binidx_pool_depths", default=MappingProxyType({}))
"""Pool name -> how many tasks of that pool this code runs in, one inside another."""
