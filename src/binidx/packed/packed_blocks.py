"""Order of all blocks of packed files, and the documents in those that `binidx export litpkds` made of a dataset.

    sample  0 1 2 | 3 4 5 | 6 7 8 9       two files of 3 blocks in set 0, two of 2 blocks in set 1
    sample  10 .. 19                      the same blocks in the second pass

    packed/train.packed.json    beside the files of `binidx export litpkds`: {"dataset": "s3://corpus/en", ...}
    stream      d0 d0 d0 / d1 d1 / d2 d2 d2 d2 /      the dataset's documents, each with a separator if one was added
    files       |0         |1           |2            chunk_size tokens each, blocks from their first token on

The lengths of documents are those of the dataset's `.idx`, which must be there; no token is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import index_of
from binidx.json_models import JsonFile, Positive
from binidx.order.blended_order import MembersOrder
from binidx.order.order_protocols import Numbers, Order
from binidx.order.source_order import SourceOrder, StoredSource, join_ranges, sorted_unique
from binidx.packed.packed_files import PackedFiles
from binidx.packed.packed_order import PackedSet
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.writing.publish import create_object

FILE_NAME = re.compile(r"(.*)_(\d{10})\.bin")
ORIGIN = ".packed.json"


@dataclass(frozen=True)
class PackedOrigin:
    """The dataset of which `binidx export litpkds` made files.

    Attributes:
        dataset: prefix of the dataset.
        chunk_size: number of tokens of a file.
        add_separator: whether a separator follows each document.
    """

    dataset: str
    chunk_size: Positive
    add_separator: bool = False

    def write(self, directory: Location, name: str) -> None:
        """Write the origin beside the files `{name}_0000000000.bin`, ... of a directory."""
        with create_object(directory / f"{name}{ORIGIN}") as out:
            out.write(ORIGIN_FILE.encode(self, "\n", indent=1))


ORIGIN_FILE = JsonFile(PackedOrigin, {"binidx": "packed", "version": 1})


class BlockOrder(SourceOrder):
    """Blocks of packed files of one dataset, file after file; numbers behind the last block are those of later passes.

    Args:
        source: the dataset.
        origin: how its files were made.
        numbers: number of each file in its name, shape (n,).
        block_size, num_blocks: number of tokens of a block, and of blocks in each file.
    """

    def __init__(
        self, source: StoredSource, origin: PackedOrigin, numbers: Numbers, block_size: int, num_blocks: int
    ) -> None:
        super().__init__(source)
        self.origin, self.numbers, self.block_size, self.num_blocks = origin, numbers, block_size, num_blocks
        self.sequence_length = block_size - 1

    @property
    def identity(self) -> Any:
        fields = {"class": "BlockOrder", **asdict(self.origin), "files": self.numbers.tolist()}
        return {**fields, "block_size": self.block_size, "data": self.source.dataset.identity}

    def __len__(self) -> int:
        return len(self.numbers) * self.num_blocks

    def starts(self, samples: Numbers) -> Numbers:
        """Return the position in the stream of the first token of each block."""
        file, block = np.divmod(samples % len(self), self.num_blocks)
        starts: Numbers = self.numbers[file] * self.origin.chunk_size + block * self.block_size
        return starts

    def sequence_starts(self, sequences: Numbers) -> Numbers:
        """Return the position in the stream of the first token of each sequence, behind the separators before it."""
        index = index_of(self.source.dataset)
        starts: Numbers = index.sequence_pointers[sequences].astype(np.int64) // index.dtype_size
        if self.origin.add_separator:
            starts += index.document_indices.searchsorted(sequences, side="right") - 1
        return starts

    def find_sequences(self, positions: Numbers) -> Numbers:
        """Return the number of sequences that begin before each position of the stream, by bisection."""
        low, high = np.zeros_like(positions), np.full_like(positions, len(self.source.dataset.sequence_lengths))
        while len(active := np.flatnonzero(low < high)):
            middle = (low[active] + high[active]) // 2
            is_before = self.sequence_starts(middle) < positions[active]
            low[active] = np.where(is_before, middle + 1, low[active])
            high[active] = np.where(is_before, high[active], middle)
        return low

    def spans(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        starts, lengths = self.starts(samples), self.source.dataset.sequence_lengths
        first, stop = (self.find_sequences(starts + ahead) for ahead in (1, self.block_size))
        first = np.maximum(first - 1, 0)
        owner, sequence = np.repeat(np.arange(len(samples)), stop - first), join_ranges(first, stop)
        begins, start = self.sequence_starts(sequence), starts[owner]
        skipped = np.maximum(start - begins, 0)
        count = np.minimum(lengths[sequence], start + self.block_size - begins) - skipped
        rows = np.stack([0 * sequence, sequence, skipped, count], axis=1)[count > 0]
        return rows, np.searchsorted(owner[count > 0], np.arange(len(samples) + 1))

    def place_spans(self, samples: Numbers, spans: Numbers, bounds: Numbers) -> Numbers:
        return self.sequence_starts(spans[:, 1]) + spans[:, 2] - np.repeat(self.starts(samples), np.diff(bounds))

    def candidates(self, sequences: Numbers) -> Numbers:
        begin, size = self.sequence_starts(sequences), self.origin.chunk_size
        end = begin + self.source.dataset.sequence_lengths[sequences]
        first, stop = begin // size, -(-end // size)
        number, row = join_ranges(first, stop), np.repeat(np.arange(len(begin)), stop - first)
        by_number = np.argsort(self.numbers, kind="stable")
        place = by_number[np.minimum(np.searchsorted(self.numbers, number, sorter=by_number), len(by_number) - 1)]
        is_here = self.numbers[place] == number
        place, number, row = place[is_here], number[is_here], row[is_here]
        low = np.minimum(np.maximum(begin[row] - number * size, 0) // self.block_size, self.num_blocks)
        high = np.clip(-(-(end[row] - number * size) // self.block_size), low, self.num_blocks)
        return sorted_unique(join_ranges(place * self.num_blocks + low, place * self.num_blocks + high))


@dataclass(frozen=True)
class FileGroup:
    """Files of one set whose names begin with the same text, and the order of their blocks.

    Attributes:
        files: numbers of the files in the set, ascending, shape (n,).
        order: the order; None: their documents are not known.
        problem: message about that.
    """

    files: NDArray[np.int64]
    order: BlockOrder | None
    problem: str = ""


def group_files(files: PackedFiles) -> list[FileGroup]:
    """Return the groups of files of a set; reads an origin and opens a dataset for each."""
    numbers: dict[str, dict[int, int]] = {}
    for file, uri in enumerate(files.uris):
        named = FILE_NAME.fullmatch(uri)
        name, number = (named[1], int(named[2])) if named else (uri, -1)
        numbers.setdefault(name, {})[file] = number
    return [_open_group(files, name, own) for name, own in numbers.items()]


def _open_group(files: PackedFiles, name: str, numbers: Mapping[int, int]) -> FileGroup:
    """Return the files whose names begin with a text: number in the set -> number in the name; -1: it has none."""
    own, options = np.array([*numbers]), files.storage_options
    if -1 in numbers.values():
        return FileGroup(
            own, None, f"{name}: is not named as binidx export litpkds names files, so its documents are not known"
        )
    try:
        origin = ORIGIN_FILE.decode(read_document(ORIGIN_FILE, Location(f"{name}{ORIGIN}", options)), name)
        dataset = IndexedDataset(origin.dataset, storage_options=options)
    except ObjectNotFoundError:
        return FileGroup(own, None, f"{name}{ORIGIN}: not found, so the documents of its files are not known")
    source = StoredSource(origin.dataset, dataset, range(len(dataset)))
    order = BlockOrder(source, origin, np.array([*numbers.values()]), files.block_size, files.num_blocks)
    return FileGroup(own, order)


class PackedBlocks(MembersOrder):
    """Blocks of the sets of packed files, as spans of the datasets of which `binidx export litpkds` made them.

    It has the samples of one pass; greater numbers are those of later passes. A source is the dataset of the files of a
    set whose names begin with the same text.

    Args:
        sets: the sets.
        names: name of each.
        files: packed files of each; None: no block can be read, and no dataset is known.
    """

    def __init__(self, sets: Sequence[PackedSet], names: Sequence[str], files: Sequence[PackedFiles] | None) -> None:
        self.sets, self.names, self.files = sets, names, files

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBlocks, (self.sets, self.names, self.files)

    @cached_property
    def bounds(self) -> Numbers:
        """Number of blocks of the sets before each set, and of all."""
        return np.cumsum([0, *(packed_set.num_files * packed_set.num_blocks for packed_set in self.sets)])

    @cached_property
    def num_blocks(self) -> Numbers:
        """Number of blocks in each file of each set."""
        return np.array([packed_set.num_blocks for packed_set in self.sets])

    def samples_of(self, blocks: Numbers) -> Numbers:
        """Return the samples that are some blocks: (set, file, block, pass), shape (n, 4)."""
        number, file, block, passes = blocks.T
        samples: Numbers = passes * self.bounds[-1] + self.bounds[number] + file * self.num_blocks[number] + block
        return samples

    def blocks_of(self, samples: Numbers) -> Numbers:
        """Return (set, file, block, pass) of samples, shape (n, 4)."""
        passes, place = np.divmod(samples, self.bounds[-1])
        number = self.bounds.searchsorted(place, side="right") - 1
        file, block = np.divmod(place - self.bounds[number], self.num_blocks[number])
        return np.stack([number, file, block, passes], axis=1)

    @cached_property
    def groups(self) -> list[tuple[int, FileGroup]]:
        """Number of the set, and files that begin with the same text; their origins are read at the first use."""
        return [(number, group) for number, files in enumerate(self.files or ()) for group in group_files(files)]

    @cached_property
    def known(self) -> list[tuple[int, FileGroup, Order]]:
        """The groups whose dataset is known, with their orders: the sources."""
        return [(number, group, group.order) for number, group in self.groups if group.order is not None]

    @property
    def members(self) -> Sequence[Order]:  # type: ignore[override]
        return [order for _, _, order in self.known]

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Source of each file of all sets, -1 if it is not known, and the file's place there; shape (num_files, 2)."""
        places = np.full((int(self.first_files[-1]), 2), -1)
        for source, (number, group, _) in enumerate(self.known):
            own = self.first_files[number] + group.files
            places[own, 0], places[own, 1] = source, np.arange(len(own))
        return places

    @cached_property
    def first_files(self) -> Numbers:
        """Number of files of the sets before each set, and of all."""
        return np.cumsum([0, *(packed_set.num_files for packed_set in self.sets)])

    @property
    def identity(self) -> Any:
        return {"class": "PackedBlocks", "names": [*self.names], "sources": [each.identity for each in self.members]}

    @property
    def num_epochs(self) -> int:
        return 1

    def epochs(self, samples: Numbers) -> Numbers:
        passes: Numbers = samples // self.bounds[-1]
        return passes

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def list_sources(self) -> NDArray[np.int16]:
        return self.locate(np.arange(len(self)))[0].astype(np.int16)

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """Return the source of each sample, -1 if its dataset is not known, and its number there."""
        number, file, block, passes = self.blocks_of(samples).T
        source, place = self.places[self.first_files[number] + file].T
        sizes = np.array([len(group.files) for _, group, _ in self.known] or [1])[source]
        return source, (passes * sizes + place) * self.num_blocks[number] + block

    def spans(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        self.check_known(range(len(self.sets)))
        return super().spans(samples)

    def find(self, source: int, sequences: Numbers) -> Numbers:
        number, group, order = self.known[source]
        place, block = np.divmod(order.find(0, sequences), self.num_blocks[number])
        samples: Numbers = self.bounds[number] + group.files[place] * self.num_blocks[number] + block
        return samples

    def check_known(self, sets: Iterable[int]) -> None:
        """Raise ConfigError unless the documents of all files of some sets are known."""
        for number, group in self.groups:
            if group.problem and number in sets:
                raise ConfigError(group.problem)

    @property
    def sequence_length(self) -> int:
        """Number of input tokens of a block, whose last one is a label alone; 0 without files."""
        return self.files[0].block_size - 1 if self.files else 0
