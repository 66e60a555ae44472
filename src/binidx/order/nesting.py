"""Where packed runs of different sizes have seen the same data: sync points, and their proof.

    files        F0 F1 F2 F3 F4 F5 F6 F7 | F8 ...        n_chunks = 1, L = 4
    2 shards     F0+F1  F2+F3  F4+F5  F6+F7              a shard's groups come in the order of the list, so after
    4 shards     F0+F1+F2+F3   F4+F5+F6+F7               k * n_chunks * L files both have read the same: the first ones

L is the least common multiple of the shard counts (ranks * workers each). Between two sync points the sets differ. The
tail breaks the promise: what the division by shards and by n_chunks leaves over depends on the number of shards.

Source: the Gemstones' README states it for their counts; made exact here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.index.packed_order import AtEnd, PackedSet, WorkerOrder


@dataclass(frozen=True)
class Nesting:
    """What topologies over one set of files share.

    Args:
        of: the set; its seed is that of rank 0, others add their rank, which changes no set of blocks at a sync point.
        block_size: tokens of a block.
        shards: ranks * workers of each topology.
    """

    of: PackedSet
    block_size: int
    shards: Sequence[int]

    def __post_init__(self) -> None:
        if not self.shards or min(self.shards) < 1:
            raise ConfigError(f"nesting: found shard counts {list(self.shards)}, needs one at least, each 1 or more")

    @property
    def sync_files(self) -> int:
        """Files from one sync point to the next."""
        return math.lcm(*self.shards) * self.of.n_chunks

    @property
    def sync_tokens(self) -> int:
        """Tokens from one sync point to the next, over all ranks."""
        return self.sync_files * self.of.num_blocks * self.block_size

    @property
    def num_syncs(self) -> int:
        """Sync points in the first pass; the last of them is the last where all topologies agree."""
        return min(self.files_read(count) for count in self.shards) // self.sync_files

    def files_read(self, count: int) -> int:
        """Files of the list that a topology reads in one pass, from the first on; the rest it drops."""
        return self.of.num_files // count // self.of.n_chunks * self.of.n_chunks * count

    def digests(self, count: int) -> NDArray[np.uint64]:
        """For each stretch between sync points a digest of the set of blocks that a topology reads in it.

        Computed from the order itself, position by position; equal sets have equal digests, others not but by a chance
        of 2^-64. Takes 30 ns a block and the memory of one stretch of one worker.
        """
        found = np.zeros(self.num_syncs, np.uint64)
        for shard in range(count):
            order = self._order_of(shard, count)
            size = self.sync_files // count * self.of.num_blocks
            for number in range(self.num_syncs):
                rows = order.blocks(number * size, (number + 1) * size)
                found[number : number + 1] += _set_digest(rows[:, 0] * self.of.num_blocks + rows[:, 1])
        return found

    def check(self) -> None:
        """Raise AssertionError unless all topologies read the same set of blocks between any two sync points."""
        first, *others = (self.digests(count) for count in self.shards)
        for count, other in zip(self.shards[1:], others, strict=True):
            if (first != other).any():
                number = int(np.flatnonzero(first != other)[0])
                raise AssertionError(f"{self.shards[0]} and {count} shards differ before sync point {number + 1}")

    def _order_of(self, shard: int, count: int) -> WorkerOrder:
        # Which rank a shard belongs to depends on its workers; the seed moves blocks within a group only.
        return replace(self.of, seed=self.of.seed + shard, at_end=AtEnd.stop).of_worker(shard, count)


def _set_digest(numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A sum of mixed numbers (splitmix64): the same for any order, another if one is missing or there twice.

    Shape (1,): an array wraps round without a warning.
    """
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return np.sum(mixed ^ (mixed >> np.uint64(31)), keepdims=True)
