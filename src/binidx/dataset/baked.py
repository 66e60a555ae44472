"""Dataset of a baked run: its samples, stored in the order in which the run consumes them.

DIR/baked.json                       description; written first
DIR/{first:012d}.bin .idx            samples from position `first` on, a sequence each: S tokens and the next one
DIR/{first:012d}-dataset_id.npy      of a blend: the dataset of each sample
DIR/complete.json                    the same as baked.json; written when all parts exist

Sample i is a byte range that follows from i: a process reads the description, the index of the first part for the dtype
of the tokens, and of the other parts only tokens, each part from its first use on.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.fill_in_middle import GPTFIMDatasetConfig
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, choose_pad_token
from binidx.dataset.megatron.ordered_dataset import SEVERAL, number_samples
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import ConfigError, FormatError, redacted
from binidx.format.idx import DType
from binidx.format.indexed_dataset import IndexedDataset
from binidx.html_table import format_html_table
from binidx.index.cache.index_files import parse_npy
from binidx.json_models import Count, JsonFile, Positive, tolerate_all
from binidx.native.gpt_samples import GPTRows
from binidx.order.order_protocols import Numbers
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.cache.memory import ForwardCache
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_document, read_whole
from binidx.storage.requests.cancellation import Scope
from binidx.storage.requests.remote_object import MAX_REQUEST, object_exists
from binidx.storage.stores.registry import join_uri
from binidx.storage.threads import OPENS


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
    """

    fingerprint: str
    first: Count
    stop: Count
    samples_per_part: Positive
    sequence_length: Positive
    add_extra_token: bool
    blended: bool

    def parts(self) -> list[range]:
        """Return the positions of each part."""
        firsts = range(self.first, self.stop, self.samples_per_part)
        return [range(first, min(first + self.samples_per_part, self.stop)) for first in firsts]

    @property
    def stored_length(self) -> int:
        """Number of stored tokens of each sample."""
        return self.sequence_length + self.add_extra_token

    def format(self) -> bytes:
        return (json.dumps({**BAKED_FILE.tags, **asdict(self)}, indent=1) + "\n").encode()


BAKED_FILE = JsonFile(
    Baked, {"binidx": "baked", "version": 1}, hint="needs a file written by binidx bake", tolerates=tolerate_all
)


def read_baked(file: Location) -> Baked:
    """Read a `baked.json`; raise FormatError if the file is none."""
    return BAKED_FILE.decode(read_document(BAKED_FILE, file), file.uri)


def check_bakeable(config: GPTDatasetConfig) -> None:
    """Raise ConfigError for samples that depend on the bounds of documents: a bake stores each as one sequence."""
    if config.inter_document_masking:
        raise ConfigError("inter_document_masking: found True, a baked run has no bounds of documents; train unbaked")


COMPLETE = "complete.json"


def part_prefix(directory: str, part: range) -> str:
    return join_uri(directory, f"{part.start:012d}")


