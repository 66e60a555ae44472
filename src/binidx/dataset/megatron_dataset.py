"""Base class of all kinds of datasets: identity, padding, and batches of samples from one vectored read."""

from __future__ import annotations

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, Split
from binidx.dataset.torch_bridge import Sample
from binidx.errors import ConfigError, redacted
from binidx.format.indexed_dataset import IndexedDataset, Span, read_spans
from binidx.index.cache.index_cache import BuildContext

NO_PAD = -1
"""Pad id of tokenizers without one; no stored token has it."""

Request = tuple[Any, Sequence[int | None], Sequence[int]]
"""A dataset, positions of its samples in serving order, and the row of each sample in the batch."""


def describe(identifiers: OrderedDict[str, Any]) -> str:
    """Return the text that Megatron hashes for the names of index caches."""
    compact = json.dumps(identifiers, default=_identify)
    try:
        # The text of json.dumps(indent=4), in C: of a blend of 1,000 prefixes in 40 ms instead of 130.
        return msgspec.json.format(compact, indent=4)
    except msgspec.DecodeError:  # of NaN, which JSON has not
        return json.dumps(identifiers, indent=4, default=_identify)


def _identify(thing: Any) -> Any:
    try:
        return thing.unique_identifiers
    except AttributeError:
        raise ConfigError(
            f"{type(thing).__name__}: has no unique_identifiers, which the names of index caches need; "
            "give the tokenizer an OrderedDict of that name"
        ) from None


def digest(description: str) -> str:
    """Return the md5, in hex, with which Megatron begins the names of index caches."""
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()


def recorded_name(kind: type) -> str:
    """Return the name of a class in index caches, orders and loader states.

    Classes of this library fix that name as `RECORDED_NAME`, so that renaming a class loses no cache. A user's subclass
    has its own name, as in Megatron Core.
    """
    return str(vars(kind).get("RECORDED_NAME", kind.__name__))


class Identified:
    """Base of datasets that are identified by their `unique_identifiers`.

    Attributes:
        unique_identifiers: class, data and options, in the order that Megatron hashes.
        unique_description: JSON text of the identifiers.
        unique_description_hash: md5 of that text, in hex.
    """

    unique_identifiers: OrderedDict[str, Any]
    build_context = BuildContext()
    """Options of the build, set by `built_with` while the constructor runs."""

    @classmethod
    def built_with(cls, context: BuildContext, *arguments: Any, **keywords: Any) -> Self:
        """Return `cls(*arguments, **keywords)`, whose index is built with the options of `context`.

        The options cannot be arguments of constructors, which have Megatron's arguments or those of a user's subclass.

        Args:
            context: options of the build.
            arguments, keywords: of the constructor.

        Returns:
            The dataset, which does not keep the options.
        """
        dataset = cls.__new__(cls, *arguments, **keywords)
        dataset.build_context = context
        dataset.__init__(*arguments, **keywords)  # type: ignore[misc]
        del dataset.build_context
        return dataset

    @cached_property
    def unique_description(self) -> str:
        return describe(self.unique_identifiers)

    @cached_property
    def unique_description_hash(self) -> str:
        return digest(self.unique_description)


