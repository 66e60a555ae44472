"""Reads beside a read: of a small object that goes with a large one, while that is read.

Their own threads, because readers are themselves read in the threads of `vectored`: one that waited there for another
thread of the same pool could wait for ever.
"""

from __future__ import annotations

import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from binidx.storage.vectored import THREADS

Result = TypeVar("Result")


def submit(read: Callable[[], Result]) -> Future[Result]:
    """Have it read in a thread; it must not call this itself."""
    return _pool(os.getpid()).submit(contextvars.copy_context().run, read)


@functools.cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """Threads do not survive a fork, so each process has its own pool."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="binidx-side")
