"""Documents in packed files: which are in a block, and which blocks have a document.

    packed/train.packed.json    beside the files of `binidx pack`: {"dataset": "s3://corpus/en", ...}
    stream      d0 d0 d0 / d1 d1 / d2 d2 d2 d2 /      the dataset's documents, each with a separator if one was added
    files       |0         |1           |2            chunk_size tokens each, blocks from their first token on

The lengths of documents are those of the dataset's `.idx`, which must be there; no token is read.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.format.idx import SequenceIndex
from binidx.format.indexed_dataset import IndexedDataset
from binidx.json_models import JsonFile, Positive
from binidx.packed.packed_files import PackedFiles
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.writing.publish import create_object

Rows = NDArray[np.int64]
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


def stream_end(index: SequenceIndex, document: int, separators: bool) -> int:
    """Return the number of tokens of the stream up to the end of a document, its separator included."""
    return index.tokens_before(int(index.document_indices[document + 1])) + separators * (document + 1)


@dataclass(frozen=True)
class PackedDocuments:
    """Documents of the blocks of one set of packed files.

    Args:
        files: the set.

    Raises:
        ConfigError: at the first question about a file without an origin.
    """

    files: PackedFiles
    _datasets: dict[str, tuple[PackedOrigin, IndexedDataset] | None] = field(
        default_factory=dict, init=False, compare=False
    )

    @cached_property
    def numbers(self) -> Mapping[str, Mapping[int, int]]:
        """First part of the files' names -> number in the name -> number of the file in the set."""
        numbers: dict[str, dict[int, int]] = {}
        for file, uri in enumerate(self.files.uris):
            name, number = self._name(uri)
            numbers.setdefault(name, {})[number] = file
        return numbers

    @staticmethod
    def _name(uri: str) -> tuple[str, int]:
        if (found := FILE_NAME.fullmatch(uri)) is None:
            raise ConfigError(f"{uri}: is not named as binidx pack names files, so its documents are not known")
        return found[1], int(found[2])

    def origin(self, name: str) -> tuple[PackedOrigin, IndexedDataset]:
        """Return the origin of the files whose names begin so, and its dataset."""
        if (found := self._find_origin(name)) is None:
            raise ConfigError(f"{name}{SUFFIX}: not found, so the documents of its files are not known")
        return found

    def _find_origin(self, name: str) -> tuple[PackedOrigin, IndexedDataset] | None:
        if name not in self._datasets:
            options = self.files.storage_options
            try:
                origin = ORIGIN_FILE.decode(read_document(ORIGIN_FILE, Location(f"{name}{SUFFIX}", options)), name)
                self._datasets[name] = origin, IndexedDataset(origin.dataset, storage_options=options)
            except ObjectNotFoundError:
                self._datasets[name] = None
        return self._datasets[name]

    def check_known(self) -> None:
        """Raise ConfigError unless the origins of all files are known."""
        for name in self.numbers:
            self.origin(name)

    @property
    def datasets(self) -> dict[str, IndexedDataset]:
        """The datasets of which files were made by their prefix, as far as they are known."""
        names = dict.fromkeys(found[1] for uri in self.files.uris if (found := FILE_NAME.fullmatch(uri)))
        return {
            origin.dataset: dataset for name in names for origin, dataset in filter(None, [self._find_origin(name)])
        }

    def documents(self, file: int, block: int) -> tuple[str | None, list[tuple[int, int, int, int]]]:
        """Return the dataset of a block, and its pieces of documents as `DocumentSpans` has them; None if unknown."""
        named = FILE_NAME.fullmatch(self.files.uris[file])
        if named is None or (found := self._find_origin(named[1])) is None:
            return None, []
        origin, dataset = found
        start = int(named[2]) * origin.chunk_size + block * self.files.block_size
        stop, index, separators = start + self.files.block_size, dataset.index, origin.add_separator
        count, pieces = len(index.document_indices) - 1, []
        document = bisect.bisect_right(range(count), start, key=lambda each: stream_end(index, each, separators))
        while document < count:
            begin = stream_end(index, document - 1, separators) if document else 0
            if begin >= stop:
                break
            end = stream_end(index, document, separators) - separators
            first, last = max(begin, start), min(end, stop)
            if first < last:
                pieces.append((document, first - begin, last - first, first - start))
            document += 1
        return origin.dataset, pieces

    def blocks_of(self, documents: Sequence[int], prefix: str | None = None) -> Rows:
        """Return the blocks with a token of one of these documents of a dataset: file, block; shape (n, 2).

        Args:
            documents: numbers of documents.
            prefix: the dataset; None if the set is made of one.
        """
        rows, size = [], self.files.block_size
        for name, numbers in self.numbers.items():
            origin, dataset = self.origin(name)
            if prefix not in (None, origin.dataset):
                continue
            index, chunk = dataset.index, origin.chunk_size
            for document in documents:
                if not 0 <= document < (count := len(index.document_indices) - 1):
                    raise ConfigError(f"{origin.dataset}: document {document}, it has {count:,}, counted from 0")
                begin = stream_end(index, document - 1, origin.add_separator) if document else 0
                end = stream_end(index, document, origin.add_separator) - origin.add_separator
                for number in range(begin // chunk, -(-end // chunk)):
                    first = max(begin - number * chunk, 0)
                    last = min(end - number * chunk, self.files.num_blocks * size)
                    blocks = range(first // size, -(-last // size)) if first < last else range(0)
                    rows += [(numbers[number], block) for block in blocks if number in numbers]
        return np.array(rows, np.int64).reshape(-1, 2)
