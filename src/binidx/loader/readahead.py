"""Batches read before they are asked for: a dataset over a dataset that knows its sampler.

    asked for          0     1     2     3   ...
    served             0     1     2     3            the trainer waits only for what is not here yet
    groups            [0]   [1]  [2 3] [4 5 6 7]      each one vectored read, in a thread

The sampler is a function of its state, so a copy of it says what comes. Each batch is compared with what is asked for:
after a restart, or under another sampler, it is read there and then, and looking ahead starts again from it.

Memory: the batches that are read ahead are a *window*. It is the first batch, then 8 when the size of one is known,
and doubles when the trainer had to wait though all of it was being read: up to 128 MiB of samples a process (a loader's
workers share them), and 2 batches at least. So a trainer that does not wait keeps it small, and so does one that is
faster than the link; and little is read in vain at the end. A batch is part of its group's memory: whoever keeps one
keeps up to 64 samples.

Groups in flight: a micro-batch of 8 samples of 4,096 tokens is about 50 ranges, and 64 requests go at once. Two groups
keep them busy; the third waits behind them for the moment when one ends; the fourth has arrived and is being laid out.
A group is a quarter of the window, up to 64 samples: beyond that a read costs by the sample, not by the call.

Where reading turns out to need no store, from a warm disk cache, it is done there and then: to hand a batch from one
thread to another costs 60 µs, to read one of 8 samples 100. Looking ahead goes on when stores are asked again.

How far to look ahead, and whether at all: as far as the trainer waits for it.
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

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.megatron_dataset import MegatronDataset
from binidx.dataset.torch_bridge import Samples, reading_worker
from binidx.loader.batch_groups import Batch, Group, GroupThreads, Prediction, Read
from binidx.loader.batches import Ledger
from binidx.loader.samplers import PretrainingSampler
from binidx.storage.stats import remote_requests
from binidx.storage.stores.registry import local_path

BUDGET_BYTES = 128 << 20


GROUPS_IN_FLIGHT = 4


SAMPLES_IN_GROUP = 64


# Planning and sending 100 requests is Python for 10 ms, in which the trainer gets the interpreter back every 5 ms only.
# Where all is here that was asked for, nothing is urgent: first he shall have his batch, and start his step.
PAUSE_SECONDS = 0.02


class ReadAheadDataset:
    """A map dataset whose next batches are being read.

    Args:
        dataset: its samples are functions of their number, and several threads may ask for them. `__getitems__` is
            called as torch calls it, else `__getitem__`.
        sampler: the batch sampler of the loader, as it is before its first batch.
        num_batches: read so many ahead; None: as many as waiting shows to be needed.
        ledger: where a worker writes what it read.

    All else is the dataset's: attributes, length, single samples. Pickles and forks without what it read: each process
    has threads of its own, made at its first batch. They end with `stop`, with this object, or at exit.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: PretrainingSampler,
        *,
        num_batches: int | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._dataset, self._sampler = dataset, copy.copy(sampler)
        self._num_batches, self._ledger = num_batches, ledger
        self._reading: ReadAheadQueue | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, idx: int) -> Any:
        return self._dataset[idx]

    def __getitems__(self, idxs: Sequence[int]) -> Any:
        """The samples of a batch, as the dataset gives them."""
        if self._reading is None or self._reading.pid != os.getpid():
            self._reading = self._begin()
        try:
            return self._reading.serve([*idxs])
        finally:
            if self._ledger is not None:
                self._ledger.write()

    def __getattr__(self, name: str) -> Any:
        if name in ("_dataset", "_reading"):  # asked of an object that is being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def stop(self) -> None:
        """Cancel what is in flight and forget what was read; the next batch begins anew."""
        if self._reading is not None:
            self._reading.stop()
        self._reading = None

    def _begin(self) -> ReadAheadQueue:
        if self._ledger is not None:
            self._ledger.write()
        worker, num_workers = reading_worker()
        reading = ReadAheadQueue(
            readahead_queue_of(self._dataset),
            Prediction(self._sampler, worker, num_workers),
            Window(self._num_batches, BUDGET_BYTES // num_workers),
            in_groups=is_ours(self._dataset),
        )
        weakref.finalize(self, reading.stop).atexit = False  # `_stop_all` comes before the threads are waited for
        return reading

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None}


