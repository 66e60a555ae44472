"""Requests: descriptions of the order that a config asks for of one split, as pure trees of frozen values.

    View("drop.txt")  ─► ViewRequest
                           BlendRequest [0.7, 0.3], 1,000,000 samples
                             SourceRequest s3://corpus/en      705,000 samples of its train split
                             SourceRequest s3://corpus/code    301,500

An order is opened, never applied: everything that changes which samples are served, and when, is a request over
requests. A view over each source stands inside the blend, a view over the blend around it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from binidx.errors import BlendError, ConfigError, IndexBuildError
from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset
from binidx.index.blend import ARRAYS, build_blend_arrays, check_blend_index, normalize, samples_per_dataset
from binidx.index.cache.array_writer import ArrayWriter, build_in_memory
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import Arrays, IndexName, describe, digest
from binidx.index.documents import check_documents, split_range
from binidx.order.blended_order import BlendedOrder
from binidx.order.gpt_order import GPTParameters, GPTRule
from binidx.order.opener import IndexOptions, Opener
from binidx.order.order_protocols import DocumentRule, Order, Source
from binidx.order.ranged_order import LazyOrder, LazySource, open_ranges
from binidx.order.source_order import SourceOrder, StoredSource
from binidx.storage.location import Location
from binidx.storage.stores.registry import join_uri
from binidx.storage.threads import OPENS

Over = TypeVar("Over", bound="OverRequest")


class Request(ABC):
    """Order that a config asks for of one split, before anything is opened: a frozen value."""

    @property
    @abstractmethod
    def inner_requests(self) -> Sequence[Request]:
        """The requests of which this one is made, whose samples it serves; none of a source."""

    @property
    def sources(self) -> Sequence[SourceRequest]:
        """The request of each source, in the order in which spans number them."""
        return [source for request in self.inner_requests for source in request.sources]

    @property
    def uncounted(self) -> str:
        """Clause about what `binidx plan` does not count of the order, as it opens nothing; "" of Megatron's orders."""
        return ""

    def list_uncounted(self) -> list[str]:
        """Return the `uncounted` of this request and of those inside, each once."""
        inner = [text for request in self.inner_requests for text in request.list_uncounted()]
        return [*dict.fromkeys(filter(None, [self.uncounted, *inner]))]

    @abstractmethod
    def open(self, opener: Opener) -> Order:
        """Return the order. Requests inside are opened by `opener.open`."""

    @abstractmethod
    def map_sources(self, change: Callable[[SourceRequest], Request]) -> Request:
        """Return the request with the result of `change` in the place of each source that is not yet opened."""


class SourceRule(Protocol):
    """Rule by which the order of one source follows from its sequences: a frozen value."""

    @property
    def parameters(self) -> GPTParameters:
        """Options of the order."""

    @property
    def fields(self) -> Mapping[str, Any]:
        """Fields for the names of caches; none for Megatron's own rule."""

    @property
    def uncounted(self) -> str:
        """Part of an order by this rule that `binidx plan` does not count: see `Request.uncounted`."""

    def open(self, source: Source, options: IndexOptions) -> SourceOrder:
        """Return the order, whose index is loaded or built."""


