"""Progress of a filling, for the threads of a process: those that fill, those that read, and the trainer.

`fill_plan` decides. Changes of the plan are made one at a time; a finalizer that stops the filling takes no lock.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from binidx.storage.cache.block_files import CachedContent
from binidx.storage.cache.fill_plan import YIELD_SECONDS, FillPlan
from binidx.storage.cache.memory import Flight
from binidx.storage.steps import Call, Steps


class FillProgress:
    """Plan of a filling that threads share.

    Args:
        plan: its threads that fetch, and reads that are measured, change it with `lock` held. Between rounds, when no
            thread fetches, the choosing thread changes it without, as a choice may take a second.
        clock: seconds of a clock that never goes back.
        wait: waits for a flight, at most for some seconds.

    Attributes:
        calm: set while the trainer does not wait.
    """

    def __init__(
        self,
        plan: FillPlan,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[Flight[int, None], float], object] = Flight.wait,
    ) -> None:
        self.plan, self.lock, self._clock, self._wait = plan, threading.Lock(), clock, wait
        self.calm, self._arrival = threading.Event(), Flight[int, None]()
        self.calm.set()
        plan.begin(clock())

    @contextlib.contextmanager
    def trainer_waiting(self) -> Iterator[None]:
        """Begin no extent in the block, in which the trainer waits for a batch, unless it waits most of the time."""
        self.plan.begin_waiting(self._clock())
        self.calm.clear()
        try:
            yield
        finally:
            self.calm.set()
            self.plan.end_waiting(self._clock())

    @contextlib.contextmanager
    def measuring_ranges(self, num_bytes: int) -> Iterator[None]:
        """Count a read of ranges, if it succeeds in the block."""
        ranges, began, read = self.plan.ranges, self._clock(), 0
        with self.lock:
            ranges.begin(began)
        try:
            yield
            read = num_bytes
        finally:
            with self.lock:
                ranges.end(began, read, self._clock())

    def chunks_to_await(self, content: CachedContent, chunks: Sequence[int]) -> Steps[list[int]]:
        """Return the missing chunks that come sooner with their extent, which is in flight, than by a range.

        If the trainer waits most of the time, and all is filled soon, first wait for the extents of all of them.
        """
        is_urgent = False
        while True:
            arrival = self._arrival
            if not (places := self.plan.coming(content, chunks, self._clock())):
                return self.plan.chunks_to_await(content, chunks, self._clock())
            if not is_urgent:
                self.plan.hurry(places)
                is_urgent = True
            yield Call(self._wait, (arrival, YIELD_SECONDS))

    def note_arrival(self) -> None:
        """Wake the reads that wait for extents."""
        arrival, self._arrival = self._arrival, Flight()
        arrival.land({})

    @property
    def ends_soon(self) -> bool:
        """True if all is likely to be filled soon after the start, so that reading far ahead by ranges does not pay."""
        return self.plan.ends_soon(self._clock())
