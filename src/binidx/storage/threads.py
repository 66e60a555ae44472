"""Threads of a process that are kept for one kind of work.

Each kind has its own: work that waited for other work in the same threads could wait for ever.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
