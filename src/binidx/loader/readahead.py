"""Read-ahead: a dataset that reads the next batches of its sampler in threads before they are requested.

    requested          0     1     2     3   ...
    served             0     1     2     3            the trainer waits only for a batch that is not read yet
    groups            [0]   [1]  [2 3] [4 5 6 7]      each one vectored read, in a thread

The sampler is a function of its state, so a copy of it predicts the batches. Each requested batch is compared with the
predicted one: after a restart, or under another sampler, it is read at once, and the read-ahead continues after it.

Memory: the batches read ahead form a *window*. Its size is one batch, then 8 when the size of a batch is measured, and
doubles when the trainer had to wait although the whole window was being read: up to 128 MiB of samples a process
(divided among a loader's workers), and at least 2 batches. So the window stays small for a trainer that does not wait
and for one that is faster than the link, and few requests are wasted at the end of a run. A batch is part of the memory
of its group: a trainer that keeps one batch keeps up to 64 samples.

Groups in flight: a micro-batch of 8 samples of 4,096 tokens is about 50 ranges, and 64 requests are sent at once. Two
groups saturate them; the third is queued and starts when one of the two ends; the fourth has arrived and is being
assembled. A group is a quarter of the window, up to 64 samples: beyond that the cost of a read is per sample, not per
call.
"""

from __future__ import annotations

import atexit
import copy
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from binidx.dataset.torch_bridge import reading_worker
from binidx.loader.batch_groups import BatchGroup, GroupThreads, running_threads
from binidx.loader.batches import WorkerUsage
from binidx.loader.dataset_protocols import Batch, ReadBatch, batch_bytes, batch_reader, is_pure
from binidx.loader.prediction import Prediction
from binidx.loader.samplers import PretrainingSampler

BUDGET_BYTES = 128 << 20
GROUPS_IN_FLIGHT = 4
SAMPLES_IN_GROUP = 64

# Planning and sending 100 requests is 10 ms of Python, during which the trainer gets the GIL every 5 ms only. If all
# submitted groups are read, nothing is urgent: the next one starts after the trainer has its batch.
PAUSE_SECONDS = 0.02
FIRST_WINDOW = 8
MIN_WINDOW = 2

# For threads in code that cannot be cancelled, at the end of the process. After it they are abandoned.
JOIN_SECONDS = 2.0


