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


class Walk:
    """One iteration over a copy of a sampler, drawn as far as batches are looked at.

    Attributes:
        drawn: batches of all workers, from the one after the last served batch on.
    """

    def __init__(self, start: PretrainingSampler) -> None:
        self._start, self._moving = start, copy.copy(start)
        self._iterator: Iterator[Batch] | None = iter(self._moving)
        self.drawn: deque[Batch] = deque()

    def draw_up_to(self, position: int) -> bool:
        """Draw batches until there is one at `position` of `drawn`; return False if the iteration ends before it."""
        while len(self.drawn) <= position:
            with contextlib.suppress(Exception):  # the loader draws from the sampler itself, and raises the error there
                if self._iterator is not None and (batch := next(self._iterator, None)) is not None:
                    self.drawn.append(batch)
                    continue
            self._iterator = None
            return False
        return True

    def draw_to(self, batch: Sequence[int], count: int) -> bool:
        """Draw `count` batches, and return whether a batch is one of them."""
        self.draw_up_to(count - 1)
        return batch in self.drawn

    def again(self) -> Walk:
        """Return the iteration that follows: from the same start while this one has not ended.

        After its end the next one begins at the position that the sampler then has: its start for the sequential
        sampler, the next epoch for the random one.
        """
        return Walk(self._start if self._iterator is not None else self._moving)


class Prediction:
    """The batches of one worker, in the order in which the DataLoader will request them.

    Args:
        sampler: in its state before the first batch is drawn. It is copied, and only the copy advances.
        worker: number of the worker, 0 to `num_workers` - 1.
        num_workers: number of workers; a single worker gets all batches.
    """

    def __init__(self, sampler: PretrainingSampler, worker: int = 0, num_workers: int = 1) -> None:
        self.stride = num_workers
        self._searched = max(SEARCHED_BATCHES, 8 * num_workers)
        self._walk = Walk(copy.copy(sampler))
        self._next = worker  # position in `drawn` of the next batch of this worker

    def peek(self) -> Batch | None:
        """Return the next batch of this worker; None at the end of the iteration."""
        return self._walk.drawn[self._next] if self._walk.draw_up_to(self._next) else None

    def next(self) -> Batch | None:
        """Return the next batch of this worker, and go on to the one after it; None at the end of the iteration."""
        batch = self.peek()
        if batch is not None:
            self._next += self.stride
        return batch

    def mark_served(self, batch: Sequence[int]) -> None:
        """Forget a batch that `next` returned, and all batches before it, which this worker will not serve."""
        while self._next > 0:
            self._next -= 1
            if self._walk.drawn.popleft() == batch:
                return

    def find(self, batch: Sequence[int]) -> bool:
        """Move to a requested batch that was not the predicted one; return False, and stay, if it is not found.

        After True, `next` returns this batch and then its successors. The search covers a limited number of batches:
        first those from the last served batch, where a loader continues whose iteration was stopped early, to some
        beyond the predicted one; then those from the start of the sampler.
        """
        walk, searched = self._walk, self._searched
        # Batches whose reads fail are predicted, but never served: more of them than are searched may lie in between.
        if not walk.draw_to(batch, self._next + searched) and not (walk := walk.again()).draw_to(batch, searched):
            return False
        while walk.drawn[0] != batch:
            walk.drawn.popleft()
        self._walk, self._next = walk, 0
        return True
