"""The base of every kind of dataset: identity, padding, and batches of samples out of one vectored read."""

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

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, Split
from binidx.dataset.torch_bridge import Sample
from binidx.errors import ConfigError
from binidx.format.indexed_dataset import IndexedDataset, Span, read_spans
from binidx.index.cache.build_context import BuildContext
from binidx.index.cache.index_files import IndexFiles

NO_PAD = -1


"""A pad id that no stored token has."""


Request = tuple[Any, Sequence[int | None], Sequence[int]]


"""A dataset, samples of it, and the rows of the batch that they go to."""


def describe(identifiers: OrderedDict[str, Any]) -> str:
    """Return the text that Megatron hashes for the names of index caches."""
    return json.dumps(identifiers, indent=4, default=_identify)


def _identify(thing: Any) -> Any:
    try:
        return thing.unique_identifiers
    except AttributeError:
        raise ConfigError(
            f"{type(thing).__name__}: has no unique_identifiers, which the names of index caches are made of; "
            "give the tokenizer an OrderedDict of that name"
        ) from None


def digest(description: str) -> str:
    """The md5, in hex, with which Megatron begins the names of index caches."""
    return hashlib.md5(description.encode("utf-8"), usedforsecurity=False).hexdigest()


def recorded_name(kind: type) -> str:
    """Return the name of a class in index caches, orders and loader states.

    Our classes fix theirs as `RECORDED_NAME`: no rename of a class loses a cache. A user's subclass has its own name,
    as in Megatron Core.
    """
    return str(vars(kind).get("RECORDED_NAME", kind.__name__))


class Identified:
    """What is known by its `unique_identifiers`: their text and its digest, made when a cache's name needs them."""

    unique_identifiers: OrderedDict[str, Any]
    build_context = BuildContext()
    """Options of the build that makes it, while it does: `built_with`."""

    @classmethod
    def built_with(cls, context: BuildContext, *arguments: Any, **keywords: Any) -> Self:
        """`cls(*arguments, **keywords)`, whose index is built with these options.

        Constructors have Megatron's arguments, and subclasses of users have their own, so the options are set before.
        """
        made = cls.__new__(cls, *arguments, **keywords)
        made.build_context = context
        made.__init__(*arguments, **keywords)  # type: ignore[misc]
        del made.build_context
        return made

    @cached_property
    def unique_description(self) -> str:
        return describe(self.unique_identifiers)

    @cached_property
    def unique_description_hash(self) -> str:
        return digest(self.unique_description)


