"""Options of one build that the builder of a run passes down to each index, and the threads that its indices share.

The options change when and where an index is built, never its bytes, so they are no part of a config.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from binidx.index.cache.build_lock import Check, Checks
from binidx.index.cache.index_files import IndexFiles

FOUND, BUILT, NOT_KEPT = "found", "built", "not kept"

SHORT_SECONDS = 0.001


@dataclass(frozen=True)
class Outcome:
    """Result of one request for an index.

    files: of the index in the cache.
    how: FOUND in the cache, also when another process has just built it; BUILT; NOT_KEPT, since it is built sooner
        than fetched.
    seconds: until its arrays were loaded, including the wait for other processes.
    """

    files: IndexFiles
    how: str
    seconds: float


OnOutcome = Callable[[Outcome], None] | None


class ThreadBudget:
    """Threads of a build, shared by all its workers so that nested work does not multiply them.

    Each worker has one thread and can borrow those that are idle: with 1,000 prefixes each is built by one thread; the
    last and largest one, alone, gets all.

    Workers run one at a time as long as each takes less than SHORT_SECONDS: two threads that release the GIL every
    20 us take twice the time of one. A worker that runs longer waits for a store or computes in C, and then all run at
    the same time.
    """

    def __init__(self, threads: int) -> None:
        self._idle, self._returned = threads, threading.Condition()
        self._turn, self._turns = threading.Lock(), 0

    @contextlib.contextmanager
    def worker(self) -> Iterator[Worker]:
        """Count the block as work of one thread of this budget."""
        has_turn = self._wait_for_turn()
        taken = self.take(1)
        try:
            yield Worker(self, waits=False)
        finally:
            self.give_back(taken)
            self._turns += 1
            if has_turn:
                self._turn.release()

    def waiter(self) -> Worker:
        """Return a worker that waits for a store; only its computations take threads out of this budget."""
        return Worker(self, waits=True)

    def take(self, wanted: int | None = None, *, wait: bool = False) -> int:
        """Take up to `wanted` idle threads, all for None, or wait until there is one; return their number."""
        with self._returned:
            if wait:
                self._returned.wait_for(lambda: self._idle > 0)
            taken = self._idle if wanted is None else min(wanted, self._idle)
            self._idle -= taken
            return taken

    def give_back(self, taken: int) -> None:
        with self._returned:
            self._idle += taken
            self._returned.notify_all()

    def _wait_for_turn(self) -> bool:
        """Wait while other workers' turns are short; return whether this worker has the turn now."""
        turns = -1
        while not self._turn.acquire(timeout=SHORT_SECONDS):
            if turns == self._turns:
                return False
            turns = self._turns
        return True


class Worker:
    """Part of a build that is done by one thread.

    Args:
        waits: its thread belongs to the budget only while it computes: in the block of `borrow_threads`.
    """

    def __init__(self, budget: ThreadBudget, *, waits: bool) -> None:
        self._budget, self._waits = budget, waits

    @contextlib.contextmanager
    def borrow_threads(self) -> Iterator[int]:
        """Yield the number of threads that the block may use: this worker's own, and all that are idle now."""
        waits, self._waits = self._waits, False
        taken = self._budget.take(wait=waits)
        try:
            yield taken if waits else 1 + taken
        finally:
            self._waits = waits
            self._budget.give_back(taken)


@dataclass(frozen=True)
class BuildContext:
    """Options of one build.

    Args:
        checks: called while the build waits for another process; an exception ends the wait.
        worker: threads shared with the other datasets of the build; None: this dataset has all that its config gives.
        on_outcome: called with the outcome of each index, by any thread.
    """

    checks: Checks = ()
    worker: Worker | None = None
    on_outcome: OnOutcome = None

    @contextlib.contextmanager
    def threads(self, threads: int) -> Iterator[int]:
        """Yield the number of threads that the block may use: those of the worker, else `threads`."""
        if self.worker is None:
            yield threads
        else:
            with self.worker.borrow_threads() as found:
                yield found

    def with_check(self, check: Check) -> BuildContext:
        """Return these options with one more check."""
        return replace(self, checks=(*self.checks, (check, check)))

    def report(self, outcome: Outcome) -> None:
        if self.on_outcome is not None:
            self.on_outcome(outcome)
