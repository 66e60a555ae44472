"""What a run asks for. Names, defaults and order of the fields are Megatron Core's; differences stand at the field."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from binidx.dataset.split import (
    Split,
    SplitMatrix,
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from binidx.errors import ConfigError

Blend = tuple[Sequence[str], Sequence[float] | None]
"""Prefixes, and their weights or None (then each dataset is taken whole, once)."""


@dataclass
class BlendedMegatronDatasetConfig:
    """What every kind of dataset needs to know.

    Args:
        random_seed: seeds the order of documents and of samples, 0 to 2^32 - 1.
        sequence_length: tokens fed per sample.
        blend: prefixes and weights of one distribution; needs `split`.
        blend_per_split: one blend or None for train, valid, test; takes the place of `blend` and `split`.
        multiple_validation_sets: with `blend_per_split`, the valid split is a list, one dataset per prefix.
        full_validation: each of those validation sets is one whole epoch; its size must be None.
        split: shares of train, valid, test, such as "969, 30, 1".
        num_dataset_builder_threads: threads of the build: prefixes at the same time, and where fewer are left than
            threads, parts of one; then parts of a blend.
        path_to_cache: a URI for index caches; by default `{prefix}/cache/{class}_indices`, in the data's own store. An
            index of less than 2^15 documents and samples has none: it is built sooner than fetched.
        mmap_bin_files: map local `.bin` files; False reads them with one call per range.
        tokenizer: gives `pad`, `eod` and `unique_identifiers`.
        mid_level_dataset_surplus: extra share of samples built per dataset of a weighted blend.
        allow_ambiguous_pad_tokens: keep a pad id that is also another special token (it will be masked everywhere).
        fast_cache_load, defer_npy_index_mmap: as in Megatron Core they need `path_to_cache`, and the first
            `blend_per_split`. There they trust that every cache is there, and open none before its first sample. They
            change nothing here: an array is mapped in 50 us, is proven before it is believed, and one that is missing
            is built.
        storage_options: passed to fsspec for every URI (ours; Megatron has no such field, and it is in no hash).
        trust_cache: "megatron" takes index caches that Megatron left as they are, though nothing proves of which data
            they are (ours). By default they are built anew, and replaced.
        cache_small_indices: cache those of less than 2^15 documents and samples, too, for Megatron to find (ours).

    Raises:
        ConfigError: options that contradict each other.

    Attributes:
        split_matrix: where each split begins and ends in [0, 1], from `split`.
        mock: neither `blend` nor `blend_per_split` was given, and `split` became Megatron's "1,1,1". Only a kind that
            makes its data up, `MockGPTDataset`, can then be built; the others raise, where Megatron's make up as well.
    """

    random_seed: int
    sequence_length: int
    blend: Blend | None = None
    blend_per_split: Sequence[Blend | None] | None = None
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None
    split_matrix: SplitMatrix | None = field(init=False, default=None)
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    mock: bool = field(init=False, default=False)
    tokenizer: Any = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)  # may hold secrets
    trust_cache: Literal["megatron"] | None = None
    cache_small_indices: bool = False

    def __post_init__(self) -> None:
        self.random_seed, self.sequence_length = operator.index(self.random_seed), operator.index(self.sequence_length)
        self.path_to_cache = None if self.path_to_cache is None else os.fspath(self.path_to_cache)
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, needs at least 1")
        if not 0 <= self.random_seed < 2**32:
            raise ConfigError(f"random_seed: found {self.random_seed}, needs 0 to 2^32 - 1")
        if self.trust_cache not in (None, "megatron"):
            raise ConfigError(f"trust_cache: found {self.trust_cache!r}, needs 'megatron' or None")
        if self.num_dataset_builder_threads < 1:
            raise ConfigError(
                f"num_dataset_builder_threads: found {self.num_dataset_builder_threads}, needs at least 1"
            )
        for name in ("fast_cache_load", "defer_npy_index_mmap"):
            if getattr(self, name) and self.path_to_cache is None:
                raise ConfigError(f"{name}: needs path_to_cache, found none")
        if self.fast_cache_load and self.blend is not None:
            raise ConfigError("fast_cache_load: excludes blend; give blend_per_split")
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
        else:
            self._check_blend()

    def _check_blend_per_split(self, blends: Sequence[Blend | None]) -> None:
        if self.blend is not None or self.split is not None:
            raise ConfigError("blend_per_split: excludes blend and split; give one or the other")
        if len(blends) != len(Split):
            raise ConfigError(f"blend_per_split: found {len(blends)} blends, needs {len(Split)} (None for no split)")
        for split, blend in zip(Split, blends, strict=True):
            if blend is not None:
                check_blend(f"blend_per_split[{split.name}]", blend)

    def _check_blend(self) -> None:
        if self.blend is None:
            self.mock, self.split = True, "1,1,1"
        elif self.split is None:
            raise ConfigError("split: found none, blend needs one such as '969, 30, 1'")
        else:
            check_blend("blend", self.blend)
        self.split_matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))


def check_blend(name: str, blend: Blend) -> None:
    """Raise ConfigError unless there are prefixes, and a positive weight for each where weights are given."""
    prefixes, weights = blend
    if not prefixes:
        raise ConfigError(f"{name}: found no prefix, needs at least one")
    if isinstance(prefixes, str) or not all(isinstance(prefix, str) for prefix in prefixes):
        raise ConfigError(
            f"{name}: found prefixes {prefixes!r}, needs a list of strings: they are part of the cache's name"
        )
    if weights is not None and (len(weights) != len(prefixes) or not all(0 < weight < inf for weight in weights)):
        raise ConfigError(f"{name}: found weights {list(weights)}, needs {len(prefixes)} above 0, one per prefix")


@dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """What GPT samples need to know besides.

    Args:
        reset_position_ids: positions start again after each end-of-document token; must be given.
        reset_attention_mask: attention does not look past an end-of-document token; must be given.
        eod_mask_loss: no loss on end-of-document tokens; must be given.
        create_attention_mask: give the (1, S, S) mask with each sample. Megatron's default is True; ours is False,
            since attention kernels make the mask themselves and S x S bytes per sample are the loader's largest output.
        drop_last_partial_validation_sequence: drop the incomplete sample at the end of the valid split.
        add_extra_token_to_sequence: read S + 1 tokens, so that the last label is a real token.
        inter_document_masking: give `cu_seqlens` and `max_seqlen`, by which attention kernels stay within documents, in
            the place of an attention mask; positions start again with each document. As in Megatron Core after 0.16.1.
        sequences_per_dataset: of each prefix, how many sequences and document bounds its `.idx` has. Megatron reads no
            header then and takes the dtype of the tokenizer; here the header is read, and is to say the same.
        object_storage_cache_path: taken for Megatron's sake, who keeps each `.idx` there; ours are in `index_dir`.
        data_parallel_size, context_parallel_size, sequence_parallel_size, hybrid_context_parallel: what the samples of
            `SFTDataset` and `VarlenDataset` are padded for: `padding_multiple`. They change no other kind.
        sft_mock_dataset_config_json, varlen_mock_dataset_config_json: of made-up chats, which there are none of: None.
        varlen_sbhd_validation: `VarlenDataset` gives rows of S tokens.

    Attributes:
        token_dtype_code: Megatron's guess at the dtype from the vocabulary, 4 for int32, 8 for uint16, None without
            one. Nothing here is read by it: the header of each `.idx` says what it holds, and the guess can be wrong.
    """

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = False
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    inter_document_masking: bool = False
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False
    sequences_per_dataset: Mapping[str, Sequence[int]] | None = None
    token_dtype_code: int | None = field(init=False, default=None)
    context_parallel_size: int | None = None
    sft_mock_dataset_config_json: str | None = None
    varlen_mock_dataset_config_json: str | None = None
    varlen_sbhd_validation: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("tokenizer", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name}: must be given for a GPT dataset")
        for name in ("sft_mock_dataset_config_json", "varlen_mock_dataset_config_json"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: there are no made-up chats here; give a file of some")
        vocabulary = getattr(self.tokenizer, "vocab_size", None)
        self.token_dtype_code = None if vocabulary is None else 4 if vocabulary > 2**16 else 8

    @property
    def padding_multiple(self) -> int:
        """Tokens that the length of each packed sequence has to be a multiple of.

        Two for each rank of a context parallel group of several (it takes one from either end, so that all have as much
        attention to do), of all data parallel ranks' groups with hybrid context parallelism; times
        `sequence_parallel_size` if there is one.

        Source: Megatron-LM, `SFTDataset._calculate_padding_divisor`.
        """
        context = self.context_parallel_size or 1
        ranks = self.data_parallel_size * context if self.hybrid_context_parallel else context
        return (2 * ranks if ranks > 1 or self.hybrid_context_parallel else 1) * (self.sequence_parallel_size or 1)
