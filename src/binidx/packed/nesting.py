"""Sync points, where packed runs of different sizes have read the same data.

    files        F0 F1 F2 F3 F4 F5 F6 F7 | F8 ...        n_chunks = 1, L = 4
    2 shards     F0+F1  F2+F3  F4+F5  F6+F7              a shard's groups are in the order of the list, so after
    4 shards     F0+F1+F2+F3   F4+F5+F6+F7               k * n_chunks * L files both have read the same: the first ones

L is the least common multiple of the shard counts (ranks * workers each). Between two sync points the sets differ. At
the tail they differ for good: the remainders of the divisions by shards and by n_chunks depend on the number of shards.

Source: the Gemstones' README gives the rule for their counts; exact here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from binidx.errors import ConfigError
from binidx.packed.packed_order import PackedSet


@dataclass(frozen=True)
class Nesting:
    """Sync points of one set of files: points where runs of different topologies have read the same blocks.

    Args:
        of: the set of files, with the seed of rank 0; seeds of other ranks do not change which blocks were read.
        block_size: number of tokens of a block.
        shards: number of shards (ranks * workers) of each topology.
    """

    of: PackedSet
    block_size: int
    shards: Sequence[int]

    def __post_init__(self) -> None:
        if not self.shards or min(self.shards) < 1:
            raise ConfigError(f"nesting: found shard counts {list(self.shards)}, needs one at least, each 1 or more")

    @property
    def sync_files(self) -> int:
        """Number of files from one sync point to the next."""
        return math.lcm(*self.shards) * self.of.n_chunks

    @property
    def sync_tokens(self) -> int:
        """Number of tokens from one sync point to the next, over all ranks."""
        return self.sync_files * self.of.num_blocks * self.block_size

    @property
    def num_syncs(self) -> int:
        """Number of sync points in the first pass over the files; after the last one the topologies differ."""
        return min(self.files_read(count) for count in self.shards) // self.sync_files

    def files_read(self, count: int) -> int:
        """Return the number of files that a topology reads in one pass, from the first on; it drops the others.

        Args:
            count: number of the topology's shards, ranks * workers.

        Returns:
            Number of files.
        """
        return self.of.num_files // count // self.of.n_chunks * self.of.n_chunks * count
