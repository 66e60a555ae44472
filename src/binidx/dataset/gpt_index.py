"""The document, sample and shuffle index of a GPT dataset: loaded from the cache, built, or read by ranges."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import Bookends, GPTDatasetConfig, Split, split_range
from binidx.dataset.megatron_dataset import MegatronDataset, digest, recorded_name
from binidx.errors import IndexBuildError
from binidx.format.idx import get_idx_path
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.ranged_arrays import CheckedIndex
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import NOT_KEPT, Access, IndexCache, Outcome, has_fingerprint
from binidx.index.cache.index_files import Arrays, IndexFiles
from binidx.index.cache.manifest import ONE_EACH, Manifest, describe_documents, get_origin
from binidx.index.cache.order_record import OrderKey, get_order_key
from binidx.index.document_sample import EpochPlan, count_tokens, plan_epochs
from binidx.index.documents import Documents, compact_documents
from binidx.index.gpt_indices import ARRAYS, build_gpt_index, check_gpt_index
from binidx.native.gpt_samples import Orders
from binidx.native.permutations import RandomState
from binidx.storage.requests.remote_object import recorded_object
from binidx.storage.stores.identity import same_object
from binidx.storage.stores.registry import join_uri

Numbers = NDArray[np.int64]
SMALL = 2**15
"""Number of samples, and documents of all epochs, up to which an index is not cached: building it takes 0.2 ms, as does
opening four small files on a disk."""


STRETCH = 1 << 22
"""Number of index elements searched together, so that intermediate results stay small."""

LAZY = ("dataset", "own_sequences", *ARRAYS)


class GPTIndices(MegatronDataset):
    """A dataset over the sequences of one split, with `document_index`, `sample_index` and `shuffle_index`.

    Attributes:
        document_index: sequence numbers in reading order over all epochs, shape (E·D,), int32.
        sample_index: position in document_index and token offset where each sample starts, shape (num_samples + 1, 2).
        shuffle_index: row of sample_index of each served sample, shape (num_samples,).
        own_sequences: the sequences of the split; a range if they are many and consecutive.
        access: "load" for whole arrays, "ranges" after `open_later`.

    Source: Megatron Core, `GPTDataset._build_document_sample_shuffle_indices`.
    """

    config: GPTDatasetConfig
    access: Access = "load"
    dataset: IndexedDataset
    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]
    own_sequences: Documents
    _bookends: Bookends
    _opening: Any

    @classmethod
    def open_later(
        cls, dataset_path: str, bookends: Bookends, num_samples: int | None, index_split: Split, config: Any
    ) -> Self:
        """Return a dataset that opens its index files at the first use, and reads ranges of them.

            manifest ─► its arrays and the .idx, pinned ─► shuffle_index of the samples ─► their rows of sample_index
                     ─► their slices of document_index ─► lengths of these sequences           four round trips

        If no index is cached, or its arrays cannot be proven to belong to the manifest, the dataset is opened as for
        training: its index is loaded whole, or built. A dataset that reads ranges serves spans (`orders.spans`), not
        samples.

        Args:
            dataset_path: prefix of the data.
            bookends: start and end of the split in the sequences, each from 0 to 1.
            num_samples: the least number of samples; None is one epoch.
            index_split: the split.
            config: as for the constructor.

        Returns:
            The dataset; no request has been made.
        """
        dataset = cls.__new__(cls)
        dataset.dataset_path, dataset.num_samples = dataset_path, num_samples
        dataset.index_split, dataset.config = index_split, config
        dataset.access, dataset._bookends, dataset._opening = "ranges", bookends, threading.RLock()
        dataset.unique_identifiers = dataset._identifiers()
        return dataset

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.access == "load":
            return super().__reduce_ex__(protocol)
        arguments = self.dataset_path, self._bookends, self.num_samples, self.index_split, self.config
        return type(self).open_later, arguments

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """After `open_later`, open the index files at the first use of one of the attributes LAZY."""
            if name in LAZY and self.access == "ranges":
                self._open()
            if name not in vars(self):
                raise AttributeError(f"{type(self).__name__} has no {name}")
            return vars(self)[name]

    def _describe_samples(self) -> str:
        # After `open_later`, the number of samples would be a request.
        return super()._describe_samples() if "sample_index" in vars(self) else "not open"

    def _open(self) -> None:
        """Open the index files, or load or build the index whole; does nothing if that is done."""
        with self._opening:
            if "shuffle_index" not in vars(self):
                prefix = str(self.dataset_path)
                files = self.name_files(prefix, self.unique_description, self.index_split, self.config)
                cache = IndexCache(files.directory, files.name, files.storage_options)
                if (arrays := cache.open_ranges(ARRAYS, self._open_dataset)) is None:
                    self._open_whole()
                else:
                    vars(self).update(arrays)

    def _open_whole(self) -> None:
        low_level = self.build_low_level_dataset(self.dataset_path, self.config)
        documents: Any = split_range(self._bookends, len(low_level))
        kind: Any = type(self)
        kind.__init__(self, low_level, self.dataset_path, documents, self.num_samples, self.index_split, self.config)

    def _open_dataset(self, manifest: Manifest) -> bool:
        """Open the dataset that an index was built from; return False if the index has other options or other data."""
        content, recorded = manifest.content, manifest.data.get("idx")
        checked = CheckedIndex(
            int(content["num_sequences"]),
            content["index_digest"],
            content.get(ONE_EACH, False),
            recorded_object(get_idx_path(str(self.dataset_path)), recorded),
        )
        documents = split_range(self._bookends, checked.num_sequences)
        if not has_fingerprint(manifest, self.get_fingerprint(documents, self.index_split, self.config)):
            return False
        dataset = IndexedDataset(
            str(self.dataset_path),
            mmap=self.config.mmap_bin_files,
            storage_options=self.config.storage_options,
            checked=checked,
        )
        if not same_object(recorded, get_origin(dataset).data()["idx"]):
            return False
        self.dataset, self.own_sequences = dataset, documents
        return True

    @property
    def indices(self) -> NDArray[np.int32]:
        """The sequences of this split, shape (num_in_split,), int32; a new array if they are stored as a range."""
        own = self.own_sequences
        return np.arange(own.start, own.stop, dtype=np.int32) if isinstance(own, range) else own

    @indices.setter
    def indices(self, documents: NDArray[np.int32] | range) -> None:
        self.own_sequences = compact_documents(documents)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all epochs of the split."""
        return self._plan.num_tokens

    @property
    def num_epochs(self) -> int:
        """Number of epochs in `document_index`."""
        return len(self.document_index) // max(len(self.own_sequences), 1)

    def find_samples(self, sequences: Numbers) -> Numbers:
        """Return the samples that may hold a token of some sequences, by one pass over each array.

        Args:
            sequences: their numbers, ascending.

        Returns:
            Positions in serving order, ascending.
        """
        places = find_positions(self.document_index, sequences)
        # Row j ends where row j + 1 starts, and may take its last token from there: both ends count.
        # Searched for values of its own type, or all of it would be converted to another.
        starts, kind = self.sample_index[:, 0], self.sample_index.dtype
        first = np.maximum(starts.searchsorted((places - 1).astype(kind), side="right") - 1, 0)
        last = np.minimum(starts.searchsorted(places.astype(kind), side="right"), len(self.sample_index) - 1)
        rows = [np.arange(low, high) for low, high in zip(first.tolist(), last.tolist(), strict=True)]
        return find_positions(self.shuffle_index, np.unique(np.concatenate([np.empty(0, np.int64), *rows])))

    def find_epochs(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the epoch in which each of these served samples starts.

        Args:
            samples: positions in serving order, shape (n,).

        Returns:
            Numbers of epochs, from 0, shape (n,), int64.
        """
        num_documents = len(self.own_sequences)
        if len(self.document_index) == num_documents:
            return np.zeros_like(samples)
        positions = self.sample_index[self.shuffle_index[samples], 0].astype(np.int64)
        epochs: NDArray[np.int64] = positions // max(num_documents, 1)
        return epochs

    def _load_or_build(self) -> Arrays:
        """Load or build the arrays. A small index, built faster than fetched, is not cached by default."""
        if not self._is_small() or self.config.cache_small_indices:
            return self._cache.load_or_build(self.unique_description, self._fingerprint(), ARRAYS, self._build)
        if self.config.trust_cache and (found := self._cache.load(self._fingerprint(), ARRAYS)):
            return found
        self._build(writer := ArrayWriter())
        if self.build_context.on_outcome is not None:
            self.build_context.report(Outcome(self._cache.files, NOT_KEPT, 0.0))
        return writer.arrays

    def _is_small(self) -> bool:
        if len(self.own_sequences) > SMALL:
            return False
        return len(self.own_sequences) * self._plan.num_epochs + self._plan.num_samples <= SMALL

    @property
    def _cache(self) -> IndexCache:
        files = self.name_files(self.dataset.path_prefix, self.unique_description, self.index_split, self.config)
        return IndexCache(
            files.directory,
            files.name,
            files.storage_options,
            origin=get_origin(self.dataset),
            order=self._order,
            trusted=self._check_foreign if self.config.trust_cache else None,
            context=self.build_context,
        )

    @classmethod
    def name_files(cls, prefix: str, description: str, split: Split, config: GPTDatasetConfig) -> IndexFiles:
        """Return the cache files of an index, whether or not they exist.

        Args:
            prefix: of the data.
            description: `unique_description` of the dataset.
            split: the split.
            config: options of the run.

        Returns:
            The files of the index, in `path_to_cache` or beside the data.
        """
        directory = config.path_to_cache or join_uri(prefix, "cache", f"{recorded_name(cls)}_indices")
        return IndexFiles(directory, f"{digest(description)}-{recorded_name(cls)}-{split.name}", config.storage_options)

    def _fingerprint(self) -> dict[str, Any]:
        return self.get_fingerprint(self.own_sequences, self.index_split, self.config)

    @classmethod
    def get_fingerprint(cls, documents: Documents, split: Split, config: GPTDatasetConfig) -> dict[str, Any]:
        """Return the options that determine the arrays, besides the data and the number of samples.

        Args:
            documents: the sequences of the split.
            split: the split.
            config: options of the run.

        Returns:
            JSON values by name, as a manifest stores them.
        """
        return {
            "class": recorded_name(cls),
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "documents": describe_documents(documents),
            "add_extra_token_to_sequence": config.add_extra_token_to_sequence,
            "drop_last_partial_sequence": drops_last_partial(split, config),
        }

    @property
    def order_identity(self) -> dict[str, Any]:
        return {**self._fingerprint(), **self._order().fields, "data": self.dataset.identity}

    def _order(self) -> OrderKey:
        return get_order_key(
            self._plan, self.config.sequence_length, add_extra_token=self.config.add_extra_token_to_sequence
        )

    def _check_foreign(self, arrays: Arrays) -> None:
        extra = self.config.add_extra_token_to_sequence
        check_gpt_index(arrays, self.dataset.sequences, self.own_sequences, self.config.sequence_length, extra)

    def _build(self, writer: ArrayWriter) -> None:
        plan = self._plan
        with self.build_context.threads(self.config.num_dataset_builder_threads) as threads:
            build_gpt_index(
                writer,
                self.dataset.sequence_lengths,
                self.own_sequences,
                plan,
                RandomState(self.config.random_seed),
                self.config.sequence_length,
                add_extra_token=self.config.add_extra_token_to_sequence,
                threads=threads,
            )

    @property
    def _plan(self) -> EpochPlan:
        # No cached_property: before Python 3.12 it holds one lock for all datasets while one of them counts.
        attributes = vars(self)
        if "_plan" not in attributes:
            with self.build_context.threads(self.config.num_dataset_builder_threads) as threads:
                attributes["_plan"] = self._plan_epochs(threads)
        plan: EpochPlan = attributes["_plan"]
        return plan

    def _plan_epochs(self, threads: int) -> EpochPlan:
        tokens_per_epoch = count_tokens(self.dataset.sequence_lengths, self.own_sequences, threads=threads)
        try:
            return plan_epochs(
                tokens_per_epoch,
                self.config.sequence_length,
                self.num_samples,
                add_extra_token=self.config.add_extra_token_to_sequence,
                drop_last_partial=drops_last_partial(self.index_split, self.config),
            )
        except IndexBuildError as error:
            raise IndexBuildError(
                f"{self.dataset_path}, {self.index_split.name} split of {len(self.own_sequences)} sequences: {error}"
            ) from None


@dataclass(frozen=True)
class RangedOrders:
    """`Orders` over `RangedArray`s: reads the parts of the arrays that the requested samples need.

    Args:
        arrays: shuffle_index, sample_index and document_index.
        dataset: the dataset of the sequences that document_index refers to.
        add_extra_token: as for Orders.
    """

    arrays: tuple[Any, Any, Any]
    dataset: IndexedDataset
    add_extra_token: bool

    def spans(self, served: Sequence[int] | Numbers) -> tuple[Numbers, Numbers]:
        """Return the spans of samples, shape (n, 3), and their bounds, as `Orders.spans` does."""
        orders, sequences = self._parts(served)
        spans, bounds = orders.spans(range(len(orders.arrays[0])))
        spans[:, 0] = sequences[spans[:, 0]]
        return spans, bounds

    def ends(
        self, served: Sequence[int] | Numbers
    ) -> tuple[Numbers, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return the bounds, sequences, starts and stops of samples, as `Orders.ends` does."""
        orders, sequences = self._parts(served)
        bounds, numbers, starts, stops = orders.ends(range(len(orders.arrays[0])))
        return bounds, sequences[numbers], starts, stops

    def _parts(self, served: Sequence[int] | Numbers) -> tuple[Orders, NDArray[np.int32]]:
        """Return `Orders` of these samples, which counts their sequences from 0, and the real sequence numbers."""
        shuffle_index, sample_index, document_index = self.arrays
        count = len(shuffle_index)
        numbers = np.asarray(served, np.int64).reshape(-1)
        if len(numbers) and not -count <= numbers.min() <= numbers.max() < count:
            raise IndexError(f"samples {numbers.min()} to {numbers.max()}: out of range (there are {count})")
        rows = shuffle_index[numbers % max(count, 1)].astype(np.int64)
        try:
            ends = sample_index[np.stack([rows, rows + 1], axis=1)].reshape(-1, 2)
            first, stop = ends[::2, 0].astype(np.int64), ends[1::2, 0].astype(np.int64) + 1
            sequences, positions = np.unique(document_index.runs(first, stop), return_inverse=True)
            some = self.dataset.sequences_at(sequences.astype(np.int64))
        except IndexError as error:
            raise IndexBuildError(f"the index arrays contradict each other: {error}") from error
        # Sample i has rows 2 i and 2 i + 1, and its documents follow those of the sample before.
        before = np.cumsum(stop - first) - (stop - first)
        ends[::2, 0], ends[1::2, 0] = before, before + (stop - first) - 1
        arrays = np.arange(0, len(ends), 2, dtype=np.uint32), ends, positions.reshape(-1).astype(np.int32)
        return Orders(*arrays, some, add_extra_token=self.add_extra_token), sequences


def drops_last_partial(split: Split, config: GPTDatasetConfig) -> bool:
    """Return whether the tokens after the last full sample are dropped; else they become a padded sample."""
    return split is not Split.valid or config.drop_last_partial_validation_sequence


def find_positions(index: NDArray[Any], values: Numbers) -> Numbers:
    """Return, in ascending order, the positions at which an index holds one of `values`."""
    if not len(values):
        return np.empty(0, np.int64)
    found = [first + np.flatnonzero(np.isin(part, values)) for first, part in stretches(index)]
    return np.concatenate([np.empty(0, np.int64), *found])


def stretches(index: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the parts of `STRETCH` elements of an index, each with the number of its first element."""
    for first in range(0, len(index), STRETCH):
        yield first, index[first : first + STRETCH]
