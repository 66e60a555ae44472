"""The three indices of a GPT dataset: planned, found in the cache of the store, or built."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, GPTDatasetConfig
from binidx.dataset.megatron_dataset import MegatronDataset, describe, digest
from binidx.dataset.split import Split
from binidx.errors import IndexBuildError
from binidx.index.build_context import NOT_KEPT, Outcome
from binidx.index.building import Arrays, Building
from binidx.index.cache import IndexCache
from binidx.index.documents import Documents, kept
from binidx.index.epochs import EpochPlan, plan_epochs
from binidx.index.files import IndexFiles
from binidx.index.foreign import check_gpt_index
from binidx.index.gpt import ARRAYS, build_gpt_index
from binidx.index.growth import Order, order_of
from binidx.index.origin import describe_documents, origin_of
from binidx.index.sample import count_tokens
from binidx.native import RandomState
from binidx.storage.publish import join_uri

SMALL = 2**15
"""Documents of all epochs and samples: 0.2 ms of building, about what four small files take to open on a disk."""


class GPTIndexed(MegatronDataset):
    """A dataset over the sequences of one split with `document_index`, `sample_index` and `shuffle_index`.

    Source: Megatron Core, `GPTDataset._build_document_sample_shuffle_indices`.
    """

    config: GPTDatasetConfig
    document_index: NDArray[np.int32]
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]

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

    def _drop_last_partial(self) -> bool:
        return drops_last_partial(self.index_split, self.config)

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
                drop_last_partial=self._drop_last_partial(),
            )
        except IndexBuildError as error:
            raise IndexBuildError(
                f"{self.dataset_path}, {self.index_split.name} split of {len(self._documents)} sequences: {error}"
            ) from None


def drops_last_partial(split: Split, config: GPTDatasetConfig) -> bool:
    """Whether the end of an epoch that fills no sample is left out; else it is padded."""
    return split is not Split.valid or config.drop_last_partial_validation_sequence
