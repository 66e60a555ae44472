"""The three indices of a GPT dataset: planned, found in the cache of the store, or built.

GPT samples: S + 1 tokens cut from the shuffled, concatenated sequences.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, Bookends, GPTDatasetConfig, Split, split_range
from binidx.dataset.gpt_batch import (
    assemble_gpt_sample,
    build_attention_mask,
    gpt_recipe,
    read_gpt_batch,
    read_gpt_sample,
    read_gpt_text,
)
from binidx.dataset.megatron_dataset import MegatronDataset, Request, describe, digest, recorded_name, required
from binidx.dataset.torch_bridge import Sample, Tensor, as_tensor
from binidx.errors import ConfigError, IndexBuildError
from binidx.format.idx import DType, get_idx_path
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.format.ranged_arrays import CheckedIndex, RangedArray
from binidx.index.cache.array_reuse import OrderKey, order_of
from binidx.index.cache.build_context import NOT_KEPT, Outcome
from binidx.index.cache.building import Arrays, Building
from binidx.index.cache.index_cache import Access, IndexCache, has_fingerprint
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import ONE_EACH, Manifest, describe_documents, origin_of
from binidx.index.cache.megatron_cache import check_gpt_index
from binidx.index.document_sample import EpochPlan, count_tokens, plan_epochs
from binidx.index.documents import Documents, kept
from binidx.index.gpt_indices import ARRAYS, build_gpt_index
from binidx.native.gather import Recipe
from binidx.native.locate import Orders
from binidx.native.permutations import RandomState
from binidx.storage.requests.head import recorded_object
from binidx.storage.stores.identity import same_object
from binidx.storage.writing.publish import join_uri

Numbers = NDArray[np.int64]


SMALL = 2**15


"""Documents of all epochs and samples: 0.2 ms of building, about what four small files take to open on a disk."""


class Later:
    """Attribute that the constructor of a dataset sets or, after `open_later`, the first use of such an attribute."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, dataset: GPTIndexed | None, owner: type) -> Any:
        opened = {} if dataset is None or dataset.access == "load" else dataset._open()
        if self.name not in opened:
            raise AttributeError(f"{owner.__name__} has no {self.name}")
        return opened[self.name]


def later() -> Any:
    return Later()


