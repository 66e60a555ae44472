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
heartbeat of a lease (`index.cache.lease`) and the agreement of ranks (`dataset.rank_agreement`).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TypeVar

Result = TypeVar("Result")
Item = TypeVar("Item")
First = TypeVar("First")
Second = TypeVar("Second")

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
OPENS = Threads("binidx-open", lambda: OPENING_THREADS)


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
    function: Callable[[Item], Result], items: Iterable[Item], count: int
) -> Generator[Result, None, None]:
    """Yield `function(item)` for all items, in order, computed in `count` threads at most `count` items ahead.

    Close the generator: until then threads may use the items, which must stay open.

    Args:
        count: threads, and most results that wait to be taken.
    """
    pending: deque[Future[Result]] = deque()
    pool = READS.executor(count)
    try:
        for item in items:
            if len(pending) == count:
                yield pending.popleft().result()
            pending.append(pool.submit(function, item))
        while pending:
            yield pending.popleft().result()
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


def io_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop on which all stores of this process send requests: fsspec's, so drivers share it."""
    from fsspec.asyn import get_loop

    loop: asyncio.AbstractEventLoop = get_loop()
    return loop


@functools.cache
def _pool(pid: int, threads: Threads, depth: int) -> ThreadPoolExecutor:
    name = threads.name if depth == 1 else f"{threads.name}-{depth}"
    return ThreadPoolExecutor(threads.count(), thread_name_prefix=name)


_depths = contextvars.ContextVar[Mapping[str, int]]("binidx_pool_depths", default=MappingProxyType({}))
"""Pool name -> how many tasks of that pool this code runs in, one inside another."""
