"""Base class of all kinds of datasets: identity, padding, and batches of samples from one vectored read."""

from __future__ import annotations

import hashlib
import json
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, ClassVar, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, Split
from binidx.dataset.token_dataset import SourceTokens, TokenDataset
from binidx.dataset.torch_bridge import Sample
from binidx.errors import ConfigError, redacted
from binidx.format.indexed_dataset import IndexedDataset, Span
from binidx.index.cache.index_cache import BuildContext
from binidx.order.order_protocols import Bounds, Numbers, Order, Spans
from binidx.order.source_order import SourceOrder, StoredSource, with_source
from binidx.storage.interfaces import RangeReader

NO_PAD = -1
"""Pad id of tokenizers without one; no stored token has it."""

Config = TypeVar("Config")
LowLevel = TypeVar("LowLevel")


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


def with_context(
    build: Callable[[str | None, Config, BuildContext], LowLevel],
) -> Callable[[str | None, Config], LowLevel]:
    """Declare a `build_low_level_dataset` that also takes the options of the build, which the builder gives it.

    Its type has Megatron's two arguments, so that a user's subclass may replace it by such a function.

    Args:
        build: has a default for its third argument, `context`.

    Returns:
        The same function.
    """
    return cast(Callable[[str | None, Config], LowLevel], build)


def open_tokens(
    kind: Callable[..., LowLevel], dataset_path: str | None, config: Any, context: BuildContext, **options: Any
) -> LowLevel:
    """Open the `.bin`/`.idx` pair of a prefix as `kind`, an `IndexedDataset`, with further options of its own."""
    options |= {"storage_options": config.storage_options, "listed": context.listed}
    return kind(required(dataset_path), mmap=config.mmap_bin_files, **options)


def index_array(name: str) -> Any:
    """Return a property of a dataset: an array of its order, which can be assigned."""
    return property(
        lambda dataset: getattr(dataset._order, name), lambda dataset, array: dataset._order.set_arrays({name: array})
    )


