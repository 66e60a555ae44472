"""Threads of a process that are kept for one kind of work.

Each kind has its own: work that waited for other work in the same threads could wait for ever.

Work for the cores: one function over many items, in threads: for what lets go of the interpreter (zstd, C).
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Threads:
    """So many threads of a name, made when the first work comes.

    Args:
        name: of the threads.
        count: how many; asked once in each process.
    """

    name: str
    count: Callable[[], int]

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """In another thread, but in this one's context: its scope (`cancel`) holds there too."""
        return _pool(os.getpid(), self).submit(contextvars.copy_context().run, work)


@functools.cache
def _pool(pid: int, threads: Threads) -> ThreadPoolExecutor:
    """Threads do not survive a fork, so each process has its own pool."""
    return ThreadPoolExecutor(threads.count(), thread_name_prefix=threads.name)


Item = TypeVar("Item")


MAX_THREADS = 8


def thread_count() -> int:
    """Threads that compute at once: as many as this process has cores, 8 at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, cores)


def over_cores(function: Callable[[Item], Result], items: Sequence[Item], *, a_thread: int) -> list[Result]:
    """`map`, in as many threads as the work is worth.

    Args:
        a_thread: items that are worth a thread; handing work to one costs 20 us.

    Raises:
        The function's first error, of the items in this thread first.
    """
    count = min(thread_count(), len(items) // a_thread)
    if count < 2:
        return list(map(function, items))
    bounds = [len(items) * each // count for each in range(count + 1)]
    here, *others = (items[start:stop] for start, stop in pairwise(bounds))
    pending = [submit(lambda part=part: list(map(function, part))) for part in others]  # type: ignore[misc]
    found = list(map(function, here))
    return [*found, *(each for part in pending for each in part.result())]


submit = Threads("binidx-core", thread_count).submit


"""Have work done in a thread, which must not wait for another one of these."""


LIST_PAGES = Threads("binidx-page", lambda: 16)


"""Threads that each wait for the pages of one list."""


def stream_thread() -> ThreadPoolExecutor:
    """Return the thread of one stream, which sends a part while the next one fills; the caller shuts it down."""
    return ThreadPoolExecutor(1, "binidx-stream")


def copy_threads(count: int) -> ThreadPoolExecutor:
    """Return the threads of one copy or upload, which each carry one part; the caller shuts them down."""
    return ThreadPoolExecutor(count, "binidx-copy")


def io_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop on which all stores of this process send requests: fsspec's, so drivers share it."""
    from fsspec.asyn import get_loop

    loop: asyncio.AbstractEventLoop = get_loop()
    return loop
