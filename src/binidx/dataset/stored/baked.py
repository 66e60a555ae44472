"""Dataset of a baked run: its samples, stored in the order in which the run consumes them.

A process reads the description, the index of the first part for the dtype of the tokens, and of the other parts only
tokens, each part from its first use on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.fill_in_middle import GPTFIMDatasetConfig
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, choose_pad_token
from binidx.dataset.megatron.ordered_dataset import SEVERAL, number_samples
from binidx.dataset.token_dataset import TokenDataset, locate_stored
from binidx.dataset.torch_bridge import Sample, Samples
from binidx.errors import ConfigError, FormatError, redacted
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import PlainTokens, StoredTokens
from binidx.html_table import format_html_table
from binidx.order.order_protocols import Numbers
from binidx.order.source_order import StoredSource
from binidx.order.stored.baked_order import COMPLETE, Baked, BakedOrder, part_prefix, read_baked
from binidx.order.stored.planned_order import PlannedOrder
from binidx.storage.adapters import JoinedReader, LazyReader
from binidx.storage.cache.memory import ForwardCache
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.cancellation import Scope
from binidx.storage.requests.remote_object import MAX_REQUEST, object_exists
from binidx.storage.threads import OPENS


class StoredRunDataset(TokenDataset):
    """Base of datasets of the samples of a run by position: sample i was served after i consumed samples.

    Args:
        directory: URI of what is stored of the run.
        config: config of the run.
        order: order of the stored positions.
    """

    order: BakedOrder | PlannedOrder

    def __init__(self, directory: str, config: GPTDatasetConfig, order: BakedOrder | PlannedOrder) -> None:
        self.directory, self.config, self.stored = directory, config, order.stored
        pad = choose_pad_token(config.tokenizer, bool(config.allow_ambiguous_pad_tokens))
        assemble = GPTAssemble.of(config, pad, masks_ends=order.ends_documents)
        super().__init__(order, [source.dataset for source in order.sources], [assemble] * len(order.sources))

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

    def __getitems__(self, idxs: Sequence[Any]) -> Sequence[Sample]:
        """Return the samples at these positions, read at once.

        Raises:
            IndexError: a position is not stored.
        """
        positions, first, stop = np.asarray(idxs, np.int64), self.stored.first, self.stored.stop
        if len(positions) and not (first <= positions.min() and positions.max() < stop):
            raise IndexError(f"{self.directory}: positions {list(idxs)} not stored (found {first} to {stop})")
        sources, samples = self.read_with_sources(idxs)
        if self.stored.blended:
            assert isinstance(samples, Samples)  # as GPTAssemble makes them
            samples.numbers = {"dataset_id": self._find_ids(positions, sources).astype(np.int16)}
        return samples

    def _find_ids(self, positions: Numbers, sources: Numbers) -> Numbers:
        """Return the dataset_id of samples of a blend, shape (B,): their source in the order, unless it has one."""
        return sources

    def locate_bytes(self, samples: Numbers) -> Iterator[tuple[RangeReader, NDArray[np.int64], Numbers]]:
        """Yield where the tokens of samples are stored; see `locate_stored`."""
        return locate_stored(self.order, self.tokens, samples)

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the stored tokens.

        Returns:
            One reader for each source, of all its files; a file is opened at its first read.
        """
        return [tokens.bin_reader for tokens in self.tokens if isinstance(tokens, StoredTokens)]


def check_stored(config: GPTDatasetConfig, stored: Baked, uri: str) -> None:
    """Raise ConfigError unless a config makes the samples of a stored run.

    Args:
        config: config of the run.
        stored: description of what is stored.
        uri: of the description.
    """
    if isinstance(config, GPTFIMDatasetConfig):
        raise ConfigError("fim_rate: found fill in the middle, which a stored order lacks; train from the run")
    needed = (config.sequence_length, config.add_extra_token_to_sequence)
    found = (stored.sequence_length, stored.add_extra_token)
    if needed != found:
        raise ConfigError(f"{uri}: sequence_length and extra token (found {found}, need {needed}); write it again")


def check_bakeable(config: GPTDatasetConfig) -> None:
    """Raise ConfigError for samples that depend on the bounds of documents: a bake stores each as one sequence."""
    if config.inter_document_masking:
        raise ConfigError("inter_document_masking: found True, a baked run has no bounds of documents; train unbaked")


class BakedDataset(StoredRunDataset):
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
        baked = read_baked(folder / "baked.json")
        check_stored(config, baked, f"{folder / 'baked.json'}")
        files = [(part, Location(part_prefix(directory, part), config.storage_options)) for part in baked.parts()]
        self.dtype = read_dtype(baked, *files[0])
        if not object_exists(folder / COMPLETE):  # not yet, or by a version that did not write it
            OPENS.map(lambda file: read_dtype(baked, *file), files[1:])
        self.sample_bytes = baked.stored_length * self.dtype.itemsize
        sizes = [len(part) * self.sample_bytes for part, _ in files]
        readers = [
            LazyReader(f"{file}.bin", size, partial(open_part, file + ".bin", size, config.mmap_bin_files))
            for (_, file), size in zip(files, sizes, strict=True)
        ]
        self.reader: RangeReader = JoinedReader(directory, readers, sizes)
        self.is_uncached = folder.local_path is None and folder.settings.cache_dir is None
        source = StoredSource(directory, PlainTokens(directory, self.dtype, self.reader), range(1))
        super().__init__(directory, config, BakedOrder(source, folder, baked))

    def _find_ids(self, positions: Numbers, sources: Numbers) -> Numbers:
        assert isinstance(self.order, BakedOrder)
        return self.order.find_ids(positions)

    def read_forward(self, num_ahead: int, scope: Scope) -> BakedDataset:
        """Return this dataset for reads in the order of its samples: whole extents are fetched ahead.

        Args:
            num_ahead: number of extents to fetch ahead, each of `MAX_REQUEST` bytes.
            scope: cancels the extents in flight.
        """
        forward = copy.copy(self)
        reader = ForwardCache(self.reader, chunk_bytes=MAX_REQUEST, num_ahead=num_ahead, scope=scope)
        forward.tokens = [PlainTokens(self.directory, self.dtype, reader)]
        return forward


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
