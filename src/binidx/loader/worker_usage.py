"""Usage counters of a loader's workers, in memory that they share with the trainer's process."""

from __future__ import annotations

import os
from collections.abc import Collection

import numpy as np

from binidx.dataset.torch_bridge import as_tensor, reading_worker, shared_zeros
from binidx.storage.stats import open_requests, usage, usage_since


class WorkerUsage:
    """Usage counters of all workers of a loader, one row a worker.

    Forked or pickled copies of this object share the memory.

    Args:
        num_workers: number of rows.
        places: hosts and buckets from which the workers read, each of which gets its histograms.
    """

    def __init__(self, num_workers: int, places: Collection[str]) -> None:
        for place in sorted(places):
            open_requests(place)
        self._names = [*usage()]
        self._rows = shared_zeros(num_workers, len(self._names))
        self._read = np.zeros(len(self._names))
        self._before: tuple[int, dict[str, float]] | None = None

    def write(self) -> None:
        """Store, in the worker's row, the counts of its process since the first call of this method."""
        if self._before is None or self._before[0] != os.getpid():
            self._before = os.getpid(), usage()
        counted = usage_since(self._before[1])
        self._rows[reading_worker()[0]] = as_tensor(np.array([counted.get(name, 0.0) for name in self._names]))

    def read_new(self) -> dict[str, float]:
        """Return the counts of all workers since the last call, by name; called in the trainer's process."""
        before, self._read = self._read, self._rows.sum(dim=0).numpy()
        return {name: float(count) for name, count in zip(self._names, self._read - before, strict=True) if count}
