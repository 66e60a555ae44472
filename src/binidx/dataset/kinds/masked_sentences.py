"""Samples of whole sentences with some of their tokens hidden: what BERT and T5 share."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig
from binidx.dataset.kinds.masking import CONTINUES, Masking, Vocabulary, random_state
from binidx.dataset.megatron_dataset import MegatronDataset, recorded_name, required
from binidx.errors import ConfigError, IndexBuildError
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.index.cache.building import Arrays, Building
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.manifest import describe_documents, origin_of
from binidx.index.documents import compact
from binidx.index.masked_samples import ARRAYS, build_masked_sample_index, check_sample_index, plan_mapping, short_ratio
from binidx.native.mappings import MaskedDocuments
from binidx.storage.writing.publish import join_uri

SMALL = 2**15


"""Sentences of the split, and samples asked of it, that are cut sooner than a cache is opened."""


logger = logging.getLogger(__name__)


Predictions = tuple[list[int], list[int], list[int], list[int], list[tuple[list[int], list[int]]]]


@dataclass
class MaskedWordPieceDatasetConfig(BlendedMegatronDatasetConfig):
    """What masked samples need to know besides; all of it must be given.

    Args:
        masking_probability: share of the tokens that are hidden, above 0 and below 1.
        short_sequence_probability: share of the samples that aim at fewer tokens than fit, 0 to 1.
        masking_max_ngram: words of the longest n-gram that is hidden.
        masking_do_full_word: hide whole words; False hides pieces.
        masking_do_permutation: shuffle as many tokens again among themselves.
        masking_use_longer_ngrams: draw long n-grams more often, instead of short ones.
        masking_use_geometric_distribution: draw n as SpanBERT does; excludes `masking_do_permutation`.

    The tokenizer is of WordPiece: it gives `inv_vocab` (id -> piece, "##" before what carries a word on), `cls`, `sep`,
    `mask`, `pad`.

    Raises:
        ConfigError: one of these is missing or out of its bounds.

    Source: Megatron Core, `MaskedWordPieceDatasetConfig`.
    """

    masking_probability: float | None = None
    short_sequence_probability: float | None = None
    masking_max_ngram: int | None = None
    masking_do_full_word: bool | None = None
    masking_do_permutation: bool | None = None
    masking_use_longer_ngrams: bool | None = None
    masking_use_geometric_distribution: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        must_be_given(self, "tokenizer", *MASKING)
        must_lie("masking_probability", self.masking_probability, lambda p: 0 < p < 1, "above 0 and below 1")
        must_lie("short_sequence_probability", self.short_sequence_probability, lambda p: 0 <= p <= 1, "0 to 1")
        must_lie("masking_max_ngram", self.masking_max_ngram, lambda n: n > 0, "at least 1")
        if self.masking_use_geometric_distribution and self.masking_do_permutation:
            raise ConfigError(
                "masking_use_geometric_distribution: excludes masking_do_permutation; give one or the other"
            )
        if self.masking_use_geometric_distribution and self.masking_use_longer_ngrams:
            logger.warning("masking_use_longer_ngrams: of no effect beside masking_use_geometric_distribution")

    @cached_property
    def masking(self) -> Masking:
        """The options as `dataset.masking` takes them."""
        return Masking(
            probability=float(self.masking_probability or 0),
            max_ngram=int(self.masking_max_ngram or 0),
            whole_words=bool(self.masking_do_full_word),
            permutation=bool(self.masking_do_permutation),
            longer_ngrams=bool(self.masking_use_longer_ngrams),
            geometric=bool(self.masking_use_geometric_distribution),
        )

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Of the tokenizer; one for all datasets of this config."""
        return Vocabulary(self.tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        # A worker makes its own: the pieces of 250,000 tokens are 20 ms of work, and 2 MB to send.
        return {name: value for name, value in vars(self).items() if name not in ("masking", "vocabulary")}


MASKING = [
    "masking_probability",
    "short_sequence_probability",
    "masking_max_ngram",
    "masking_do_full_word",
    "masking_do_permutation",
    "masking_use_longer_ngrams",
    "masking_use_geometric_distribution",
]


"""The fields that are part of the identity, in the order that is hashed."""


def must_be_given(config: Any, *names: str) -> None:
    """Raise ConfigError for a field that is None."""
    for name in names:
        if getattr(config, name) is None:
            raise ConfigError(f"{name}: must be given for {type(config).__name__}")


def must_lie(name: str, value: Any, holds: Callable[[Any], bool], needed: str) -> None:
    """Raise ConfigError for a value out of its bounds."""
    if not holds(value):
        raise ConfigError(f"{name}: found {value}, needs {needed}")


class MaskedWordPieceDataset(MegatronDataset):
    """Samples of neighbouring sentences (stored sequences) of one document, for subclasses to mask.

        sample i  ─ sample_index ─►  sentences first .. end - 1, and the tokens they aim at  ─ .bin ─►  tokens

    A subclass calls `_build_sample_index` from its `__init__`, makes samples in `assemble`, and says what stands in the
    place of a hidden token in `_get_token_mask`. Splits divide documents.

    Attributes:
        sample_index: (first sentence, end, tokens aimed at) of each sample, shape (num_samples, 3): whole epochs.

    Raises:
        IndexBuildError: samples are asked of a split that has none (Megatron goes through 2^31 epochs).

    Source: Megatron Core, `MaskedWordPieceDataset`. Differences: `num_samples` None is one epoch, as it says there (it
    raises TypeError); with `masking_do_permutation` its samples differ from call to call, as it draws n-grams from
    NumPy's global state; here they are drawn from the sample's own. A sample is a function of seed and number.
    """

    config: MaskedWordPieceDatasetConfig
    sample_index: NDArray[Any]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Documents."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: MaskedWordPieceDatasetConfig) -> IndexedDataset:
        """Open the `.bin`/`.idx` pair under a prefix, at any URI."""
        return IndexedDataset(
            required(dataset_path), mmap=config.mmap_bin_files, storage_options=config.storage_options
        )

    @property
    def token_lookup(self) -> list[int]:
        """All ids of the vocabulary."""
        return self.config.vocabulary.ids

    @staticmethod
    def _key_config_attributes() -> list[str]:
        return [*MegatronDataset._key_config_attributes(), *MASKING]

    def __len__(self) -> int:
        return len(self.sample_index)

    # Index

    def _build_sample_index(self, sequence_length: int, min_sentences_per_sample: int) -> NDArray[Any]:
        """The `sample_index` of samples that aim at so many tokens: out of the cache, or built for it."""
        fingerprint = {
            "class": recorded_name(type(self)),
            "random_seed": self.config.random_seed,
            "sequence_length": sequence_length,
            "min_sentences_per_sample": min_sentences_per_sample,
            "short_sequence_probability": self.config.short_sequence_probability,
            "documents": describe_documents(compact(self.indices)),
        }

        def build(building: Building) -> None:
            self._build(building, sequence_length, min_sentences_per_sample)

        if not self._is_small() or self.config.cache_small_indices:
            arrays = self._cache.load_or_build(self.unique_description, fingerprint, ARRAYS, build)
            return arrays["sample_index"]
        if self.config.trust_cache and (found := self._cache.load(fingerprint, ARRAYS)):
            return found["sample_index"]
        build(building := Building())
        return building.arrays["sample_index"]

    @property
    def _cache(self) -> IndexCache:
        prefix = join_uri(self.dataset.path_prefix, "cache", f"{recorded_name(type(self))}_indices")
        return IndexCache(
            self.config.path_to_cache or prefix,
            f"{self.unique_description_hash}-{recorded_name(type(self))}",
            self.config.storage_options,
            origin=origin_of(self.dataset),
            trusted=self._check_foreign if self.config.trust_cache else None,
            context=self.build_context,
        )

    def _is_small(self) -> bool:
        bounds = self._bounds()
        return bounds[-1] - bounds[0] <= SMALL and (self.num_samples or 0) <= SMALL

    def _bounds(self) -> NDArray[np.int64]:
        """First sentence of each document of the split, and the end, shape (num_in_split + 1,)."""
        bounds, run = self.dataset.document_indices, compact(self.indices)
        if len(run) == 0:
            return bounds[:1]
        if not isinstance(run, range):
            raise IndexBuildError(f"{self.dataset_path}: a split of documents with gaps, needs one run of them")
        return bounds[run.start : run.stop + 1]

    def _build(self, building: Building, sequence_length: int, least: int) -> None:
        documents = MaskedDocuments(
            self._bounds(),
            self.dataset.sequence_lengths,
            sequence_length=sequence_length,
            least=least,
            short_ratio=short_ratio(float(self.config.short_sequence_probability or 0)),
        )
        try:
            plan = plan_mapping(documents, self.config.random_seed, self.num_samples)
        except IndexBuildError as error:
            raise IndexBuildError(f"{self.dataset_path}, {self.index_split.name} split: {error}") from None
        build_masked_sample_index(building, plan)

    def _check_foreign(self, arrays: Arrays) -> None:
        bounds = self._bounds()
        check_sample_index(arrays["sample_index"], int(bounds[0]), int(bounds[-1]), self.config.sequence_length)

    # Samples

    def row(self, idx: int | None) -> tuple[int, int, int]:
        """(number of the sample, its first sentence, the end); None is sample 0.

        Raises:
            IndexError: there is no such sample.
        """
        number = 0 if idx is None else int(idx)
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {idx}, there are {len(self)}")
        number %= len(self)
        first, end, _ = self.sample_index[number].tolist()
        return number, first, end

    def spans(self, idx: int | None) -> list[Span]:
        """Whole sentences."""
        _, first, end = self.row(idx)
        lengths = self.dataset.sequence_lengths[first:end].tolist()
        return [(sentence, 0, length) for sentence, length in zip(range(first, end), lengths, strict=True)]

    @contextmanager
    def draws(self, idx: int | None) -> Iterator[tuple[int, RandomState]]:
        """Tokens that the sample aims at, and for the block its random state, of the seed and its number alone."""
        number = self.row(idx)[0]
        with random_state((self.config.random_seed + number) % 2**32) as rng:
            yield int(self.sample_index[number, 2]), rng

    def _create_masked_lm_predictions(
        self, token_ids: Sequence[int] | NDArray[Any], target_sequence_length: int, numpy_random_state: RandomState
    ) -> Predictions:
        """Hide some of the tokens.

        Returns:
            The tokens as the model sees them; positions of the hidden ones, rising; what they were; for each token 1
            where a word or a special token begins, else 0; positions and tokens of each hidden n-gram.

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
        """What stands in the place of a hidden token; None for the token itself."""
