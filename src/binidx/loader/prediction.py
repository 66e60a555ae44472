"""Prediction of the batches that a DataLoader will request.

The sampler is a function of its state, so a copy of it predicts the batches.

    the sampler          0 1 2 3 4 5 6 7 8 ...        batches of all workers
    worker 1 of 3          1     4     7              torch's DataLoader deals batches to workers in turn
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence

from binidx.loader.dataset_protocols import Batch
from binidx.loader.samplers import PretrainingSampler

SEARCHED_BATCHES = 64
"""Number of batches among which an unexpected one is searched for; eight for each worker, if that is more."""


class Prediction:
    """The batches of one worker, in the order in which the DataLoader will request them.

    Args:
        sampler: in its state before the first batch is drawn. It is copied, and only the copy advances.
        worker: number of the worker, 0 to `num_workers` - 1.
        num_workers: number of workers; a single worker gets all batches.

    When an iteration ends, the next one begins at the position that the sampler then has: its start for the sequential
    sampler, the next epoch for the random one.
    """

    def __init__(self, sampler: PretrainingSampler, worker: int = 0, num_workers: int = 1) -> None:
        self._start = copy.copy(sampler)
        self.stride = num_workers
        self._searched = max(SEARCHED_BATCHES, 8 * num_workers)
        self._restart()
        self._next = worker

    def _restart(self) -> None:
        self._moving = copy.copy(self._start)
        self._iterator: Iterator[Batch] | None = iter(self._moving)
        self._drawn: deque[Batch] = deque()  # of all workers, from the last served one on
        self._next = 0  # position in it of the next batch of this worker

    def next(self) -> Batch | None:
        """Return the next batch of this worker; None at the end of the iteration."""
        if not self._draw_up_to(self._next):
            return None
        self._next += self.stride
        return self._drawn[self._next - self.stride]

    def mark_served(self, batch: Sequence[int]) -> None:
        """Forget a predicted batch that was requested, and all batches before it, which this worker will not serve."""
        while self._drawn and self._next > 0:
            self._next -= 1
            if self._drawn.popleft() == batch:
                return

    def find(self, batch: Sequence[int]) -> bool:
        """Move the prediction to a requested batch that was not the predicted one; return False if it is not found.

        After True, `next` returns this batch and then its successors. The search covers a limited number of batches:
        first those after the last served batch, where a loader continues whose iteration was stopped early; then those
        from the start of the sampler.
        """
        for restart in (False, True):
            if restart:
                self._restart()
            self._draw_up_to(self._searched - 1)
            if batch in self._drawn:
                while self._drawn[0] != batch:
                    self._drawn.popleft()
                self._next = 0
                return True
        return False

    def _draw_up_to(self, position: int) -> bool:
        """Draw batches until there is one at `position`; return False if the iteration ends before it."""
        while len(self._drawn) <= position:
            batch = self._draw()
            if batch is None:
                return False
            self._drawn.append(batch)
        return True

    def _draw(self) -> Batch | None:
        with contextlib.suppress(Exception):  # the loader draws from the sampler itself, and raises the error there
            if self._iterator is not None and (batch := next(self._iterator, None)) is not None:
                return batch
        self._iterator, self._start = None, self._moving
        return None