class ReadAheadQueue:
    """The reading ahead of one process: what is in flight, and what is here and not yet asked for."""

    def __init__(self, read: Read, prediction: Prediction, window: Window, *, in_groups: bool) -> None:
        self.pid = os.getpid()
        self._read, self._prediction, self._window, self._in_groups = read, prediction, window, in_groups
        self._groups: deque[Group] = deque()
        self._next_size, self._batch_size = 1, 1
        self._misses = 0
        self._pace = Pace(always_ahead=window.is_fixed or not in_groups)
        self._busy = threading.Lock()
        self._threads = GroupThreads(read, GROUPS_IN_FLIGHT)
        _readings.add(self)

    def serve(self, batch: Batch) -> Any:
        """The samples of a batch: those that were read ahead, if it is the one that was expected."""
        if not self._busy.acquire(blocking=False):
            return self._read(batch)  # another thread is being served; the order is not ours to guess
        self._batch_size = max(1, len(batch))
        try:
            if self._pace.is_quick and not self._groups:
                return self._read_now(batch)
            return self._take(batch) if self._expects(batch) or self._finds(batch) else self._read(batch)
        finally:
            self._busy.release()

    def stop(self) -> None:
        """Cancel what is in flight, end the threads. A child forked in between has neither."""
        if os.getpid() == self.pid:
            self._drop()
            self._threads.stop()

    def _expects(self, batch: Batch) -> bool:
        if not self._groups:
            self._fill()
        return bool(self._groups) and self._groups[0].next_batch == batch

    def _finds(self, batch: Batch) -> bool:
        """Whether the batch is near what was expected. Asked ever less often when it is not, time after time."""
        self._drop()
        self._misses += 1
        if self._misses & (self._misses - 1) or not self._prediction.find(batch):
            return False
        self._misses = 0
        self._fill()
        return bool(self._groups)  # none where reading is quick

    def _take(self, batch: Batch) -> Any:
        group = self._groups[0]
        on_the_way = sum(not each.is_here for each in self._groups)
        self._window.serve(waiting=not group.is_here and on_the_way <= GROUPS_IN_FLIGHT)
        self._fill()
        group.hurry()
        group.wait()
        self._prediction.served(batch)
        try:
            samples = group.take(self._read)
        finally:
            if group.next_batch is None:
                self._groups.popleft()
        if not self._window.is_measured:
            self._window.measure(batch_bytes(samples))
            self._next_size = 1  # the second batch is soon asked for, too
        self._pace.took(group.seconds / group.num_batches)
        self._fill()
        return samples

    def _read_now(self, batch: Batch) -> Any:
        """Without looking ahead, but knowing what would come."""
        if self._prediction.next() == batch or (self._prediction.find(batch) and self._prediction.next()):
            self._prediction.served(batch)
        began = time.perf_counter()
        samples = self._read(batch)
        self._pace.took(time.perf_counter() - began)
        return samples

    def _fill(self) -> None:
        """Have more read, as far as the window is open: groups count until they are served whole."""
        if self._pace.is_quick:
            return
        room = self._window.batches - sum(group.num_batches for group in self._groups)
        while room >= (size := min(self._next_size, self._largest_group())):
            batches: list[Batch] = []
            while len(batches) < size and (batch := self._prediction.next()) is not None:
                batches.append(batch)
            if not batches:
                return
            self._groups.append(Group(batches, self._pause()))
            self._threads.submit(self._groups[-1])
            self._next_size, room = 2 * size, room - size

    def _pause(self) -> float:
        """Before a group is read: where all is here that was asked for before it."""
        return PAUSE_SECONDS if self._groups and all(group.is_here for group in self._groups) else 0.0

    def _largest_group(self) -> int:
        if not self._in_groups:
            return 1
        return max(1, min(self._window.batches // GROUPS_IN_FLIGHT, SAMPLES_IN_GROUP // self._batch_size))

    def _drop(self) -> None:
        for group in self._groups:
            group.cancel()
        self._groups.clear()
        self._next_size = 1


def readahead_queue_of(dataset: Any) -> Read:
    """How torch asks a dataset for a batch."""
    together: Read | None = getattr(dataset, "__getitems__", None)
    return together or (lambda batch: [dataset[idx] for idx in batch])


def batch_bytes(samples: Any) -> int:
    """What the samples of a batch hold in memory, as far as they are tensors and arrays."""
    if isinstance(samples, Samples):
        return samples.num_bytes
    rows = samples if isinstance(samples, list | tuple) else [samples]
    values = [value for row in rows for value in (row.values() if isinstance(row, dict) else [row])]
    return sum(getattr(value, "nbytes", 0) for value in {id(value): value for value in values}.values())


def is_ours(dataset: Any) -> bool:
    """Whether all that makes its samples is ours, and so a function of their number, for batches of any size."""
    megatrons = "_query_document_sample_shuffle_indices"  # of `compat`, where it may be a user's
    ways = ("__getitem__", "__getitems__", "spans", "assemble", "read_together", megatrons)
    kinds = {type(each) for each in (dataset, *_parts(dataset)) if isinstance(each, BlendedDataset | MegatronDataset)}
    found = [getattr(kind, name) for kind in kinds for name in ways if hasattr(kind, name)]
    return bool(found) and all(way.__module__.startswith("binidx.") for way in found)


def reads_remotely(dataset: Any) -> bool:
    """Whether reading from it can mean waiting for a store."""
    readers = [getattr(getattr(part, "dataset", None), "bin_reader", None) for part in _parts(dataset)]
    stored = [each for reader in readers if reader is not None for each in getattr(reader, "parts", [reader])]
    return any(local_path(reader.uri) is None for reader in stored)


def _parts(dataset: Any) -> Sequence[Any]:
    return dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]


def _stop_all() -> None:
    for reading in [*_readings]:
        reading.stop()


_readings: weakref.WeakSet[ReadAheadQueue] = weakref.WeakSet()


atexit.register(_stop_all)  # after that of `groups`, so it runs before it


FIRST_WINDOW = 8


LEAST_WINDOW = 2


# A batch that takes no request, and no longer than this, is not worth a thread: a disk of this machine answers 40 reads
# in 4 ms; a shared file system may take longer.
QUICK_SECONDS = 0.01


# So many in a row, and looking ahead ends; two slow ones among them, and it begins again. What comes unforeseen is 30
# ms of waiting: in this way 0.6 ms a batch at most.
QUICK_BATCHES = 64


SLOW_COUNTS = 48


class Window:
    """How many batches are read ahead; grows with the waiting.

    Args:
        fixed: so many, whatever happens.
        budget_bytes: the most that they may take, but for LEAST_WINDOW batches.
    """

    def __init__(self, fixed: int | None, budget_bytes: int) -> None:
        self.is_fixed, self._budget_bytes, self._most = fixed is not None, budget_bytes, 0
        self._served_since = 0
        self.batches = fixed or 1  # the first batch goes first: a second one would share its requests in flight

    @property
    def is_measured(self) -> bool:
        return self.is_fixed or self._most > 0

    def measure(self, batch_bytes: int) -> None:
        """The first batch is here: from now on we know what one takes."""
        self._most = max(LEAST_WINDOW, self._budget_bytes // max(1, batch_bytes))
        if not self.is_fixed:
            self.batches = min(FIRST_WINDOW, self._most)

    def serve(self, waiting: bool) -> None:
        """A batch is asked for. Waiting for what was asked of the store under a smaller window proves nothing."""
        self._served_since += 1
        if waiting and not self.is_fixed and self._served_since > self.batches and self.batches < self._most:
            self.batches, self._served_since = min(2 * self.batches, self._most), 0


class Pace:
    """Whether batches come so quickly that reading them ahead is not worth its threads: out of a warm disk cache.

    Args:
        always_ahead: whatever it costs, and where we do not know what a read costs.
    """

    def __init__(self, *, always_ahead: bool) -> None:
        self.is_quick = False
        self._always_ahead, self._score, self._sent = always_ahead, 0, remote_requests()

    def took(self, seconds: float) -> None:
        """A batch was read in this time."""
        was, self._sent = self._sent, remote_requests()
        if seconds < QUICK_SECONDS and self._sent == was and not self._always_ahead:
            self._score = min(QUICK_BATCHES, self._score + 1)
        else:
            self._score = max(0, self._score - SLOW_COUNTS)
        self.is_quick = self._score > 0 if self.is_quick else self._score == QUICK_BATCHES
