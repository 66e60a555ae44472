"""Which batches will be asked for next: what a copy of the sampler says, as long as it is right.

    the sampler          0 1 2 3 4 5 6 7 8 ...        batches of all workers
    worker 1 of 3          1     4     7              its own: where the DataLoader deals them out in turn

No I/O and no threads here. A wrong prediction costs time, never a sample: whoever reads compares each batch with what
he is asked for.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterator, Sequence

from binidx.loader.samplers import PretrainingSampler

Batch = list[int]
"""The numbers of its samples."""

NEARBY = 64
"""Batches, or eight for each worker if that is more, among which one that was not expected is looked for."""


class Prediction:
    """The batches of one worker, in the order in which they will be asked for.

    Args:
        sampler: as it is before the first batch is drawn; copied, and its copy moves as it would.
        worker, num_workers: whose batches: 0 of 1 is all of them.

    When an iteration ends the next one begins where the sampler stands then: at its start for the sequential one, in
    the next epoch for the random one.
    """

    def __init__(self, sampler: PretrainingSampler, worker: int = 0, num_workers: int = 1) -> None:
        self._start = copy.copy(sampler)
        self._stride = num_workers
        self._nearby = max(NEARBY, 8 * num_workers)
        self._begin()
        self._next = worker

    def _begin(self) -> None:
        self._moving = copy.copy(self._start)
        self._drawn: Iterator[Batch] | None = iter(self._moving)
        self._known: deque[Batch] = deque()  # of all workers, from the last that was served on
        self._next = 0  # where in it the next one stands that was not told yet

    def next(self) -> Batch | None:
        """The next batch of this worker; None at the end of the iteration."""
        if not self._know(self._next):
            return None
        self._next += self._stride
        return self._known[self._next - self._stride]

    def served(self, batch: Sequence[int]) -> None:
        """A batch that was told has been asked for: what lies before it will not be."""
        while self._known and self._next > 0:
            self._next -= 1
            if self._known.popleft() == batch:
                return

    def find(self, batch: Sequence[int]) -> bool:
        """Look for a batch that was not expected; if it is near, it is the next one and the others follow it.

        First further on, since a loader that was left early goes on from there; then from the start.
        """
        if self._is_near(batch):
            return True
        self._begin()
        return self._is_near(batch)

    def _is_near(self, batch: Sequence[int]) -> bool:
        for place in range(self._nearby):
            if not self._know(place):
                return False
            if self._known[place] == batch:
                for _ in range(place):
                    self._known.popleft()
                self._next = 0
                return True
        return False

    def _know(self, place: int) -> bool:
        """Draw batches up to a place; False if there are not so many."""
        while len(self._known) <= place:
            batch = self._draw()
            if batch is None:
                return False
            self._known.append(batch)
        return True

    def _draw(self) -> Batch | None:
        with contextlib.suppress(Exception):  # the loader draws from the sampler itself, and will hear of it there
            if self._drawn is not None and (batch := next(self._drawn, None)) is not None:
                return batch
        self._drawn, self._start = None, self._moving
        return None