class GPTIndexed(MegatronDataset):
    """A dataset over the sequences of one split with `document_index`, `sample_index` and `shuffle_index`.

    Source: Megatron Core, `GPTDataset._build_document_sample_shuffle_indices`.
    """

    config: GPTDatasetConfig
    access: Access = "load"
    dataset: IndexedDataset = later()
    document_index: NDArray[np.int32] = later()
    sample_index: NDArray[Any] = later()
    shuffle_index: NDArray[Any] = later()
    _documents: Documents = later()
    _bookends: Bookends
    _opening: Any

    @classmethod
    def open_later(
        cls, dataset_path: str, bookends: Bookends, num_samples: int | None, index_split: Split, config: Any
    ) -> Self:
        """Return a dataset that opens its files at the first use of its order, and reads ranges of them.

            manifest ─► its arrays and the .idx, pinned ─► shuffle_index of the samples ─► their rows of sample_index
                     ─► their slices of document_index ─► lengths of these sequences           four round trips

        Where no index is cached, or nothing proves that its arrays belong to the manifest, the dataset is opened as for
        training: its index is loaded whole, or built. The samples have no tokens: read their spans from `dataset`.

        Args:
            bookends: the part of the sequences that the split has.
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

    def _open(self) -> dict[str, Any]:
        """Open the files unless they are open, and return all attributes."""
        with self._opening:
            if "shuffle_index" not in vars(self):
                files = self._files(str(self.dataset_path))
                cache = IndexCache(files.directory, files.name, files.storage_options)
                if (arrays := cache.open_ranges(ARRAYS, self._open_dataset)) is None:
                    self._open_whole()
                else:
                    vars(self).update(arrays)
        return vars(self)

    def _open_whole(self) -> None:
        low_level = self.build_low_level_dataset(self.dataset_path, self.config)
        documents: Any = split_range(self._bookends, len(low_level))
        kind: Any = type(self)
        kind.__init__(self, low_level, self.dataset_path, documents, self.num_samples, self.index_split, self.config)

    def _open_dataset(self, manifest: Manifest) -> bool:
        """Open the dataset that an index was built of; False where the index is of other options or other data."""
        content, known = manifest.content, manifest.data.get("idx")
        checked = CheckedIndex(
            int(content["num_sequences"]), content["index_digest"], content.get(ONE_EACH, False),
            recorded_object(get_idx_path(str(self.dataset_path)), known),
        )
        documents = split_range(self._bookends, checked.num_sequences)
        if not has_fingerprint(manifest, self.fingerprint_of(documents, self.index_split, self.config)):
            return False
        dataset = IndexedDataset(
            str(self.dataset_path),
            mmap=self.config.mmap_bin_files,
            storage_options=self.config.storage_options,
            checked=checked,
        )
        if not same_object(known, origin_of(dataset).data()["idx"]):
            return False
        self.dataset, self._documents = dataset, documents
        return True

    @property
    def own_sequences(self) -> Documents:
        """`indices` as they are kept: of many that follow each other a range."""
        return self._documents

    @property
    def indices(self) -> NDArray[np.int32]:
        """The sequences of this split, shape (num_in_split,). Of many that follow each other only the ends are kept."""
        documents = self._documents
        return np.arange(documents.start, documents.stop, dtype=np.int32) if isinstance(documents, range) else documents

    @indices.setter
    def indices(self, documents: NDArray[np.int32] | range) -> None:
        self._documents: Documents = kept(documents)

    @property
    def num_tokens(self) -> int:
        """Of all epochs of the split, as samples are cut from them."""
        return self._plan.num_tokens

    @property
    def num_epochs(self) -> int:
        """How often the split's documents stand in `document_index`."""
        return len(self.document_index) // max(len(self._documents), 1)

    def epochs_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """How often the documents were gone through before each of these samples, as served; shape (n,)."""
        num_documents = len(self._documents)
        if len(self.document_index) == num_documents:
            return np.zeros_like(samples)
        places = self.sample_index[self.shuffle_index[samples], 0].astype(np.int64)
        epochs: NDArray[np.int64] = places // max(num_documents, 1)
        return epochs

    def _load_or_build(self) -> Arrays:
        """An index that is built sooner than a cache of it is opened has none, unless it is asked for."""
        if not self._is_small() or self.config.cache_small_indices:
            return self._cache.load_or_build(self.unique_description, self._fingerprint(), ARRAYS, self._build)
        if self.config.trust_cache and (found := self._cache.load(self._fingerprint(), ARRAYS)):
            return found
        self._build(building := Building())
        if self.build_context.on_outcome is not None:
            self.build_context.report(Outcome(self._cache.files, NOT_KEPT, 0.0))
        return building.arrays

    def _is_small(self) -> bool:
        if len(self._documents) > SMALL:
            return False
        return len(self._documents) * self._plan.num_epochs + self._plan.num_samples <= SMALL

    @property
    def _cache(self) -> IndexCache:
        files = self._files(self.dataset.path_prefix)
        return IndexCache(
            files.directory,
            files.name,
            files.storage_options,
            origin=origin_of(self.dataset),
            order=self._order,
            trusted=self._check_foreign if self.config.trust_cache else None,
            context=self.build_context,
        )

    def _files(self, prefix: str) -> IndexFiles:
        """Where the index of data under this prefix is cached."""
        return self._files_of(prefix, self.unique_description_hash, self.index_split, self.config)

    @classmethod
    def _files_of(cls, prefix: str, md5: str, split: Split, config: BlendedMegatronDatasetConfig) -> IndexFiles:
        directory = config.path_to_cache or join_uri(prefix, "cache", f"{recorded_name(cls)}_indices")
        return IndexFiles(directory, f"{md5}-{recorded_name(cls)}-{split.name}", config.storage_options)

    @classmethod
    def cached_in(
        cls, prefix: str, num_samples: int | None, split: Split, config: BlendedMegatronDatasetConfig
    ) -> IndexFiles | None:
        return cls._files_of(prefix, digest(describe(cls.identify(prefix, num_samples, split, config))), split, config)

    def _fingerprint(self) -> dict[str, Any]:
        return self.fingerprint_of(self._documents, self.index_split, self.config)

    @classmethod
    def fingerprint_of(cls, documents: Documents, split: Split, config: GPTDatasetConfig) -> dict[str, Any]:
        """What the arrays depend on, besides the data and how many samples are asked for."""
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
        return order_of(
            self._plan, self.config.sequence_length, add_extra_token=self.config.add_extra_token_to_sequence
        )

    def _check_foreign(self, arrays: Arrays) -> None:
        extra = self.config.add_extra_token_to_sequence
        check_gpt_index(arrays, self.dataset.sequences, self._documents, self.config.sequence_length, extra)

    def _build(self, building: Building) -> None:
        plan = self._plan
        if self._is_small():
            self._build_planned(building, plan, 1)
            return
        with self.build_context.threads(self.config.num_dataset_builder_threads) as threads:
            self._build_planned(building, plan, threads)

    def _build_planned(self, building: Building, plan: EpochPlan, threads: int) -> None:
        build_gpt_index(
            building,
            self.dataset.sequence_lengths,
            self._documents,
            plan,
            RandomState(self.config.random_seed),
            self.config.sequence_length,
            add_extra_token=self.config.add_extra_token_to_sequence,
            threads=threads,
        )

    @property
    def _plan(self) -> EpochPlan:
        # No cached_property: before Python 3.12 it holds one lock for all datasets while one of them counts.
        made = vars(self)
        if "_plan" not in made:
            made["_plan"] = self._plan_in_threads()
        found: EpochPlan = made["_plan"]
        return found

    def _plan_in_threads(self) -> EpochPlan:
        if len(self._documents) <= SMALL:
            return self._plan_epochs(1)
        with self.build_context.threads(self.config.num_dataset_builder_threads) as threads:
            return self._plan_epochs(threads)

    def _plan_epochs(self, threads: int) -> EpochPlan:
        tokens_per_epoch = count_tokens(self.dataset.sequence_lengths, self._documents, threads=threads)
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
                f"{self.dataset_path}, {self.index_split.name} split of {len(self._documents)} sequences: {error}"
            ) from None


