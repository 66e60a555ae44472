"""Base class of the kinds of datasets: request and order of one source, and batches from one vectored read."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.config import BlendedMegatronDatasetConfig, Bookends, Split, choose_pad_token
from binidx.dataset.megatron.ordered_dataset import SEVERAL, OrderedDataset, current_build, number_samples, own_methods
from binidx.dataset.megatron_releases import Rule, describe_rules
from binidx.dataset.token_dataset import Assemble, SampleAssemble, SourceRows, SourceTokens, TokenDataset
from binidx.dataset.torch_bridge import Sample
from binidx.errors import TRIMMED, ConfigError, IndexBuildError, redacted, trim_traceback
from binidx.forks import cached_property
from binidx.format.tokens import Span, StoredTokens
from binidx.html_table import format_html_table
from binidx.index.cache.index_files import describe, recorded_name
from binidx.index.documents import Documents, as_array
from binidx.order.order_protocols import Bounds, Numbers, Order, Spans
from binidx.order.requests import OpaqueRequest, OpenedRequest, Request, SourceRequest, SourceRule
from binidx.order.source_order import SourceOrder, StoredSource, with_source
from binidx.storage.interfaces import RangeReader

LowLevel = TypeVar("LowLevel")

NO_SPANS = np.empty((0, 3), np.int64)

HOOKS = (
    *("__init__", "__len__", "spans", "build_low_level_dataset", "numel_low_level_dataset", "_open_order"),
    *("_build_document_sample_shuffle_indices", "_query_document_sample_shuffle_indices"),
)
"""Methods on which an order depends, and which a request cannot call; the last two are `compat.megatron`'s."""


def open_tokens(kind: Callable[..., LowLevel], dataset_path: str | None, config: Any, **options: Any) -> LowLevel:
    """Open the `.bin`/`.idx` pair of a prefix as `kind`, an `IndexedDataset`, with further options of its own.

    Args:
        kind: class of the opened pair, an `IndexedDataset`.
        dataset_path: prefix, a path or any URI.
        config: `mmap_bin_files` and `storage_options` are used.
        options: further arguments of `kind`.
    """
    prefix = required(dataset_path)
    options |= {"storage_options": config.storage_options, "listed": current_build().listed.get(prefix)}
    return kind(prefix, mmap=config.mmap_bin_files, **options)


