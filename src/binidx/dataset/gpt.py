"""GPT samples: S + 1 tokens cut from the shuffled, concatenated sequences."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, GPTDatasetConfig
from binidx.dataset.gpt_batch import (
    assemble_gpt_sample,
    gpt_recipe,
    read_gpt_batch,
    read_gpt_sample,
    read_gpt_text,
)
from binidx.dataset.masks import build_attention_mask
from binidx.dataset.megatron_dataset import MegatronDataset, Request, describe, digest, required
from binidx.dataset.split import Split
from binidx.dataset.torch_bridge import Sample, Tensor, as_tensor
from binidx.errors import ConfigError, IndexBuildError
from binidx.format.idx import DType
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.index.budget import threads_here
from binidx.index.building import Arrays, Building
from binidx.index.cache import IndexCache
from binidx.index.documents import Documents, kept
from binidx.index.epochs import EpochPlan, plan_epochs
from binidx.index.files import IndexFiles
from binidx.index.foreign import check_gpt_index
from binidx.index.gpt import ARRAYS, build_gpt_index
from binidx.index.growth import Order, order_of
from binidx.index.origin import describe_documents, origin_of
from binidx.index.outcome import NOT_KEPT, Outcome, tell
from binidx.index.sample import count_tokens
from binidx.native import Orders, RandomState
from binidx.native.gather import Recipe
from binidx.storage.publish import join_uri

FIT_INT32 = {DType.code_from_dtype(dtype) for dtype in (np.uint8, np.int8, np.int16, np.int32, np.uint16)}
SMALL = 2**15
"""Documents of all epochs and samples: 0.2 ms of building, about what four small files take to open on a disk."""


class GPTDataset(MegatronDataset):
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

    takes_a_range = True
    """`indexed_indices` may be one: see `split_range`."""

    config: GPTDatasetConfig
    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]

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
        arrays = self._load_or_build()
        self.document_index, self.sample_index, self.shuffle_index = (arrays[name] for name in ARRAYS)

    def __getstate__(self) -> dict[str, Any]:
        # What is bound for C holds addresses of this process.
        return {name: value for name, value in vars(self).items() if name not in ("_orders", "recipe")}

    @property
    def indices(self) -> NDArray[np.int32]:
        """The sequences of this split, shape (num_in_split,). Of many that follow each other only the ends are kept."""
        documents = self._documents
        return np.arange(documents.start, documents.stop, dtype=np.int32) if isinstance(documents, range) else documents

    @indices.setter
    def indices(self, documents: NDArray[np.int32] | range) -> None:
        self._documents: Documents = kept(documents)

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

    # Indices

    def _drop_last_partial(self) -> bool:
        return drops_last_partial(self.index_split, self.config)

    def _load_or_build(self) -> Arrays:
        """An index that is built sooner than a cache of it is opened has none, unless it is asked for."""
        if not self._is_small() or self.config.cache_small_indices:
            return self._cache.load_or_build(self.unique_description, self._fingerprint(), ARRAYS, self._build)
        if self.config.trust_cache and (found := self._cache.load(self._fingerprint(), ARRAYS)):
            return found
        self._build(building := Building())
        tell(lambda: Outcome(self._cache.files, NOT_KEPT, 0.0))
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
        )

    def _files(self, prefix: str) -> IndexFiles:
        """Where the index of data under this prefix is cached."""
        return self._files_of(prefix, self.unique_description_hash, self.index_split, self.config)

    @classmethod
    def _files_of(cls, prefix: str, md5: str, split: Split, config: BlendedMegatronDatasetConfig) -> IndexFiles:
        directory = config.path_to_cache or join_uri(prefix, "cache", f"{cls.__name__}_indices")
        return IndexFiles(directory, f"{md5}-{cls.__name__}-{split.name}", config.storage_options)

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
            "class": cls.__name__,
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
            "documents": describe_documents(documents),
            "add_extra_token_to_sequence": config.add_extra_token_to_sequence,
            "drop_last_partial_sequence": drops_last_partial(split, config),
        }

    @property
    def order_identity(self) -> dict[str, Any]:
        return {**self._fingerprint(), **self._order().fields, "data": self.dataset.identity}

    def _order(self) -> Order:
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
        with threads_here(self.config.num_dataset_builder_threads) as threads:
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
        with threads_here(self.config.num_dataset_builder_threads) as threads:
            return self._plan_epochs(threads)

    def _plan_epochs(self, threads: int) -> EpochPlan:
        tokens_per_epoch = count_tokens(self.dataset.sequence_lengths, self._documents, threads=threads)
        try:
            return plan_epochs(
                tokens_per_epoch,
                self.config.sequence_length,
                self.num_samples,
                add_extra_token=self.config.add_extra_token_to_sequence,
                drop_last_partial=self._drop_last_partial(),
            )
        except IndexBuildError as error:
            raise IndexBuildError(
                f"{self.dataset_path}, {self.index_split.name} split of {len(self._documents)} sequences: {error}"
            ) from None

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
        """The three indices and the sequences, bound for C; anew when one of them was replaced."""
        arrays = self.shuffle_index, self.sample_index, self.document_index
        bound = self.__dict__.get("_orders")
        if bound is None or any(map(operator.is_not, bound.arrays, arrays)):
            extra = self.config.add_extra_token_to_sequence
            bound = self._orders = Orders(*arrays, self.dataset.sequences, add_extra_token=extra)
        return cast(Orders, bound)

    @cached_property
    def recipe(self) -> Recipe:
        """What C makes of the stored tokens."""
        return gpt_recipe(self.config, self._pad_token_id)

    @cached_property
    def shared_attention_mask(self) -> Tensor:
        """Forbids the future, shape (1, S, S). One for all samples, as Megatron's: it is too large to make anew."""
        return as_tensor(build_attention_mask(np.arange(self.config.sequence_length)))


def drops_last_partial(split: Split, config: GPTDatasetConfig) -> bool:
    """Whether the end of an epoch that fills no sample is left out; else it is padded."""
    return split is not Split.valid or config.drop_last_partial_validation_sequence


def check_counts(dataset: IndexedDataset, needed: Sequence[int] | None) -> None:
    """ConfigError unless a dataset has as many sequences and document bounds as its config says."""
    found = dataset.index.sequence_count, dataset.index.document_count
    if needed is None or tuple(needed) != found:
        said = "nothing" if needed is None else tuple(needed)
        raise ConfigError(
            f"sequences_per_dataset: says {said} of {dataset.path_prefix}, whose .idx has {found} sequences and bounds"
        )