@dataclass(frozen=True)
class RangedOrders:
    """`native.Orders` over `RangedArray`s: reads the parts of the arrays that some samples need, and gives them to C.

    arrays: shuffle_index, sample_index and document_index.
    dataset: of the sequences that document_index names.
    add_extra_token: as of Orders.
    """

    arrays: tuple[Any, Any, Any]
    dataset: IndexedDataset
    add_extra_token: bool

    def spans(self, served: Sequence[int] | Numbers) -> tuple[Numbers, Numbers]:
        """Return (sequence, first token, tokens), shape (n, 3), and the bounds of each sample, as Orders does.

        Raises:
            IndexError: there is no such sample.
            IndexBuildError: the indices do not belong together.
        """
        orders, sequences = self._parts(served)
        spans, bounds = orders.spans(range(len(orders.arrays[0])))
        spans[:, 0] = sequences[spans[:, 0]]
        return spans, bounds

    def ends(
        self, served: Sequence[int] | Numbers
    ) -> tuple[Numbers, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Return the bounds, sequences, starts and stops of samples, as Orders does."""
        orders, sequences = self._parts(served)
        bounds, numbers, starts, stops = orders.ends(range(len(orders.arrays[0])))
        return bounds, sequences[numbers], starts, stops

    def _parts(self, served: Sequence[int] | Numbers) -> tuple[Orders, NDArray[np.int32]]:
        """The orders of these samples alone, and the numbers of the sequences, which they count from 0."""
        shuffle_index, sample_index, document_index = self.arrays
        count = len(shuffle_index)
        numbers = np.asarray(served, np.int64).reshape(-1)
        if len(numbers) and not -count <= numbers.min() <= numbers.max() < count:
            raise IndexError(f"samples {numbers.min()} to {numbers.max()}, there are {count}")
        rows = shuffle_index[numbers % max(count, 1)].astype(np.int64)
        try:
            ends = sample_index[np.stack([rows, rows + 1], axis=1)].reshape(-1, 2)
            first, stop = ends[::2, 0].astype(np.int64), ends[1::2, 0].astype(np.int64) + 1
            sequences, place = np.unique(document_index.runs(first, stop), return_inverse=True)
            some = self.dataset.sequences_at(sequences.astype(np.int64))
        except IndexError as error:
            raise IndexBuildError(f"the indices do not belong together: {error}") from error
        # Sample i has rows 2 i and 2 i + 1, and its documents follow those of the sample before.
        before = np.cumsum(stop - first) - (stop - first)
        ends[::2, 0], ends[1::2, 0] = before, before + (stop - first) - 1
        arrays = np.arange(0, len(ends), 2, dtype=np.uint32), ends, place.reshape(-1).astype(np.int32)
        return Orders(*arrays, some, add_extra_token=self.add_extra_token), sequences


def drops_last_partial(split: Split, config: GPTDatasetConfig) -> bool:
    """Whether the end of an epoch that fills no sample is left out; else it is padded."""
    return split is not Split.valid or config.drop_last_partial_validation_sequence


FIT_INT32 = {DType.code_from_dtype(dtype) for dtype in (np.uint8, np.int8, np.int16, np.int32, np.uint16)}


class GPTDataset(GPTIndexed):
    """Samples of `sequence_length` tokens and their labels, in Megatron Core's order.

        sample i  ─ shuffle_index ─►  rows j and j+1 of sample_index: where it starts and ends in document_index
                  ─ document_index ─►  spans of sequences  ─ .bin ─►  tokens

    A sample is a dict of tensors, each of shape (S,): `tokens`, `labels`, `position_ids` int64, `loss_mask` float32,
    and `attention_mask` bool (1, S, S) on request, True where attention is forbidden. With `inter_document_masking`
    instead of the mask, both int32: `cu_seqlens` (S + 1,), where each document starts and then S to the end, and
    `max_seqlen` (), tokens of the longest; and positions start again with each document.

    The tensors of a batch share one block of memory, which lives as long as one of them does.

    Raises:
        IndexBuildError: the split has no tokens, and samples were asked of it (Megatron loops for ever).

    Source: Megatron Core, `GPTDataset`. Differences: counts stay integers (its count of a partial last sample goes
    through float32), a stale index cache is rebuilt instead of served, and the loss mask of a padded sample stays its
    own (when Megatron serves a padded sample first, it keeps that mask for all others).
    """

    RECORDED_NAME: ClassVar[str] = "GPTDataset"

    takes_a_range = True
    """`indexed_indices` may be one: see `split_range`."""

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self._keep_index(self._load_or_build())

    def _keep_index(self, arrays: Arrays) -> None:
        self.document_index, self.sample_index, self.shuffle_index = (arrays[name] for name in ARRAYS)

    def __getstate__(self) -> dict[str, Any]:
        # What is bound for C holds addresses of this process.
        return {name: value for name, value in vars(self).items() if name not in ("_orders", "recipe")}

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Sequences: GPT divides by sequence, not by document."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair under a prefix, at any URI.

        Raises:
            ConfigError: `sequences_per_dataset` lacks the prefix, or says otherwise than its header.
        """
        prefix = required(dataset_path)
        opened = IndexedDataset(prefix, mmap=config.mmap_bin_files, storage_options=config.storage_options)
        if config.sequences_per_dataset:
            check_counts(opened, config.sequences_per_dataset.get(prefix))
        return opened

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    # Samples

    def spans(self, idx: int | None) -> list[Span]:
        """(sequence, first token, tokens) of each piece; `idx` counts in shuffled order, None is sample 0."""
        return [(sequence, first, count) for sequence, first, count in self.orders.spans([idx or 0])[0].tolist()]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Tokens and labels, padded to S, with masks and positions."""
        return assemble_gpt_sample(self, idx, sequences)

    def read_one(self, idx: int | None) -> Sample:
        return super().read_one(idx) if self._has_own_ways() else read_gpt_sample(self, idx)

    @classmethod
    def read_together(cls, requests: Sequence[Request], num_rows: int) -> Sequence[Sample]:
        """The samples of a batch, filled by C.

        By `spans` and `assemble` where a subclass has its own, or where the datasets do not share a config.
        """
        if cls._has_own_ways() or len({id(dataset.config) for dataset, *_ in requests}) != 1:
            return super().read_together(requests, num_rows)
        return read_gpt_batch(requests, num_rows)

    @classmethod
    def _has_own_ways(cls) -> bool:
        return (cls.spans, cls.assemble) != (GPTDataset.spans, GPTDataset.assemble)

    def read_tokens(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Samples as their tokens alone: int32, shape (B, S + 1), for trainers that shift by themselves.

        `text[:, :-1]` are the tokens and `text[:, 1:]` the labels, both views. A pad is the tokenizer's pad id, or -1
        where it has none, as a label or a token: mask these labels, and map these tokens to one that the embedding has.
        There are pads in a partial last validation sample, and in the last column without the extra token.

        Raises:
            ConfigError: the tokens are stored as float or int64, or a subclass has its own samples.

        Source: ours; a seventh of the bytes of `__getitems__`.
        """
        return self.read_tokens_together([(self, idxs, range(len(idxs)))], len(idxs))

    @classmethod
    def read_tokens_together(cls, requests: Sequence[Request], num_rows: int) -> NDArray[np.int32]:
        if cls._has_own_ways() or len({id(dataset.config) for dataset, *_ in requests}) != 1:
            raise ConfigError(f"{cls.__name__}: tokens alone need one config, and samples that are GPTDataset's own")
        for dataset, *_ in requests:
            if dataset.dataset.sequences.dtype_code not in FIT_INT32:
                raise ConfigError(
                    f"{dataset.dataset_path}: tokens are {dataset.dataset.index.dtype.__name__}, int32 needs integers "
                    "of up to 32 bits; take the samples, whose tokens are int64"
                )
        return read_gpt_text(requests, num_rows)

    @property
    def orders(self) -> Orders:
        """The three indices and the sequences, bound for C; anew when one of them was replaced.

        `RangedOrders` where the indices are read by ranges.
        """
        arrays = self.shuffle_index, self.sample_index, self.document_index
        bound = self.__dict__.get("_orders")
        if bound is None or any(map(operator.is_not, bound.arrays, arrays)):
            extra = self.config.add_extra_token_to_sequence
            if isinstance(self.shuffle_index, RangedArray):
                bound = RangedOrders(arrays, self.dataset, extra)
            else:
                bound = Orders(*arrays, self.dataset.sequences, add_extra_token=extra)
            self._orders = bound
        return cast(Orders, bound)

    @cached_property
    def recipe(self) -> Recipe:
        """What C makes of the stored tokens."""
        return gpt_recipe(self.config, self._pad_token_id)

    @cached_property
    def shared_attention_mask(self) -> Tensor:
        """Forbids the future, shape (1, S, S). One for all samples, as Megatron's: it is too large to make anew."""
        return as_tensor(build_attention_mask(np.arange(self.config.sequence_length)))


def check_counts(dataset: IndexedDataset, needed: Sequence[int] | None) -> None:
    """ConfigError unless a dataset has as many sequences and document bounds as its config says."""
    found = dataset.index.sequence_count, dataset.index.document_count
    said = tuple(needed) if isinstance(needed, Sequence) else "nothing" if needed is None else needed
    if said != found:
        raise ConfigError(
            f"sequences_per_dataset: says {said} of {dataset.path_prefix}, whose .idx has {found} sequences and bounds"
        )
