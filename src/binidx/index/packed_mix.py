"""What one rank of a packed run reads: sets mixed by draws, DataLoader workers in turn; any position at once.

    worker 0   set of block i: draw i of random.choices      a a b a ...
    rank       micro-batches of its workers in turn          w0 w1 w2 w0 w1 ...

Source: lit-gpt, `CombinedDataset` under torch's DataLoader.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.index.packed_order import AtEnd, PackedSet, Rows, WorkerOrder


@dataclass(frozen=True)
class PackedRun:
    """What one rank reads: one set or several mixed, by DataLoader workers in turn.

    Args:
        sets: in the order of the run's configuration.
        weights: of the sets; None for equal ones.
        seed: of the draws that mix them; each worker draws the same.
        rank, num_ranks: this rank, and how many there are.
        num_workers: of each rank's DataLoader; 0 and 1 read the same.
        micro_batch_size: blocks that a worker gives at a time.

    Source: lit-gpt, `CombinedDataset` under torch's DataLoader: one draw of Python's `random.choices` a block.
    """

    sets: Sequence[PackedSet]
    weights: Sequence[float] | None
    seed: int
    rank: int
    num_ranks: int
    num_workers: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        if not self.sets or (self.weights is not None and len(self.weights) != len(self.sets)):
            raise ConfigError(f"packed run: {len(self.sets)} sets with weights {self.weights}, needs one each")
        if len({each.at_end is AtEnd.stop for each in self.sets}) > 1:
            raise ConfigError("packed run: some sets end and some do not, needs one rule for all")
        if self.micro_batch_size < 1:
            raise ConfigError(f"packed run: micro-batches of {self.micro_batch_size}, needs at least 1")

    @cached_property
    def orders(self) -> list[list[WorkerOrder]]:
        """[worker][set]."""
        count = self._count
        return [
            [each.of_worker(self.rank * count + worker, self.num_ranks * count) for each in self.sets]
            for worker in range(count)
        ]

    @property
    def _count(self) -> int:
        return max(1, self.num_workers)

    def blocks(self, first: int, stop: int) -> Rows:
        """Rows (set, file, block, pass) of the rank's blocks first to stop in the order they are served.

        Raises:
            IndexError: the stream ends before, or first is below 0.
        """
        if not 0 <= first <= stop:
            raise IndexError(f"packed run: blocks {first}-{stop}, needs 0 or more, in order")
        worker, position = self._place(np.arange(first, stop))
        rows = np.empty((stop - first, 4), np.int64)
        for each in range(self._count):
            here = worker == each
            if here.any():
                rows[here] = self._of_worker(each, position[here])
        return rows

    def _place(self, samples: Rows) -> tuple[Rows, Rows]:
        """The worker of each block, and its position there. Micro-batches go round; the last of each may be short."""
        batch, slot = np.divmod(samples, self.micro_batch_size)
        turn, worker = np.divmod(batch, self._count)
        position = turn * self.micro_batch_size + slot
        if self.length is None:
            return worker, position
        whole = self._worker_length // self.micro_batch_size * self.micro_batch_size
        short = self._worker_length - whole
        behind = samples - whole * self._count
        if len(samples) and samples[-1] >= self.length:
            raise IndexError(f"packed run: block {samples[-1]} of rank {self.rank}, it has {self.length}")
        tail = behind >= 0
        if tail.any():
            worker[tail], slot[tail] = np.divmod(behind[tail], short)
            position[tail] = whole + slot[tail]
        return worker, position

    @cached_property
    def length(self) -> int | None:
        """Blocks until the first set that is drawn once more has none left, over all workers; None: no end."""
        return None if self.sets[0].at_end is not AtEnd.stop else self._worker_length * self._count

    @cached_property
    def _worker_length(self) -> int:
        """Blocks of each worker; all have as many files and draw alike."""
        left = np.array([len(order) for order in self.orders[0]])
        if len(left) == 1:
            return int(left[0])
        total = int(left.sum()) + 1
        drawn = self._draws(total)
        ends = [np.flatnonzero(drawn == each) for each in range(len(left))]
        return int(min(where[count] for where, count in zip(ends, left, strict=True) if len(where) > count))

    def _of_worker(self, worker: int, positions: Rows) -> Rows:
        """Rows for rising positions of one worker."""
        rows = np.empty((len(positions), 4), np.int64)
        drawn = self._draws(int(positions[-1]) + 1)
        rows[:, 0] = drawn[positions]
        for each, order in enumerate(self.orders[worker]):
            where = np.flatnonzero(drawn == each)
            here = rows[:, 0] == each
            if here.any():
                numbers = np.searchsorted(where, positions[here])
                first = int(numbers[0])
                rows[here, 1:] = order.blocks(first, int(numbers[-1]) + 1)[numbers - first]
        return rows

    def _draws(self, count: int) -> Rows:
        """Which set each of the first `count` blocks of a worker is from."""
        drawn = self._drawn[0]
        if len(drawn) < count:
            drawn = self._drawn[0] = self._draw(max(count, 2 * len(drawn)))
        return drawn[:count]

    @cached_property
    def _drawn(self) -> list[Rows]:
        """What was drawn so far, as many as were ever asked for."""
        return [np.empty(0, np.int64)]

    def _draw(self, count: int) -> Rows:
        if len(self.sets) == 1:
            return np.zeros(count, np.int64)
        weights = self.weights or [1 / len(self.sets)] * len(self.sets)
        cumulative = np.cumsum(np.asarray(weights, np.float64))
        found = np.searchsorted(cumulative, _python_random(self.seed, count) * cumulative[-1], side="right")
        drawn: Rows = np.minimum(found, len(weights) - 1)
        return drawn


def _python_random(seed: int, count: int) -> NDArray[np.float64]:
    """`random.Random(seed).random()`, `count` times: the same generator as NumPy's legacy one, seeded by an array."""
    *key, position = random.Random(seed).getstate()[1]
    rng = np.random.RandomState()
    rng.set_state(("MT19937", np.array(key, np.uint32), position, 0, 0.0))
    return rng.random_sample(count)
