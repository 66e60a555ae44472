"""Config of a run's datasets: options and splits. Names and order of the fields are Megatron Core's.

Source: Megatron Core, `BlendedMegatronDatasetConfig` and `GPTDatasetConfig`.
"""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.affects import affects, described_fields, words_of
from binidx.dataset.blend_arguments import Blend, is_sequence_of, parse_blend
from binidx.dataset.megatron_releases import parse_release_name
from binidx.errors import ConfigError, redacted_text
from binidx.index.blend import normalize
from binidx.index.documents import as_array, split_range
from binidx.order.order_options import OrderOption, parse_order
from binidx.storage.location import Location

Bookends = tuple[float, float]
SplitMatrix = list[Bookends | None]


class Split(Enum):
    """Splits of a run, in the order of every list over splits: train 0, valid 1, test 2.

    Example:
        >>> binidx.Split.valid.value
        1

    Source: Megatron Core, `Split`.
    """

    train = 0
    valid = 1
    test = 2


def parse_and_normalize_split(split: str) -> list[float]:
    """Return the three shares of a split string such as "969, 30, 1".

    Raises:
        ConfigError: a sign or an exponent (Megatron reads "1e-3" as 1 and 3), more than three numbers, or a sum of 0.

    Source: Megatron Core: every run of digits and dots is a number, missing ones are 0.
    """
    if not isinstance(split, str) or re.search(r"[^\d\s.,:;/|]|\.\d*\.|(?<!\d)\.(?!\d)", split):
        raise ConfigError(f"split: found {split!r}, need plain numbers such as '969, 30, 1'")
    shares = [float(number) for number in re.findall(r"[.0-9]+", split)]
    shares += [0.0] * (len(Split) - len(shares))
    if len(shares) != len(Split) or sum(shares) <= 0:
        raise ConfigError(f"split: found {split!r}, need one to three numbers with a positive sum")
    return normalize(shares)


def convert_split_vector_to_split_matrix(vector_a: list[float], vector_b: list[float] | None = None) -> SplitMatrix:
    """Return start and end of each split in [0, 1]; `None` for a split without a share.

    Args:
        vector_a: one share per split.
        vector_b: a second partition, intersected with the first.

    Source: Megatron Core; sums run from the left, in float64.
    """
    bookends_a, bookends_b = ([*pairwise(accumulate(vector, initial=0))] for vector in (vector_a, vector_b or vector_a))
    overlaps = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(bookends_a, bookends_b, strict=True)]
    return [(begin, end) if begin < end else None for begin, end in overlaps]


def split_indices(bookends: Bookends, num_elements: int) -> NDArray[np.int32]:
    """Return the numbers of the elements (sequences or documents) of one split, shape (num_in_split,), int32.

    Args:
        bookends: start and end of the split, from 0 to 1.
        num_elements: number of elements of all splits.

    Source: Megatron Core; Python's `round`, which takes halves to the even neighbour.
    """
    return as_array(split_range(bookends, num_elements))


MOST_TOKENS, SAMPLE_BYTES = (1 << 31) - 1, 28
"""Largest sequence_length; and bytes of each token of a GPT sample: token, label, loss mask and position."""

MOST_SAMPLES, INDEX_BYTES = 1 << 40, 12
"""Largest size of a split; and bytes of each sample in shuffle_index and sample_index of a GPT dataset."""


def check_num_samples(name: str, num_samples: int) -> None:
    """Raise ConfigError for more than MOST_SAMPLES samples: an index that no machine can hold.

    Args:
        name: the option, for the error.
        num_samples: the number to check.
    """
    if num_samples > MOST_SAMPLES:
        raise ConfigError(
            f"{name}: found {num_samples:,} samples, need at most {MOST_SAMPLES:,}; their index takes "
            f"{INDEX_BYTES * num_samples:,} bytes; request fewer: a sample has sequence_length tokens"
        )


