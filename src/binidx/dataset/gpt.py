"""GPT samples: S + 1 tokens cut from the shuffled, concatenated sequences."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import GPTDatasetConfig
from binidx.dataset.gpt_batch import (
    assemble_gpt_sample,
    gpt_recipe,
    read_gpt_batch,
    read_gpt_sample,
    read_gpt_text,
)
from binidx.dataset.gpt_index import GPTIndexed, RangedOrders
from binidx.dataset.masks import build_attention_mask
from binidx.dataset.megatron_dataset import Request, required
from binidx.dataset.split import Split
from binidx.dataset.torch_bridge import Sample, Tensor, as_tensor
from binidx.errors import ConfigError
from binidx.format.idx import DType
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.format.ranged import RangedArray
from binidx.index.building import Arrays
from binidx.index.gpt import ARRAYS
from binidx.native import Orders
from binidx.native.gather import Recipe

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
