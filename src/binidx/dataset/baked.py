"""Dataset of a baked run: its samples, stored in the order in which the run consumes them.

DIR/baked.json                       description; written first
DIR/{first:012d}.bin .idx            samples from position `first` on, a sequence each: S tokens and the next one
DIR/{first:012d}-dataset_id.npy      of a blend: the dataset of each sample
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.fill_in_middle import GPTFIMDatasetConfig
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, choose_pad_token
from binidx.dataset.token_dataset import TokenDataset
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import ConfigError, FormatError, redacted
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.cache.index_files import parse_npy
from binidx.json_models import Count, JsonFile, Positive, tolerate_all
from binidx.order.blended_order import BakedOrder
from binidx.order.order_protocols import Numbers
from binidx.order.sequences import SequenceOrder
from binidx.order.source_order import StoredSource
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_document, read_whole
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

    def __getitem__(self, idx: int) -> Sample:
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
        uri = join_uri(directory, "baked.json")
        check_bakeable(config)
        super().__init__(directory, config, read_baked(Location(uri, config.storage_options)), uri)
        self.parts = OPENS.map(self._open, self.stored.parts())
        members = [SequenceOrder(StoredSource(part.path_prefix, part, range(len(part)))) for part in self.parts]
        positions = range(self.stored.first, self.stored.stop)
        self.order = BakedOrder(self.stored.fingerprint, positions, self.stored.samples_per_part, members)
        self.dataset_ids = self._dataset_ids() if self.stored.blended else None

    def _read(self, positions: Numbers) -> tuple[Sequence[Sample], NDArray[Any] | None]:
        ids = None if self.dataset_ids is None else self.dataset_ids[positions - self.stored.first]
        return self._samples.__getitems__(positions.tolist()), ids

    @cached_property
    def _samples(self) -> TokenDataset:
        return TokenDataset(self.order, self.parts, [self._assemble] * len(self.parts))

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the stored tokens.

        Returns:
            One reader for each part.
        """
        return [part.bin_reader for part in self.parts]

    def _open(self, part: range) -> IndexedDataset:
        prefix = part_prefix(self.directory, part)
        stored = IndexedDataset(prefix, mmap=self.config.mmap_bin_files, storage_options=self.config.storage_options)
        lengths = stored.sequence_lengths
        if len(lengths) != len(part) or (lengths != self.stored.stored_length).any():
            needed = f"{len(part)} of {self.stored.stored_length} tokens"
            raise FormatError(f"{prefix}.idx: wrong sequences (found {len(lengths)}, need {needed}); bake it again")
        return stored

    def _dataset_ids(self) -> NDArray[np.int16]:
        uris = [f"{part_prefix(self.directory, part)}-dataset_id.npy" for part in self.stored.parts()]
        options = self.config.storage_options
        parts = OPENS.map(
            lambda uri: parse_npy(read_whole(open_object(uri, storage_options=options, cache=False))), uris
        )
        ids: NDArray[np.int16] = np.concatenate([np.empty(0, np.int16), *parts])
        if len(ids) != self.stored.stop - self.stored.first:
            raise FormatError(f"{self.directory}: {len(ids)} dataset ids, need one for each sample; bake it again")
        return ids
