"""Read-ahead: a dataset that reads the next batches of its sampler in threads before they are requested.

    requested          0     1     2     3   ...
    served             0     1     2     3            the trainer waits only for a batch that is not read yet
    groups            [0]   [1]  [2 3] [4 5 6 7]      each one vectored read, in a thread

Each requested batch is compared with the predicted one (`prediction`): after a restart, or under another sampler, it is
read at once, and the read-ahead continues after it. A wrong prediction costs time, never a sample.

Disk caches are filled meanwhile, from the first served batch on; a baked run is read in extents: `cache_fill`. A failed
group is read again batch by batch, so that an error is raised at the batch it belongs to. The threads are daemons: code
that cannot be cancelled does not keep the process alive.

After 64 batches for which neither a store nor a disk was read, batches are read when they are requested, by the thread
that requests them, until one needs more than memory again: threads and their memory would cost more than they save.

Memory: the batches read ahead form a *window*: one batch, then 8 when the size of a batch is measured, and twice as
many when the trainer had to wait although the whole window was being read: up to 128 MiB of samples a process (divided
among a loader's workers), and at least 2 batches. A batch is part of the memory of its group: a trainer that keeps one
keeps up to 64 samples.

Groups in flight: a micro-batch of 8 samples of 4,096 tokens is about 50 ranges, and 64 requests are sent at once. Two
groups saturate them; the third is queued, the fourth has arrived and is being assembled. A group is a quarter of the
window, up to 64 samples: beyond that the cost of a read is per sample, not per call.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from binidx.dataset.torch_bridge import as_tensor, reading_worker, shared_zeros
from binidx.loader.cache_fill import open_filling, open_forward
from binidx.loader.dataset_protocols import Batch, ReadBatch, batch_bytes, batch_reader, is_pure
from binidx.loader.prediction import Prediction
from binidx.loader.samplers import PretrainingSampler
from binidx.storage.cache.filling import CacheFilling
from binidx.storage.requests.cancellation import Scope, cancellable, current_scope
from binidx.storage.requests.node_rates import is_throttled
from binidx.storage.stats import NAMES, add_usage, count_fetches, usage, usage_since
from binidx.storage.threads import background

BUDGET_BYTES, FORWARD_BYTES = 128 << 20, 32 << 20  # the second where extents in memory are read
GROUPS_IN_FLIGHT, SAMPLES_IN_GROUP = 4, 64

PAUSE_SECONDS = 0.02
"""Planning and sending 100 requests is 10 ms of Python, during which the trainer gets the GIL every 5 ms only. If all
submitted groups are read, nothing is urgent: the next one starts after the trainer has its batch."""
FIRST_WINDOW, MIN_WINDOW = 8, 2

LOCAL_BATCHES = 64
"""Batches in a row from memory after which no more are read ahead: a sample took 25 us of CPU ahead, 9 without."""

JOIN_SECONDS = 2.0  # for threads in code that cannot be cancelled, at the end of the process; then they are abandoned


def count_first_reads(batch_size: int) -> int:
    """Return the number of samples that a loader reads at once at its start."""
    return min(SAMPLES_IN_GROUP, batch_size * FIRST_WINDOW // GROUPS_IN_FLIGHT)


class ReadAheadDataset:
    """Map-style dataset that reads the next batches of its sampler ahead.

    Args:
        dataset: its samples are functions of their number, and it may be used from several threads.
        sampler: the batch sampler of the loader, in its state before the first batch.
        num_batches: number of batches to read ahead; None: a number that grows when the trainer has to wait.
        usage: counters that a worker shares with the trainer's process.
        in_groups: read several batches in one call; None: if each sample is a function of its number alone.
        budget_bytes: most bytes of all processes that were read ahead and not requested.

    Attributes, length and single samples are those of the dataset. It pickles and forks without the batches read ahead:
    each process starts its own threads at its first batch. The threads end with this object, or at exit.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: PretrainingSampler,
        *,
        num_batches: int | None = None,
        usage: WorkerUsage | None = None,
        in_groups: bool | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._dataset, self._sampler, self._num_batches, self._usage = dataset, copy.copy(sampler), num_batches, usage
        self._in_groups, self._budget_bytes = in_groups, budget_bytes
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

    def _start(self) -> ReadAheadQueue:
        if self._usage is not None:
            self._usage.write()
        (worker, num_workers), scope = reading_worker(), Scope()
        forward = open_forward(self._dataset, self._sampler, scope)
        ahead = ReadAheadQueue(
            batch_reader(forward or self._dataset),
            scope,
            Prediction(self._sampler, worker, num_workers),
            Window(self._num_batches, (FORWARD_BYTES if forward else self._budget_bytes) // num_workers),
            in_groups=is_pure(self._dataset) if self._in_groups is None else self._in_groups,
            filling=None if forward else open_filling(self._dataset, self._sampler),
        )
        background().add(self, ahead.stop)
        return ahead

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_queue": None}


class ReadAheadQueue:
    """Batches that one process reads ahead: those being read, and those read and not yet requested.

    Args:
        read, scope: function that returns the samples of given numbers, and the scope of what it fetches beside them.
        prediction, window: the batches to come, and how many of them may be in this queue.
        in_groups: read several batches in one call.
        filling: of the disk caches of the samples; None: there is none.
    """

    def __init__(
        self,
        read: ReadBatch,
        scope: Scope,
        prediction: Prediction,
        window: Window,
        *,
        in_groups: bool,
        filling: CacheFilling | None,
    ) -> None:
        self.pid, self._scope = os.getpid(), scope
        self._read = functools.partial(_read_counted, read)
        self._prediction, self._window, self._in_groups, self._filling = prediction, window, in_groups, filling
        self._groups: deque[BatchGroup] = deque()
        self._next_size, self._batch_size = 1, 1
        self._num_misses = self._num_local = 0
        self._fetches, self._is_local = count_fetches(), False
        self._lock = threading.Lock()
        self._submitted: queue.SimpleQueue[BatchGroup | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def serve(self, batch: Batch) -> Any:
        """Return the samples of a batch: the ones read ahead, if it is the predicted batch."""
        if not self._lock.acquire(blocking=False):
            return self._read(batch)  # several threads request batches, so their order cannot be predicted
        self._batch_size = max(1, len(batch))
        try:
            self._count_local()
            if not self._is_next(batch) and not self._find(batch):
                return self._read(batch)
            return self._take(batch) if self._groups else self._mark_served(batch, self._read(batch))
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Cancel the reads in flight and end the threads."""
        self._drop()
        self._scope.cancel()
        for _ in self._threads:
            self._submitted.put(None)
        if self._filling is not None:
            self._filling.stop()

    def _count_local(self) -> None:
        before, self._fetches = self._fetches, count_fetches()
        self._num_local = self._num_local + 1 if self._fetches == before else 0
        self._is_local = self._num_local >= LOCAL_BATCHES and not self._window.is_fixed

    def _mark_served(self, batch: Batch, samples: Any) -> Any:
        self._prediction.mark_served(batch)
        if self._filling is not None and self._filling.advance(self._prediction.stride):
            _running_threads.add(self._filling.thread)
        return samples

    def _is_next(self, batch: Batch) -> bool:
        if not self._groups:
            if self._is_local:
                return self._prediction.next() == batch
            self._fill()
        return bool(self._groups) and self._groups[0].next_batch == batch

    def _find(self, batch: Batch) -> bool:
        """Continue reading ahead at an unexpected batch; return False if it is not found.

        The batch is searched for only after 1, 2, 4, 8, ... misses in a row.
        """
        self._drop()
        self._num_misses += 1
        if self._num_misses & (self._num_misses - 1) or not self._prediction.find(batch):
            return False
        self._num_misses = 0
        return self._is_next(batch)

    def _take(self, batch: Batch) -> Any:
        group = self._groups[0]
        in_flight = sum(not queued.is_read for queued in self._groups)
        self._window.serve(waiting=not group.is_read and in_flight <= GROUPS_IN_FLIGHT and not is_throttled())
        self._fill()
        group.hurry()
        with self._filling.progress.trainer_waiting() if self._filling else contextlib.nullcontext():
            group.wait()
        try:
            samples = group.take(self._read)
        finally:
            if group.next_batch is None:
                self._groups.popleft()
        if not self._window.is_measured:
            self._window.measure(batch_bytes(samples))
            self._next_size = 1  # the second batch is requested soon, too
        self._fill()
        return self._mark_served(batch, samples)

    def _fill(self) -> None:
        """Submit groups of batches as far as the window allows; a group counts until its last batch is served.

        While a store refuses requests, nothing is submitted before all is read, and then one batch. While a filling of
        a cache ends soon, the window is one batch. If all is in memory, nothing is submitted.
        """
        if self._is_local:
            return
        most = 1 if self._filling is not None and self._filling.progress.ends_soon else self._window.batches
        free = most - sum(group.num_batches for group in self._groups)
        if is_throttled():
            free, self._next_size = min(free, int(all(group.is_read for group in self._groups))), 1
        while free >= (size := min(self._next_size, self._max_group_size())):
            batches: list[Batch] = []
            while len(batches) < size and (batch := self._prediction.next()) is not None:
                batches.append(batch)
            if not batches:
                return
            is_idle = self._groups and all(group.is_read for group in self._groups)
            self._groups.append(BatchGroup(batches, PAUSE_SECONDS if is_idle else 0.0))
            self._submit(self._groups[-1])
            self._next_size, free = 2 * size, free - size

    def _submit(self, group: BatchGroup) -> None:
        """Queue a group for the next free thread."""
        self._submitted.put(group)
        if len(self._threads) < GROUPS_IN_FLIGHT:
            work = threading.Thread(target=_work, args=(self._submitted, self._read), name="binidx-ahead", daemon=True)
            self._threads.append(work)
            _running_threads.add(work)
            work.start()

    def _max_group_size(self) -> int:
        size = min(self._window.batches // GROUPS_IN_FLIGHT, SAMPLES_IN_GROUP // self._batch_size)
        return max(1, size) if self._in_groups else 1

    def _drop(self) -> None:
        while self._groups:
            self._groups.popleft().cancel()
        self._next_size = 1


class Window:
    """Number of batches read ahead, which grows when the trainer has to wait.

    Args:
        fixed: constant number of batches; None: a number that grows.
        budget_bytes: upper bound of the batches' memory, except for MIN_WINDOW batches.
    """

    def __init__(self, fixed: int | None, budget_bytes: int) -> None:
        self.is_fixed, self._budget_bytes, self._max_batches = fixed is not None, budget_bytes, 0
        self._served_since = 0
        self.batches = fixed or 1  # the first batch alone: a second one would compete for its requests

    @property
    def is_measured(self) -> bool:
        return self.is_fixed or self._max_batches > 0

    def measure(self, batch_bytes: int) -> None:
        """Set the bounds from the size of the first batch, in bytes."""
        self._max_batches = max(MIN_WINDOW, self._budget_bytes // max(1, batch_bytes))
        self.batches = min(FIRST_WINDOW, self._max_batches)

    def serve(self, waiting: bool) -> None:
        """Count a requested batch, and double the window if the trainer waits.

        Waiting for batches submitted under a smaller window does not count.
        """
        self._served_since += 1
        if waiting and self._served_since > self.batches and self.batches < self._max_batches:
            self.batches, self._served_since = min(2 * self.batches, self._max_batches), 0


class WorkerUsage:
    """Usage counters in memory that a loader shares with its workers, one row a worker.

    Forked or pickled copies of this object share the memory.
    """

    def __init__(self, num_workers: int) -> None:
        self._rows = shared_zeros(num_workers, len(NAMES))
        self._read = np.zeros(len(NAMES))
        self._before: tuple[int, dict[str, float]] | None = None

    def write(self) -> None:
        """Store, in the worker's row, the counts of its process since the first call of this method."""
        if self._before is None or self._before[0] != os.getpid():
            self._before = os.getpid(), usage()
        counted = usage_since(self._before[1])
        self._rows[reading_worker()[0]] = as_tensor(np.array([counted[name] for name in NAMES]))

    def read_new(self) -> dict[str, float]:
        """Return the counts of all workers since the last call, by name; called in the trainer's process."""
        before, self._read = self._read, self._rows.sum(dim=0).numpy()
        return {name: float(count) for name, count in zip(NAMES, self._read - before, strict=True) if count}


class BatchGroup:
    """Some batches and, once they are read, their samples.

    Args:
        batches: at least one.
        pause: seconds before reading begins, unless `hurry` is called.
    """

    def __init__(self, batches: Sequence[Batch], pause: float = 0.0) -> None:
        self.num_batches = len(batches)
        self._left = deque(batches)
        self._all = [*chain.from_iterable(batches)]
        self._scope, self._pause, self._hurried = Scope(), pause, threading.Event()
        self._changed = threading.Event()
        self.is_read = False
        self._samples: Any = None
        self._error: BaseException | None = None

    @property
    def next_batch(self) -> Batch | None:
        """The batch whose samples the next `take` returns; None when all were taken."""
        return self._left[0] if self._left else None

    def read(self, read: ReadBatch) -> None:
        """Read the samples, or store the error. Runs in a thread; raises nothing."""
        self._hurried.wait(self._pause)
        try:
            with cancellable(self._scope):
                self._scope.check()
                self._samples = read(self._all)
        except BaseException as error:
            self._error = error
        finally:
            self.is_read = True
            self._changed.set()

    def cancel(self) -> None:
        """Stop reading; the samples are not needed any more."""
        self._scope.cancel()
        self.hurry()

    def hurry(self) -> None:
        """End the pause before reading."""
        self._hurried.set()

    def wait(self) -> None:
        """Block until the group is read or has failed.

        Raises:
            CancelledReadError: the scope of the waiting thread was cancelled.
        """
        scope = current_scope()
        with scope.watched_by(self._changed.set) if scope else contextlib.nullcontext():
            while not self.is_read:
                self._changed.wait()
                self._changed.clear()
                if scope:
                    scope.check()

    def take(self, read: ReadBatch) -> Any:
        """Return the samples of the next batch; call it after `wait`.

        Raises:
            Exception: the error of reading this batch. In a failed group each batch is read again on its own.
        """
        batch = self._left.popleft()
        if self._error is not None:
            if self.num_batches > 1:
                return read(batch)
            error, self._error = self._error, None
            try:
                raise error  # with the frames of the thread
            finally:
                del error  # a cycle with its traceback would keep the samples in memory
        if self.num_batches == 1:
            return self._samples
        stop = len(self._all) - sum(map(len, self._left))
        return self._samples[stop - len(batch) : stop]


def _read_counted(read: ReadBatch, batch: Batch) -> Any:
    """Read samples, and count them as read ahead: the loader subtracts those that it serves."""
    samples = read(batch)
    add_usage({"samples_ahead": len(batch)})
    return samples


def _work(groups: queue.SimpleQueue[BatchGroup | None], read: ReadBatch) -> None:
    while (group := groups.get()) is not None:
        group.read(read)
        del group  # an idle thread must not keep its samples in memory


_running_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all queues and join their threads: a thread that runs during interpreter shutdown finds no modules."""
    if _running_threads:
        background().finish()
    deadline = time.monotonic() + JOIN_SECONDS
    for thread in [*_running_threads]:
        thread.join(max(0.0, deadline - time.monotonic()))