@dataclass(frozen=True)
class WrittenPaths:
    """Relative paths as the file of a run has them.

    Attributes:
        directory: absolute path of the directory below which they are opened; None: there are none.
        opened: path that is opened -> the path as it is written.
    """

    directory: str | None = None
    opened: Mapping[str, str] = field(default_factory=dict)


@dataclass(repr=False)
class BlendedMegatronDatasetConfig:
    """Options of every kind of dataset.

    Args:
        random_seed: seed of the order of documents and samples, 0 to 2^32 - 1.
        sequence_length: S, tokens fed per sample.
        blend: prefixes and weights of one distribution, in any form of `parse_blend`; needs `split`.
        blend_per_split: one blend or None for each of train, valid, test; replaces `blend` and `split`.
        multiple_validation_sets: with `blend_per_split`, the valid split is a list of one dataset per prefix.
        full_validation: each validation set of such a list is one whole epoch; its size must be None.
        split: shares of train, valid, test, such as "969, 30, 1"; also as numbers.
        num_dataset_builder_threads: number of threads of the build: prefixes that are built at the same time share
            them; then the parts of a blend use them.
        path_to_cache: URI of the indices; by default `{prefix}/cache/{class}_indices`, in the data's own store. An
            index of at most 2^15 documents and samples is not cached: it is built faster than fetched.
        mmap_bin_files: map local `.bin` files; False reads them with one call per range.
        tokenizer: object with `pad`, `eod` and `unique_identifiers`.
        mid_level_dataset_surplus: extra share of samples built per dataset of a weighted blend.
        allow_ambiguous_pad_tokens: keep a pad id that is also another special token (all of them are masked).
        fast_cache_load, defer_npy_index_mmap: checked as in Megatron Core, without effect. (There they skip checks of
            caches; here an array is mapped in 50 us and checked, and a missing one is built.)
        storage_options: fsspec's options for every URI (not in Megatron Core, and in no hash).
        trust_cache: "megatron" accepts indices that Megatron left, without a proof that they belong to the data
            (not in Megatron Core). By default they are rebuilt and replaced.
        cache_small_indices: also cache indices of at most 2^15 documents and samples, for Megatron to find (not in
            Megatron Core).
        megatron_samples: release of Megatron whose samples are served (not in Megatron Core): a name in `RELEASES` of
            `binidx.dataset.megatron_releases`, a full version such as "0.19.2", or "main", of August 2026. BERT,
            chats, variable lengths and fill in the middle differ; the other kinds do not. A loader state that binidx
            saved before it had this option needs "0.16.1".
        read_plan: serve samples by the read plan of `binidx prepare read-plan` in `path_to_cache`, if there is
            one for these options, without any index (not in Megatron Core). Then a split is a `PlannedDataset`.
        written_paths: relative paths as the file of a run has them, on which the names of caches depend; set by
            `binidx.Run` (not in Megatron Core).

    Attributes:
        split_matrix: start and end of each split in [0, 1], from `split`.
        mock: whether neither `blend` nor `blend_per_split` was given; `split` is then Megatron's "1,1,1". Only
            `MockGPTDataset` can be built (in Megatron other kinds make up data, too).

    Raises:
        ConfigError: options contradict each other, or a number is out of range.

    Source: Megatron Core, `BlendedMegatronDatasetConfig`.
    """

    random_seed: int = field(metadata=affects("order", masked="samples", fim="samples"))
    sequence_length: int = field(metadata=affects("order", "samples"))
    blend: Blend | None = field(default=None, metadata=affects("place", "order"))
    blend_per_split: Sequence[Blend | None] | None = field(default=None, metadata=affects("place", "order"))
    multiple_validation_sets: bool | None = field(default=None, metadata=affects(lists="order"))
    full_validation: bool | None = field(default=None, metadata=affects(lists="order"))
    split: str | None = field(default=None, metadata=affects("order"))
    split_matrix: SplitMatrix | None = field(init=False, default=None, metadata=affects("order"))
    num_dataset_builder_threads: int = field(default=1, metadata=affects("start"))
    path_to_cache: str | None = field(default=None, metadata=affects("place"))
    mmap_bin_files: bool = field(default=True, metadata=affects("start"))
    mock: bool = field(init=False, default=False, metadata=affects("order"))
    tokenizer: Any = field(default=None, metadata=affects("samples", chats="order"))
    mid_level_dataset_surplus: float = field(default=0.005, metadata=affects("order"))
    allow_ambiguous_pad_tokens: bool | None = field(default=False, metadata=affects("samples"))
    fast_cache_load: bool = field(default=False, metadata=affects("start"))
    defer_npy_index_mmap: bool = field(default=False, metadata=affects("start"))
    # May hold secrets, so no repr and no file of a run has them.
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False, metadata=affects("place", saved=False))
    # "order": an index of other data would be accepted.
    trust_cache: Literal["megatron"] | None = field(default=None, metadata=affects("start", "order"))
    cache_small_indices: bool = field(default=False, metadata=affects("start"))
    megatron_samples: str = field(
        default="main", metadata=affects(chats="samples", masked="samples", fim="samples", saved=False)
    )
    read_plan: bool = field(default=False, metadata=affects("start", saved=False))
    written_paths: WrittenPaths = field(default=WrittenPaths(), repr=False, metadata=affects("place", saved=False))

    def __post_init__(self) -> None:
        for name in ("random_seed", "sequence_length", "num_dataset_builder_threads"):
            setattr(self, name, _whole_number(name, getattr(self, name)))
        for each in fields(self):
            if "bool" in str(each.type) and isinstance(value := getattr(self, each.name), str):
                raise ConfigError(f"{each.name}: found {value!r}, needs True or False")
        self.path_to_cache = self.path_to_cache and Location.text_of("path_to_cache", self.path_to_cache)
        if self.sequence_length < 1:
            raise ConfigError(f"sequence_length: found {self.sequence_length}, need at least 1")
        if self.sequence_length > MOST_TOKENS:
            raise ConfigError(
                f"sequence_length: found {self.sequence_length:,}, need at most {MOST_TOKENS:,}; a sample of so many "
                f"tokens takes {SAMPLE_BYTES * self.sequence_length:,} bytes of memory"
            )
        if not 0 <= self.random_seed < 2**32:
            raise ConfigError(f"random_seed: found {self.random_seed}, need 0 to 2^32 - 1")
        if self.trust_cache not in (None, "megatron"):
            raise ConfigError(f"trust_cache: found {self.trust_cache!r}, need 'megatron' or None")
        if self.megatron_samples != "main":
            parse_release_name(self.megatron_samples)
        if (threads := self.num_dataset_builder_threads) < 1:
            raise ConfigError(f"num_dataset_builder_threads: found {threads}, need at least 1")
        for name in ("fast_cache_load", "defer_npy_index_mmap", "read_plan"):
            if getattr(self, name) and self.path_to_cache is None:
                raise ConfigError(f"{name}: needs path_to_cache, found none")
        if self.fast_cache_load and self.blend is not None:
            raise ConfigError("fast_cache_load: excludes blend; give blend_per_split")
        if self.blend_per_split is not None and any(self.blend_per_split):
            self._check_blend_per_split(self.blend_per_split)
        else:
            self._check_blend()

    def __repr__(self) -> str:
        """Return the fields that are not their defaults, without secrets."""
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.repr}
        defaults = {each.name: repr(each.default) for each in fields(self)}
        given = [f"{name}={value!r}" for name, value in shown.items() if repr(value) != defaults[name]]
        return redacted_text(f"{type(self).__name__}({', '.join(given)})")

    @classmethod
    def harmless_options(cls) -> list[str]:
        """Return the names of the fields that affect neither the order nor the samples."""
        return [name for name, option in described_fields(cls).items() if words_of(option) <= {"place", "start"}]

    @property
    def prefixes(self) -> set[str]:
        """The prefixes of the blends of all splits."""
        blends = [self.blend, *(self.blend_per_split or ())]
        return {prefix for blend in blends if blend for prefix in blend[0]}

    @property
    def cache_directory(self) -> Location | None:
        """Folder of the indices; None: beside the data."""
        return None if self.path_to_cache is None else Location(self.path_to_cache, self.storage_options)

    @property
    def order_option(self) -> OrderOption | None:
        """The option `order`; None if it is not set, or this kind of dataset has no such option."""
        return None

    def as_written(self, path: str | None) -> str | None:
        """Return a path as the file of a run has it: itself, unless the run has recorded a directory."""
        return self.written_paths.opened.get(path or "", path)

    def _check_blend_per_split(self, blends: Sequence[Blend | None]) -> None:
        if self.blend is not None or self.split is not None:
            raise ConfigError("blend_per_split: excludes blend and split; give one or the other")
        if isinstance(blends, str | Mapping) or len(blends) != len(Split):
            raise ConfigError(
                f"blend_per_split: found {blends!r}, needs a list of {len(Split)} blends (None for no split)"
            )
        self.blend_per_split = [
            None if blend is None else parse_blend(f"blend_per_split[{split.name}]", blend)
            for split, blend in zip(Split, blends, strict=True)
        ]

    def _check_blend(self) -> None:
        if self.blend is None:
            self.mock, self.split = True, "1,1,1"
        elif self.split is None:
            raise ConfigError("split: found none, blend needs one such as '969, 30, 1'")
        else:
            self.blend = parse_blend("blend", self.blend)
            self.split = ",".join(map(str, self.split)) if is_sequence_of(self.split, Real) else self.split
        self.split_matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(self.split))


