"""Which share of the sequences each split takes.

What a run asks for. Names, defaults and order of the fields are Megatron Core's; differences stand at the field.

Blends as they are given to scripts: lists of arguments, and files of them at any URI.

    a b c                    three prefixes, in proportion to their sizes
    0.7 a 0.3 b              weights and prefixes in turn: where every other argument, from the first on, is a number

Source: Megatron Core, `get_blend_from_list`, and Megatron-LM, `get_blend_and_blend_per_split`.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate, pairwise
from math import inf
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.storage.open import open_object, read_whole

Bookends = tuple[float, float]


SplitMatrix = list[Bookends | None]


class Split(Enum):
    """The splits, in the order every list over splits has."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: list[float] | list[int]) -> list[float]:
    """Weights over their sum, in float64. Source: Megatron Core, `normalize` (its rounding decides ties of a blend)."""
    array = np.asarray(weights, dtype=np.float64)
    return [float(weight) for weight in array / np.sum(array)]


def parse_and_normalize_split(split: str) -> list[float]:
    """The three shares of a split string such as "969, 30, 1".

    Raises:
        ConfigError: a sign or an exponent (Megatron reads "1e-3" as 1 and 3), no three numbers, or a sum of zero.

    Source: Megatron Core: every run of digits and dots is a number, missing ones are 0.
    """
    if re.search(r"[^\d\s.,:;/|]|\.\d*\.", split):
        raise ConfigError(f"split {split!r}: needs plain numbers such as '969, 30, 1'")
    shares = [float(number) for number in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (len(Split) - len(shares))
    if len(shares) != len(Split) or sum(shares) <= 0:
        raise ConfigError(f"split {split!r}: found {shares}, needs one to three numbers with a positive sum")
    return normalize(shares)


def convert_split_vector_to_split_matrix(vector_a: list[float], vector_b: list[float] | None = None) -> SplitMatrix:
    """Where each split begins and ends in [0, 1]; `None` for a split without a share.

    Args:
        vector_a: one share per split.
        vector_b: a second partition that narrows the first.

    Source: Megatron Core. Sums run from the left, in float64, as its do.
    """
    bookends_a, bookends_b = ([*pairwise(accumulate(vector, initial=0))] for vector in (vector_a, vector_b or vector_a))
    overlaps = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(bookends_a, bookends_b, strict=True)]
    return [(begin, end) if begin < end else None for begin, end in overlaps]


def split_indices(bookends: Bookends, num_elements: int) -> NDArray[np.int32]:
    """The elements of one split, shape (num_in_split,); may be empty.

    Source: Megatron Core: Python's `round`, which takes halves to the even neighbour.
    """
    found = split_range(bookends, num_elements)
    return np.arange(found.start, found.stop, dtype=np.int32)


def split_range(bookends: Bookends, num_elements: int) -> range:
    """The same as a range: of 300 million numbers an array is 1.2 GB."""
    begin, end = (round(edge * float(num_elements)) for edge in bookends)
    return range(begin, end)


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


WHOLE = ("data_path", "data_args_path")


PER_SPLIT = ("train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")


def get_blend_from_list(blend: Sequence[str] | None) -> Blend | None:
    """The prefixes of a list of arguments, and their weights or None.

    A list of two that are both numbers is a weight and a prefix.

    Raises:
        ConfigError: weights for some prefixes only, where Megatron takes the weights for prefixes; or no prefix.
    """
    if blend is None:
        return None
    if not blend:
        raise ConfigError("data path: found none, needs prefixes, or weights and prefixes in turn")
    if len(blend) % 2:
        return _prefixes(blend), None
    weights = [_number(each) for each in blend[::2]]
    given = [weight for weight in weights if weight is not None]
    if not given:
        return _prefixes(blend), None
    if len(given) < len(weights):
        bad = blend[2 * weights.index(None)]
        raise ConfigError(f"data path: found {bad!r} in the place of a weight; needs one before each prefix, or none")
    return _prefixes(blend[1::2]), given


def read_data_args(uri: str, storage_options: Mapping[str, Any] | None = None) -> Blend | None:
    """The blend in a text of arguments apart by white space: what `--data-args-path` names.

    Raises:
        ConfigError: as `get_blend_from_list`.
        ObjectNotFoundError: there is no such file.
    """
    return _named(uri, _text(uri, storage_options).split())


def read_per_split_data_args(uri: str, storage_options: Mapping[str, Any] | None = None) -> list[Blend | None]:
    """The blends of train, valid and test in a JSON object: what `--per-split-data-args-path` names.

    Each value is a list of arguments, a string of them, or null for a split without data.

    Raises:
        ConfigError: no object with these three keys, and as `get_blend_from_list`.
        ObjectNotFoundError: there is no such file.
    """
    try:
        found = json.loads(_text(uri, storage_options))
    except ValueError as error:
        raise ConfigError(f"{uri}: no JSON: {error}") from error
    names = [split.name for split in Split]
    if not isinstance(found, dict) or set(found) != set(names):
        raise ConfigError(f"{uri}: found {_said(found)}, needs an object with {', '.join(names)}")
    return [_named(f"{uri}, {name}", _arguments(uri, name, found[name])) for name in names]


def get_blend_and_blend_per_split(
    args: Any, storage_options: Mapping[str, Any] | None = None
) -> tuple[Blend | None, list[Blend | None] | None]:
    """`blend` and `blend_per_split` of a config, out of a script's arguments.

    Args:
        args: has some of `data_path`, `data_args_path`; or of `train_data_path`, `valid_data_path`, `test_data_path`,
            `per_split_data_args_path`. What it does not have is None.

    Raises:
        ConfigError: arguments of two of these ways (Megatron takes the first), and as the functions above.
    """
    given = [name for name in (*WHOLE, *PER_SPLIT) if getattr(args, name, None) is not None]
    several = len(given) > 1 and not set(given) <= set(PER_SPLIT[:3])
    if several:
        raise ConfigError(f"data path: found {', '.join(given)}, needs one way of saying it")
    if not given:
        return None, None
    way, value = given[0], getattr(args, given[0])
    if way == "data_path":
        return get_blend_from_list(value), None
    if way == "data_args_path":
        return read_data_args(value, storage_options), None
    if way == "per_split_data_args_path":
        return None, read_per_split_data_args(value, storage_options)
    return None, [get_blend_from_list(getattr(args, name, None)) for name in PER_SPLIT[:3]]


def _prefixes(arguments: Sequence[str]) -> list[str]:
    return [prefix.strip() for prefix in arguments]


def _number(argument: Any) -> float | None:
    try:
        return float(argument)
    except ValueError:
        return None


def _arguments(uri: str, name: str, value: Any) -> list[Any] | None:
    arguments = value.split() if isinstance(value, str) else value
    if arguments is not None and not isinstance(arguments, list):
        raise ConfigError(f"{uri}: found {name}: {value!r}, needs a list, a string or null")
    return arguments


def _named(subject: str, arguments: Sequence[Any] | None) -> Blend | None:
    try:
        return get_blend_from_list(arguments)
    except ConfigError as error:
        raise ConfigError(f"{subject}: {error}") from error
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{subject}: found {arguments!r}, needs strings, and numbers for weights") from error


def _said(found: Any) -> str:
    return f"an object with {', '.join(found) or 'nothing'}" if isinstance(found, dict) else type(found).__name__


def _text(uri: str, storage_options: Mapping[str, Any] | None) -> str:
    data = read_whole(open_object(uri, storage_options=storage_options, cache=False))
    try:
        return str(bytes(data), "utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{uri}: no text in UTF-8: {error}") from error
