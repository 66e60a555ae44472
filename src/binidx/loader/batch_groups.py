"""Which batches will be asked for next: what a copy of the sampler says, as long as it is right.

    the sampler          0 1 2 3 4 5 6 7 8 ...        batches of all workers
    worker 1 of 3          1     4     7              its own: where the DataLoader deals them out in turn

No I/O and no threads here. A wrong prediction costs time, never a sample: whoever reads compares each batch with what
he is asked for.

Groups of batches, each read in one go by a thread, and cut into its batches again.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from binidx.loader.samplers import PretrainingSampler
from binidx.storage.requests.cancellation import Scope, cancellable, current_scope

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


Read = Callable[[Batch], Any]


"""The samples of a batch, as the dataset gives them."""


SECONDS_TO_END = 2.0


"""At exit, for threads in code that cannot be cancelled. They are daemons: after that they are left."""


class Group:
    """Some batches and, when they are here, their samples.

    Args:
        batches: at least one.
        pause: seconds until reading begins, if nobody hurries.
    """

    def __init__(self, batches: Sequence[Batch], pause: float = 0.0) -> None:
        self.num_batches = len(batches)
        self._left = deque(batches)
        self._all = [*itertools.chain.from_iterable(batches)]
        self._scope, self._pause, self._hurried = Scope(), pause, threading.Event()
        self._stirred = threading.Event()
        self.is_here = False
        self.seconds = 0.0
        """Of reading, without the time before it began."""
        self._samples: Any = None
        self._error: BaseException | None = None

    @property
    def next_batch(self) -> Batch | None:
        """What `take` will give; None when all is taken."""
        return self._left[0] if self._left else None

    def read(self, read: Read) -> None:
        """Get the samples, or the reason why there are none. In a thread; raises nothing."""
        self._hurried.wait(self._pause)
        began = time.perf_counter()
        try:
            with cancellable(self._scope):
                self._scope.check()
                self._samples = read(self._all)
        except BaseException as error:
            self._error = error
        finally:
            self.seconds = time.perf_counter() - began
            self.is_here = True
            self._stirred.set()

    def cancel(self) -> None:
        """Stop reading; nobody will take from this group again."""
        self._scope.cancel()
        self.hurry()

    def hurry(self) -> None:
        """Begin now."""
        self._hurried.set()

    def wait(self) -> None:
        """Until the samples are here, or an error is.

        Raises:
            CancelledReadError: the scope of the thread that waits was cancelled.
        """
        scope = current_scope()
        with scope.watched_by(self._stirred.set) if scope else contextlib.nullcontext():
            while not self.is_here:
                self._stirred.wait()
                self._stirred.clear()
                if scope:
                    scope.check()

    def take(self, read: Read) -> Any:
        """The samples of the next batch, after `wait`. What failed is read again, each batch for itself.

        Raises:
            What reading it raised: it is raised at the batch it belongs to, and at no other.
        """
        batch = self._left.popleft()
        if self._error is not None:
            return self._read_alone(batch, read)
        if self.num_batches == 1:
            return self._samples
        stop = len(self._all) - sum(map(len, self._left))
        return self._samples[stop - len(batch) : stop]

    def _read_alone(self, batch: Batch, read: Read) -> Any:
        if self.num_batches > 1:
            return read(batch)
        error, self._error = self._error, None
        assert error is not None
        try:
            raise error  # with the frames of the thread
        finally:
            del error


class GroupThreads:
    """Threads that read groups, first come first served; made when they are needed, gone after `stop`."""

    def __init__(self, read: Read, most: int) -> None:
        self._read, self._most = read, most
        self._groups: queue.SimpleQueue[Group | None] = queue.SimpleQueue()
        self._count = 0

    def submit(self, group: Group) -> None:
        """Have it read by the next free thread."""
        self._groups.put(group)
        if self._count < self._most:
            self._count += 1
            thread = threading.Thread(target=_work, args=(self._groups, self._read), name="binidx-ahead", daemon=True)
            _threads.add(thread)
            thread.start()

    def stop(self) -> None:
        """Each thread ends when it is done with the group it has; cancel that before."""
        for _ in range(self._count):
            self._groups.put(None)


def _work(groups: queue.SimpleQueue[Group | None], read: Read) -> None:
    while (group := groups.get()) is not None:
        group.read(read)
        del group  # its samples belong to who waits


def _end_threads() -> None:
    """A thread that still runs while the interpreter is taken apart finds no modules; so they get a moment to end."""
    deadline = time.monotonic() + SECONDS_TO_END
    for thread in [*_threads]:
        thread.join(max(0.0, deadline - time.monotonic()))


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


atexit.register(_end_threads)
