"""A run over packed files: its order over all ranks.

Tables of its order have blocks instead of documents:

    step int32, rank int16, slot int16      position in the global order
    sample int64                            file * blocks per file + block, in its set
    source dictionary<int16, string>        the set
    epoch int16                             complete passes over its files before
    file int32, block int32                 the block
    input_ids list<uint16 or uint32>        on request: its tokens
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, trims_traceback
from binidx.format.virtual import check_named
from binidx.jobs.parts import PerProcess
from binidx.order.order_protocols import Numbers, Source
from binidx.order.source_order import StoredSource
from binidx.packed.packed_description import FORKS, PACKED_FILE, PackedDescription
from binidx.packed.packed_files import PackedFiles, read_blocks
from binidx.packed.packed_order import PackedRun, PackedSet, WeightSchedule, order_files
from binidx.packed.packed_origins import PackedDocuments
from binidx.run.global_order import SampleReads
from binidx.run.provenance.contents import DocumentSpans, SampleContents, SampleOrigins
from binidx.run.provenance.joined_sources import JoinedSources, join_sources
from binidx.storage.location import Location
from binidx.storage.open import read_document

if TYPE_CHECKING:
    from binidx.run.provenance.export import pa

STRETCH = 1 << 20
"""Number of blocks of a rank that are looked at together: 100 MB."""


@dataclass(frozen=True)
class BlockContents(SampleContents):
    """Contents of samples that are blocks of packed files.

    Attributes:
        blocks: (set, file, block, pass) of each, shape (n, 4).
    """

    blocks: Numbers


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
    consumed_samples: ClassVar[int] = 0
    knows_earlier: ClassVar[bool] = True

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

    @property
    def pass_steps(self) -> int:
        """Number of steps in which all ranks read as many blocks as there are, at least 1."""
        return max(int(self._bounds[-1]) // self.num_rows(range(1)), 1)

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

    def readings(self, steps: range, rank: int | None = None) -> SampleReads:
        """Return the reads of some steps, sorted by step, rank and slot.

        Args:
            steps: steps, counted from 0.
            rank: this rank alone; None for all.

        Returns:
            Step, rank, slot, position and sample of each read; `blocks` has the block of a sample.

        Raises:
            IndexError: a step after the end.
        """
        ranks = range(self.num_ranks) if rank is None else [rank]
        size = self.blocks_per_step
        of_ranks = [self.run_of(number).blocks(steps.start * size, steps.stop * size) for number in ranks]
        blocks = np.stack([rows.reshape(len(steps), size, 4) for rows in of_ranks], axis=1).reshape(-1, 4)
        grids = np.meshgrid(np.asarray(steps), np.asarray(ranks), np.arange(size), indexing="ij")
        step, rank_of, slot = (grid.reshape(-1) for grid in grids)
        position = (step * self.num_ranks + rank_of) * size + slot
        return SampleReads(step, rank_of, slot, position, self._samples_of(blocks))

    @cached_property
    def _bounds(self) -> Numbers:
        """Number of blocks of the sets before each set, and of all."""
        return np.cumsum([0, *(packed_set.num_files * packed_set.num_blocks for packed_set in self.sets)])

    @cached_property
    def _num_blocks(self) -> Numbers:
        return np.array([packed_set.num_blocks for packed_set in self.sets])

    def _samples_of(self, blocks: Numbers) -> Numbers:
        number, file, block, passes = blocks.T
        samples: Numbers = passes * self._bounds[-1] + self._bounds[number] + file * self._num_blocks[number] + block
        return samples

    def blocks(self, samples: Numbers) -> Numbers:
        """Return (set, file, block, pass) of samples, which number all blocks of pass after pass; shape (n, 4)."""
        passes, place = np.divmod(samples, self._bounds[-1])
        number = self._bounds.searchsorted(place, side="right") - 1
        file, block = np.divmod(place - self._bounds[number], self._num_blocks[number])
        return np.stack([number, file, block, passes], axis=1)

    def trained(self, steps: Numbers) -> NDArray[np.bool_]:
        """Return that the samples of each step are trained."""
        return np.ones(len(steps), np.bool_)

    def table(
        self, steps: range, rank: int | None = None, *, docs: Any = True, tokens: bool = False, trained: Any = False
    ) -> pa.Table:
        """Return the rows of some steps as an Arrow table; the columns are described at the top of this module.

        Args:
            steps: steps, counted from 0.
            rank: this rank alone; None for all.
            docs: include the columns file and block.
            tokens: include `input_ids`, which are read from the files.
            trained: ignored: all blocks are trained.

        Returns:
            One row for each block, sorted by step, rank and slot.
        """
        from binidx.run.provenance.export import to_table

        reads = self.readings(steps, rank)
        number, file, block, epoch = self.blocks(reads.sample).T
        own, stored = file * self._num_blocks[number] + block, {"file": file, "block": block}
        origins, texts = SampleOrigins(number, own, epoch), list(self.read(reads.sample)) if tokens else None
        return to_table(reads._replace(sample=own), origins, self.names, texts, blocks=stored if docs else None)

    def orders(self, steps: range) -> Iterator[tuple[PackedRunOrder, range]]:
        """Yield this order and these steps, as a `RunHistory` does for each of its runs."""
        yield self, steps

    @cached_property
    def documents(self) -> list[PackedDocuments]:
        """Documents of the files of each set."""
        return [PackedDocuments(files) for files in self.files or ()]

    @cached_property
    def _origins(self) -> dict[tuple[int, str], StoredSource]:
        """Number of a set, and prefix -> a dataset of which some of its files were made."""
        return {
            (number, prefix): StoredSource(prefix, dataset, range(len(dataset)))
            for number, documents in enumerate(self.documents) for prefix, dataset in documents.datasets.items()
        }  # fmt: skip

    @property
    def sources(self) -> Sequence[StoredSource]:
        """Datasets of which the files of each set were made, as far as they are known."""
        return [*self._origins.values()]

    @property
    def joined(self) -> JoinedSources:
        """The sources by their prefix."""
        return join_sources([self.sources])

    def select_sources(self, name: str | None = None) -> dict[str, Source]:
        """Return the datasets by their prefix: that of a prefix, those of a set's name, or all.

        Args:
            name: prefix, or name of a set.

        Raises:
            ConfigError: files whose dataset is not known, or another name.
        """
        numbers = [number for number, each in enumerate(self.names) if each == name] or range(len(self.names))
        for number in numbers:
            self.documents[number].check_known()
        sources: dict[str, Source] = {
            prefix: own for (number, prefix), own in self._origins.items() if number in numbers
        }
        if name is None or name in self.names:
            return sources
        if name not in sources:
            raise ConfigError(f"--source: found {name}, needs one of {', '.join([*self.names, *sources])}")
        return {name: sources[name]}

    def samples_named(self, name: str) -> Numbers:
        """Return the samples of the first pass that are the block FILE:BLOCK; none if `name` is no such name."""
        (uri, _, block), blocks = name.rpartition(":"), []
        for number, files in enumerate(self.files or ()):
            if uri in files.uris and block.isdecimal():
                if int(block) >= files.num_blocks:
                    raise ConfigError(f"{uri}: block {block}, it has {files.num_blocks:,}, counted from 0")
                blocks.append((number, files.uris.index(uri), int(block), 0))
        return self._samples_of(np.array(blocks, np.int64).reshape(-1, 4))

    def samples_with(self, source: int, documents: Sequence[int] | Numbers) -> Numbers:
        """Return the samples of the first pass with a token of one of these documents of a source, ascending.

        Args:
            source: number of the source in `sources`.
            documents: numbers of documents in that source.
        """
        number, prefix = [*self._origins][source]
        blocks = self.documents[number].blocks_of(np.asarray(documents).tolist(), prefix)
        return np.unique(self._samples_of(np.insert(np.insert(blocks, 2, 0, axis=1), 0, number, axis=1)))

    def reads_of(self, samples: Numbers, stop_step: int, *, earlier: bool = True) -> SampleReads:
        """Return all reads, in the steps before `stop_step`, of some blocks in any pass.

        The ranks whose workers read the files of these blocks are followed from step 0 on: some 100 ns a block of each.

        Args:
            samples: samples of the first pass.
            stop_step: first step that is not searched.
            earlier: as in `RunOrder.where`; there is no sample before step 0.

        Returns:
            The reads in the order of the steps.
        """
        shards, workers = self.num_ranks * max(1, self.num_workers), max(1, self.num_workers)
        parts = [self.readings(range(0))]
        for rank in np.unique(self.blocks(samples)[:, 1] % shards // workers).tolist():
            for first in range(0, stop_step, step := max(1, STRETCH // self.blocks_per_step)):
                reads = self.readings(range(first, min(first + step, stop_step)), rank)
                parts.append(reads.at(np.isin(reads.sample % self._bounds[-1], samples)))
        reads = SampleReads.joined(parts)
        return reads.at(np.argsort(reads.position, kind="stable"))

    def contents(self, samples: Numbers) -> BlockContents:
        """Return the blocks of samples, and their documents where `binidx pack` wrote their origin."""
        blocks, numbers = self.blocks(samples), {key: number for number, key in enumerate(self._origins)}
        documents = functools.cache(lambda number, file, block: self.documents[number].documents(file, block))
        found = [(number, *documents(number, *block)) for number, *block in blocks[:, :3].tolist()]
        source = np.array([-1 if prefix is None else numbers[number, prefix] for number, prefix, _ in found], np.int64)
        bounds = np.cumsum([0, *(len(pieces) for *_, pieces in found)])
        columns = np.array([piece for *_, pieces in found for piece in pieces], np.int64).reshape(-1, 4).T
        own = blocks[:, 1] * self._num_blocks[blocks[:, 0]] + blocks[:, 2]
        return BlockContents(source, own, blocks[:, 3], DocumentSpans(bounds, *columns), blocks)

    def sources_of(self, samples: Numbers) -> Numbers:
        """Return the source of each sample; -1 if it is not known."""
        return self.contents(samples).source

    def label(self, contents: BlockContents, place: int) -> dict[str, Any]:
        """Return the columns of a row that name a block, its set, and its dataset if that is known."""
        (number, file, block, epoch), source = contents.blocks[place].tolist(), int(contents.source[place])
        row = {"sample": int(contents.sample[place]), "source": self.names[number], "epoch": epoch}
        row |= {"file": self.documents[number].files.uris[file], "block": block}
        return row if source < 0 else row | {"dataset": self.sources[source].name}

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

    def account(self, stop_step: int) -> list[dict[str, Any]]:
        """Return for each set its size and its use in the steps before `stop_step`, as JSON values.

        Args:
            stop_step: first step that is not counted.
        """
        rows, counts = list[dict[str, Any]](), self.count_blocks(stop_step).tolist()
        for name, of, files, read in zip(self.names, self.sets, self.files or (), counts, strict=True):
            total = of.num_files * of.num_blocks
            sizes = {"source": name, "files": of.num_files, "blocks": total, "tokens": total * files.block_size}
            rows.append(sizes | {"blocks_read": read, "tokens_read": read * files.block_size, "epochs": read / total})
        return rows

    def read(self, samples: Numbers) -> NDArray[Any]:
        """Return the tokens of samples, shape (n, block_size), dtype as stored.

        Raises:
            ConfigError: the run was described without its files.
        """
        if self.files is None:
            raise ConfigError("packed run: has no files to read tokens from; give files")
        return read_blocks(self.files, self.blocks(samples))

    @property
    def sequence_length(self) -> int:
        """Number of input tokens of a block, whose last one is a label alone; 0 without files."""
        return self.files[0].block_size - 1 if self.files else 0

    def input_length(self, source: int) -> int:
        """Return `sequence_length`, which all sources have."""
        return self.sequence_length

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """Options of the stores of the files and of their datasets."""
        return self.files[0].storage_options if self.files else None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of everything the order depends on, 32 hex digits."""
        depends = {name: getattr(self, name) for name in ("names", "weights", "seed", "num_ranks", "num_workers")}
        depends |= {name: getattr(self, name) for name in ("micro_batch_size", "accumulation", "mixed_by_rank")}
        if self.schedules or self.max_epochs:
            depends["mixing"] = [[asdict(each) for each in self.schedules or ()], self.max_epochs]
        depends["sets"] = [{**asdict(packed_set), "at_end": packed_set.at_end.name} for packed_set in self.sets]
        return hashlib.blake2b(json.dumps(depends).encode(), digest_size=16).hexdigest()


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