@dataclass(frozen=True)
class SourceRequest(Request):
    """Order of one split of one source.

    Args:
        kind: recorded name of the class of dataset.
        prefix: of the data, as it is opened; "" if it is made up.
        name: prefix, as the user wrote it.
        storage_options: options of the store of the data.
        split: name of the split.
        bookends: start and end of the split in the sequences, from 0 to 1; None if the caller has chosen the sequences.
        fields: values by name that Megatron hashes for the name of the cache.
        rule: how the order follows from the sequences; None if the class of dataset opens it by itself.
        directory: folder of the index; None: beside the data.
        documents: rule that chooses the documents of which the index is built; None: all of the split.
        more: further identifiers, of an index that is made of this one.
    """

    kind: str
    prefix: str
    name: str
    storage_options: Mapping[str, Any] | None = field(repr=False)  # may hold secrets
    split: str
    bookends: tuple[float, float] | None
    fields: OrderedDict[str, Any]
    rule: SourceRule | None
    directory: Location | None = None
    documents: DocumentRule | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    inner_requests: ClassVar[Sequence[Request]] = ()

    @property
    def sources(self) -> Sequence[SourceRequest]:
        return [self]

    @property
    def num_samples(self) -> int | None:
        """The least number of samples; None is one epoch."""
        count: int | None = self.fields["num_samples"]
        return count

    def map_sources(self, change: Callable[[SourceRequest], Request]) -> Request:
        return change(self)

    @property
    def parameters(self) -> GPTParameters:
        """Options of the order of GPT samples.

        Raises:
            ConfigError: the class of dataset has an order of its own.
        """
        if self.rule is None:
            raise ConfigError(f"order: {self.kind} has an order of its own; leave it, or skip documents")
        return self.rule.parameters

    def with_documents(self, rule: DocumentRule) -> SourceRequest:
        """Return the request of an index that is built of the documents that a rule chooses.

        Args:
            rule: the rule; without fields it is not applied.

        Raises:
            ConfigError: the class of dataset has an order of its own.
        """
        if not rule.index_fields(self.storage_options):
            return self
        self.parameters  # noqa: B018 - checks that documents can be chosen
        return replace(self, documents=rule)

    @cached_property
    def identifiers(self) -> OrderedDict[str, Any]:
        """The identifiers that Megatron hashes for the name of the index."""
        order = dict(self.rule.fields) if self.rule else {}
        order |= self.documents.index_fields(self.storage_options) if self.documents else {}
        more = {**({"order": order} if order else {}), **self.more}
        return OrderedDict([*self.fields.items(), *more.items()]) if more else self.fields

    def index_name(self) -> IndexName:
        """Return the name of the index in the cache, whether or not it exists."""
        beside_data = Location(join_uri(self.prefix, f"cache/{self.kind}_indices"), self.storage_options)
        return IndexName.of(self.directory or beside_data, self.kind, self.split, self.identifiers)

    def description_hash(self) -> str:
        """Return the md5 of the text with which Megatron names the index."""
        return digest(describe(self.identifiers))

    def split_documents(self, num_sequences: int) -> range:
        """Return the sequences of the split."""
        assert self.bookends is not None
        return split_range(self.bookends, num_sequences)

    @property
    def uncounted(self) -> str:
        rule = self.rule if self.documents is None else self.documents
        return "" if rule is None else rule.uncounted

    def choose_sequences(self, source: StoredSource) -> StoredSource:
        """Return a source with the documents of which the index is built; raise ConfigError if the rule has others."""
        if self.documents is None:
            return source
        chosen = self.documents.choose_sequences(source, self.storage_options)
        sequences = chosen if isinstance(chosen, range) else np.asarray(chosen)
        try:
            check_documents(sequences)
        except IndexBuildError as error:
            rule = f"{type(self.documents).__name__}.choose_sequences"
            raise ConfigError(f"{source.name}: {rule}: {error}") from None
        return replace(source, sequences=sequences)

    def index_options(self, opener: Opener) -> IndexOptions:
        return IndexOptions(self.index_name, opener)

    def check_pure(self) -> None:
        """Raise ConfigError if the class of dataset opens the order by itself, so that a request cannot."""
        if self.bookends is None or self.rule is None:
            raise ConfigError(f"order: found {self.kind}, which opens its order by itself; build the dataset")

    def open(self, opener: Opener) -> Order:
        self.check_pure()
        if opener.access == "ranges" and isinstance(self.rule, GPTRule) and self.documents is None:
            return LazyOrder(self.parameters, LazySource(self.name, self.prefix, partial(self._open_ranges, opener)))
        return self._open_whole(opener)

    def _open_whole(self, opener: Opener) -> SourceOrder:
        assert self.rule is not None
        dataset = IndexedDataset(self.prefix, mmap=opener.mmap, storage_options=self.storage_options)
        source = StoredSource(self.name, dataset, self.split_documents(len(dataset)))
        return self.rule.open(self.choose_sequences(source), self.index_options(opener))

    def _open_ranges(self, opener: Opener) -> SourceOrder:
        """Return the order by ranges of its cached index; whole if none is cached, or proven to be that of the data."""
        parameters, prefix = self.parameters, Location(self.prefix, self.storage_options)
        found = open_ranges(parameters, prefix, self.name, self.split_documents, self.index_options(opener))
        return self._open_whole(opener) if found is None else found