class MegatronDataset(Identified, ABC):
    """Samples of one split of one low-level dataset.

    A subclass says which spans of tokens a sample needs (`spans`, pure) and makes the sample of them (`assemble`); the
    base reads the spans of a whole batch in one go. A subclass with its own `__getitem__` is asked through that.

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix, as given by the user: part of the identity.
        indices: the sequences (GPT) or documents of this split, shape (num_in_split,).
        num_samples: the least number of samples, or None for one epoch.
        index_split: which split this is.
        config: what the run asks for.

    Source: Megatron Core, `MegatronDataset`; `spans`, `assemble` and `__getitems__` are ours.
    """

    config_class: ClassVar[type[BlendedMegatronDatasetConfig]] = BlendedMegatronDatasetConfig
    """The config whose options this kind asks for; one that has them under another name will do."""

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

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # torch's DataLoader prefers __getitems__: without this it would pass by a subclass's own __getitem__.
        if "__getitem__" in vars(cls) and "__getitems__" not in vars(cls):
            cls.__getitems__ = _one_by_one  # type: ignore[method-assign]

    def _identifiers(self) -> OrderedDict[str, Any]:
        return self.identify(self.dataset_path, self.num_samples, self.index_split, self.config)

    @classmethod
    def identify(
        cls, dataset_path: str | None, num_samples: int | None, split: Split, config: BlendedMegatronDatasetConfig
    ) -> OrderedDict[str, Any]:
        """What Megatron hashes for the names of its caches, known before the data is opened."""
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
    def cached_in(
        cls, prefix: str, num_samples: int | None, split: Split, config: BlendedMegatronDatasetConfig
    ) -> IndexFiles | None:
        """Where the index of such a dataset would be cached, where its kind has them prefetched."""
        return None

    @classmethod
    def open_later(cls, *arguments: Any) -> Any:
        """Return a dataset that reads ranges of its index files, where a kind has such: `GPTDataset.open_later`."""
        raise ConfigError(f"{cls.__name__}: its index cannot be read by ranges; that of GPT datasets can")

    @property
    def order_identity(self) -> Any:
        """What its samples and their order depend on, in JSON values: equal wherever the data lies, and for as many
        samples as come in the same order. A kind that does not say has the text that Megatron hashes."""
        return self.unique_description

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """The config fields that are part of the identity, in the order that is hashed."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """The elements that splits divide: sequences for GPT, documents for others."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        """Open the low-level dataset under a prefix. Without a blend there is none: `required`, or data made up."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def spans(self, idx: int | None) -> list[Span]:
        """The spans of tokens that make sample `idx`, in order. None is the padding sample: sample 0 without loss."""

    @abstractmethod
    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """The sample made of the tokens of its spans."""

    def __getitem__(self, idx: int | None) -> Sample:
        return self.read_one(idx)

    def __getitems__(self, idxs: Sequence[int | None]) -> Sequence[Sample]:
        """The samples of a batch, their tokens read in one go."""
        return self.read_together([(self, idxs, range(len(idxs)))], len(idxs))

    def read_one(self, idx: int | None) -> Sample:
        """One sample: a batch of one, where a subclass knows no quicker way."""
        return self.read_together([(self, [idx], [0])], 1)[0]

    @classmethod
    def read_together(cls, requests: Sequence[Request], num_rows: int) -> Sequence[Sample]:
        """A batch of `num_rows` samples of several datasets of this class, their tokens read at the same time."""
        spans = [[dataset.spans(idx) for idx in idxs] for dataset, idxs, _ in requests]
        wanted = [(request[0].dataset, [*chain(*found)]) for request, found in zip(requests, spans, strict=True)]
        batch: list[Sample] = [{}] * num_rows
        for (dataset, idxs, rows), found, tokens in zip(requests, spans, map(iter, read_spans(wanted)), strict=True):
            for idx, row, sample in zip(idxs, rows, found, strict=True):
                batch[row] = dataset.assemble(idx, [next(tokens) for _ in sample])
        return batch

    @classmethod
    def read_tokens_together(cls, requests: Sequence[Request], num_rows: int) -> NDArray[np.int32]:
        """The tokens alone of a batch of several datasets of this class, where it has such samples."""
        raise ConfigError(f"{cls.__name__}: has no samples that are tokens alone; GPT datasets have")


def _one_by_one(self: MegatronDataset, idxs: Sequence[int | None]) -> list[Sample]:
    return [self[idx] for idx in idxs]


def required(dataset_path: str | None) -> str:
    """The prefix; ConfigError where a config without a blend has none."""
    if dataset_path is None:
        raise ConfigError(
            "blend: found none, needs blend=([prefixes], [weights] or None) or blend_per_split; "
            "for made-up tokens build MockGPTDataset"
        )
    return dataset_path


def choose_pad_token(tokenizer: Any, allow_ambiguous: bool) -> int:
    """The id that pads, or -1 where the tokenizer has none or it is another special token too.

    Source: Megatron Core, with its two warnings.
    """
    pad = token_of(tokenizer, "pad")
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


def token_of(tokenizer: Any, name: str) -> int | None:
    """The id of "pad", "eod" and the like; None of a tokenizer that has none, or raises at the question."""
    try:
        token: int | None = getattr(tokenizer, name)
    except Exception:  # tokenizers without this token raise what they like
        return None
    return token


def _special_tokens(tokenizer: Any) -> list[Any]:
    try:
        tokens = [token for name, token in tokenizer.special_tokens_dict.items() if name != "pad_token"]
    except (AttributeError, IndexError, ValueError):
        tokens = []
    return tokens or [token_of(tokenizer, "eos"), token_of(tokenizer, "eod")]
