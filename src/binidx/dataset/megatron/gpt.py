"""Megatron's constructor and names of GPT samples, over an order and the stored tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.config import GPTDatasetConfig, Split
from binidx.dataset.megatron.megatron_dataset import MegatronDataset, open_tokens
from binidx.dataset.megatron.ordered_dataset import index_array
from binidx.dataset.token_dataset import Assemble
from binidx.errors import ConfigError
from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import StoredTokens, Tokens, check_tokens
from binidx.index.cache.index_files import recorded_name
from binidx.index.document_sample import EpochPlan
from binidx.index.documents import Documents, as_array, compact_documents
from binidx.index.gpt_indices import ARRAYS
from binidx.order.gpt_order import GPTParameters, GPTRule, count_epochs
from binidx.order.opener import IndexOptions
from binidx.order.requests import SourceRule
from binidx.order.source_order import SourceOrder, StoredSource

LowLevel = TypeVar("LowLevel", bound=IndexedDataset)


class GPTDataset(MegatronDataset):
    """Samples of `sequence_length` tokens and their labels, in Megatron Core's order.

        sample i  ─ shuffle_index ─►  rows j and j+1 of sample_index: where it starts and ends in document_index
                  ─ document_index ─►  spans of sequences  ─ .bin ─►  tokens

    A sample is a dict of tensors, each of shape (S,): `tokens`, `labels`, `position_ids` int64, `loss_mask` float32,
    and on request `attention_mask` bool (1, S, S), True where attention is forbidden. With `inter_document_masking`
    there are instead of the mask, both int32: `cu_seqlens` (S + 1,), the starts of documents and then S to the end, and
    `max_seqlen` (), tokens of the longest document; positions restart at each document. The tensors of a batch share
    one block of memory, which is freed with the last of them.

    Usually built by `BlendedMegatronDatasetBuilder`.

    Args:
        indexed_dataset: the stored sequences.
        dataset_path: their prefix, as the user wrote it: part of the identity.
        indexed_indices: the sequences of the split, shape (num_in_split,), int32.
        num_samples: the least number of samples; None is one epoch.
        index_split: the split.
        config: options of the run.

    Attributes:
        order: the order of the samples, with the arrays of the index: see `GPTOrder`. They are attributes here, too,
            and can be assigned.

    Raises:
        ConfigError: the tokenizer has no `eod` and the config needs it.
        IndexBuildError: samples were requested of a split without tokens (Megatron loops for ever).

    Example:
        >>> config = binidx.GPTDatasetConfig(
        ...     random_seed=1234, sequence_length=4096, blend=(["s3://corpus/en"], None), split="1,0,0",
        ...     tokenizer=tokenizer)
        >>> builder = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [1000, 0, 0], lambda: True, config)
        >>> train, _, _ = builder.build()
        >>> train[0]["tokens"].shape
        torch.Size([4096])

    Source: Megatron Core, `GPTDataset`. Differences: counts stay integers (its count of a partial last sample goes
    through float32), a stale index is rebuilt instead of served, and each sample has its own loss mask (if
    Megatron serves a padded sample first, it reuses that mask for all others).
    """

    RECORDED_NAME: ClassVar[str] = "GPTDataset"

    config: GPTDatasetConfig
    dataset: Tokens

    def __init__(
        self,
        indexed_dataset: Tokens,
        dataset_path: str | None,
        indexed_indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)

    @classmethod
    def _rule(cls, num_samples: int | None, split: Split, config: GPTDatasetConfig) -> SourceRule:
        return GPTRule(gpt_parameters(cls, num_samples, split, config, **cls._describe_release(config)))

    def _open_order(self) -> SourceOrder:
        rule = self.source_request.rule
        assert rule is not None
        with self.naming_split(f" of {len(self.own_sequences)} sequences"):
            return rule.open(self._source, self._index_options)

    document_index, sample_index, shuffle_index = map(index_array, ARRAYS)

    @property
    def _parameters(self) -> GPTParameters:
        """Options of the order, besides the data."""
        return self.source_request.parameters

    @cached_property
    def _source(self) -> StoredSource:
        if not isinstance(self.dataset, StoredTokens):
            check_tokens(self.dataset)
        source = StoredSource(self.source_request.name, self.dataset, self.own_sequences)
        chosen = self.source_request.choose_sequences(source)
        self._keep_indices(chosen.sequences)
        return chosen

    @cached_property
    def _plan(self) -> EpochPlan:
        """The epochs of the index."""
        with self.naming_split(f" of {len(self.own_sequences)} sequences"):
            return count_epochs(self._parameters, self._source, self.opener)

    @property
    def _index_options(self) -> IndexOptions:
        # In Megatron the index is beside the opened data, whatever path names it.
        return IndexOptions(replace(self.source_request, prefix=self.dataset.path_prefix).index_name, self.opener)

    @property
    def indices(self) -> NDArray[np.int32]:
        """The sequences of this split, shape (num_in_split,), int32; a new array if they are stored as a range."""
        return as_array(self.own_sequences)

    @indices.setter
    def indices(self, documents: NDArray[np.int32]) -> None:
        self._keep_indices(documents)

    def _keep_indices(self, indices: Documents) -> None:
        self.own_sequences = compact_documents(indices)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all epochs of the split; of packed documents, in one epoch."""
        is_built = "_order" in vars(self)  # hooks that build the index may ask
        return int(self._order.num_tokens if is_built else self._plan.num_tokens)

    @property
    def num_epochs(self) -> int:
        """Number of epochs in `document_index`."""
        return int(self._order.num_epochs)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Tokens) -> int:
        """Return the number of elements that splits divide.

        Args:
            low_level_dataset: the stored sequences.

        Returns:
            The number of sequences: GPT splits by sequence, not by document.
        """
        return len(low_level_dataset.sequence_lengths)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> Tokens:
        """Open the `.bin`/`.idx` pair of a prefix.

        Args:
            dataset_path: prefix, a path or any URI.
            config: `mmap_bin_files`, `storage_options` and `sequences_per_dataset` are used.

        Returns:
            The stored sequences.

        Raises:
            ConfigError: there is no prefix, or `sequences_per_dataset` lacks it or contradicts its header.
            ObjectNotFoundError: one of the two files is missing.
        """
        return open_low_level_dataset(IndexedDataset, dataset_path, config)

    def _make_assemble(self) -> Assemble:
        return self.assemble_for(self.config)

    def assemble_for(self, config: Any) -> Assemble:
        """Return the function that makes the samples of a batch of other lengths.

        Args:
            config: of the dataset, with the `sequence_length` of the samples.
        """
        return GPTAssemble.of(config, self._pad_token_id, masks_ends=self._order.ends_documents)

    def read_tokens(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Return only the tokens of samples, a seventh of their bytes, for trainers that shift labels themselves.

        Args:
            idxs: positions in serving order, B of them.

        Returns:
            `text`, int32, shape (B, S + 1): `text[:, :-1]` are tokens, `text[:, 1:]` labels. A pad has the tokenizer's
            pad id, or -1 if it has none: exclude these labels from the loss, and replace these tokens by a valid one.
            Pads occur in a partial last validation sample, and in the last column without the extra token.

        Raises:
            ConfigError: the tokens are stored as float or int64, or a subclass makes its own samples.

        Example:
            >>> train.read_tokens([0, 1]).shape
            (2, 4097)

        Source: ours.
        """
        if self.reads_by_itself:
            raise ConfigError(f"{type(self).__name__}: cannot serve tokens alone (only GPT datasets can)")
        return self._samples.read_text(idxs)


def gpt_parameters(
    kind: type, num_samples: int | None, split: Split, config: GPTDatasetConfig, **versions: str
) -> GPTParameters:
    """Return the options of a config that determine an order of GPT samples.

    Args:
        kind: class of the dataset.
        num_samples: the least number of samples; None is one epoch.
        split: the split.
        config: options of the run.
        versions: further fields of the identity.
    """
    return GPTParameters(
        recorded_name(kind),
        num_samples,
        config.random_seed,
        config.sequence_length,
        config.add_extra_token_to_sequence,
        # Else the tokens after the last full sample become a padded sample.
        split is not Split.valid or config.drop_last_partial_validation_sequence,
        versions,
    )


def open_low_level_dataset(cls: type[LowLevel], dataset_path: str | None, config: GPTDatasetConfig) -> LowLevel:
    """Open a prefix as `cls` and compare it with `sequences_per_dataset` of the config.

    Args:
        cls: class of the opened pair.
        dataset_path: prefix, a path or any URI.
        config: options of the run.
    """
    opened = open_tokens(cls, dataset_path, config)
    if config.sequences_per_dataset:
        needed = config.sequences_per_dataset.get(config.as_written(dataset_path) or opened.path_prefix)
        found = opened.index.sequence_count, opened.index.document_count
        if not isinstance(needed, Sequence) or tuple(needed) != found:
            raise ConfigError(
                f"sequences_per_dataset: wrong for {opened.path_prefix} (found {needed}, its .idx has {found}: "
                "sequences, document bounds); correct it"
            )
    return opened
