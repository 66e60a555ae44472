"""Threads of a build: one number for all that is built at the same time, so that parts of parts do not multiply it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

SHORT_SECONDS = 0.001


class Budget:
    """So many threads to work with. Each worker has one; a worker that can use more takes those that are idle.

    With 1,000 prefixes each is built by one thread; when the last and largest is alone, it gets all.

    Workers also take turns, as long as turns are short: two threads that each let go of the GIL every 20 us take twice
    the time of one. A turn without an end for a millisecond is one that waits, for a store, or works in C; then all go.
    """

    def __init__(self, threads: int) -> None:
        self._idle, self._lock = threads, threading.Lock()
        self._given = threading.Condition(self._lock)
        self._turn, self._turns, self._waiting = threading.Lock(), 0, 0

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """The block is work of one thread, out of this budget."""
        has_turn = self._wait()
        taken = self._take(1)
        try:
            yield Worker(self, waits=False)
        finally:
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

    def waiter(self) -> Worker:
        """Work that waits for a store; only its builds (`Worker.rest`) take threads out of this budget."""
        return Worker(self, waits=True)

    def _take(self, wanted: int | None) -> int:
        with self._lock:
            taken = self._idle if wanted is None else min(wanted, self._idle)
            self._idle -= taken
            return taken

    def _take_some(self) -> int:
        """All that are idle, once there is one."""
        with self._given:
            self._given.wait_for(lambda: self._idle > 0)
            taken, self._idle = self._idle, 0
            return taken

    def _give(self, taken: int) -> None:
        with self._lock:
            self._idle += taken
            self._given.notify_all()


class Worker:
    """One piece of work of a budget, done by one thread.

    Args:
        waits: its thread is none of the budget's, outside of `rest`.
    """

    def __init__(self, budget: Budget, *, waits: bool) -> None:
        self._budget, self._waits = budget, waits

    @contextlib.contextmanager
    def rest(self) -> Iterator[int]:
        """How many threads the block may use: this one, which a waiter has to get first, and all that are idle now."""
        waits, self._waits = self._waits, False
        taken = self._budget._take_some() if waits else self._budget._take(None)
        try:
            yield taken if waits else 1 + taken
        finally:
            self._waits = waits
            self._budget._give(taken)
