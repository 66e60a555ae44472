"""Options of one build that are passed from the builder of a run down to each index: threads, checks, prefetched files.

They change when and where an index is built, never its bytes, so they are no part of a config.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from binidx.index.cache.build_lock import Check, Checks
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.prefetch import Prefetch
from binidx.index.cache.thread_budget import Worker

FOUND, TAKEN_OVER, BUILT, NOT_KEPT = "found", "taken over", "built", "not kept"


@dataclass(frozen=True)
class Outcome:
    """Result of one request for an index.

    files: of the index in the cache.
    how: FOUND in the cache, also when another process has just built it; TAKEN_OVER from an index of the same order;
        BUILT; NOT_KEPT, since it is built sooner than fetched.
    seconds: until its arrays were loaded, including the wait for other processes.
    """

    files: IndexFiles
    how: str
    seconds: float


OnOutcome = Callable[[Outcome], None] | None


@dataclass(frozen=True)
class BuildContext:
    """Options of one build.

    Args:
        checks: called while the build waits for another process; an exception ends the wait.
        worker: threads shared with the other datasets of the build; None: this one has all that its config gives.
        prefetch: cached indices of this dataset that are fetched already.
        on_outcome: called with the outcome of each index, by any thread.
    """

    checks: Checks = ()
    worker: Worker | None = None
    prefetch: Prefetch | None = None
    on_outcome: OnOutcome = None

    @contextlib.contextmanager
    def threads(self, threads: int) -> Iterator[int]:
        """How many threads the block may use: those of the worker, else `threads`."""
        if self.worker is None:
            yield threads
        else:
            with self.worker.rest() as found:
                yield found

    def with_check(self, check: Check) -> BuildContext:
        """These options, and one more check."""
        return replace(self, checks=(*self.checks, (check, check)))

    def report(self, outcome: Outcome) -> None:
        if self.on_outcome is not None:
            self.on_outcome(outcome)
