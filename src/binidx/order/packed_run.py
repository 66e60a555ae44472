"""The order of a run over packed files, for all of its ranks: tables as of `RunOrder`, with blocks for documents.

step int32, rank int16, slot int16      who read it, and when
sample int64                            file * blocks a file + block, in its set
source dictionary<int16, string>        the set, and
epoch int16                             how often its files were gone through before
file int32, block int32                 where it lies
input_ids list<uint16 or uint32>        on request: the block
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.format.packed import PackedFiles
from binidx.index.packed_mix import PackedRun
from binidx.index.packed_order import PackedSet
from binidx.loader.readings import Readings

if TYPE_CHECKING:
    from binidx.order.arrow import pa

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class PackedRunOrder:
    """What a run over packed files reads.

    Args:
        sets: with the run's own seed; each rank adds its number to it, as in all forks.
        names: of the sets.
        weights: of the sets; None for equal ones.
        seed: of the draws that mix the sets.
        num_ranks: processes that read.
        num_workers: of each rank's DataLoader.
        micro_batch_size: blocks a worker gives at a time.
        accumulation: micro-batches of a rank in one step.
        mixed_by_rank: each rank adds its number to the seed of the draws too: lit-gpt does, TinyLlama does not.
        files: of each set, where tokens are wanted.

    Raises:
        ConfigError: sets, names and weights that do not fit each other, or too few files.
    """

    sets: Sequence[PackedSet]
    names: Sequence[str]
    weights: Sequence[float] | None = None
    seed: int = 0
    num_ranks: int = 1
    num_workers: int = 0
    micro_batch_size: int = 1
    accumulation: int = 1
    mixed_by_rank: bool = False
    files: Sequence[PackedFiles] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sets) or (self.files is not None and len(self.files) != len(self.sets)):
            raise ConfigError(f"packed run: {len(self.sets)} sets, {len(self.names)} names; needs one each, and files")
        self.run_of(0).orders  # noqa: B018 - checks that there are files for every worker

    @property
    def blocks_per_step(self) -> int:
        """Of one rank."""
        return self.micro_batch_size * self.accumulation

    def run_of(self, rank: int) -> PackedRun:
        """What one rank reads."""
        if rank not in self._runs:
            self._runs[rank] = self._make_run(rank)
        return self._runs[rank]

    @functools.cached_property
    def _runs(self) -> dict[int, PackedRun]:
        """Each remembers its generators, 81 of 300 bytes a worker for a whole run of the Gemstones."""
        return {}

    def _make_run(self, rank: int) -> PackedRun:
        sets = [replace(each, seed=each.seed + rank) for each in self.sets]
        seed = self.seed + rank if self.mixed_by_rank else self.seed
        return PackedRun(sets, self.weights, seed, rank, self.num_ranks, self.num_workers, self.micro_batch_size)

    def num_steps(self) -> int | None:
        """Whole steps until the first rank ends; None: none does."""
        lengths = [self.run_of(rank).length for rank in range(self.num_ranks if self.mixed_by_rank else 1)]
        return (
            None if None in lengths else min(length for length in lengths if length is not None) // self.blocks_per_step
        )

    def num_rows(self, steps: range) -> int:
        """Blocks of these steps, over all ranks."""
        return len(steps) * self.blocks_per_step * self.num_ranks

    def rows(self, steps: range, rank: int | None = None) -> tuple[Readings, Numbers]:
        """Who reads what: readings, and rows (set, file, block, pass) of shape (n, 4); by step, rank, slot.

        Raises:
            IndexError: a step after the end.
        """
        ranks = range(self.num_ranks) if rank is None else [rank]
        size = self.blocks_per_step
        found = [self.run_of(each).blocks(steps.start * size, steps.stop * size) for each in ranks]
        blocks = np.stack([each.reshape(len(steps), size, 4) for each in found], axis=1).reshape(-1, 4)
        step, rank_of, slot = (
            grid.reshape(-1)
            for grid in np.meshgrid(np.asarray(steps), np.asarray(ranks), np.arange(size), indexing="ij")
        )
        num_blocks = np.array([each.num_blocks for each in self.sets])
        sample = blocks[:, 1] * num_blocks[blocks[:, 0]] + blocks[:, 2]
        position = (step * self.num_ranks + rank_of) * size + slot
        return Readings(step, rank_of, slot, position, sample), blocks

    def table(self, steps: range, rank: int | None = None, *, docs: Any = True, tokens: bool = False) -> pa.Table:
        """`rows` as an Arrow table, without file and block unless `docs`; with `tokens`, the tokens of each block."""
        from binidx.order.arrow import packed_table

        readings, blocks = self.rows(steps, rank)
        table = packed_table(readings, blocks, self.names, list(self.read(blocks)) if tokens else None)
        return table if docs else table.drop(["file", "block"])

    def read(self, blocks: Numbers) -> NDArray[Any]:
        """The tokens of rows (set, file, block, pass), shape (n, block_size).

        Raises:
            ConfigError: the run was described without its files.
        """
        if self.files is None:
            raise ConfigError("packed run: tokens asked, but it was described without its files")
        out = np.empty((len(blocks), self.files[0].block_size), self.files[0].header.dtype)
        for number, files in enumerate(self.files):
            here = blocks[:, 0] == number
            out[here] = files.read(blocks[here, 1].tolist(), blocks[here, 2].tolist())
        return out

    @functools.cached_property
    def fingerprint(self) -> str:
        """Of everything the order depends on."""
        depends = {each: getattr(self, each) for each in ("names", "weights", "seed", "num_ranks", "num_workers")}
        depends |= {each: getattr(self, each) for each in ("micro_batch_size", "accumulation", "mixed_by_rank")}
        depends["sets"] = [{**asdict(each), "at_end": each.at_end.name} for each in self.sets]
        return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()