@dataclass(frozen=True)
class OpaqueRequest(SourceRequest):
    """Order of one source that methods of a user's class make: its constructor alone opens it.

    Args:
        own: names of these methods.
    """

    own: Sequence[str] = ()

    def check_pure(self) -> None:
        found = f"found {self.kind} with its own {', '.join(self.own)}"
        raise ConfigError(f"order: {found}, which only its constructor calls; build the dataset")


@dataclass(frozen=True)
class OpenedRequest(Request):
    """Request of one source whose order a dataset has opened already.

    Args:
        asked: the request of Megatron's order of the source.
        source: the request that was opened: another one if the option `order` changes the index.
        order: its order.
    """

    asked: SourceRequest
    source: SourceRequest
    order: Order

    inner_requests: ClassVar[Sequence[Request]] = ()

    @property
    def sources(self) -> Sequence[SourceRequest]:
        return [self.source]

    def map_sources(self, change: Callable[[SourceRequest], Request]) -> Request:
        changed = change(self.asked)
        if [*changed.sources] != [self.source]:
            found = f"found a dataset of {self.source.name} that was built without it"
            raise ConfigError(f"order: {found}; build it with the config of the blend, or with a builder")
        return self if isinstance(changed, SourceRequest) else changed.map_sources(lambda _: self)

    def open(self, opener: Opener) -> Order:
        return self.order


@dataclass(frozen=True)
class OverRequest(Request):
    """Base of a request over another one; a subclass serves samples of its order.

    Args:
        inner: the other request.
    """

    inner: Request

    @property
    def inner_requests(self) -> Sequence[Request]:
        return [self.inner]

    @property
    def uncounted(self) -> str:
        return "samples and reads are counted without it"

    def map_sources(self: Over, change: Callable[[SourceRequest], Request]) -> Over:
        return replace(self, inner=self.inner.map_sources(change))

    def open(self, opener: Opener) -> Order:
        return self.serve(opener.open(self.inner))

    def serve(self, order: Order) -> Order:
        """Return the order over that of the other request; a subclass that overrides `open` needs none.

        Args:
            order: the order of `inner`. Its arrays may be read by ranges, so use the methods of `Order`.

        Returns:
            A `binidx.order.view.ViewOrder`, another `ComposedOrder`, or `order` itself if nothing changes.
        """
        raise NotImplementedError(f"{type(self).__name__}: needs a method `serve`")


OpenBlend = Callable[["BlendRequest", Sequence[Order], Opener], Order]
"""Function that returns the order of a blend of opened parts."""


def open_blend(request: BlendRequest, parts: Sequence[Order], opener: Opener) -> BlendedOrder:
    """Return the order of a blend of opened parts."""
    order = request.order_of(parts, request.load_or_build([*map(len, parts)] if opener.trust else [], opener))
    order.description_hash = request.description_hash() or ""
    if opener.access == "whole":
        request.check_rows(order)
    return order


