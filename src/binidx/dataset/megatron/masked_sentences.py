"""Megatron's base class of samples of whole sentences with some of their tokens masked."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.assemble.masking import CONTINUES, MASKING, MaskedPredictions, MaskedWordPieceDatasetConfig
from binidx.dataset.config import Split
from binidx.dataset.megatron.megatron_dataset import MegatronDataset, open_tokens
from binidx.dataset.megatron.ordered_dataset import index_array
from binidx.errors import IndexBuildError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.cache.array_writer import ArrayWriter, build_in_memory
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import Arrays, IndexFiles, recorded_name
from binidx.index.cache.manifest import describe_documents, get_origin
from binidx.index.documents import as_range
from binidx.index.masked_samples import ARRAYS, build_masked_sample_index, check_sample_index, plan_mapping, short_ratio
from binidx.native.mappings import MaskedDocuments
from binidx.order.sequences import SentenceOrder
from binidx.storage.location import Location
from binidx.storage.stores.registry import join_uri

SMALL = 2**15
"""Number of sentences, and of requested samples, up to which an index is built faster than a cache of it is opened."""


class MaskedWordPieceDataset(MegatronDataset):
    """Samples of neighbouring sentences (stored sequences) of one document, for subclasses to mask.

        sample i  ─ sample_index ─►  sentences first .. end - 1, and their target length  ─ .bin ─►  tokens

    A subclass sets `sample_index` by `_build_sample_index` in its `__init__`, makes samples in `assemble`, and returns
    the replacement of a masked token from `_get_token_mask`. Splits divide documents.

    Args:
        indexed_dataset: the `.bin`/`.idx` pair, a sequence per sentence.
        dataset_path: its prefix, as given by the user; part of the identity.
        indexed_indices: documents of the split, shape (num_in_split,) int32.
        num_samples: minimum number of samples; None is one epoch.
        index_split: the split.
        config: `MaskedWordPieceDatasetConfig`.

    Attributes:
        sample_index: (first sentence, end, target length in tokens) of each sample of whole epochs, shape
            (num_samples, 3).

    Raises:
        IndexBuildError: samples are requested of a split that has none (Megatron Core goes through 2^31 epochs).

    Source: Megatron Core, `MaskedWordPieceDataset`. Differences: a sample is a function of seed and number, also with
    `masking_do_permutation`, where Megatron Core draws n-grams from NumPy's global state, so that its samples differ
    from call to call; `num_samples` None is one epoch, as documented there (it raises TypeError).
    """

    config: MaskedWordPieceDatasetConfig
    dataset: IndexedDataset
    sample_index = index_array("sample_index")

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: MaskedWordPieceDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    def _list_sequences(self) -> range:
        bounds = self._bounds()
        return range(int(bounds[0]), int(bounds[-1]))

    def _open_order(self) -> SentenceOrder:
        return SentenceOrder(self._source, self.sample_identifiers)

    def _open_built_order(self, reserved_tokens: int, min_sentences: int) -> SentenceOrder:
        """Return the order of samples of `sequence_length` tokens, some of which are reserved, with its index."""
        order = MaskedWordPieceDataset._open_order(self)
        index = self._build_sample_index(self.config.sequence_length - reserved_tokens, min_sentences)
        order.set_arrays({"sample_index": index})
        return order

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of documents, which splits divide.

        Args:
            low_level_dataset: the `.bin`/`.idx` pair.

        Returns:
            Number of documents.
        """
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: MaskedWordPieceDatasetConfig) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair of a prefix.

        Args:
            dataset_path: prefix, a path or any URI.
            config: `mmap_bin_files` and `storage_options` are used.

        Returns:
            The opened pair.
        """
        return open_tokens(IndexedDataset, dataset_path, config)

    @property
    def token_lookup(self) -> list[int]:
        """All ids of the vocabulary, in the order of `inv_vocab`."""
        return self.config.vocabulary.ids

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MegatronDataset._key_config_attributes(), *MASKING]

    # Index

    def _build_sample_index(self, sequence_length: int, min_sentences_per_sample: int) -> NDArray[Any]:
        """Return the index of samples, from the cache or built.

        Args:
            sequence_length: maximum target length of a sample, in tokens.
            min_sentences_per_sample: minimum number of sentences of a sample.

        Returns:
            (first sentence, end, target length) of each sample, shape (num_samples, 3).
        """
        fingerprint = {
            "class": recorded_name(type(self)),
            "random_seed": self.config.random_seed,
            "sequence_length": sequence_length,
            "min_sentences_per_sample": min_sentences_per_sample,
            "short_sequence_probability": self.config.short_sequence_probability,
            "documents": describe_documents(as_range(self.indices)),
        }
        build = partial(self._build, sequence_length=sequence_length, min_sentences=min_sentences_per_sample)
        num_sentences = len(self._list_sequences())
        is_small = num_sentences <= SMALL and (self.num_samples or 0) <= SMALL
        if not is_small or self.config.cache_small_indices:
            return self._cache.load_or_build(self.unique_description, fingerprint, ARRAYS, build)["sample_index"]
        if self.config.trust_cache and (arrays := self._cache.load(fingerprint, ARRAYS)):
            return arrays["sample_index"]
        return build_in_memory(build)["sample_index"]

    @property
    def _cache(self) -> IndexCache:
        kind = recorded_name(type(self))
        directory = self.config.path_to_cache or join_uri(self.dataset.path_prefix, f"cache/{kind}_indices")
        return IndexCache(
            IndexFiles(Location(directory, self.config.storage_options), f"{self.unique_description_hash}-{kind}"),
            origin=get_origin(self.dataset),
            trusted=self._check_foreign if self.config.trust_cache else None,
            context=self.build_context,
            digests=self.index_digests,
        )

    def _bounds(self) -> NDArray[np.int64]:
        """Return the first sentence of each document of the split, then the end, shape (num_in_split + 1,)."""
        bounds, run = self.dataset.document_indices, as_range(self.indices)
        if len(run) == 0:
            return bounds[:1]
        if not isinstance(run, range):
            raise IndexBuildError(f"{self.dataset_path}: a split of documents with gaps, needs one run of them")
        return bounds[run.start : run.stop + 1]

    def _build(self, writer: ArrayWriter, sequence_length: int, min_sentences: int) -> None:
        documents = MaskedDocuments(
            self._bounds(),
            self.dataset.sequence_lengths,
            sequence_length=sequence_length,
            least=min_sentences,
            short_ratio=short_ratio(float(self.config.short_sequence_probability or 0)),
        )
        with self.naming_split():
            plan = plan_mapping(documents, self.config.random_seed, self.num_samples)
        build_masked_sample_index(writer, plan)

    def _check_foreign(self, arrays: Arrays) -> None:
        bounds = self._bounds()
        check_sample_index(arrays["sample_index"], int(bounds[0]), int(bounds[-1]), self.config.sequence_length)

    # Samples

    def _create_masked_lm_predictions(
        self, token_ids: Sequence[int] | NDArray[Any], target_sequence_length: int, numpy_random_state: RandomState
    ) -> MaskedPredictions:
        """Mask some of the tokens.

        Args:
            token_ids: tokens of the sample, shape (n,).
            target_sequence_length: target length of the sample in tokens.
            numpy_random_state: source of all draws.

        Returns:
            The tokens as the model sees them; positions of the masked tokens, increasing; their original tokens; for
            each token 1 if a word or a special token begins with it, else 0; positions and original tokens of each
            n-gram.

        Source: Megatron Core's method of this name, and its draws.
        """
        tokens = np.asarray(token_ids, np.int64)
        kinds = self.config.vocabulary.kinds(tokens)
        target = int(target_sequence_length)
        masked = self.config.masking.mask(tokens, kinds, target, numpy_random_state, self._get_token_mask)
        positions, labels = ([label[part] for label in masked.labels] for part in (0, 1))
        boundaries = (kinds != CONTINUES).astype(np.int64).tolist()
        return masked.tokens, positions, labels, boundaries, masked.spans

    @abstractmethod
    def _get_token_mask(self, numpy_random_state: RandomState) -> int | None:
        """Return the replacement of a masked token; None keeps the token."""
