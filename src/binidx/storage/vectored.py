"""Ranges of many objects in one go: remote objects are read at the same time, so a blend waits once.

And any two pieces of work at the same time, on the same threads.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from binidx.storage.local_file import LocalFile
from binidx.storage.ranges import Range, RangeReader

THREADS = 32
"""Objects read at once in a process; the requests of each are bounded by its filesystem."""

First = TypeVar("First")
Second = TypeVar("Second")


def read_many(requests: Sequence[tuple[RangeReader, Sequence[Range]]]) -> list[list[memoryview]]:
    """What each reader's `read` gives for its ranges, in the order of the requests.

    Mapped files are read in this thread, as is a reader that is the only remote one; other readers in threads.

    Raises:
        The first request's error that fails, after all of them have ended.
    """
    remote = [place for place, (reader, ranges) in enumerate(requests) if ranges and not isinstance(reader, LocalFile)]
    elsewhere = remote[1:]
    pending = {place: _submit(functools.partial(requests[place][0].read, requests[place][1])) for place in elsewhere}
    try:
        here = {place: reader.read(ranges) for place, (reader, ranges) in enumerate(requests) if place not in pending}
    finally:
        wait(pending.values())
    return [pending[place].result() if place in pending else here[place] for place in range(len(requests))]


def run_both(here: Callable[[], First], elsewhere: Callable[[], Second]) -> tuple[First, Second]:
    """What two functions give that run at the same time, the second in a thread; it must not call this itself.

    Raises:
        The first's error, else the second's, after both have ended.
    """
    pending = _submit(elsewhere)
    try:
        found = here()
    finally:
        wait([pending])
    return found, pending.result()


def _submit(work: Callable[[], First]) -> Future[First]:
    """In another thread, but in this one's context: its scope (`cancel`) holds there too."""
    return _pool(os.getpid()).submit(contextvars.copy_context().run, work)


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Threads do not survive a fork, so each process has its own pool."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="binidx-read")
