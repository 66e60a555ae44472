"""Threads of a build: one number for all that is built at the same time, so that parts of parts do not multiply it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar

SHORT_SECONDS = 0.001

_current: ContextVar[Budget | None] = ContextVar("budget", default=None)
_waits: ContextVar[bool] = ContextVar("waits", default=False)
"""Whether this thread is none of the budget's."""


class Budget:
    """So many threads to work with. Whoever works has one; whoever can use more takes those that are idle.

    With 1,000 prefixes each is built by one thread; when the last and largest is alone, it gets all.

    Workers also take turns, as long as turns are short: two threads that each let go of the GIL every 20 us take twice
    the time of one. A turn without an end for a millisecond is one that waits, for a store, or works in C; then all go.
    """

    def __init__(self, threads: int) -> None:
        self._idle, self._lock = threads, threading.Lock()
        self._given = threading.Condition(self._lock)
        self._turn, self._turns, self._waiting = threading.Lock(), 0, 0

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        """The block is work of one thread, out of this budget."""
        has_turn = self._wait()
        taken = self._take(1)
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            self._give(taken)
            self._turns += 1
            if has_turn:
                self._turn.release()

    def _wait(self) -> bool:
        """Whether it is now this worker's turn; False: it goes without."""
        turns, self._waiting = -1, self._waiting + 1
        try:
            # So that they look once a millisecond together, and not each of them.
            while not self._turn.acquire(timeout=SHORT_SECONDS * self._waiting):
                if turns == self._turns:
                    return False
                turns = self._turns
            return True
        finally:
            self._waiting -= 1

    @contextlib.contextmanager
    def waiter(self) -> Iterator[None]:
        """The block waits, for a store; only what it builds (`threads_here`) is work out of this budget."""
        token = _current.set(self)
        waits = _waits.set(True)
        try:
            yield
        finally:
            _waits.reset(waits)
            _current.reset(token)

    @contextlib.contextmanager
    def rest(self) -> Iterator[int]:
        """How many threads the block may use: this one and all that are idle now.

        A waiter's has to be one of them.
        """
        if not _waits.get():
            taken = self._take(None)
            try:
                yield 1 + taken
            finally:
                self._give(taken)
            return
        with self._given:
            self._given.wait_for(lambda: self._idle > 0)
            taken, self._idle = self._idle, 0
        token = _waits.set(False)
        try:
            yield taken
        finally:
            _waits.reset(token)
            self._give(taken)

    def _take(self, wanted: int | None) -> int:
        with self._lock:
            taken = self._idle if wanted is None else min(wanted, self._idle)
            self._idle -= taken
            return taken

    def _give(self, taken: int) -> None:
        with self._lock:
            self._idle += taken
            self._given.notify_all()


@contextlib.contextmanager
def threads_here(threads: int) -> Iterator[int]:
    """How many threads the block may use: those of the budget it is worker of, else `threads`."""
    budget = _current.get()
    if budget is None:
        yield threads
    else:
        with budget.rest() as found:
            yield found