class ReadAheadDataset:
    """Map-style dataset that reads the next batches of its sampler ahead.

    Args:
        dataset: its samples are functions of their number, and it may be used from several threads.
        sampler: the batch sampler of the loader, in its state before the first batch.
        num_batches: batches to read ahead; None grows the window with the trainer's waiting.
        usage: counters that a worker shares with the trainer's process.

    Attributes, length and single samples are the dataset's. It pickles and forks without the batches read ahead: each
    process starts its own threads at its first batch. They end with `stop`, with this object, or at exit.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: PretrainingSampler,
        *,
        num_batches: int | None = None,
        usage: WorkerUsage | None = None,
    ) -> None:
        self._dataset, self._sampler = dataset, copy.copy(sampler)
        self._num_batches, self._usage = num_batches, usage
        self._queue: ReadAheadQueue | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, idx: int) -> Any:
        return self._dataset[idx]

    def __getitems__(self, idxs: Sequence[int]) -> Any:
        """Return the samples of a batch, as the dataset returns them."""
        if self._queue is None or self._queue.pid != os.getpid():
            self._queue = self._start()
        try:
            return self._queue.serve([*idxs])
        finally:
            if self._usage is not None:
                self._usage.write()

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_queue"):  # while the object is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def stop(self) -> None:
        """Cancel the reads in flight and drop the batches read ahead; the next batch starts anew."""
        if self._queue is not None:
            self._queue.stop()
        self._queue = None

    def _start(self) -> ReadAheadQueue:
        if self._usage is not None:
            self._usage.write()
        worker, num_workers = reading_worker()
        queue = ReadAheadQueue(
            batch_reader(self._dataset),
            Prediction(self._sampler, worker, num_workers),
            Window(self._num_batches, BUDGET_BYTES // num_workers),
            in_groups=is_pure(self._dataset),
        )
        weakref.finalize(self, queue.stop).atexit = False  # `_stop_all` does it then
        return queue

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_queue": None}


class ReadAheadQueue:
    """The batches that one process reads ahead, in flight or read and not yet requested.

    Args:
        read: reads the samples of some numbers.
        prediction: the batches to come.
        window: how many of them may be in flight or read.
        in_groups: read several batches in one call.
    """

    def __init__(self, read: ReadBatch, prediction: Prediction, window: Window, *, in_groups: bool) -> None:
        self.pid = os.getpid()
        self._read, self._prediction, self._window, self._in_groups = read, prediction, window, in_groups
        self._groups: deque[BatchGroup] = deque()
        self._next_size, self._batch_size = 1, 1
        self._num_misses = 0
        self._lock = threading.Lock()
        self._threads = GroupThreads(read, GROUPS_IN_FLIGHT)
        _queues.add(self)

    def serve(self, batch: Batch) -> Any:
        """Return the samples of a batch: those read ahead if it is the predicted one."""
        if not self._lock.acquire(blocking=False):
            return self._read(batch)  # several threads request batches, so their order cannot be predicted
        self._batch_size = max(1, len(batch))
        try:
            return self._take(batch) if self._is_next(batch) or self._find(batch) else self._read(batch)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Cancel the reads in flight and end the threads. A forked child has neither."""
        if os.getpid() == self.pid:
            self._drop()
            self._threads.stop()

    def _is_next(self, batch: Batch) -> bool:
        if not self._groups:
            self._fill()
        return bool(self._groups) and self._groups[0].next_batch == batch

    def _find(self, batch: Batch) -> bool:
        """Search for an unexpected batch near the predicted one, after 1, 2, 4, 8, ... misses in a row only."""
        self._drop()
        self._num_misses += 1
        if self._num_misses & (self._num_misses - 1) or not self._prediction.find(batch):
            return False
        self._num_misses = 0
        self._fill()
        return True

    def _take(self, batch: Batch) -> Any:
        group = self._groups[0]
        in_flight = sum(not each.is_read for each in self._groups)
        self._window.serve(waiting=not group.is_read and in_flight <= GROUPS_IN_FLIGHT)
        self._fill()
        group.hurry()
        group.wait()
        self._prediction.mark_served(batch)
        try:
            samples = group.take(self._read)
        finally:
            if group.next_batch is None:
                self._groups.popleft()
        if not self._window.is_measured:
            self._window.measure(batch_bytes(samples))
            self._next_size = 1  # the second batch is requested soon, too
        self._fill()
        return samples

    def _fill(self) -> None:
        """Submit groups as far as the window allows; a group counts until its last batch is served."""
        free = self._window.batches - sum(group.num_batches for group in self._groups)
        while free >= (size := min(self._next_size, self._max_group_size())):
            batches: list[Batch] = []
            while len(batches) < size and (batch := self._prediction.next()) is not None:
                batches.append(batch)
            if not batches:
                return
            is_idle = bool(self._groups) and all(group.is_read for group in self._groups)
            self._groups.append(BatchGroup(batches, PAUSE_SECONDS if is_idle else 0.0))
            self._threads.submit(self._groups[-1])
            self._next_size, free = 2 * size, free - size

    def _max_group_size(self) -> int:
        if not self._in_groups:
            return 1
        return max(1, min(self._window.batches // GROUPS_IN_FLIGHT, SAMPLES_IN_GROUP // self._batch_size))

    def _drop(self) -> None:
        for group in self._groups:
            group.cancel()
        self._groups.clear()
        self._next_size = 1


class Window:
    """Number of batches read ahead; grows with the trainer's waiting.

    Args:
        fixed: constant number of batches, or None.
        budget_bytes: upper bound of their memory, except for MIN_WINDOW batches.
    """

    def __init__(self, fixed: int | None, budget_bytes: int) -> None:
        self._is_fixed, self._budget_bytes, self._max_batches = fixed is not None, budget_bytes, 0
        self._served_since = 0
        self.batches = fixed or 1  # the first batch alone: a second one would compete for its requests

    @property
    def is_measured(self) -> bool:
        return self._is_fixed or self._max_batches > 0

    def measure(self, batch_bytes: int) -> None:
        """Set the bounds from the size of the first batch, in bytes."""
        self._max_batches = max(MIN_WINDOW, self._budget_bytes // max(1, batch_bytes))
        self.batches = min(FIRST_WINDOW, self._max_batches)

    def serve(self, waiting: bool) -> None:
        """Count a requested batch, and grow if the trainer waits.

        Waiting for batches submitted under a smaller window does not count.
        """
        self._served_since += 1
        if waiting and self._served_since > self.batches and self.batches < self._max_batches:
            self.batches, self._served_since = min(2 * self.batches, self._max_batches), 0


_queues: weakref.WeakSet[ReadAheadQueue] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all queues and join their threads: a thread that runs during interpreter shutdown finds no modules."""
    for queue in [*_queues]:
        queue.stop()
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in [*running_threads]:
        thread.join(max(0.0, deadline - time.monotonic()))
