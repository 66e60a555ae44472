"""Locks and cached values that a forked child can use although threads of its parent, which it lacks, were at work.

A lock that such a thread held is never free again in the child, which then waits for ever, as a worker of a DataLoader
would that was forked while its parent read.

All locks within a process (`tests/structure.py` counts them, and misses none here); those across processes are files:

    module            guards                                          held within it
    forks             what an instance opens at its first use         all that opening it takes
    run_parts         the value of the job at work (a ProcessLock)    the same
    builder           number of datasets that are built at once       the same
    cached_object     the cached objects and quotas (a ProcessLock)   their files
    cached_object     the mapped blocks of one object                 none
    quota_files       an eviction                                     the next two, and the kernel's lock of a byte
    quota_files       writes of blocks, by path                       the next one
    quota_files       the record of a quota                           the kernel's lock of another byte
    fill_progress     the plan of a filling                           none
    memory            the chunks in memory                            none
    stats             all counters; renewed after a fork              none
    readahead         which thread's batches are read ahead           all that serving a batch takes
    losses            rows of losses that are being written           the requests that write them
    direct            the address of an object, of asyncio            the request that renews it
    multipart         one write to a file at a time                   none
    parquet_footer    the pipe to the process that parses footers     none
    json_models       the first use of a model (a ProcessLock)        none
    threads           thresholds of the collector (a ProcessLock)     none
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property

    opened_once = cached_property
else:

    class cached_property:  # noqa: N801 named as the one of functools
        """`functools.cached_property` as of Python 3.12, without a lock: threads may compute a value twice.

        The one of Python 3.11 has a lock for all instances of a class.
        """

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self.compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            values = vars(instance)
            if self.name not in values:
                values[self.name] = self.compute(instance)
            return values[self.name]

    class opened_once(cached_property):  # noqa: N801 as above
        """`cached_property` that one thread of a process computes: the others wait, as for `opening`."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            with nullcontext() if instance is None else opening(instance):
                return super().__get__(instance, owner)


def opening(instance: Any) -> AbstractContextManager[object]:
    """Return the lock of an instance, in this process, for what it opens at the first use."""
    # One step, so two threads get the same one.
    lock: ProcessLock = vars(instance).setdefault("_opening", ProcessLock())
    return lock()


class ProcessLock:
    """Lock that each process has of its own: `with lock():`. A thread that holds it may acquire it again."""

    def __init__(self) -> None:
        self._locks: dict[int, AbstractContextManager[object]] = {}

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()

    def __call__(self) -> AbstractContextManager[object]:
        """Return the lock of this process."""
        return self._locks.setdefault(os.getpid(), threading.RLock())  # one step, so two threads get the same one
