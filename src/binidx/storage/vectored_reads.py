"""Ranges of many objects in one go: remote objects are read at the same time, so a blend waits once.

And any two pieces of work at the same time, on the same threads.

Reads beside a read: of a small object that goes with a large one, while that is read.

Their own threads, because readers are themselves read in the threads of `vectored`: one that waited there for another
thread of the same pool could wait for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import TypeVar

from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.requests.remote_reader import Begun, RemoteObject
from binidx.storage.stores.local import LocalFile
from binidx.storage.threads import Threads

THREADS = 32


"""Objects read at once in a process that need a thread each: those with a layer over them."""


First = TypeVar("First")


Second = TypeVar("Second")


Requests = Sequence[tuple[RangeReader, Sequence[Range]]]


def read_many(requests: Requests) -> list[list[memoryview]]:
    """What each reader's `read` gives for its ranges, in the order of the requests.

    A reader that is made of others may `split` its ranges over them: they are read with the rest, and not in threads
    that would wait for threads.

    Objects are asked for from this thread, all at once. Of the others the mapped files are read in it, as is the first
    remote one, and the rest in threads.

    Raises:
        The first request's error that fails, after all of them have ended; at once what cannot be asked for.
    """
    if any(hasattr(reader, "split") for reader, _ in requests):
        return _read_split(requests)
    remote = {place: each for place, each in enumerate(requests) if each[1] and not isinstance(each[0], LocalFile)}
    with ExitStack() as sending:
        begun = {
            place: sending.enter_context(reader.begin(ranges))
            for place, (reader, ranges) in remote.items()
            if isinstance(reader, RemoteObject) and reader.needs_no_thread
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


def _read_split(requests: Requests) -> list[list[memoryview]]:
    """`read_many`, where some readers are made of others."""
    plans = [reader.split(ranges) if hasattr(reader, "split") else None for reader, ranges in requests]
    below = [plan[1] if plan else [each] for plan, each in zip(plans, requests, strict=True)]
    found = iter(read_many([each for parts in below for each in parts]))
    answers = [[next(found) for _ in parts] for parts in below]
    return [_put_together(plan[0], each) if plan else each[0] for plan, each in zip(plans, answers, strict=True)]


def _put_together(pieces: Sequence[Sequence[tuple[int, int]]], answers: Sequence[list[memoryview]]) -> list[memoryview]:
    """For each range the one view that it is, or a copy of all its pieces, given as (answer, place in it)."""
    views = [[answers[answer][place] for answer, place in mine] for mine in pieces]
    return [mine[0] if len(mine) == 1 else memoryview(b"".join(mine)) for mine in views]


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


submit = Threads("binidx-side", lambda: THREADS).submit


"""Have a read done in a thread; it must not call this itself."""
