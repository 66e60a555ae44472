"""Order of a baked run, whose samples are stored one after the other: sample i is a range that follows from i.

DIR/baked.json                       description; written first, so that no directory holds parts of two runs
DIR/{first:012d}.bin .idx            samples from position `first` on, a sequence each: S tokens and the next one
DIR/{first:012d}-dataset_id.npy      of a blend: the dataset of each sample
DIR/complete.json                    the same as baked.json; written when all parts exist
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, FormatError, ObjectExistsError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import PlainTokens
from binidx.index.cache.index_files import parse_npy
from binidx.json_models import Count, JsonFile, Positive, tolerate_all
from binidx.order.opener import Opener
from binidx.order.order_protocols import Bounds, Numbers, Order, Source, Spans
from binidx.order.requests import Request, SourceRequest
from binidx.order.source_order import SourceOrder, StoredSource
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_document, read_whole
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import put_if_absent


@dataclass(frozen=True)
class Baked:
    """Contents of `baked.json`.

    Attributes:
        fingerprint: identity of the order that was baked; the states of loaders contain it.
        first, stop: positions of the run that are stored.
        samples_per_part: number of samples in each part (pair of files) but the last.
        sequence_length: number of tokens fed per sample, S.
        add_extra_token: whether the token after each sample is stored, too.
        blended: whether the samples have a dataset_id.
        options: fields of the config that decide on the order, but for the number of samples and, of a bake, the places
            of data; None in early ones. What an earlier version began goes on without them.
    """

    fingerprint: str
    first: Count
    stop: Count
    samples_per_part: Positive
    sequence_length: Positive
    add_extra_token: bool
    blended: bool
    options: Mapping[str, Any] | None = field(default=None, compare=False, kw_only=True)

    first_file: ClassVar[str] = "baked.json"
    last_file: ClassVar[str] = "complete.json"

    @property
    def json_file(self) -> JsonFile[Any]:
        """Kind of its files."""
        return BAKED_FILE

    def write_first(self, directory: Location) -> bytes:
        """Write the first file, unless it is there, and return its bytes, which are also those of the last file.

        Raises:
            ObjectExistsError: the directory holds another run.
        """
        file, data = directory / self.first_file, self.json_file.encode(self, "\n", indent=1)
        if put_if_absent(file, data):
            return data
        data = read_document(self.json_file, file)
        if self.json_file.decode(data, file.uri) != self:
            problem = "of another run, of other steps of it, or of data that changed since"
            raise ObjectExistsError(f"{file}: {problem}; write into another directory, or delete this one")
        return data

    def parts(self) -> list[range]:
        """Return the positions of each part."""
        firsts = range(self.first, self.stop, self.samples_per_part)
        return [range(first, min(first + self.samples_per_part, self.stop)) for first in firsts]

    @property
    def stored_length(self) -> int:
        """Number of stored tokens of each sample."""
        return self.sequence_length + self.add_extra_token

    def part_file(self, directory: Location, part: range) -> Location:
        """Return the prefix of the files of a part; of a read plan, its file."""
        return directory / f"{part.start:012d}"


BAKED_FILE = JsonFile(
    Baked, {"binidx": "baked", "version": 1}, hint="needs a file written by binidx prepare bake", tolerates=tolerate_all
)


@dataclass(frozen=True)
class StoredRequest(Request):
    """Base of requests of the samples of a run, by position, as they or their places are stored.

    The description of a stored run names its sources, and a request opens nothing: what depends on them is refused.

    Args:
        directory: of the stored run.
    """

    directory: Location

    inner_requests: ClassVar[Sequence[Request]] = ()
    file_name: ClassVar[str]

    @property
    def file(self) -> Location:
        """The description."""
        return self.directory / self.file_name

    @property
    def sources(self) -> Sequence[SourceRequest]:
        self._refuse()

    def map_sources(self, change: Callable[[SourceRequest], Request]) -> Request:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(f"order: found the stored run {self.directory}, needs sources; take the run that it is of")


@dataclass(frozen=True)
class BakedRequest(StoredRequest):
    """Samples of a run that `binidx prepare bake` has stored in the order of its steps."""

    file_name = Baked.first_file

    def open(self, opener: Opener) -> Order:
        """Return the `BakedOrder`; each part is opened at its first read.

        Raises:
            FormatError: the description is invalid, or a part contradicts it.
            ObjectNotFoundError: the description or a part is missing.
        """
        baked, uri = BAKED_FILE.decode(read_document(BAKED_FILE, self.file), self.file.uri), self.directory.uri
        files = [(part, baked.part_file(self.directory, part)) for part in baked.parts()]
        dtype = read_dtype(baked, *files[0])
        if not object_exists(self.directory / baked.last_file):  # not yet, or by a version that did not write it
            OPENS.map(lambda file: read_dtype(baked, *file), files[1:])
        sizes = [len(part) * baked.stored_length * dtype.itemsize for part, _ in files]
        readers = [
            LazyReader(f"{file}.bin", size, partial(open_part, file + ".bin", size, opener.mmap))
            for (_, file), size in zip(files, sizes, strict=True)
        ]
        tokens = PlainTokens(uri, dtype, JoinedReader(uri, readers, sizes))
        return BakedOrder(StoredSource(uri, tokens, range(1)), self.directory, baked)


def read_dtype(baked: Baked, part: range, prefix: Location) -> np.dtype[Any]:
    """Return the dtype of a part; raise FormatError if its index contradicts the description.

    Args:
        baked: the description.
        part: positions of the part.
        prefix: of its files.
    """
    stored = IndexedDataset(prefix.uri, storage_options=prefix.options)
    lengths = stored.sequence_lengths
    if len(lengths) != len(part) or (lengths != baked.stored_length).any():
        needed = f"{len(part)} of {baked.stored_length} tokens"
        raise FormatError(f"{prefix}.idx: wrong sequences (found {len(lengths)}, need {needed}); bake it again")
    return stored.dtype


def open_part(file: Location, size: int, mmap: bool) -> RangeReader:
    """Open the tokens of a part; raise FormatError if it has not `size` bytes."""
    reader = open_object(file, mmap=mmap)
    if reader.size != size:
        raise FormatError(f"{file}: wrong size (found {reader.size:,} bytes, need {size:,}); bake it again")
    return reader


class BakedOrder(SourceOrder):
    """Samples of a run by position, one after the other in one sequence: sample i was served after i consumed samples.

    Positions before the first stored one are no samples.

    Args:
        source: the tokens of all parts as one sequence.
        directory: of the baked run.
        baked: its description.
    """

    def __init__(self, source: Source, directory: Location, baked: Baked) -> None:
        super().__init__(source)
        self.directory, self.stored, self.parts = directory, baked, baked.parts()
        self._ids: dict[int, NDArray[np.int16]] = {}

    @property
    def identity(self) -> str:
        return self.stored.fingerprint

    def __len__(self) -> int:
        return self.stored.stop

    def candidates(self, sequences: Numbers) -> Numbers:
        return np.arange(self.stored.first, self.stored.stop)

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        spans, length = np.zeros((len(samples), 4), np.int64), self.stored.stored_length
        spans[:, 2], spans[:, 3] = (samples - self.stored.first) * length, length
        return spans, np.arange(len(samples) + 1)

    def find_ids(self, samples: Numbers) -> Numbers:
        """Return the dataset_id of samples of a blend, shape (B,)."""
        part, number = np.divmod(samples - self.stored.first, self.stored.samples_per_part)
        ids = np.empty(len(samples), np.int64)
        for own in {*part.tolist()}:  # a tenth of the time of `np.unique` for a batch
            rows = part == own
            ids[rows] = self._ids_of(own)[number[rows]]
        return ids

    def _ids_of(self, number: int) -> NDArray[np.int16]:
        """Return the dataset_id of each sample of a part, which is read at its first use."""
        if (ids := self._ids.get(number)) is None:
            reader = open_object(
                self.stored.part_file(self.directory, self.parts[number]) + "-dataset_id.npy", cache=False
            )
            ids = self._ids[number] = parse_npy(read_whole(reader))
            if len(ids) != len(self.parts[number]):
                raise FormatError(
                    f"{reader.uri}: {len(ids)} dataset ids, need {len(self.parts[number])}; bake it again"
                )
        return ids
