"""Window of a read-ahead: the batches that are read before they are requested, in groups. It decides; threads read.

    requested          0     1     2     3   ...
    groups            [0]   [1]  [2 3] [4 5 6 7]      each one vectored read
                      └──────── window ────────┘      batches that are being read, or read and not requested

    event              from            decision
    request(batch)     the trainer     which group has the batch, and which groups are begun; None: read it yourself
    arrive(samples)    a thread        -
    take()             the trainer     samples, or the error of this batch; None: its group failed, read it yourself
    serve(batch)       the trainer     which groups are begun now that there is room
    stop()             any thread      all reads are cancelled, and none is begun any more

Each requested batch is compared with the predicted one (`prediction`). After a restart the prediction goes on at the
batch that was requested; under another sampler nothing is read ahead until a requested batch is the predicted one. A
wrong prediction costs time, never a sample.

After 64 batches for which neither a store nor a disk was read, batches are read when they are requested, by the thread
that requests them, until one needs more than memory again: threads and their memory would cost more than they save.

Size: one batch, then 8 when the size of a batch is measured, and twice as many when the trainer had to wait although
the whole window was being read: up to a budget of bytes, and at least 2 batches. A batch is part of the memory of its
group, so a group counts until its last batch is requested: a trainer that keeps one keeps up to 64 samples.

Groups in flight: a micro-batch of 8 samples of 4,096 tokens is about 50 ranges, and 64 requests are sent at once. Two
groups saturate them; the third is queued, the fourth has arrived and is being assembled. A group is a quarter of the
window, up to 64 samples: beyond that the cost of a read is per sample, not per call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, TypeVar

from binidx.loader.dataset_protocols import Batch
from binidx.loader.prediction import Prediction

GROUPS_IN_FLIGHT, SAMPLES_IN_GROUP = 4, 64

PAUSE_SECONDS = 0.02
"""Planning and sending 100 requests is 10 ms of Python, during which the trainer gets the GIL every 5 ms only. If all
groups are read, nothing is urgent: the next one begins after the trainer has its batch."""
FIRST_WINDOW, MIN_WINDOW = 8, 2

LOCAL_BATCHES = 64
"""Batches in a row from memory after which no more are read ahead: a sample took 25 us of CPU ahead, 9 without."""


def count_first_reads(batch_size: int) -> int:
    """Return the number of samples that a loader reads at once at its start."""
    return min(SAMPLES_IN_GROUP, batch_size * FIRST_WINDOW // GROUPS_IN_FLIGHT)


class BatchGroup:
    """Some batches that are read at once and, once they are read, their samples. A subclass pauses, and is cancelled.

    Args:
        batches: at least one.

    Attributes:
        samples: numbers of the samples of all batches.
        left: batches that were not taken.
        is_read: whether the read has ended.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.num_batches = len(batches)
        self.left = deque(batches)
        self.samples = [*chain.from_iterable(batches)]
        self.is_read = False
        self._read: Any = None
        self._errors: list[BaseException] = []

    def hurry(self) -> None:
        """End the pause before the read."""

    def cancel(self) -> None:
        """Stop reading; the samples are not needed any more."""

    @property
    def next_batch(self) -> Batch | None:
        """The batch whose samples the next `take` returns; None when all were taken."""
        return self.left[0] if self.left else None

    def arrive(self, read: Any, *errors: BaseException) -> None:
        """Note that the read has ended, with samples or an error; a thread may call it at any time, once."""
        self._read, self._errors = read, [*errors]
        self.is_read = True

    def take(self) -> Any:
        """Return the samples of the next batch of a group that is read; None: the group failed, read the batch alone.

        Raises:
            Exception: the error of a group that is this batch alone.
        """
        batch = self.left.popleft()
        if self.num_batches == 1:
            if self._errors:
                raise self._errors.pop()  # a reference to it would be a cycle with its traceback, and keep the samples
            return self._read
        if self._errors:
            return None
        stop = len(self.samples) - sum(map(len, self.left))
        return self._read[stop - len(batch) : stop]


Group = TypeVar("Group", bound=BatchGroup)


