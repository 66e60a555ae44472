"""Datasets of one build, made at the same time in several threads: what one raises ends the others.

    computes                    goes on to its end, and nobody waits for it
    raises                      out of here, at once
    waits for another process   is called away: its check raises, see `turn.Checks`
    has not begun               never does

So no rank keeps an error to itself for as long as another node builds, and none waits for that when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

from binidx.errors import PeerError
from binidx.index.turn import Check
from binidx.storage.threads import Threads

WAITING_THREADS = 128
"""Remote prefixes that are opened at once: as many requests as a process has in flight."""
SLOW_SECONDS, PATIENCE_SECONDS = 0.005, 0.25
"""For each that computes only, ten times what it takes and less than a round trip; and for a machine that is busy."""

Result = TypeVar("Result")
Work = Callable[[Check], Result]
"""Work on one dataset. It calls the check while it waits; the check raises once another dataset has failed."""
Submit = Callable[[Callable[[], Any]], Future[Any]]

_submit = Threads("binidx-open", lambda: WAITING_THREADS).submit


def in_threads(works: Sequence[Work[Result]], threads: int) -> list[Result]:
    """What pieces of work give that compute, so many at the same time."""
    pool = ThreadPoolExecutor(threads, "binidx-build")
    try:
        return at_once(works, submit=pool.submit)
    finally:
        pool.shutdown(wait=False)


def at_once(works: Sequence[Work[Result]], at_hand: Sequence[bool] = (), *, submit: Submit = _submit) -> list[Result]:
    """What pieces of work give that wait for a store, done at the same time.

    Args:
        at_hand: which of them have to compute only, as far as we know. They are done in this thread: a hundred threads
            that compute take the GIL from each other, and need three times as long. If they take longer than that,
            the rest waits with the others.

    Raises:
        The first error, without waiting for the rest.
    """
    here = [number for number, each in enumerate(at_hand) if each]
    found: dict[int, Result] = {}
    pending: dict[int, Future[Result]] = {}
    failed: list[BaseException] = []

    def begin(number: int) -> None:
        pending[number] = submit(partial(works[number], check))
        pending[number].add_done_callback(lambda done: failed.extend(_errors(done)))

    def check() -> None:
        if failed:
            raise PeerError(f"not waited for: another dataset of this build failed: {failed[0]}")

    try:
        for number in {*range(len(works))}.difference(here):
            begin(number)
        began = time.monotonic()
        for number in here:
            if time.monotonic() - began > PATIENCE_SECONDS + SLOW_SECONDS * len(found):
                begin(number)
            else:
                found[number] = works[number](check)
        wait(pending.values(), return_when=FIRST_EXCEPTION)
        found |= {number: each.result() for number, each in sorted(pending.items()) if each.done()}
        return [found[number] for number in range(len(works))]
    except BaseException as error:
        failed.append(error)
        for each in pending.values():
            each.cancel()
        raise failed[0] from failed[0].__cause__


def _errors(done: Future[Any]) -> list[BaseException]:
    error = None if done.cancelled() else done.exception()
    return [] if error is None else [error]