class MegatronDataset(ABC):
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
        context: options of the build of the index (not in Megatron Core); the builder gives it to constructors that
            have an argument of this name.

    Attributes:
        unique_identifiers: class, data and options, in the order that Megatron hashes.
        order: which tokens make a sample, as a value: see `binidx.order.order_protocols.Order`.

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

    samples_differ: ClassVar[bool] = False
    """Megatron 0.16.1 and main make different samples of this kind; `megatron_samples` selects a version."""

    _view: Order | None = None

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
        *,
        context: BuildContext = BuildContext(),  # noqa: B008 (frozen)
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.unique_identifiers = self._identifiers()
        self._pad_token_id = choose_pad_token(config.tokenizer, bool(config.allow_ambiguous_pad_tokens))
        self.build_context = context
        self.index_digests: dict[str, str] = {}
        self._load_index()

    def _load_index(self) -> None:  # noqa: B027 (optional)
        """Load or build the index of samples; called at the end of construction. Does nothing by default."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_samples", "build_context")}

    @cached_property
    def unique_description(self) -> str:
        """JSON text of the identifiers."""
        return describe(self.unique_identifiers)

    @cached_property
    def unique_description_hash(self) -> str:
        """md5 of that text, in hex."""
        return digest(self.unique_description)

    @cached_property
    def _order(self) -> Any:
        return HookedOrder(self)

    @property
    def order(self) -> Order:
        """Order of the samples: the tokens of each, as a value."""
        order: Order = self._order
        return order

    @property
    def index_names(self) -> Sequence[str]:
        """Attributes that are arrays of the index."""
        return self._order.array_names  # type: ignore[no-any-return]

    @cached_property
    def _samples(self) -> TokenDataset:
        """Reader of samples, made at the first use. A subclass's hooks are looked up here, not at each read."""
        return TokenDataset(self.order, [self.dataset], [self.assemble_function])

    @property
    def assemble_function(self) -> Any:
        """Function that makes the samples of a batch (`Assemble`)."""
        return OneByOne(self)

    @property
    def reads_by_itself(self) -> bool:
        """True if a class of the user reads samples in its own way, so that a blend calls its methods."""
        return type(self).__getitems__ is not MegatronDataset.__getitems__

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
                ("dataset_path", config.as_written(dataset_path)),
                ("num_samples", num_samples),
                ("index_split", split.name),
                *((name, getattr(config, name)) for name in cls._key_config_attributes()),
            ]
        )

    @property
    def order_identity(self) -> Any:
        """Identity of the samples and their order, in JSON values.

        Equal for copies of the data in other places, and for numbers of samples that share one order. By default the
        text that Megatron hashes.
        """
        version = self._sample_version
        return describe(OrderedDict({**self.unique_identifiers, **version})) if version else self.unique_description

    @property
    def _sample_version(self) -> dict[str, str]:
        """The field of `order_identity` that tells samples of main from those of 0.16.1, whose states have no field."""
        return {"megatron_samples": "main"} if self.samples_differ and self.config.megatron_samples == "main" else {}

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
        return self._samples[idx]

    def __getitems__(self, idxs: Sequence[int | None]) -> Sequence[Sample]:
        """Return the samples of a batch, whose tokens are read at once."""
        return self._samples.__getitems__(idxs)

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the stored bytes of which samples are made.

        Returns:
            One reader; none if the low-level dataset computes its tokens.
        """
        reader = getattr(self.dataset, "bin_reader", None)
        return [] if reader is None else [reader]


def wrap_order(dataset: Any, *, is_whole: bool) -> Order | None:
    """Return the order over a dataset's own that its config asks for; None if it asks for none.

    Args:
        dataset: a GPT dataset or a blend.
        is_whole: whether the dataset is that of a split; else one source of a blend.

    Raises:
        ConfigError: methods of the user make the samples, which take no order.
    """
    option = getattr(dataset.config, "order", None)  # other kinds have no such option
    if option is None:
        return None
    order: Order = option.wrap(dataset.order, dataset.config.storage_options, is_whole=is_whole)
    if order is dataset.order:
        return None
    parts = dataset.datasets if hasattr(dataset, "datasets") else [dataset]
    if any(part.reads_by_itself for part in parts):
        raise ConfigError(f"order: {type(parts[0]).__name__} reads samples by itself, which takes no order")
    return order


class HookedOrder(SourceOrder):
    """Order of a dataset whose class implements `spans`."""

    def __init__(self, dataset: MegatronDataset) -> None:
        super().__init__(StoredSource(str(dataset.dataset_path), dataset.dataset, dataset.indices))
        self.hooks = dataset

    @property
    def identity(self) -> Any:
        return self.hooks.order_identity

    def __len__(self) -> int:
        return len(self.hooks)

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        spans = [self.hooks.spans(sample) for sample in samples.tolist()]
        rows = np.array([*chain(*spans)], np.int64).reshape(-1, 3)
        return with_source(0, rows), np.cumsum([0, *map(len, spans)])

    def candidates(self, sequences: Numbers) -> Numbers:
        return np.arange(len(self))

    @property
    def num_epochs(self) -> int:
        return int(self.epochs(np.empty(0, np.int64)).max(initial=0)) + 1

    def epochs(self, samples: Numbers) -> Numbers:
        raise ConfigError(f"order: {type(self.hooks).__name__} has no epochs; needs GPT datasets or a blend of them")


@dataclass(frozen=True)
class OneByOne:
    """Assemble function that calls `assemble` of a dataset for each sample."""

    dataset: MegatronDataset

    def __call__(self, tokens: SourceTokens) -> Sequence[Sample]:
        bounds = tokens.bounds.tolist()
        return [
            self.dataset.assemble(number, tokens.pieces[first:stop])
            for number, (first, stop) in zip(tokens.of.numbers, pairwise(bounds), strict=True)
        ]


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