class PositionedDataset(ABC):
    """Base of datasets of the samples of a run by position: sample i was served after i consumed samples.

    Args:
        directory: URI of what is stored of the run.
        config: config of the run.
        stored: description of what is stored.
        uri: of the description.
    """

    masks_ends = False
    """True if the last token of each piece has no label."""

    def __init__(self, directory: str, config: GPTDatasetConfig, stored: Baked, uri: str) -> None:
        self.directory, self.config, self.stored = directory, config, stored
        if isinstance(config, GPTFIMDatasetConfig):
            raise ConfigError("fim_rate: found fill in the middle, which a stored order lacks; train from the run")
        needed = (config.sequence_length, config.add_extra_token_to_sequence)
        found = (stored.sequence_length, stored.add_extra_token)
        if needed != found:
            raise ConfigError(f"{uri}: sequence_length and extra token (found {found}, need {needed}); write it again")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_samples", "_assemble")}

    def __len__(self) -> int:
        return self.stored.stop

    def __repr__(self) -> str:
        positions = f"positions {self.stored.first:,} to {self.stored.stop:,}"
        return f"{type(self).__name__}({redacted(self.directory)}, {positions} x {self.config.sequence_length:,})"

    def _repr_html_(self) -> str:
        rows = [("first position", self.stored.first), ("positions", len(self) - self.stored.first)]
        title = f"{type(self).__name__}: {redacted(self.directory)}"
        return format_html_table(title, [*rows, ("tokens a sample", self.config.sequence_length)])

    def __getitem__(self, idx: Any) -> Any:
        """Return a sample, or the list of the samples of a slice or of a list of positions, which are read at once."""
        if isinstance(idx, SEVERAL):
            return list(self.__getitems__(number_samples(idx, len(self))))
        return self.__getitems__([idx])[0]

    def __getitems__(self, idxs: Sequence[int]) -> Sequence[Sample]:
        """Return the samples at these positions, read at once.

        Raises:
            IndexError: a position is not stored.
        """
        positions, first, stop = np.asarray(idxs, np.int64), self.stored.first, self.stored.stop
        if len(positions) and not (first <= positions.min() and positions.max() < stop):
            raise IndexError(f"{self.directory}: positions {list(idxs)} not stored (found {first} to {stop})")
        samples, ids = self._read(positions)
        assert isinstance(samples, Samples)  # as GPTAssemble makes them
        numbers = {} if ids is None else {"dataset_id": ids.astype(np.int16)}
        return Samples(len(positions), samples.columns, samples.shared, numbers)

    @abstractmethod
    def _read(self, positions: Numbers) -> tuple[Sequence[Sample], NDArray[Any] | None]:
        """Return the samples at these positions, and the source of each; None if the run is no blend."""

    @cached_property
    def _assemble(self) -> GPTAssemble:
        pad = choose_pad_token(self.config.tokenizer, bool(self.config.allow_ambiguous_pad_tokens))
        return GPTAssemble.of(self.config, pad, masks_ends=self.masks_ends)