class WindowSize:
    """Number of batches in the window, which grows when the trainer has to wait.

    Args:
        fixed: constant number of batches; None: a number that grows.
        budget_bytes: upper bound of the batches' memory, except for MIN_WINDOW batches.
    """

    def __init__(self, fixed: int | None, budget_bytes: int) -> None:
        self.is_fixed, self._budget_bytes, self.largest = fixed is not None, budget_bytes, 0
        self._requested_since = 0
        self.batches = self._most = fixed or 1  # the first batch alone: a second would compete for its requests

    def measure(self, batch_bytes: int) -> None:
        """Set the bounds from the size of a batch, in bytes, if it is the first one or the largest so far."""
        if not self.is_fixed and batch_bytes > self.largest:
            wanted = self.batches if self.largest else FIRST_WINDOW
            self.largest, self._most = batch_bytes, max(MIN_WINDOW, self._budget_bytes // batch_bytes)
            self.batches = min(wanted, self._most)

    def request(self, is_waiting: bool) -> None:
        """Count a requested batch, and double the window if the trainer waits.

        Waiting for batches of groups that were begun under a smaller window does not count.
        """
        self._requested_since += 1
        if is_waiting and self._requested_since > self.batches and self.batches < self._most:
            self.batches, self._requested_since = min(2 * self.batches, self._most), 0


@dataclass(eq=False)
class ReadAheadWindow(Generic[Group]):
    """Groups of batches that are read ahead by one process for one iteration of its trainer.

    Args:
        prediction: the batches to come.
        size: how many of them may be in the window.
        begin: begins to read batches as a group, after a pause in seconds unless the group is hurried.
        is_throttled: returns whether requests of the process wait for the rate of a store, or did a moment ago.
        is_filled_soon: returns whether a filling of the disk caches ends soon, so that little is read by ranges.
        in_groups: read several batches at once.

    Attributes:
        groups: in the order of their batches.
        is_followed: whether the last requested batch was the predicted one, or was found.
    """

    prediction: Prediction
    size: WindowSize
    begin: Callable[[Sequence[Batch], float], Group]
    is_throttled: Callable[[], bool]
    is_filled_soon: Callable[[], bool]
    in_groups: bool
    groups: deque[Group] = field(default_factory=deque)

    is_followed = _is_local = _is_stopped = False
    _num_batches = _num_local = 0
    _next_size, _batch_size, _fetches = 1, 1, -1.0

    def request(self, batch: Batch, fetches: float) -> Group | None:
        """Return the group whose next batch is the requested one; None if the trainer's thread is to read it.

        Args:
            fetches: a number that grows with each read of the process from a store or a disk, beyond memory.
        """
        self._batch_size = max(1, len(batch))
        self._num_local = self._num_local + 1 if self._fetches == fetches else 0
        self._fetches, self._is_local = fetches, self._num_local >= LOCAL_BATCHES and not self.size.is_fixed
        while self.groups and self.groups[0].next_batch != batch:
            dropped = self.groups.popleft()
            dropped.cancel()
            self._num_batches -= dropped.num_batches
        predicted = self.groups[0].next_batch if self.groups else self.prediction.peek()
        self.is_followed = not self._is_stopped and (predicted == batch or self.prediction.find(batch))
        if not self.is_followed:
            return None
        if not self.groups:
            if self._is_local:
                self.prediction.next()
                return None
            self._next_size, self._num_batches = 1, 0
            self._fill()
        group = self.groups[0]
        in_flight = sum(not begun.is_read for begun in self.groups)
        is_full = in_flight <= GROUPS_IN_FLIGHT and not self.is_throttled()
        self.size.request(is_waiting=is_full and not group.is_read)
        self._fill()
        group.hurry()
        return group

    def take(self) -> Any:
        """Return the samples of the requested batch, when its group is read; None: read the batch alone.

        Raises:
            Exception: the error of reading this batch.
        """
        group = self.groups[0]
        if len(group.left) == 1:
            self.groups.popleft()
            self._num_batches -= group.num_batches
        return group.take()

    def serve(self, batch: Batch, num_bytes: int) -> None:
        """Note that the trainer has the requested batch.

        Args:
            num_bytes: size of the batch; 0: not measured.
        """
        if not self.is_followed:
            return
        if num_bytes:
            self._next_size = self._next_size if self.size.largest else 1  # the second batch is requested soon, too
            self.size.measure(num_bytes)
        self._fill()
        self.prediction.mark_served(batch)

    def stop(self) -> None:
        """Cancel all reads; the trainer's thread reads what is requested from now on."""
        self._is_stopped = True
        for group in self.groups.copy():  # another thread may be in `request`
            group.cancel()

    def _fill(self) -> None:
        """Begin groups as far as the size allows; a group counts until its last batch is requested.

        While a store refuses requests, nothing is begun before all is read, and then one batch. While a filling of a
        cache ends soon, the window is one batch. If all is in memory, nothing is begun.
        """
        if self._is_local or self._is_stopped:
            return
        samples = SAMPLES_IN_GROUP if self.in_groups else 1
        largest = max(1, min(self.size.batches // GROUPS_IN_FLIGHT, samples // self._batch_size))
        most = 1 if self.is_filled_soon() else self.size.batches
        free = most - self._num_batches
        if self.is_throttled():
            free, self._next_size = min(free, int(all(group.is_read for group in self.groups))), 1
        while free >= (size := min(self._next_size, largest)):
            batches: list[Batch] = []
            while len(batches) < size and (batch := self.prediction.next()) is not None:
                batches.append(batch)
            if not batches:
                return
            is_idle = self.groups and all(group.is_read for group in self.groups)
            self.groups.append(self.begin(batches, PAUSE_SECONDS if is_idle else 0.0))
            self._num_batches += len(batches)
            self._next_size, free = 2 * size, free - size
