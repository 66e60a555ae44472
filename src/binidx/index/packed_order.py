"""The order in which packed blocks are served, as arithmetic: any position of any worker without what came before.

    files  F0 F1 F2 ...  ── every S-th from s, S = ranks * workers ──►  the files of one worker
           in groups of n_chunks ── one permutation of the group's blocks each ──►  (file, block) by position

Cost: a permutation of n_chunks * num_blocks numbers for each group before the position: 81 of 8,192 for all of a
Gemstones worker, 7 ms; the generators are remembered, so the next position costs at most one.

Source: lit-gpt `PackedDataset`, TinyLlama, and the UMD fork of the Gemstones; verified against them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError

Rows = NDArray[np.int64]


class AtEnd(Enum):
    """What a fork does where fewer than n_chunks files are left."""

    stop = "lit-gpt"
    wrap = "TinyLlama, and lit-gpt with wrap=True: from the first file again, with new permutations"
    repeat = "UMD, Gemstones: from the first file again, with the same permutations"


def list_files(names: Iterable[str], seed: int) -> list[str]:
    """The files as TinyLlama (since its #67) and the Gemstones list them: sorted, then shuffled with a seed.

    lit-gpt takes a directory's order as it comes, which only who ran it knows.
    """
    files = sorted(names)
    random.Random(seed).shuffle(files)
    return files


@dataclass(frozen=True)
class PackedSet:
    """One set of packed files, as every worker of a run sees it.

    Args:
        num_files: in the order of `list_files`, or as the run listed them.
        num_blocks: of each file, chunk_size // block_size.
        n_chunks: files whose blocks are shuffled together.
        seed: of the permutations; the run's seed plus the rank, as all forks have it, is for the caller to add.
        shuffle: without it blocks come as they lie.
        at_end: what follows the last whole group.
    """

    num_files: int
    num_blocks: int
    n_chunks: int
    seed: int
    shuffle: bool = True
    at_end: AtEnd = AtEnd.stop

    def of_worker(self, shard: int, num_shards: int) -> WorkerOrder:
        """The blocks of one worker: files shard, shard + num_shards, ... of as many as all workers get alike."""
        if not 0 <= shard < num_shards:
            raise ConfigError(f"packed order: shard {shard}, needs 0 to {num_shards - 1}")
        return WorkerOrder(self, shard, num_shards)


@dataclass(frozen=True)
class WorkerOrder:
    """Blocks by position for one worker of one rank.

    Raises:
        ConfigError: not one whole group of files for a worker.
    """

    of: PackedSet
    shard: int
    num_shards: int
    # What was computed is kept: threads may both compute it, and put the same under the same key.
    _states: dict[int, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _last: list[tuple[int, Rows]] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.num_groups:
            raise ConfigError(
                f"packed order: {self.of.num_files} files give each of {self.num_shards} workers {self.num_mine}, "
                f"needs {self.of.n_chunks} at least (n_chunks)"
            )

    @property
    def num_mine(self) -> int:
        """Files of each worker; what the division leaves over no worker reads."""
        return self.of.num_files // self.num_shards

    @property
    def num_groups(self) -> int:
        """Groups of files in one pass."""
        return self.num_mine // self.of.n_chunks

    @property
    def group_blocks(self) -> int:
        return self.of.n_chunks * self.of.num_blocks

    @property
    def pass_blocks(self) -> int:
        """Blocks in one pass over the worker's files."""
        return self.num_groups * self.group_blocks

    def __len__(self) -> int:
        """Blocks until the stream ends; ConfigError where it does not."""
        if self.of.at_end is not AtEnd.stop:
            raise ConfigError(f"packed order: {self.of.at_end.name} has no end, only passes of {self.pass_blocks}")
        return self.pass_blocks

    def blocks(self, first: int, stop: int) -> Rows:
        """Rows (file, block, pass) of positions first to stop, shape (stop - first, 3).

        Raises:
            IndexError: positions below 0, or after the end of a stream that has one.
        """
        if not 0 <= first <= stop or (self.of.at_end is AtEnd.stop and stop > self.pass_blocks):
            raise IndexError(
                f"packed order: positions {first}-{stop} of worker {self.shard}, it has {self.pass_blocks}"
            )
        size = self.group_blocks
        parts = [self._group(group) for group in range(first // size, -(-stop // size))]
        rows = np.concatenate(parts) if parts else np.empty((0, 3), np.int64)
        start = first - first // size * size
        return rows[start : start + stop - first]

    def _group(self, group: int) -> Rows:
        """The rows of one group; those of the last are kept, since micro-batches take it piece by piece."""
        number, rows = self._last[0] if self._last else (-1, np.empty((0, 3), np.int64))
        if number != group:
            rows = self._make_group(group)
            self._last[:] = [(group, rows)]
        return rows

    def _make_group(self, group: int) -> Rows:
        turn, place = divmod(group, self.num_groups)
        order = self._permutation(place if self.of.at_end is AtEnd.repeat else group)
        chunk, block = np.divmod(order, self.of.num_blocks)
        files = self.shard + (place * self.of.n_chunks + chunk) * self.num_shards
        return np.stack([files, block, np.full_like(block, turn)], axis=1)

    def _permutation(self, number: int) -> Rows:
        if not self.of.shuffle:
            return np.arange(self.group_blocks)
        rng = self._generator(number)
        order = rng.permutation(self.group_blocks)
        self._states[number + 1] = rng.bit_generator.state
        return order

    def _generator(self, number: int) -> np.random.Generator:
        """As it is before permutation `number`, from the nearest one that is remembered."""
        rng, known = np.random.default_rng(self.of.seed), number
        while known and known not in self._states:
            known -= 1
        if known:
            rng.bit_generator.state = self._states[known]
        for passed in range(known, number):
            rng.permutation(self.group_blocks)
            self._states[passed + 1] = rng.bit_generator.state
        return rng