class BakedDataset(PositionedDataset):
    """Dataset of a run that `binidx bake` has stored in the order of its steps.

    Sample i is the one that the run's loaders served at position i (after i consumed samples), with any sampler. Read
    it with the "single" sampler, from any `consumed_samples`, on any number of ranks. `len()` is one past the last
    position; positions before the first stored one raise IndexError.

    Args:
        directory: URI of the baked run.
        config: config of the run. Its blend is not opened; sequence_length, extra token and masks must be the run's.

    Raises:
        ConfigError: the config has another sequence_length or extra token.
        FormatError: the description is invalid, or a part contradicts it.
        ObjectNotFoundError: the description or a part is missing: the bake has not finished.

    Example:
        >>> dataset = binidx.BakedDataset("s3://corpus/baked", config)
        >>> batch = dataset.__getitems__(range(1000, 1008))

    Source: ours.
    """

    RECORDED_NAME: ClassVar[str] = "BakedDataset"

    def __init__(self, directory: str, config: GPTDatasetConfig) -> None:
        folder = Location(directory, config.storage_options)
        check_bakeable(config)
        super().__init__(directory, config, read_baked(folder / "baked.json"), f"{folder / 'baked.json'}")
        self.parts = self.stored.parts()
        self.dtype = self._open(self.parts[0])
        if not object_exists(folder / COMPLETE):  # not yet, or by a version that did not write it
            OPENS.map(self._open, self.parts[1:])
        self.sample_bytes = self.stored.stored_length * self.dtype.itemsize
        sizes = [len(part) * self.sample_bytes for part in self.parts]
        files = [Location(part_prefix(directory, part), config.storage_options) + ".bin" for part in self.parts]
        readers = [
            LazyReader(file.uri, size, partial(open_part, file, size, config.mmap_bin_files))
            for file, size in zip(files, sizes, strict=True)
        ]
        self.reader: RangeReader = JoinedReader(directory, readers, sizes)
        self.is_uncached = folder.local_path is None and folder.settings.cache_dir is None
        self._ids: dict[int, NDArray[np.int16]] = {}

    def _read(self, positions: Numbers) -> tuple[Sequence[Sample], NDArray[Any] | None]:
        rows = GPTRows(self._assemble.recipe, len(positions))
        views, code = self.reader.read(self.locate(positions)), DType.code_from_dtype(self.dtype)
        bounds = np.arange(len(views) + 1)
        rows.fill(views, bounds, range(len(views)), dtype_code=code, item_bytes=self.dtype.itemsize)
        return self._assemble.finish(rows), self._find_ids(positions) if self.stored.blended else None

    def locate(self, positions: Numbers) -> list[Range]:
        """Return the byte range of each sample in all parts, one after the other."""
        starts = (positions - self.stored.first) * self.sample_bytes
        return list(zip(starts.tolist(), (starts + self.sample_bytes).tolist(), strict=True))

    def locate_bytes(self, samples: Numbers) -> Iterator[tuple[RangeReader, NDArray[np.int64], Numbers]]:
        """Yield where the tokens of samples are stored; see `OrderedDataset.locate_bytes`."""
        yield self.reader, np.array(self.locate(samples), np.int64).reshape(-1, 2), np.arange(len(samples))

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the stored tokens.

        Returns:
            One reader of all parts; a part is opened at its first read.
        """
        return [self.reader]

    def read_forward(self, num_ahead: int, scope: Scope) -> BakedDataset:
        """Return this dataset for reads in the order of its samples: whole extents are fetched ahead.

        Args:
            num_ahead: number of extents to fetch ahead, each of `MAX_REQUEST` bytes.
            scope: cancels the extents in flight.
        """
        forward = copy.copy(self)
        forward.reader = ForwardCache(self.reader, chunk_bytes=MAX_REQUEST, num_ahead=num_ahead, scope=scope)
        return forward

    def _open(self, part: range) -> np.dtype[Any]:
        """Return the dtype of a part; raise FormatError if its index contradicts the description."""
        prefix = part_prefix(self.directory, part)
        stored = IndexedDataset(prefix, storage_options=self.config.storage_options)
        lengths = stored.sequence_lengths
        if len(lengths) != len(part) or (lengths != self.stored.stored_length).any():
            needed = f"{len(part)} of {self.stored.stored_length} tokens"
            raise FormatError(f"{prefix}.idx: wrong sequences (found {len(lengths)}, need {needed}); bake it again")
        return np.dtype(stored.index.dtype)

    def _find_ids(self, positions: Numbers) -> NDArray[np.int16]:
        """Return the dataset_id of samples."""
        part, number = np.divmod(positions - self.stored.first, self.stored.samples_per_part)
        ids = np.empty(len(positions), np.int16)
        for own in np.unique(part).tolist():
            ids[part == own] = self._ids_of(own)[number[part == own]]
        return ids

    def _ids_of(self, number: int) -> NDArray[np.int16]:
        """Return the dataset_id of each sample of a part, which is read at its first use."""
        if (ids := self._ids.get(number)) is None:
            uri = f"{part_prefix(self.directory, self.parts[number])}-dataset_id.npy"
            file = open_object(uri, storage_options=self.config.storage_options, cache=False)
            ids = self._ids[number] = parse_npy(read_whole(file))
            if len(ids) != len(self.parts[number]):
                raise FormatError(f"{uri}: {len(ids)} dataset ids, need {len(self.parts[number])}; bake it again")
        return ids


def open_part(file: Location, size: int, mmap: bool) -> RangeReader:
    """Open the tokens of a part; raise FormatError if it has not `size` bytes."""
    reader = open_object(file, mmap=mmap)
    if reader.size != size:
        raise FormatError(f"{file}: wrong size (found {reader.size:,} bytes, need {size:,}); bake it again")
    return reader
