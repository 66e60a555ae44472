"""Groups of batches, each read by a thread in one call and then split into its batches.

A failed group is read again batch by batch, so that an error is raised at the batch it belongs to. The threads are
daemons: code that cannot be cancelled does not keep the process alive.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from binidx.loader.dataset_protocols import Batch, ReadBatch
from binidx.storage.requests.cancellation import Scope, cancellable, current_scope


class BatchGroup:
    """Some batches and, once they are read, their samples.

    Args:
        batches: at least one.
        pause: seconds before reading begins, unless `hurry` is called.
    """

    def __init__(self, batches: Sequence[Batch], pause: float = 0.0) -> None:
        self.num_batches = len(batches)
        self._left = deque(batches)
        self._all = [*itertools.chain.from_iterable(batches)]
        self._scope, self._pause, self._hurried = Scope(), pause, threading.Event()
        self._changed = threading.Event()
        self.is_read = False
        self._samples: Any = None
        self._error: BaseException | None = None

    @property
    def next_batch(self) -> Batch | None:
        """The batch whose samples `take` returns; None when all were taken."""
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
        """Begin reading now."""
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
            return self._read_alone(batch, read)
        if self.num_batches == 1:
            return self._samples
        stop = len(self._all) - sum(map(len, self._left))
        return self._samples[stop - len(batch) : stop]

    def _read_alone(self, batch: Batch, read: ReadBatch) -> Any:
        if self.num_batches > 1:
            return read(batch)
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error  # with the frames of the thread
        finally:
            del error


running_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


class GroupThreads:
    """Threads that read groups in the order submitted; started when needed, ended by `stop`."""

    def __init__(self, read: ReadBatch, max_threads: int) -> None:
        self._read, self._max_threads = read, max_threads
        self._groups: queue.SimpleQueue[BatchGroup | None] = queue.SimpleQueue()
        self._count = 0

    def submit(self, group: BatchGroup) -> None:
        """Queue a group for the next free thread."""
        self._groups.put(group)
        if self._count < self._max_threads:
            self._count += 1
            thread = threading.Thread(target=_work, args=(self._groups, self._read), name="binidx-ahead", daemon=True)
            running_threads.add(thread)
            thread.start()

    def stop(self) -> None:
        """Let each thread end after its current group; cancel the groups first."""
        for _ in range(self._count):
            self._groups.put(None)


def _work(groups: queue.SimpleQueue[BatchGroup | None], read: ReadBatch) -> None:
    while (group := groups.get()) is not None:
        group.read(read)
        del group  # an idle thread must not keep its samples in memory