def _whole_number(name: str, value: Any) -> int:
    number: Any = None if isinstance(value, bool) else value
    try:
        return operator.index(number)
    except TypeError:
        raise ConfigError(f"{name}: found {value!r}, needs a whole number") from None


HOW_TO_GIVE = {"tokenizer": ": binidx.describe_tokenizer(URI), or binidx.SpecialTokens(eod=ID)"}


def check_given(config: Any, kind: str, *names: str) -> None:
    """Raise ConfigError if one of these fields is None; `kind` names the samples that need them."""
    for name in names:
        if getattr(config, name) is None:
            raise ConfigError(f"{name}: must be given for {kind}{HOW_TO_GIVE.get(name, '')}")


@dataclass(frozen=True)
class SpecialTokens:
    """Stand-in for a tokenizer: the ids of the two tokens on which GPT samples depend.

    Args:
        eod: token that ends a document; `eod_mask_loss`, `reset_position_ids` and `reset_attention_mask` need it.
        pad: token without loss, which also fills a partial last sample.

    Example:
        >>> binidx.load_dataset("s3://corpus/en", 4096, tokenizer=binidx.SpecialTokens(eod=50256), eod_mask_loss=True)

    Source: ours.
    """

    eod: int | None = None
    pad: int | None = None

    def __post_init__(self) -> None:
        for name in ("eod", "pad"):
            if getattr(self, name) is not None:
                _whole_number(name, getattr(self, name))

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Part of the names of indices; in Megatron's form."""
        return OrderedDict([("class", "binidx.SpecialTokens"), ("eod", self.eod), ("pad", self.pad)])


