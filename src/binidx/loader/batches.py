"""The batches of one iteration, with counters of the trainer's waiting and of the bytes read for it."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from binidx.dataset.torch_bridge import as_tensor, reading_worker, shared_zeros
from binidx.storage.stats import NAMES, add_usage, log_report, since, usage


class Batches(Iterator[Any]):
    """Iterator over the batches of one iteration of a loader.

    Args:
        batches: the DataLoader's own iterator.
        counter: counts each batch; logs the iteration's report when the batches end or are dropped.
        on_batch: called after each batch.
    """

    def __init__(self, batches: Iterator[Any], counter: BatchCounter, on_batch: Callable[[], object]) -> None:
        self._batches, self._counter, self._on_batch = batches, counter, on_batch
        weakref.finalize(self, counter.close)

    def __next__(self) -> Any:
        began = time.perf_counter()
        try:
            batch = next(self._batches)
        except StopIteration:
            self._counter.close()
            raise
        self._counter.count(time.perf_counter() - began)
        self._on_batch()
        return batch


class BatchCounter:
    """Adds served batches to the process's `report`, and logs the report of one iteration at its end.

    Args:
        samples: samples of a batch.
        tokens: tokens of a batch.
        worker_usage: counters of the workers' reads; None without workers.
    """

    def __init__(self, samples: int, tokens: int, worker_usage: WorkerUsage | None) -> None:
        self._samples, self._tokens, self._usage = samples, tokens, worker_usage
        self._pid, self._before, self._last = os.getpid(), usage(), time.perf_counter()
        self._is_open, self._num_batches = True, 0

    def count(self, waited: float) -> None:
        """Count a batch for which the trainer waited so many seconds."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._num_batches += 1
        add_usage({"samples": self._samples, "tokens": self._tokens, "seconds": seconds, "wait_seconds": waited})
        if self._usage is not None:
            add_usage(self._usage.read_new())

    def close(self) -> None:
        """Log the report once, in the process that counted, if there was a batch."""
        if self._is_open and self._num_batches and os.getpid() == self._pid:
            log_report(since(self._before))
        self._is_open = False


class WorkerUsage:
    """Usage counters in memory that a loader shares with its workers, one row a worker.

    Forked or pickled copies share the memory.
    """

    def __init__(self, num_workers: int) -> None:
        self._rows = shared_zeros(num_workers, len(NAMES))
        self._read = np.zeros(len(NAMES))
        self._before: tuple[int, dict[str, float]] | None = None

    def write(self) -> None:
        """Store in the worker's row what its process counted since the first call."""
        if self._before is None or self._before[0] != os.getpid():
            self._before = os.getpid(), usage()
        counted = since(self._before[1])
        self._rows[reading_worker()[0]] = as_tensor(np.array([counted[name] for name in NAMES]))

    def read_new(self) -> dict[str, float]:
        """Return, in the trainer, what the workers counted since the last call."""
        before, self._read = self._read, self._rows.sum(dim=0).numpy()
        return {name: float(count) for name, count in zip(NAMES, self._read - before, strict=True) if count}