class MegatronDataset(OrderedDataset):
    """Samples of one split of one low-level dataset.

    A kind of dataset implements two pure methods: `spans` returns the spans of tokens of a sample, `assemble` makes the
    sample of these tokens. This class reads the spans of a whole batch at once. A subclass may also replace
    `__getitem__`; its batches are then made of single samples. A class with `spans` also has `__len__`: the number of
    samples, at least `num_samples`. The page "Add a kind of dataset" has a whole one.

    Args:
        dataset: the low-level dataset.
        dataset_path: its prefix, as the user wrote it: part of the identity.
        indices: the sequences (GPT) or documents of this split, shape (num_in_split,), int32; the builder gives a range
            to constructors of this library.
        num_samples: the least number of samples; None is one epoch.
        index_split: the split.
        config: options of the run.

    Attributes:
        dataset, dataset_path, indices, num_samples, index_split, config: the arguments.
        unique_identifiers: class, data and options, in the order that Megatron hashes.
        order: spans of the tokens of each sample: see `binidx.order.order_protocols.Order`.

    Example:
        >>> class FirstTokens(binidx.megatron.MegatronDataset):
        ...     numel_low_level_dataset = staticmethod(len)
        ...     @staticmethod
        ...     def build_low_level_dataset(dataset_path, config):
        ...         return binidx.IndexedDataset(dataset_path, storage_options=config.storage_options)
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

    release_rules: ClassVar[Set[Rule]] = frozenset()
    """Rules of Megatron's releases on which the samples of this kind depend; `megatron_samples` selects a release."""

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: NDArray[np.int32],
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self._keep_indices(indices)
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config
        self.build_context, self.index_digests = current_build().unlisted, {}
        asked, option = self.request_source(dataset_path, num_samples, index_split, config), config.order_option
        [self.source_request] = [asked] if option is None else option.request(asked).sources
        self.unique_identifiers = self.source_request.identifiers
        self._pad_token_id = choose_pad_token(config.tokenizer, bool(config.allow_ambiguous_pad_tokens))
        order = self._open_order()
        self._order: Any = HookedOrder(self, None) if order is None else order
        served = HookedOrder(self, order) if self._has_own_spans else self._order
        self.opened = OpenedRequest(asked, self.source_request, served)

    @classmethod
    def request_source(
        cls,
        dataset_path: str | None,
        num_samples: int | None,
        split: Split,
        config: Any,
        bookends: Bookends | None = None,
    ) -> SourceRequest:
        """Return the request of Megatron's order of one split of one prefix; the data need not be open.

        Args:
            dataset_path: prefix, as the user wrote it.
            num_samples: the least number of samples; None is one epoch.
            split: the split.
            config: options of the run.
            bookends: start and end of the split in the sequences, from 0 to 1; None if they are chosen already.
        """
        own = own_methods(cls, *HOOKS)
        request: Callable[..., SourceRequest] = partial(OpaqueRequest, own=own) if own else SourceRequest
        return request(
            recorded_name(cls),
            dataset_path or "",
            str(config.as_written(dataset_path)),
            config.storage_options,
            split.name,
            bookends,
            cls.identify(dataset_path, num_samples, split, config),
            cls._rule(num_samples, split, config),
            config.cache_directory,
        )

    @contextlib.contextmanager
    def naming_split(self, size: str = "") -> Iterator[None]:
        """Let errors of a build in the block name the split, and its size; not one of another rank."""
        try:
            yield
        except IndexBuildError as error:
            if type(error) is not IndexBuildError:
                raise
            raise IndexBuildError(f"{self.dataset_path}, {self.index_split.name} split{size}: {error}") from None

    @classmethod
    def _rule(cls, num_samples: int | None, split: Split, config: Any) -> SourceRule | None:
        """Return how the order follows from the sequences; None if the class opens it by itself."""
        return None

    def _open_order(self) -> SourceOrder | None:
        """Return the order of the samples, whose index is loaded or built; None if `spans` is the order."""
        return None

    @cached_property
    def request(self) -> Request:
        """Request of the samples that are served, if the dataset is a split of its own."""
        return self.request_order(self.opened)

    @property
    def order(self) -> Order:
        """Order of this request, which is opened at the first use: a blend of the dataset opens its own."""
        if self._opened_order is not None:
            return self._opened_order
        # Threads do not wait for one another, and may open the order, too. A set changes in one step.
        opening, thread = vars(self).setdefault("_opening_threads", set()), threading.get_ident()
        if thread in opening:
            return self.opened.order  # a method of a user asks for the length while a view is opened
        opening.add(thread)
        try:
            self._opened_order = order = self.opener.open(self.request)
        finally:
            opening.discard(thread)
        return order

    @property
    def _has_own_spans(self) -> bool:
        return bool(own_methods(type(self), "spans"))

    @cached_property
    def _source(self) -> StoredSource:
        """The sequences of the split."""
        return StoredSource(self.source_request.name, self.dataset, self._list_sequences())

    def _keep_indices(self, indices: Documents) -> None:
        """Set `indices`, an array in Megatron."""
        self.indices = as_array(indices)

    def _list_sequences(self) -> Documents:
        """Return the numbers of the sequences of the split, shape (num_in_split,)."""
        return self.indices

    @property
    def parts(self) -> Sequence[MegatronDataset]:
        return [self]

    def __len__(self) -> int:
        order = self.order
        return len(order.own) if isinstance(order, HookedOrder) and order.own is not None else len(order)

    @cached_property
    def _assemble(self) -> Assemble:
        """Function that makes the samples of a batch."""
        return self._make_assemble()

    def _make_assemble(self) -> Assemble:
        """Return the function that makes the samples of a batch, unless the class has its own `assemble`."""
        raise NotImplementedError(f"{type(self).__name__}: has neither __getitem__ nor spans and assemble")

    @property
    def assemble_function(self) -> Assemble:
        """Function that makes the samples of a batch; it calls a user's `assemble` if there is one."""
        return HookedAssemble(self) if own_methods(type(self), "assemble") else self._assemble

    @cached_property
    def _samples(self) -> TokenDataset:
        """Reader of samples, made at the first use. A subclass's hooks are looked up here, not at each read."""
        return TokenDataset(self.order, [self.dataset], [self.assemble_function])

    @property
    def reads_by_itself(self) -> bool:
        """True if a class of the user reads samples in its own way, so that a blend calls its methods."""
        return bool(own_methods(type(self), "__getitem__", "__getitems__"))

    @property
    def counts_by_itself(self) -> bool:
        """True if a class of the user has its own `__len__`."""
        return bool(own_methods(type(self), "__len__"))

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
                *[(name, getattr(config, name)) for name in cls._key_config_attributes()],
            ]
        )

    @property
    def sample_identifiers(self) -> OrderedDict[str, Any]:
        """The identifiers, and the rules of the release of Megatron whose samples are served, if releases differ."""
        return OrderedDict({**self.unique_identifiers, **self._describe_release(self.config)})

    @classmethod
    def _describe_release(cls, config: Any) -> dict[str, str]:
        """Return the field of `order_identity` for the rules of a release; identities of 0.16 have none."""
        return describe_rules(config, cls.release_rules) if cls.release_rules else {}

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

    def spans(self, idx: int | None) -> list[Span]:
        """Return the spans of a sample's tokens, without reading any.

        Args:
            idx: position in serving order; None is the padding sample: the tokens of sample 0, without loss.

        Returns:
            (sequence, first token, number of tokens) of each span, in order. Sequences are those of `dataset`, not
            positions in `indices`.

        Raises:
            IndexError: there is no such sample.
        """
        if isinstance(self._order, HookedOrder):
            raise NotImplementedError(f"{type(self).__name__}: has neither __getitem__ nor spans and assemble")
        # A user's method calls this one for the samples of the order below it.
        order = self._order if self._has_own_spans else self.order
        spans, _ = order.spans(np.array([self._position(idx, len(order))]))
        return [(sequence, first, count) for _, sequence, first, count in spans.tolist()]

    def assemble(self, idx: int | None, sequences: Sequence[NDArray[Any]]) -> Sample:
        """Return the sample made of the given tokens, without reading.

        Args:
            idx: number of the sample in the dataset's own order, of which a view leaves some out; None as for `spans`.
            sequences: the tokens of each span, 1-D, of the stored dtype or a wider one.

        Returns:
            Tensors or NumPy scalars by name, as the class describes them.
        """
        dtype = np.result_type(*sequences) if len(sequences) else np.int32
        pieces = [np.ascontiguousarray(sequence, dtype) for sequence in sequences]
        number, spans = 0 if idx is None else int(idx), NO_SPANS
        if isinstance(self._assemble, SampleAssemble):  # functions of batches need the pieces alone
            number = self._position(idx, len(self._order))
            spans = self._order.spans(np.array([number]))[0][:, 1:]
        elif number < 0:
            number += len(self._order)
        rows = SourceRows(0, [None if idx is None else number], [0])
        return self._assemble(SourceTokens(rows, spans, np.array([0, len(pieces)]), pieces))[0]

    def _position(self, idx: int | None, size: int) -> int:
        """Return the number of a sample of `size` samples; a negative `idx` counts from the end, None is sample 0.

        Raises:
            IndexError: there is no such sample.
        """
        number = 0 if idx is None else int(idx)
        if not -size <= number < size:
            raise IndexError(f"{self.dataset_path}, {self.index_split.name} split: sample {idx}, it has {size}")
        return number % size

    def find_sequences(self, idx: int | None) -> tuple[int, int]:
        """Return (start, stop) of the sequences of a sample, for kinds whose samples are runs of sequences.

        Args:
            idx: number of the sample; a negative one counts from the end, None is sample 0.

        Returns:
            Numbers of stored sequences.

        Raises:
            IndexError: there is no such sample.
        """
        _, number = self.order.locate(np.array([self._position(idx, len(self))]))
        (first,), (stop,) = self._order.runs(number)
        return int(first), int(stop)

    def __repr__(self) -> str:
        path = redacted(self.dataset_path or "made-up tokens")
        return f"{type(self).__name__}({path}, {self.index_split.name}, {self._describe_samples()})"

    def _repr_html_(self) -> str:
        values = (self.index_split.name, len(self), self.config.sequence_length, len(self.dataset))
        names = ("split", "samples", "tokens a sample", "stored sequences")
        title = f"{type(self).__name__}: {redacted(self.dataset_path or 'made-up tokens')}"
        return format_html_table(title, [*zip(names, values, strict=True)])

    def _describe_samples(self) -> str:
        try:
            return f"{len(self):,} samples x {self.config.sequence_length:,}"
        except AttributeError:  # within its constructor
            return "not built"

    def __getitem__(self, idx: Any) -> Any:
        """Return a sample, or the list of the samples of a slice or of a list of numbers, which are read at once."""
        if isinstance(idx, SEVERAL):
            return list(self.__getitems__(number_samples(idx, len(self))))
        try:
            return self._samples[idx]
        except TRIMMED as error:
            trim_traceback(error)
            raise

    def __getitems__(self, idxs: Sequence[int | None]) -> Sequence[Sample]:
        """Return the samples of a batch, whose tokens are read at once."""
        return self._samples.__getitems__(idxs)

    def token_readers(self) -> Sequence[RangeReader]:
        """Return the readers of the stored bytes of which samples are made.

        Returns:
            One reader; none if the low-level dataset computes its tokens.
        """
        return [self.dataset.bin_reader] if isinstance(self.dataset, StoredTokens) else []


