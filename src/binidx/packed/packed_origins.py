"""Documents in packed files: an order of the blocks of files that `binidx pack` made of a dataset.

    packed/train.packed.json    beside the files of `binidx pack`: {"dataset": "s3://corpus/en", ...}
    stream      d0 d0 d0 / d1 d1 / d2 d2 d2 d2 /      the dataset's documents, each with a separator if one was added
    files       |0         |1           |2            chunk_size tokens each, blocks from their first token on

The lengths of documents are those of the dataset's `.idx`, which must be there; no token is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ObjectNotFoundError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import index_of
from binidx.json_models import JsonFile, Positive
from binidx.order.order_protocols import Bounds, Numbers, Spans
from binidx.order.source_order import SourceOrder, StoredSource, join_ranges, sorted_unique
from binidx.packed.packed_files import PackedFiles
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.writing.publish import create_object

FILE_NAME = re.compile(r"(.*)_(\d{10})\.bin")
SUFFIX = ".packed.json"
TAGS = {"binidx": "packed", "version": 1}


@dataclass(frozen=True)
class PackedOrigin:
    """The dataset of which `binidx pack` made files.

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
        with create_object(directory / f"{name}{SUFFIX}") as out:
            out.write((json.dumps({**TAGS, **asdict(self)}, indent=1) + "\n").encode())


ORIGIN_FILE = JsonFile(PackedOrigin, TAGS)


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

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        starts, lengths = self.starts(samples), self.source.dataset.sequence_lengths
        first, stop = (self.find_sequences(starts + ahead) for ahead in (1, self.block_size))
        first = np.maximum(first - 1, 0)
        owner, sequence = np.repeat(np.arange(len(samples)), stop - first), join_ranges(first, stop)
        begins, start = self.sequence_starts(sequence), starts[owner]
        skipped = np.maximum(start - begins, 0)
        count = np.minimum(lengths[sequence], start + self.block_size - begins) - skipped
        rows = np.stack([0 * sequence, sequence, skipped, count], axis=1)[count > 0]
        return rows, np.searchsorted(owner[count > 0], np.arange(len(samples) + 1))

    def place_spans(self, samples: Numbers, spans: Spans, bounds: Bounds) -> Numbers:
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
        return FileGroup(own, None, f"{name}: is not named as binidx pack names files, so its documents are not known")
    try:
        origin = ORIGIN_FILE.decode(read_document(ORIGIN_FILE, Location(f"{name}{SUFFIX}", options)), name)
        dataset = IndexedDataset(origin.dataset, storage_options=options)
    except ObjectNotFoundError:
        return FileGroup(own, None, f"{name}{SUFFIX}: not found, so the documents of its files are not known")
    source = StoredSource(origin.dataset, dataset, range(len(dataset)))
    order = BlockOrder(source, origin, np.array([*numbers.values()]), files.block_size, files.num_blocks)
    return FileGroup(own, order)