@dataclass(repr=False)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Options of GPT datasets, besides those of every kind.

    Args:
        reset_position_ids: restart positions after each end-of-document token. This and the next two are off by
            default, as in Megatron-LM's arguments (Megatron Core's config requires a value).
        reset_attention_mask: forbid attention beyond an end-of-document token.
        eod_mask_loss: no loss on end-of-document tokens.
        create_attention_mask: serve a mask (1, S, S) with each sample. Megatron's default is True, here it is False:
            attention kernels make the mask themselves and S x S bytes per sample are the loader's largest output.
        drop_last_partial_validation_sequence: drop the incomplete sample at the end of the valid split.
        add_extra_token_to_sequence: read S + 1 tokens, so that the last label is a real token.
        inter_document_masking: serve `cu_seqlens` and `max_seqlen` instead of a mask, for attention kernels that stay
            within documents; positions restart at each document. As in Megatron Core since 0.19.
        object_storage_cache_path: without effect (Megatron stores `.idx` files there; binidx uses `index_dir`).
        data_parallel_size, context_parallel_size, sequence_parallel_size, hybrid_context_parallel: determine
            `padding_multiple`, to which `SFTDataset` and `VarlenDataset` pad. Other kinds ignore them.
        sequences_per_dataset: expected numbers of sequences and document bounds of each prefix. (Megatron skips the
            header then and derives the dtype from the tokenizer; here the header is read and compared.)
        sft_mock_dataset_config_json, varlen_mock_dataset_config_json: must be None: there are no mock chats.
        varlen_sbhd_validation: `VarlenDataset` serves rows of S tokens instead of rows of their own length.
        order: order besides Megatron's (not in Megatron Core): "first_fit" or "best_fit" for whole documents, packed; a
            `binidx.View` or another `binidx.OrderOption`; the name of a registered order; or a kind and its fields, as
            {"kind": "view", "documents": "s3://corpus/drop.txt"}.

    Attributes:
        EOD_FLAGS: options that may need the EOD, off by default; Megatron Core's config has no default for them.
        token_dtype_code: Megatron's guess of the dtype from the vocabulary, 4 for int32, 8 for uint16, None without a
            vocabulary. Not used: the header of each `.idx` has the dtype, and the guess can be wrong.

    Raises:
        ConfigError: as for `BlendedMegatronDatasetConfig`, or an option that must be given is missing.

    Example:
        >>> config = binidx.GPTDatasetConfig(
        ...     random_seed=1234, sequence_length=4096, blend=(["s3://corpus/en", "gs://corpus/code"], [0.7, 0.3]),
        ...     split="99,1,0", tokenizer=binidx.describe_tokenizer("tokenizer.json"))

    Source: Megatron Core, `GPTDatasetConfig`.
    """

    # Without annotations: ranks compare what is annotated.
    EOD_FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
    moves_text = False
    """True for samples that have other tokens than the order says, as those of fill in the middle."""

    reset_position_ids: bool | None = field(default=False, metadata=affects("samples"))
    reset_attention_mask: bool | None = field(default=False, metadata=affects("samples"))
    eod_mask_loss: bool | None = field(default=False, metadata=affects("samples"))
    create_attention_mask: bool = field(default=False, metadata=affects("samples"))
    drop_last_partial_validation_sequence: bool = field(default=True, metadata=affects(valid="order"))
    add_extra_token_to_sequence: bool = field(default=True, metadata=affects("order", "samples"))
    inter_document_masking: bool = field(default=False, metadata=affects("samples"))
    object_storage_cache_path: str | None = field(default=None, metadata=affects("place"))
    data_parallel_size: int = field(default=1, metadata=affects(chats="order", padded="samples"))
    sequence_parallel_size: int = field(default=0, metadata=affects(chats="order", padded="samples"))
    hybrid_context_parallel: bool = field(default=False, metadata=affects(chats="order", padded="samples"))
    sequences_per_dataset: Mapping[str, Sequence[int]] | None = field(default=None, metadata=affects("nothing"))
    token_dtype_code: int | None = field(init=False, default=None, metadata=affects("nothing"))
    context_parallel_size: int | None = field(default=None, metadata=affects(chats="order", padded="samples"))
    sft_mock_dataset_config_json: str | None = field(default=None, metadata=affects(chats="order"))
    varlen_mock_dataset_config_json: str | None = field(default=None, metadata=affects(chats="order"))
    varlen_sbhd_validation: bool = field(default=False, metadata=affects(chats="samples"))
    order: Any = field(default=None, metadata=affects("order", "samples"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.order = None if self.order is None else parse_order(self.order)
        check_given(self, "a GPT dataset", "tokenizer", *self.EOD_FLAGS)
        if isinstance(self.tokenizer, str | os.PathLike):
            raise ConfigError(f"tokenizer: found {self.tokenizer!r}, needs binidx.describe_tokenizer of it")
        for name in ("sft_mock_dataset_config_json", "varlen_mock_dataset_config_json"):
            if getattr(self, name) is not None:
                raise ConfigError(f"{name}: mock chats are not supported; give a file of chats")
        vocabulary = getattr(self.tokenizer, "vocab_size", None)
        self.token_dtype_code = None if vocabulary is None else 4 if vocabulary > 2**16 else 8

    @property
    def order_option(self) -> OrderOption | None:
        option: OrderOption | None = self.order
        return option

    @property
    def restarts_after_eod(self) -> bool:
        """True if positions, or attention, start again after each EOD."""
        resets_mask = self.create_attention_mask and self.reset_attention_mask
        return not self.inter_document_masking and bool(self.reset_position_ids or resets_mask)

    @property
    def needs_eod(self) -> bool:
        """True if the samples depend on the EOD."""
        return bool(self.eod_mask_loss) or self.restarts_after_eod

    def check_bakeable(self) -> None:
        """Raise ConfigError for samples that depend on the bounds of documents: a bake stores each as one sequence."""
        if self.inter_document_masking:
            problem = "found True, a baked run has no bounds of documents; train unbaked"
            raise ConfigError(f"inter_document_masking: {problem}")

    @property
    def padding_multiple(self) -> int:
        """Number of tokens of which the length of each packed sequence must be a multiple.

        Two for each rank of a context parallel group (a rank takes one chunk from either end, which balances
        attention), or of all data parallel ranks' groups with hybrid context parallelism; times
        `sequence_parallel_size` if it is not 0.

        Source: Megatron-LM, `SFTDataset._calculate_padding_divisor`.
        """
        return padding_multiple(self, hybrid=self.hybrid_context_parallel)


def padding_multiple(config: Any, *, hybrid: bool, sequence_parallel: bool = True) -> int:
    """Return `GPTDatasetConfig.padding_multiple` of any config with the fields of its three sizes.

    Args:
        config: has `data_parallel_size`, `context_parallel_size` and `sequence_parallel_size`.
        hybrid: whether the groups of all data parallel ranks count, as with hybrid context parallelism.
        sequence_parallel: whether the ranks of sequence parallelism count.
    """
    context = config.context_parallel_size or 1
    ranks = config.data_parallel_size * context if hybrid else context
    return (2 * ranks if ranks > 1 or hybrid else 1) * ((sequence_parallel and config.sequence_parallel_size) or 1)


NO_PAD = -1
"""Pad id of tokenizers without one; no stored token has it."""


def choose_pad_token(tokenizer: Any, allow_ambiguous: bool) -> int:
    """Return the pad id; -1 if there is none, or if it is also another special token and that is not allowed.

    Args:
        tokenizer: any object with the ids of special tokens as attributes.
        allow_ambiguous: `allow_ambiguous_pad_tokens` of the config.

    Source: Megatron Core, with its two warnings.
    """
    pad = find_token(tokenizer, "pad")
    if pad is None or pad not in _special_tokens(tokenizer):
        return NO_PAD if pad is None else pad
    unmasked = "pads in the data are not masked; give the tokenizer a pad of its own, or set allow_ambiguous_pad_tokens"
    effect = "all of them are masked" if allow_ambiguous else unmasked
    warnings.warn(f"pad id {pad} is also another special token: {effect}", stacklevel=2)
    return pad if allow_ambiguous else NO_PAD


def find_token(tokenizer: Any, name: str) -> int | None:
    """Return the id of a special token such as "pad" or "eod"; None if the tokenizer has none."""
    try:
        token: int | None = getattr(tokenizer, name)
    except Exception:  # tokenizers without the token raise errors of any class
        return None
    return token


def _special_tokens(tokenizer: Any) -> list[Any]:
    try:
        tokens = [token for name, token in tokenizer.special_tokens_dict.items() if name != "pad_token"]
    except (AttributeError, IndexError, ValueError):
        tokens = []
    return tokens or [find_token(tokenizer, "eos"), find_token(tokenizer, "eod")]