class HookedOrder(SourceOrder):
    """Order of a dataset whose class implements `spans`.

    Args:
        dataset: the dataset, whose `spans` is called for each sample.
        own: the order by the index of the dataset, on which its `spans` relies; None: it has no index.
    """

    def __init__(self, dataset: MegatronDataset, own: SourceOrder | None) -> None:
        super().__init__(dataset._source)
        self.hooks, self.own = dataset, own

    @property
    def identity(self) -> Any:
        return describe(self.hooks.sample_identifiers) if self.own is None else self.own.identity

    def __len__(self) -> int:
        if self.hooks.counts_by_itself:
            return len(self.hooks)
        if self.own is None:
            raise NotImplementedError(f"{type(self.hooks).__name__}: has no __len__")
        return len(self.own)

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
class HookedAssemble(SampleAssemble):
    """Assemble function that calls `assemble` of a dataset for each sample."""

    dataset: MegatronDataset

    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        return self.dataset.assemble(number, pieces)


def required(dataset_path: str | None) -> str:
    """Return the prefix; raise ConfigError if it is None, as for a config without a blend."""
    if dataset_path is None:
        raise ConfigError(
            "blend: found none, needs blend=([prefixes], [weights] or None) or blend_per_split; "
            "for made-up tokens build MockGPTDataset"
        )
    return dataset_path
