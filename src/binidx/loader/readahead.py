"""Read-ahead: a dataset that reads the next batches of its sampler in threads before they are requested.

    trainer ─ batch ─► ReadAheadWindow ─ group ─► threads ─ samples ─► group ─► trainer, which waits only for a batch
                       which batches are read                                   that is not read yet

`readahead_window` decides; here are the threads that read. Disk caches are filled meanwhile, from the
first served batch on; a baked run is read in extents: `cache_fill`. The threads are daemons: code that cannot be
cancelled does not keep the process alive. They end with the dataset: its finalizer leaves a token, and the thread of
`background` stops them, as it does at exit.

Memory: up to 128 MiB of samples a process, divided among a loader's workers.
"""

from __future__ import annotations

import contextlib
import copy
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from binidx.dataset.torch_bridge import reading_worker
from binidx.loader.cache_fill import open_filling, open_forward
from binidx.loader.dataset_protocols import Batch, ReadBatch, batch_bytes, batch_reader, is_pure
from binidx.loader.prediction import Prediction
from binidx.loader.readahead_window import GROUPS_IN_FLIGHT, BatchGroup, ReadAheadWindow, WindowSize
from binidx.loader.samplers import PretrainingSampler
from binidx.storage.cache.filling import CacheFilling
from binidx.storage.requests.cancellation import Scope, cancellable, current_scope
from binidx.storage.requests.node_rates import is_throttled
from binidx.storage.stats import add_usage, count_fetches
from binidx.storage.threads import background

BUDGET_BYTES, FORWARD_BYTES = 128 << 20, 32 << 20  # the second where extents in memory are read

JOIN_SECONDS = 2.0  # for threads in code that cannot be cancelled; then they are abandoned