class MegatronDataset(Identified, ABC):
    """Samples of one split of one low-level dataset.

    A kind of dataset implements two pure methods: `spans` returns the spans of tokens of a sample, `assemble` makes the
    sample of these tokens. This class reads the spans of a whole batch at once. A subclass may also replace
    `__getitem__`; its batches are then made of single samples.

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix, as the user wrote it: part of the identity.
        indices: the sequences (GPT) or documents of this split, shape (num_in_split,), int32.
        num_samples: the least number of samples; None is one epoch.
        index_split: the split.
        config: options of the run.

    Example:
        >>> class FirstTokens(binidx.MegatronDataset):
        ...     numel_low_level_dataset = staticmethod(len)
        ...     def build_low_level_dataset(dataset_path, config):
        ...         return binidx.IndexedDataset(dataset_path)
        ...     def __len__(self):
        ...         return len(self.indices)
        ...     def spans(self, idx):
        ...         return [(int(self.indices[idx or 0]), 0, 1)]
        ...     def assemble(self, idx, sequences):
        ...         return {"token": torch.from_numpy(sequences[0].astype("int64"))}

    Source: Megatron Core, `MegatronDataset`; `spans`, `assemble` and `__getitems__` are ours.
    """

    config_class: ClassVar[type[BlendedMegatronDatasetConfig]] = BlendedMegatronDatasetConfig
    """The config class whose options this kind needs; any config with fields of these names is accepted."""

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.unique_identifiers = self._identifiers()
        self._pad_token_id = choose_pad_token(config.tokenizer, bool(config.allow_ambiguous_pad_tokens))
        self._load_index()

    def _load_index(self) -> None:
        """Load or build the index of samples; called at the end of construction. Does nothing by default."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # torch's DataLoader prefers __getitems__: without this it would bypass a subclass's own __getitem__.
        if "__getitem__" in vars(cls) and "__getitems__" not in vars(cls):
            cls.__getitems__ = _one_by_one  # type: ignore[method-assign]

    def _identifiers(self) -> OrderedDict[str, Any]:
        return self.identify(self.dataset_path, self.num_samples, self.index_split, self.config)

    @classmethod
    def identify(
        cls, dataset_path: str | None, num_samples: int | None, split: Split, config: BlendedMegatronDatasetConfig
    ) -> OrderedDict[str, Any]:
        """Return the identifiers that Megatron hashes for the names of its caches; the data need not be open.

        Args:
            dataset_path: prefix, as the user wrote it.
            num_samples: the least number of samples; None is one epoch.
            split: the split.
            config: options of the run.

        Returns:
            Values by name, in Megatron's order.
        """
        return OrderedDict(
            [
                ("class", recorded_name(cls)),
                ("dataset_path", dataset_path),
                ("num_samples", num_samples),
                ("index_split", split.name),
                *((name, getattr(config, name)) for name in cls._key_config_attributes()),
            ]
        )

    @classmethod
    def open_later(cls, *arguments: Any) -> Any:
        """Return a dataset that reads ranges of its index files.

        Args:
            arguments: those of `GPTDataset.open_later`.

        Returns:
            Nothing here: only GPT datasets can do it.

        Raises:
            ConfigError: always, for other kinds.
        """
        raise ConfigError(f"{cls.__name__}: its index cannot be read by ranges (only GPT datasets' can)")

    @property
    def order_identity(self) -> Any:
        """Identity of the samples and their order, in JSON values.

        Equal for copies of the data in other places, and for numbers of samples that share one order. By default the
        text that Megatron hashes.
        """
        return self.unique_description

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Return the names of config fields in the identity, in the order that is hashed."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Return the number of elements that splits divide: sequences for GPT, documents for other kinds.

        Args:
            low_level_dataset: as `build_low_level_dataset` returns it.

        Returns:
            The number of elements; the indices of a split are some of 0 to this number - 1.
        """

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open the low-level dataset of a prefix.

        Args:
            dataset_path: prefix, a path or any URI; None for a config without a blend.
            config: options of the run.

        Returns:
            The stored data, which the constructor takes as `dataset`.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def spans(self, idx: int | None) -> list[Span]:
        """Return the spans of a sample's tokens, without reading any.

        Args:
            idx: position in serving order; None is the padding sample: the tokens of sample 0, without loss.

        Returns:
            (sequence, first token, number of tokens) of each span, in order.
        """

    @abstractmethod
    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Return the sample made of the given tokens, without reading.

        Args:
            idx: as for `spans`.
            sequences: the tokens of each span, 1-D, of the stored dtype.

        Returns:
            Tensors or NumPy scalars by name.
        """

    def _position(self, idx: int | None) -> int:
        """Return the position of a sample in serving order; a negative `idx` counts from the end, None is sample 0.

        Raises:
            IndexError: there is no such sample.
        """
        number = 0 if idx is None else int(idx)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.dataset_path}, {self.index_split.name} split: sample {idx}, it has {len(self)}")
        return number % len(self)

    def __repr__(self) -> str:
        path = redacted(self.dataset_path or "made-up tokens")
        return f"{type(self).__name__}({path}, {self.index_split.name}, {self._describe_samples()})"

    def _describe_samples(self) -> str:
        try:
            return f"{len(self):,} samples x {self.config.sequence_length:,}"
        except AttributeError:  # within its constructor
            return "not built"

    def __getitem__(self, idx: int | None) -> Sample:
        return self.read_sample(idx)

    def __getitems__(self, idxs: Sequence[int | None]) -> Sequence[Sample]:
        """Return the samples of a batch, whose tokens are read at once."""
        return self.read_batch([(self, idxs, range(len(idxs)))], len(idxs))

    def read_sample(self, idx: int | None) -> Sample:
        """Return one sample: a batch of one, unless a kind has a faster way.

        Args:
            idx: as for `spans`.

        Returns:
            The result of `assemble` for its tokens.
        """
        return self.read_batch([(self, [idx], [0])], 1)[0]

    @classmethod
    def read_batch(cls, requests: Sequence[Request], num_rows: int) -> Sequence[Sample]:
        """Return a batch of samples of several datasets of this class, whose tokens are read at once.

        Args:
            requests: the samples of each dataset and their rows.
            num_rows: size of the batch; each row is in one request.

        Returns:
            The samples in the order of their rows.
        """
        spans = [[dataset.spans(idx) for idx in idxs] for dataset, idxs, _ in requests]
        reads = [(request[0].dataset, [*chain(*each)]) for request, each in zip(requests, spans, strict=True)]
        batch: list[Sample] = [{}] * num_rows
        for (dataset, idxs, rows), each, tokens in zip(requests, spans, map(iter, read_spans(reads)), strict=True):
            for idx, row, sample in zip(idxs, rows, each, strict=True):
                batch[row] = dataset.assemble(idx, [next(tokens) for _ in sample])
        return batch

    @classmethod
    def read_tokens_of_batch(cls, requests: Sequence[Request], num_rows: int) -> NDArray[np.int32]:
        """Return only the tokens of a batch, without masks and positions; GPT datasets alone can.

        Args:
            requests: the samples of each dataset and their rows.
            num_rows: size of the batch.

        Returns:
            int32, shape (num_rows, S + 1): as of `GPTDataset.read_tokens`.

        Raises:
            ConfigError: always, for other kinds.
        """
        raise ConfigError(f"{cls.__name__}: cannot serve tokens alone (only GPT datasets can)")


def _one_by_one(self: MegatronDataset, idxs: Sequence[int | None]) -> list[Sample]:
    return [self[idx] for idx in idxs]


def required(dataset_path: str | None) -> str:
    """Return the prefix; raise ConfigError if it is None, as for a config without a blend."""
    if dataset_path is None:
        raise ConfigError(
            "blend: found none, needs blend=([prefixes], [weights] or None) or blend_per_split; "
            "for made-up tokens build MockGPTDataset"
        )
    return dataset_path


def choose_pad_token(tokenizer: Any, allow_ambiguous: bool) -> int:
    """Return the pad id; -1 if there is none, or if it is also another special token and that is not allowed.

    Source: Megatron Core, with its two warnings.
    """
    pad = find_token(tokenizer, "pad")
    if pad is None or pad not in _special_tokens(tokenizer):
        return NO_PAD if pad is None else pad
    if allow_ambiguous:
        warnings.warn(f"pad id {pad} is also another special token, and all of them are masked", stacklevel=2)
        return pad
    warnings.warn(
        f"pad id {pad} is also another special token: pad tokens in the data are not masked; give the tokenizer "
        "a pad id of its own, or set allow_ambiguous_pad_tokens",
        stacklevel=2,
    )
    return NO_PAD


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
