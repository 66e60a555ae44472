"""A run over packed files: its description in JSON, its order over all ranks, and its sync points.

The description:

    {"fork": "umd", "block_size": 2049, "n_chunks": 4, "seed": 1337,
     "sets": [{"name": "web", "files": ["s3://corpus/web_0000000000.bin", ...], "weight": 0.7}, ...],
     "num_ranks": 256, "num_workers": 1, "micro_batch_size": 8, "accumulation": 1}

`fork` names the loader whose rules apply; FORKS lists them. `files` is a list, or the URI of a text file with one name
per line. lit-gpt reads the files in the order of a directory listing, so that order is part of the description; the
others sort and shuffle them.

Tables of its order have blocks instead of documents:

    step int32, rank int16, slot int16      position in the global order
    sample int64                            file * blocks per file + block, in its set
    source dictionary<int16, string>        the set
    epoch int16                             complete passes over its files before
    file int32, block int32                 the block
    input_ids list<uint16 or uint32>        on request: its tokens

Sync points, where packed runs of different sizes have read the same data:

    files        F0 F1 F2 F3 F4 F5 F6 F7 | F8 ...        n_chunks = 1, L = 4
    2 shards     F0+F1  F2+F3  F4+F5  F6+F7              a shard's groups are in the order of the list, so after
    4 shards     F0+F1+F2+F3   F4+F5+F6+F7               k * n_chunks * L files both have read the same: the first ones

L is the least common multiple of the shard counts (ranks * workers each). Between two sync points the sets differ. At
the tail they differ for good: the remainders of the divisions by shards and by n_chunks depend on the number of shards.

Source: the Gemstones' README gives the rule for their counts; exact here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, trims_traceback
from binidx.format.virtual import check_named
from binidx.jobs.parts import PerProcess
from binidx.json_models import Count, JsonFile, Positive
from binidx.packed.packed_files import PackedFiles, read_blocks
from binidx.packed.packed_order import AtEnd, PackedRun, PackedSet, WeightSchedule, order_files
from binidx.run.global_order import SampleReads
from binidx.storage.location import Location
from binidx.storage.open import read_document

if TYPE_CHECKING:
    from binidx.run.provenance.export import pa


Numbers = NDArray[np.int64]

STRETCH = 1 << 20
"""Number of blocks of a rank that are looked at together: 100 MB."""


@dataclass(frozen=True)
class PackedRunOrder:
    """The order of a run over packed files, over all ranks.

    Args:
        sets: the sets, with the run's own seed; each rank adds its number to it, as in all forks.
        names: names of the sets.
        weights: weights of the sets; None for equal ones.
        seed: seed of the draws that mix the sets.
        num_ranks: number of reading processes.
        num_workers: number of workers of each rank's DataLoader.
        micro_batch_size: number of blocks that a worker yields at a time.
        accumulation: number of micro-batches of a rank in one step.
        mixed_by_rank: whether each rank adds its number to the seed of the draws, too, as in lit-gpt, not in TinyLlama.
        files: packed files of each set, needed for tokens.
        schedules, max_epochs: weights that change, and passes after which they are 0, of each set, as in `PackedRun`.

    Raises:
        ConfigError: sets, names and weights that do not fit each other, or too few files.

    Example:
        order = load_packed_run("s3://corpus/packed.json")
        order.table(range(10))

    Source: lit-gpt, TinyLlama, and the UMD fork of the Gemstones.
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
    schedules: Sequence[WeightSchedule] | None = None
    max_epochs: Sequence[int | None] | None = None
    _runs: dict[int, PackedRun] = field(default_factory=dict, init=False, repr=False, compare=False)
    first_step: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sets) or (self.files is not None and len(self.files) != len(self.sets)):
            raise ConfigError(f"packed run: {len(self.sets)} sets, {len(self.names)} names; needs one each, and files")
        self.run_of(0).orders  # noqa: B018 - checks that there are files for every worker

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedRunOrder, tuple(getattr(self, option.name) for option in fields(self) if option.init)

    def per_process(self) -> PerProcess[PackedRunOrder]:
        """Return the order for the parts of a job; other processes unpickle it, without any request."""
        return PerProcess(self)

    @property
    def blocks_per_step(self) -> int:
        """Number of blocks of one rank in a step."""
        return self.micro_batch_size * self.accumulation

    def run_of(self, rank: int) -> PackedRun:
        """Return the blocks of one rank.

        Args:
            rank: 0 to `num_ranks` - 1.

        Returns:
            The blocks of this rank by position: the same object at every call, as it caches states of its generators.
        """
        if rank not in self._runs:
            sets = [replace(packed_set, seed=packed_set.seed + rank) for packed_set in self.sets]
            seed = self.seed + rank if self.mixed_by_rank else self.seed
            topology = rank, self.num_ranks, self.num_workers
            mixing = self.micro_batch_size, self.schedules, self.max_epochs
            self._runs[rank] = PackedRun(sets, self.weights, seed, *topology, *mixing)
        return self._runs[rank]

    def num_steps(self) -> int | None:
        """Return the number of whole steps of the run.

        Returns:
            Number of steps until the first rank ends; None if no rank ends.
        """
        lengths = [self.run_of(rank).length for rank in range(self.num_ranks if self.mixed_by_rank else 1)]
        ends = [length for length in lengths if length is not None]
        return min(ends) // self.blocks_per_step if ends else None

    def num_rows(self, steps: range) -> int:
        """Return the number of blocks of some steps, over all ranks.

        Args:
            steps: steps, counted from 0.

        Returns:
            Number of blocks, which are the rows of `table`.
        """
        return len(steps) * self.blocks_per_step * self.num_ranks

    def largest(self, steps: range) -> Mapping[str, int]:
        """Return bounds of the ranks, slots and epochs of some steps.

        Args:
            steps: the steps.

        Returns:
            Column -> a number that none of its values exceeds.
        """
        epochs = max(steps.stop * self.blocks_per_step // order.pass_blocks for order in self.run_of(0).orders[0])
        return {"rank": self.num_ranks - 1, "slot": self.blocks_per_step - 1, "epoch": epochs}

    def rows(self, steps: range, rank: int | None = None) -> tuple[SampleReads, Numbers]:
        """Return the position and the block of each row of some steps, sorted by step, rank and slot.

        Args:
            steps: steps, counted from 0.
            rank: this rank alone; None for all.

        Returns:
            Step, rank, slot, position and sample of each row; and (set, file, block, pass), shape (n, 4).

        Raises:
            IndexError: a step after the end.
        """
        ranks = range(self.num_ranks) if rank is None else [rank]
        size = self.blocks_per_step
        of_ranks = [self.run_of(number).blocks(steps.start * size, steps.stop * size) for number in ranks]
        blocks = np.stack([rows.reshape(len(steps), size, 4) for rows in of_ranks], axis=1).reshape(-1, 4)
        grids = np.meshgrid(np.asarray(steps), np.asarray(ranks), np.arange(size), indexing="ij")
        step, rank_of, slot = (grid.reshape(-1) for grid in grids)
        num_blocks = np.array([packed_set.num_blocks for packed_set in self.sets])
        sample = blocks[:, 1] * num_blocks[blocks[:, 0]] + blocks[:, 2]
        position = (step * self.num_ranks + rank_of) * size + slot
        return SampleReads(step, rank_of, slot, position, sample), blocks

    def table(self, steps: range, rank: int | None = None, *, docs: Any = True, tokens: bool = False) -> pa.Table:
        """Return the rows of some steps as an Arrow table; the columns are described at the top of this module.

        Args:
            steps: steps, counted from 0.
            rank: this rank alone; None for all.
            docs: include the columns file and block.
            tokens: include `input_ids`, which are read from the files.

        Returns:
            One row for each block, sorted by step, rank and slot.
        """
        from binidx.run.provenance.export import packed_table

        readings, blocks = self.rows(steps, rank)
        table = packed_table(readings, blocks, self.names, list(self.read(blocks)) if tokens else None)
        return table if docs else table.drop(["file", "block"])

    def where(self, blocks: Mapping[int, Numbers], stop_step: int) -> tuple[SampleReads, Numbers]:
        """Return all reads, in the steps before `stop_step`, of some blocks.

        The ranks whose workers read the files of these blocks are followed from step 0 on: some 100 ns a block of each.

        Args:
            blocks: number of a set -> its blocks, (file, block) of each, shape (n, 2).
            stop_step: first step that is not searched.

        Returns:
            As `rows`, in the order of the steps.
        """
        shards, workers = self.num_ranks * max(1, self.num_workers), max(1, self.num_workers)
        files = [wanted[:, 0] for wanted in blocks.values()] or [np.empty(0, np.int64)]
        codes = {
            number: wanted[:, 0] * self.sets[number].num_blocks + wanted[:, 1] for number, wanted in blocks.items()
        }
        parts = [self.rows(range(0))]
        for rank in np.unique(np.concatenate(files) % shards // workers).tolist():
            for first in range(0, stop_step, step := max(1, STRETCH // self.blocks_per_step)):
                readings, rows = self.rows(range(first, min(first + step, stop_step)), rank)
                here = np.zeros(len(rows), np.bool_)
                for number, code in codes.items():
                    here |= (rows[:, 0] == number) & np.isin(readings.sample, code)
                parts.append((readings.at(here), rows[here]))
        readings = SampleReads.joined(part[0] for part in parts)
        order = np.argsort(readings.position, kind="stable")
        return readings.at(order), np.concatenate([part[1] for part in parts])[order]

    def count_blocks(self, stop_step: int) -> Numbers:
        """Return how many blocks of each set all ranks read in the steps before `stop_step`.

        Args:
            stop_step: first step that is not counted.

        Returns:
            Shape (number of sets,).
        """
        if not self.mixed_by_rank or len(self.sets) == 1:
            return self.run_of(0).count_sets(stop_step * self.blocks_per_step) * self.num_ranks
        counts = [self.run_of(rank).count_sets(stop_step * self.blocks_per_step) for rank in range(self.num_ranks)]
        return sum(counts, np.zeros(len(self.sets), np.int64))

    def read(self, blocks: Numbers) -> NDArray[Any]:
        """Return the tokens of some blocks.

        Args:
            blocks: (set, file, block, pass) of each, shape (n, 4), as `rows` returns them.

        Returns:
            Shape (n, block_size), dtype as stored.

        Raises:
            ConfigError: the run was described without its files.
        """
        if self.files is None:
            raise ConfigError("packed run: has no files to read tokens from; give files")
        return read_blocks(self.files, blocks)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything the order depends on, 32 hex digits."""
        depends = {name: getattr(self, name) for name in ("names", "weights", "seed", "num_ranks", "num_workers")}
        depends |= {name: getattr(self, name) for name in ("micro_batch_size", "accumulation", "mixed_by_rank")}
        if self.schedules or self.max_epochs:
            depends["mixing"] = [[asdict(each) for each in self.schedules or ()], self.max_epochs]
        depends["sets"] = [{**asdict(packed_set), "at_end": packed_set.at_end.name} for packed_set in self.sets]
        return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Fork:
    """Rules of a loader: for the end of the files, for the seed of each rank's draws, and for shuffling files."""

    at_end: AtEnd
    mixed_by_rank: bool
    shuffles_files: bool


FORKS = {
    "lit-gpt": Fork(AtEnd.stop, mixed_by_rank=True, shuffles_files=False),
    "lit-gpt-wrap": Fork(AtEnd.wrap, mixed_by_rank=True, shuffles_files=False),
    "tinyllama": Fork(AtEnd.wrap, mixed_by_rank=False, shuffles_files=True),
    "umd": Fork(AtEnd.repeat, mixed_by_rank=True, shuffles_files=True),
}
"""Rules of each loader. "tinyllama" is TinyLlama after its #67; "umd" made the Gemstones, goldfish and fictional-QA."""


@dataclass(frozen=True)
class DescribedSet:
    """One set of packed files; `files` is the list of their names, or the URI of a text file with their names."""

    name: str
    files: str | list[str]
    weight: float = 1.0
    scheduler: list[str | float | int] | None = None
    max_epoch: Positive | None = None


@dataclass(frozen=True)
class PackedDescription:
    """Fields of the description; `PackedSet` and `PackedRunOrder` document them."""

    fork: str
    block_size: Positive
    n_chunks: Positive
    seed: Count
    sets: list[DescribedSet]
    num_ranks: Positive = 1
    num_workers: Count = 0
    micro_batch_size: Positive = 1
    accumulation: Positive = 1
    shuffle: bool = True
    shuffle_filenames: bool | None = None

    def __post_init__(self) -> None:
        if self.fork not in FORKS:
            raise ConfigError(f"fork: found {self.fork!r}, needs one of {', '.join(FORKS)}")
        if not self.sets:
            raise ConfigError("sets: found none, needs at least one")
        if self.fork != "umd" and any(each.scheduler or each.max_epoch for each in self.sets):
            raise ConfigError(f"scheduler, max_epoch: found in a run of {self.fork}, only umd has them")
        weights = [packed_set.weight for packed_set in self.sets]
        if min(weights) < 0 or not 0 < sum(weights) < math.inf:
            raise ConfigError("sets: found weights below 0, or none above it, or infinite ones")


PACKED_FILE = JsonFile(PackedDescription, error=ConfigError)


@trims_traceback
def load_packed_run(uri: str, storage_options: Mapping[str, Any] | None = None) -> PackedRunOrder:
    """Return the order of the run that a file describes, with its packed files opened and checked.

    Args:
        uri: path or URI of the description.
        storage_options: options of the stores of the description and of the packed files.

    Returns:
        The order over all ranks.

    Raises:
        ConfigError: no JSON object, unknown or missing fields, or invalid values.
        ObjectNotFoundError, FormatError: a packed file is missing or malformed.
    """
    file = Location.of(uri, storage_options)
    described = PACKED_FILE.decode(read_document(PACKED_FILE, file), uri)
    for packed_set in described.sets:
        check_named([packed_set.files] if isinstance(packed_set.files, str) else packed_set.files, file)
    try:
        return _open_described(described, storage_options)
    except ConfigError as error:
        raise ConfigError(f"{uri}: {error}") from error


def _open_described(described: PackedDescription, options: Mapping[str, Any] | None) -> PackedRunOrder:
    """Return the order of a parsed description; `options` are those of the stores of the packed files."""
    fork, seed = FORKS[described.fork], described.seed
    files = []
    for packed_set in described.sets:
        listed = packed_set.files
        uris = _read_names(Location(listed, options)) if isinstance(listed, str) else listed
        shuffled = fork.shuffles_files if described.shuffle_filenames is None else described.shuffle_filenames
        uris = order_files(uris, seed) if shuffled else uris
        uris = [Location(uri).absolute for uri in uris]  # workers of a job may have another working directory
        files.append(PackedFiles(uris, described.block_size, storage_options=options))
    total = sum(packed_set.weight for packed_set in described.sets)
    weights = [packed_set.weight / total for packed_set in described.sets]
    schedules = max_epochs = None
    if any(each.scheduler or each.max_epoch for each in described.sets):
        given = [each.scheduler or ["const", each.weight] for each in described.sets]
        schedules = [WeightSchedule(str(kind), tuple(numbers)) for kind, *numbers in given]  # type: ignore[arg-type]
        max_epochs = [each.max_epoch for each in described.sets]
    rules = described.n_chunks, seed, described.shuffle, fork.at_end
    sets = [PackedSet(len(packed.uris), packed.num_blocks, *rules) for packed in files]
    names = [packed_set.name for packed_set in described.sets]
    topology = described.num_ranks, described.num_workers, described.micro_batch_size, described.accumulation
    mixing = fork.mixed_by_rank, files, schedules, max_epochs
    return PackedRunOrder(sets, names, weights, seed, *topology, *mixing)


def _read_names(file: Location) -> list[str]:
    """Return the names of packed files in a text file."""
    try:
        names = read_document(PACKED_FILE, file).decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}: not UTF-8 ({error}); needs a text file with a name on each line") from error
    check_named(names, file)
    return names


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