class ReadAheadDataset:
    """Map-style dataset that reads the next batches of its sampler ahead.

    Args:
        dataset: its samples are functions of their number, and it may be used from several threads.
        sampler: the batch sampler of the loader, in its state before the first batch.
        num_batches: number of batches to read ahead; None: a number that grows when the trainer has to wait.
        on_batch: called before the first and after each batch, such as to share the counters of a worker.
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
        on_batch: Callable[[], object] = bool,
        in_groups: bool | None = None,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._dataset, self._sampler, self._num_batches = dataset, copy.copy(sampler), num_batches
        self._on_batch, self._in_groups, self._budget_bytes = on_batch, in_groups, budget_bytes
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
            self._on_batch()

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_queue"):  # while the object is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def _start(self) -> ReadAheadQueue:
        self._on_batch()
        (worker, num_workers), scope = reading_worker(), Scope()
        forward = open_forward(self._dataset, self._sampler, scope)
        size = WindowSize(self._num_batches, (FORWARD_BYTES if forward else self._budget_bytes) // num_workers)
        threads = GroupThreads(batch_reader(forward or self._dataset), scope)
        in_groups = is_pure(self._dataset) if self._in_groups is None else self._in_groups
        prediction = Prediction(self._sampler, worker, num_workers)
        filling = None if forward else open_filling(self._dataset, self._sampler)
        is_filled_soon = bool if filling is None else lambda: filling.progress.ends_soon
        window = ReadAheadWindow(prediction, size, threads.begin, is_throttled, is_filled_soon, in_groups=in_groups)
        ahead = ReadAheadQueue(threads, window, filling, num_workers)
        background().add(self, ahead.stop)
        return ahead

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_queue": None}


@dataclass(eq=False)
class ReadAheadQueue:
    """Batches that one process reads ahead: a window, the threads that read its groups, and the filling of caches.

    Args:
        filling: of the disk caches of the samples; None: there is none.
        stride: batches that all workers serve while this one serves one.
    """

    threads: GroupThreads
    window: ReadAheadWindow[GroupRead]
    filling: CacheFilling | None
    stride: int
    pid: int = field(default_factory=os.getpid)
    _lock: Any = field(default_factory=threading.Lock)

    def serve(self, batch: Batch) -> Any:
        """Return the samples of a batch: the ones read ahead, if it is the predicted batch."""
        if not self._lock.acquire(blocking=False):
            return self.threads.read(batch)  # several threads request batches, so their order cannot be predicted
        try:
            return self._serve(batch)
        finally:
            self._lock.release()

    def stop(self) -> None:
        """Cancel the reads in flight, and end the threads, which would find no modules while the interpreter ends."""
        self.window.stop()
        self.threads.end()
        threads = self.threads.running
        if self.filling is not None:
            self.filling.stop()
            threads = [*threads, *filter(threading.Thread.is_alive, [self.filling.thread])]
        deadline = time.monotonic() + JOIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _serve(self, batch: Batch) -> Any:
        window, samples = self.window, None
        group = window.request(batch, count_fetches())
        if group is not None:
            with self.filling.progress.trainer_waiting() if self.filling else contextlib.nullcontext():
                group.wait()
            samples = window.take()
        if samples is None:
            samples = self.threads.read(batch)
        is_measured = group is None or group.next_batch is not None or window.size.is_fixed
        window.serve(batch, 0 if is_measured else max(1, batch_bytes(samples)))
        if self.filling is not None and window.is_followed:
            self.filling.advance(self.stride)
        return samples


class GroupThreads:
    """Daemon threads that read groups of batches, in the order in which they are begun.

    Args:
        read, scope: function that returns the samples of given numbers, and the scope of what it fetches beside them.
    """

    def __init__(self, read: ReadBatch, scope: Scope) -> None:
        self._read, self._scope, self.running = read, scope, list[threading.Thread]()
        self._begun: queue.SimpleQueue[GroupRead | None] = queue.SimpleQueue()

    def read(self, batch: Batch) -> Any:
        """Read samples, and count them as read ahead: the loader subtracts those that it serves."""
        samples = self._read(batch)
        add_usage({"samples_ahead": len(batch)})
        return samples

    def begin(self, batches: Sequence[Batch], pause: float) -> GroupRead:
        """Return a group that the next free thread reads."""
        group = GroupRead(batches, pause)
        if len(self.running) < GROUPS_IN_FLIGHT:
            thread = threading.Thread(target=self._work, name="binidx-ahead", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads are possible: the interpreter ends, or a limit
                thread.start()
                self.running.append(thread)
        if self.running:
            self._begun.put(group)
        else:
            group.run(self.read)
        return group

    def end(self) -> None:
        """Cancel the fetches beside the groups, and end the threads after the groups that are begun."""
        self._scope.cancel()
        for _ in self.running:
            self._begun.put(None)

    def _work(self) -> None:
        while (group := self._begun.get()) is not None:
            group.run(self.read)
            del group  # an idle thread must not keep its samples in memory


class GroupRead(BatchGroup):
    """Read of a group by a thread.

    Args:
        batches: at least one.
        pause: seconds before reading begins, unless `hurry` is called.
    """

    def __init__(self, batches: Sequence[Batch], pause: float = 0.0) -> None:
        super().__init__(batches)
        self._scope, self._pause = Scope(), pause
        self._hurried, self._woken = queue.SimpleQueue[None](), queue.SimpleQueue[None]()

    def run(self, read: ReadBatch) -> None:
        """Read the samples, or store the error. Runs in a thread; raises nothing."""
        with contextlib.suppress(queue.Empty):
            self._hurried.get(timeout=self._pause)
        try:
            with cancellable(self._scope):
                self._scope.check()
                self.arrive(read(self.samples))
        except BaseException as error:
            self.arrive(None, error)
        self._woken.put(None)

    def cancel(self) -> None:
        self._scope.cancel()
        self.hurry()

    def hurry(self) -> None:
        self._hurried.put(None)

    def wait(self) -> None:
        """Block until the group is read or has failed.

        Raises:
            CancelledReadError: the scope of the waiting thread was cancelled.
        """
        scope = current_scope()
        with scope.watched_by(lambda: self._woken.put(None)) if scope else contextlib.nullcontext():
            while not self.is_read:
                self._woken.get()
                if scope:
                    scope.check()
