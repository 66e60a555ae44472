"""A run over packed files: which rank reads which block at which step, and its description in a JSON file.

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
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, trims_traceback
from binidx.forks import cached_property
from binidx.format.virtual import check_named
from binidx.json_models import Count, JsonFile, Positive
from binidx.order.order_protocols import Numbers, Source
from binidx.order.reads import SampleOrigins, TokenReads
from binidx.packed.packed_blocks import PackedBlocks
from binidx.packed.packed_files import PackedFiles, read_blocks
from binidx.packed.packed_order import AtEnd, PackedRun, PackedSet, WeightSchedule, order_files
from binidx.run.global_order import SampleReads
from binidx.run.joined_sources import unknown_source
from binidx.run.run_order import STRETCH_POSITIONS, Docs, RunOrder
from binidx.run.schedule import BatchSchedule
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.ranges import cut

if TYPE_CHECKING:
    from binidx.format.arrow import pa

STRETCH_BLOCKS = 1 << 20
"""Number of blocks of a rank that are looked at together: 100 MB."""


@dataclass(frozen=True)
class PackedReading:
    """The blocks that the ranks of a run over packed files read, in order; implements `Reading`.

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
        schedules, max_epochs: weights that change, and passes after which they are 0, of each set, as in `PackedRun`.

    Raises:
        ConfigError: sets, names and weights that do not fit each other, or too few files for every worker.
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
    schedules: Sequence[WeightSchedule] | None = None
    max_epochs: Sequence[int | None] | None = None
    _runs: dict[int, PackedRun] = field(default_factory=dict, init=False, repr=False, compare=False)
    dataloader_type: ClassVar[str] = "packed"
    knows_earlier: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sets):
            raise ConfigError(f"packed run: {len(self.sets)} sets, {len(self.names)} names; needs one each")
        self.run_of(0).orders  # noqa: B018 - checks that there are files for every worker

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedReading, tuple(getattr(self, option.name) for option in fields(self) if option.init)

    @cached_property
    def schedule(self) -> BatchSchedule:
        """Sizes of the steps, all equal."""
        return BatchSchedule(self.blocks_per_step * self.num_ranks, self.micro_batch_size, self.num_ranks)

    @cached_property
    def blocks(self) -> PackedBlocks:
        """Order that numbers the blocks of all sets; it has no files, so no dataset is known."""
        return PackedBlocks(self.sets, self.names, None)

    @property
    def blocks_per_step(self) -> int:
        """Number of blocks of one rank in a step."""
        return self.micro_batch_size * self.accumulation

    def run_of(self, rank: int) -> PackedRun:
        """Return the blocks of one rank by position: the same object at every call, as it caches generators."""
        if rank not in self._runs:
            sets = [replace(packed_set, seed=packed_set.seed + rank) for packed_set in self.sets]
            seed = self.seed + rank if self.mixed_by_rank else self.seed
            topology = rank, self.num_ranks, self.num_workers
            mixing = self.micro_batch_size, self.schedules, self.max_epochs
            self._runs[rank] = PackedRun(sets, self.weights, seed, *topology, *mixing)
        return self._runs[rank]

    def num_steps(self) -> int | None:
        """Return the number of whole steps until the first rank ends; None if no rank ends."""
        lengths = [self.run_of(rank).length for rank in range(self.num_ranks if self.mixed_by_rank else 1)]
        ends = [length for length in lengths if length is not None]
        return min(ends) // self.blocks_per_step if ends else None

    @property
    def end(self) -> int | None:
        """The position at which the run ends; None if it does not."""
        steps = self.num_steps()
        return None if steps is None else self.schedule.samples_before(steps)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything the order depends on."""
        depends = {name: getattr(self, name) for name in ("names", "weights", "seed", "num_ranks", "num_workers")}
        depends |= {name: getattr(self, name) for name in ("micro_batch_size", "accumulation", "mixed_by_rank")}
        if self.schedules or self.max_epochs:
            depends["mixing"] = [[asdict(each) for each in self.schedules or ()], self.max_epochs]
        depends["sets"] = [{**asdict(packed_set), "at_end": packed_set.at_end.name} for packed_set in self.sets]
        return depends

    def count_passes(self, num_epochs: int, stop_step: int) -> int:
        """Return the largest number of passes over the files of a set that have begun before a step."""
        read = stop_step * self.blocks_per_step
        return max(read // order.pass_blocks for order in self.run_of(0).orders[0]) + 1

    def readings(self, steps: range, rank: int | None = None) -> SampleReads:
        """Return the reads of some steps; raise IndexError for a step after the end."""
        ranks = range(self.num_ranks) if rank is None else [rank]
        size = self.blocks_per_step
        of_ranks = [self.run_of(number).blocks(steps.start * size, steps.stop * size) for number in ranks]
        blocks = np.stack([rows.reshape(len(steps), size, 4) for rows in of_ranks], axis=1).reshape(-1, 4)
        grids = np.meshgrid(np.asarray(steps), np.asarray(ranks), np.arange(size), indexing="ij")
        step, rank_of, slot = (grid.reshape(-1) for grid in grids)
        position = (step * self.num_ranks + rank_of) * size + slot
        return SampleReads(step, rank_of, slot, position, self.blocks.samples_of(blocks))

    def samples_at(self, position: Numbers) -> Numbers:
        """Return the block at each position; those of all steps from the first to the last position are drawn."""
        first, last = (self.schedule.step_of(int(end)) for end in (position.min(initial=0), position.max(initial=0)))
        return self.readings(range(first, last + 1)).sample[position - self.schedule.samples_before(first)]

    def served_at(self, samples: Numbers, stop: int) -> SampleReads:
        """Return all reads of some blocks of the first pass, in any pass, at positions before `stop`.

        The ranks whose workers read the files of these blocks are followed from step 0 on: some 100 ns a block of each.
        """
        workers, stop_step = max(1, self.num_workers), self.schedule.step_of(stop)
        parts, size = [self.readings(range(0))], max(1, STRETCH_BLOCKS // self.blocks_per_step)
        for rank in np.unique(self.blocks.blocks_of(samples)[:, 1] % (self.num_ranks * workers) // workers).tolist():
            for first in range(0, stop_step, size):
                reads = self.readings(range(first, min(first + size, stop_step)), rank)
                parts.append(reads.at(np.isin(reads.sample % self.blocks.bounds[-1], samples)))
        reads = SampleReads.joined(parts)
        return reads.at(np.argsort(reads.position, kind="stable"))

    def count_blocks(self, stop_step: int) -> Numbers:
        """Return how many blocks of each set all ranks read in the steps before a step, shape (number of sets,)."""
        num_blocks = stop_step * self.blocks_per_step
        if not self.mixed_by_rank or len(self.sets) == 1:
            return self.run_of(0).count_sets(num_blocks) * self.num_ranks
        counts = [self.run_of(rank).count_sets(num_blocks) for rank in range(self.num_ranks)]
        return sum(counts, np.zeros(len(self.sets), np.int64))


class PackedRunOrder(RunOrder):
    """The order of a run over packed files, over all ranks.

    Args:
        reading: the blocks that the ranks read.
        files: packed files of each set, needed for tokens.

    Raises:
        ConfigError: files for another number of sets.

    Example:
        order = load_packed_run("s3://corpus/packed.json")
        order.table(range(10))

    Source: lit-gpt, TinyLlama, and the UMD fork of the Gemstones.
    """

    def __init__(self, reading: PackedReading, files: Sequence[PackedFiles] | None = None) -> None:
        if files is not None and len(files) != len(reading.sets):
            raise ConfigError(f"packed run: {len(reading.sets)} sets, files of {len(files)}; needs those of each")
        super().__init__(PackedBlocks(reading.sets, reading.names, files), reading, None, "")

    @property
    def packed(self) -> PackedReading:
        """The reading, with the parameters of the run."""
        return cast(PackedReading, self.reading)

    @property
    def blocks(self) -> PackedBlocks:
        """The order, with the files."""
        return cast(PackedBlocks, self.order)

    @property
    def files(self) -> Sequence[PackedFiles] | None:
        """Packed files of each set."""
        return self.blocks.files

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        return self.files[0].storage_options if self.files else None

    def samples_counted(self, positions: Numbers) -> Numbers:
        samples = self.reading.samples_at(positions) % len(self.order)  # a block has the same tokens in every pass
        counted: Numbers = samples[self.list_sources[samples] >= 0]
        return counted

    def select_sources(self, name: str | None = None) -> Mapping[str, Source]:
        """Return datasets by their prefix: that of a prefix, those of a set, or all; ConfigError if not known."""
        names = self.packed.names
        sets = [number for number, each in enumerate(names) if each == name] or range(len(names))
        self.blocks.check_known(sets)
        sources = {each.sources[0].name: each.sources[0] for number, _, each in self.blocks.known if number in sets}
        if name is None or name in names:
            return sources
        if name not in sources:
            raise unknown_source(name, [*names, *sources])
        return {name: sources[name]}

    def samples_named(self, name: str) -> Numbers:
        (uri, _, block), blocks = name.rpartition(":"), []
        for number, files in enumerate(self.files or ()):
            if uri in files.uris and block.isdecimal():
                if int(block) >= files.num_blocks:
                    raise ConfigError(f"{uri}: block {block}, it has {files.num_blocks:,}, counted from 0")
                blocks.append((number, files.uris.index(uri), int(block), 0))
        return self.blocks.samples_of(np.array(blocks, np.int64).reshape(-1, 4))

    def contents(self, samples: Numbers) -> TokenReads:
        """Return the tokens of blocks, as whole pieces of their documents."""
        return super().contents(samples).join_sequences()

    def read(self, samples: Numbers) -> NDArray[Any]:
        if self.files is None:
            raise ConfigError("packed run: has no files to read tokens from; give files")
        return read_blocks(self.files, self.blocks.blocks_of(samples))

    def table(
        self, steps: range, rank: int | None = None, *, docs: Docs = "ends", tokens: bool = False, trained: bool = True
    ) -> pa.Table:
        """Return an Arrow table of `readings`, with the columns above; without `file` and `block` if `docs` is None."""
        from binidx.run.read_table import to_table

        reads = self.readings(steps, rank)
        number, file, block, passes = self.blocks.blocks_of(reads.sample).T
        origins = SampleOrigins(number, file * self.blocks.num_blocks[number] + block, passes)
        texts, columns = self.read(reads.sample) if tokens else None, {"file": file, "block": block} if docs else None
        own = reads._replace(sample=origins.sample)
        return to_table(own, origins, self.packed.names, texts, blocks=columns)

    def label(self, sample: int, source: int = -1, epoch: int = 0) -> dict[str, Any]:
        """Return the set of a block, its number there, its pass, file and number in it, and its dataset if known."""
        ((number, file, block, epoch),) = self.blocks.blocks_of(np.array([sample])).tolist()
        uri, packed = self.files[number].uris[file] if self.files else "", self.packed
        row = {"sample": file * packed.sets[number].num_blocks + block, "source": packed.names[number]}
        row |= {"epoch": epoch, "file": uri, "block": block}
        return row if source < 0 else {**row, "dataset": self.sources[source].name}

    def list_unknown(self) -> Sequence[str]:
        return [group.problem for _, group in self.blocks.groups if group.problem]

    def count_unknown(self, stop: int) -> Iterable[tuple[str, int, int, int]]:
        if not self.list_unknown():
            return []
        sets, names = self.blocks.blocks_of(np.arange(len(self.order)))[:, 0], self.packed.names
        own = np.where(self.list_sources < 0, sets + 1, 0)  # 0: counted with its dataset
        sizes, read = np.bincount(own, minlength=len(names) + 1), np.zeros(len(names) + 1, np.int64)
        for stretch in cut((0, stop), STRETCH_POSITIONS):
            read += np.bincount(own[self.reading.samples_at(np.arange(*stretch)) % len(own)], minlength=len(read))
        counts = zip(names, sizes[1:].tolist(), read[1:].tolist(), strict=True)
        return [(name, size, count, self.blocks.sequence_length) for name, size, count in counts if size]

    def run_of(self, rank: int) -> PackedRun:
        """Return the blocks of one rank, by position.

        Args:
            rank: 0 to `num_ranks` - 1.
        """
        return self.packed.run_of(rank)

    def replace(self, **changes: Any) -> PackedRunOrder:
        """Return the order with other parameters of its reading."""
        return PackedRunOrder(replace(self.packed, **changes), self.files)

    def account(self, stop_step: int) -> list[dict[str, Any]]:
        """Return for each set its size and its use in the steps before `stop_step`, as JSON values.

        Args:
            stop_step: first step that is not counted.
        """
        rows, counts, packed = list[dict[str, Any]](), self.packed.count_blocks(stop_step).tolist(), self.packed
        for name, of, files, read in zip(packed.names, packed.sets, self.files or (), counts, strict=True):
            total = of.num_files * of.num_blocks
            sizes = {"source": name, "files": of.num_files, "blocks": total, "tokens": total * files.block_size}
            rows.append(sizes | {"blocks_read": read, "tokens_read": read * files.block_size, "epochs": read / total})
        return rows


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
    """Fields of the description; `PackedSet` and `PackedReading` document them."""

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
    mixing = fork.mixed_by_rank, schedules, max_epochs
    return PackedRunOrder(PackedReading(sets, names, weights, seed, *topology, *mixing), files)


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

        files        F0 F1 F2 F3 F4 F5 F6 F7 | F8 ...        n_chunks = 1, L = 4
        2 shards     F0+F1  F2+F3  F4+F5  F6+F7              a shard's groups are in the order of the list, so after
        4 shards     F0+F1+F2+F3   F4+F5+F6+F7               k * n_chunks * L files both have read the same: the first

    L is the least common multiple of the shard counts (ranks * workers each). Between two sync points the sets differ.
    At the tail they differ for good: the remainders of the divisions by shards and by n_chunks depend on the number of
    shards.

    Args:
        of: the set of files, with the seed of rank 0; seeds of other ranks do not change which blocks were read.
        block_size: number of tokens of a block.
        shards: number of shards (ranks * workers) of each topology.

    Source: the Gemstones' README gives the rule for their counts; exact here.
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