@dataclass(frozen=True)
class BlendRequest(Request):
    """Samples of several orders, each drawn from the one that is furthest behind its weight.

    Args:
        parts: the request of each source, or one over it.
        weights: one for each part; None: in proportion to their numbers of samples.
        size: number of samples. None: of parts with weights, these are the numbers of samples; else all samples.
        split: name of the split.
        directory: folder of the index; None: it is not cached.
        kind: recorded name of the class of the blend.
        surplus: `mid_level_dataset_surplus` of the config, for errors.
        open_index: opens the order of the opened parts; that of a dataset keeps it, and its methods may build it.
        more: further identifiers. A blend with some has other rows than Megatron's; they are those of a subclass.
        fingerprint: the inputs of its arrays that the identifiers do not contain.
    """

    parts: Sequence[Request]
    weights: Sequence[float] | None
    size: int | None
    split: str
    directory: Location | None = None
    kind: str = "BlendedDataset"
    surplus: float = 0.0
    open_index: OpenBlend = field(default=open_blend, repr=False, compare=False)
    more: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inner_requests(self) -> Sequence[Request]:
        return self.parts

    def map_sources(self, change: Callable[[SourceRequest], Request]) -> BlendRequest:
        return replace(self, parts=[part.map_sources(change) for part in self.parts])

    def measured(self, lengths: Sequence[int]) -> BlendRequest:
        """Return the request with weights, those of parts of these lengths if it has none.

        Args:
            lengths: number of samples of each part; they count only without weights.
        """
        if self.weights is not None:
            return self
        return replace(self, weights=lengths, size=None if self.size is None else min(self.size, sum(lengths)))

    def count(self, lengths: Sequence[int]) -> int:
        """Return the number of samples of a blend of parts of these lengths."""
        request = self.measured(lengths)
        return sum(map(int, request.shares)) if request.size is None else request.size

    @property
    def shares(self) -> list[float]:
        """The weights; normalized again if there is a size, as in Megatron Core: both roundings decide ties."""
        assert self.weights is not None
        return list(self.weights) if self.size is None or self.more else normalize(list(self.weights))

    @cached_property
    def identifiers(self) -> OrderedDict[str, Any]:
        """The identifiers that Megatron hashes for the name of the index."""
        sources = [source.identifiers for source in self.sources]
        own = {"class": self.kind, "datasets": sources, "split": self.split, "weights": self.shares, "size": self.size}
        return OrderedDict({**own, **self.more})

    def index_name(self) -> IndexName | None:
        """Return the name of the index in the cache; None if it is not cached, or depends on the parts' lengths."""
        if self.directory is None or self.weights is None:
            return None
        return IndexName.of(self.directory, self.kind, self.split, self.identifiers)

    def description_hash(self) -> str | None:
        """Return the md5 of the text with which Megatron names the index; None if it depends on the parts' lengths."""
        return None if self.weights is None else digest(describe(self.identifiers))

    def open(self, opener: Opener) -> Order:
        waits = opener.access == "ranges" and not isinstance(self.parts[0], SourceRequest)  # whose orders open later
        parts = OPENS.map(opener.open, self.parts) if waits else [*map(opener.open, self.parts)]
        request = self if self.weights is not None else self.measured(OPENS.map(len, parts))
        return self.open_index(request, parts, opener)

    def load_or_build(self, lengths: Sequence[int], opener: Opener) -> Arrays:
        """Return the two arrays of the index, from the cache or built.

        Args:
            lengths: number of samples of each part.
            opener: options of the cache and the build.
        """

        def check(arrays: Arrays) -> None:
            check_blend_index(arrays, lengths, self.size)

        build = partial(self.build, threads=opener.threads)
        if (name := self.index_name()) is None:
            return build_in_memory(build)
        trusted = check if opener.trust else None
        cache = IndexCache(name.files, trusted=trusted, context=opener.context, digests=opener.digests)
        return cache.load_or_build(name.description, self.fingerprint, ARRAYS, build, opener.access)

    def build(self, writer: ArrayWriter, threads: int) -> None:
        """Write the two arrays of the index."""
        build_blend_arrays(writer, self.shares, self.size, threads)

    def check_rows(self, order: BlendedOrder) -> None:
        """Raise BlendError if the blend needs more samples of a part than it has."""
        served = samples_per_dataset(order.dataset_index, len(order.parts))
        for number, (part, source, count) in enumerate(zip(order.parts, self.sources, served, strict=True)):
            if count > len(part):
                raise BlendError(
                    f"{self.split} blend, dataset {number} ({source.name}): has {len(part)} samples, the blend needs "
                    f"{count}; raise mid_level_dataset_surplus from {self.surplus}, say ten-fold"
                )

    def order_of(self, parts: Sequence[Order], arrays: Arrays) -> BlendedOrder:
        """Return the order of these arrays over the orders of the parts."""
        return BlendedOrder(parts, arrays, {"class": self.kind, "weights": self.shares, "all": self.size is None})


def find_blend(request: Request) -> BlendRequest | None:
    """Return the blend in a request over one; None if there is none."""
    while isinstance(request, OverRequest):
        request = request.inner
    return request if isinstance(request, BlendRequest) else None
