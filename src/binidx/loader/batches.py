"""What a loader gives, with a watch beside it: how long the trainer waited, and what was read for it."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from binidx.dataset.torch_bridge import as_tensor, reading_worker, shared_zeros
from binidx.storage.report import NAMES, log_report, since, tell, usage


class Batches(Iterator[Any]):
    """The batches of one iteration.

    Args:
        batches: the DataLoader's own iterator.
        tally: where the waiting is counted; its line is logged when the batches end, or are dropped.
        served: called as each is handed over.
    """

    def __init__(self, batches: Iterator[Any], tally: Tally, served: Callable[[], object]) -> None:
        self._batches, self._tally, self._served = batches, tally, served
        self.num_batches = 0
        self.wait_seconds = 0.0
        """Spent in `next` so far: what a trainer waited."""
        weakref.finalize(self, tally.end)

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._tally.end()
            raise
        waited = time.perf_counter() - began
        self.num_batches += 1
        self.wait_seconds += waited
        self._tally.served(waited)
        self._served()
        return batch


class Tally:
    """Counts what is served into the process's `report`, and logs the line of this iteration at its end.

    Args:
        samples, tokens: of a batch.
        ledger: where workers write what they read.
    """

    def __init__(self, samples: int, tokens: int, ledger: Ledger | None) -> None:
        self._samples, self._tokens, self._ledger = samples, tokens, ledger
        self._pid, self._before, self._last = os.getpid(), usage(), time.perf_counter()
        self._open, self._any = True, False

    def served(self, waited: float) -> None:
        """One more batch, for which the trainer waited so many seconds."""
        now = time.perf_counter()
        seconds, self._last, self._any = now - self._last, now, True
        tell({"samples": self._samples, "tokens": self._tokens, "seconds": seconds, "wait_seconds": waited})
        if self._ledger is not None:
            tell(self._ledger.news())

    def end(self) -> None:
        """Once, and in the process that counted."""
        if self._open and self._any and os.getpid() == self._pid:
            log_report(since(self._before))
        self._open = False


class Ledger:
    """Counters in memory that a loader shares with its workers, a row for each; forked or pickled it is the same."""

    def __init__(self, num_workers: int) -> None:
        self._rows = shared_zeros(num_workers, len(NAMES))
        self._known = [0.0] * len(NAMES)
        self._before: tuple[int, dict[str, float]] | None = None

    def write(self) -> None:
        """In a worker: what this process counted since its first call."""
        if self._before is None or self._before[0] != os.getpid():
            self._before = os.getpid(), usage()
        counted = since(self._before[1])
        self._rows[reading_worker()[0]] = as_tensor(np.array([counted[name] for name in NAMES]))

    def news(self) -> dict[str, float]:
        """In the trainer: what the workers have written since the last call."""
        counted = self._rows.sum(dim=0).tolist()
        found = {name: now - was for name, now, was in zip(NAMES, counted, self._known, strict=True) if now != was}
        self._known = counted
        return found
