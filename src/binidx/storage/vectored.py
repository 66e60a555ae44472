"""Ranges of many objects in one go: remote objects are read at the same time, so a blend waits once.

And any two pieces of work at the same time, on the same threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import TypeVar

from binidx.storage.fsspec_object import Begun, FsspecObject
from binidx.storage.local_file import LocalFile
from binidx.storage.ranges import Range, RangeReader
from binidx.storage.threads import Threads

THREADS = 32
"""Objects read at once in a process that need a thread each: those with a layer over them."""

First = TypeVar("First")
Second = TypeVar("Second")


def read_many(requests: Sequence[tuple[RangeReader, Sequence[Range]]]) -> list[list[memoryview]]:
    """What each reader's `read` gives for its ranges, in the order of the requests.

    Objects are asked for from this thread, all at once. Of the others the mapped files are read in it, as is the first
    remote one, and the rest in threads.

    Raises:
        The first request's error that fails, after all of them have ended; at once what cannot be asked for.
    """
    remote = {place: each for place, each in enumerate(requests) if each[1] and not isinstance(each[0], LocalFile)}
    with ExitStack() as sending:
        begun = {
            place: sending.enter_context(reader.begin(ranges))
            for place, (reader, ranges) in remote.items()
            if isinstance(reader, FsspecObject) and reader.needs_no_thread
        }
        in_threads = [place for place in remote if place not in begun][1:]
        pending = {place: _submit(functools.partial(remote[place][0].read, remote[place][1])) for place in in_threads}
        elsewhere: dict[int, Begun | Future[list[memoryview]]] = {**begun, **pending}
        try:
            here = {place: reader.read(each) for place, (reader, each) in enumerate(requests) if place not in elsewhere}
        finally:
            wait(pending.values())
            wait([each.outcome for each in begun.values()])
        return [elsewhere[place].result() if place in elsewhere else here[place] for place in range(len(requests))]


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


_submit = Threads("binidx-read", lambda: THREADS).submit
