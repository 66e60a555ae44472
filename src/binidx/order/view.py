"""Orders without some documents, or with some alone.

    how="skip"       every sample with a token of a listed document leaves; the others keep their tokens, their relative
                     order and their seeds
    how="rebuild"    the documents leave before the index is built: a new order, with a new identity

The list is a text file: on each line the number of a document, or, in a run of several sources, the prefix of the
source, a tab and the number.

A view that begins in the middle of a run:

    without it         0 1 2 3 4 5 6 7 | 8 9 ..      8 samples were read; documents of 2, 5 and 9 leave
    the view           0 1   3 4   6 7 | 8   ..      6 of its samples were read: it continues with its sample 6
    in steps of 4      0 1   3 4 |   6 7 8   ..      its step begins with sample 4: 4 and 5 are read again

A sample is the same in two orders if it has the same number in the own order of the same source: views keep these.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import BlendError, ConfigError
from binidx.forks import cached_property
from binidx.format.tokens import index_of
from binidx.index.documents import Documents
from binidx.order.blended_order import BlendedOrder, MembersOrder, list_members, map_sources
from binidx.order.order_options import OrderOption
from binidx.order.order_protocols import ComposedOrder, Numbers, Order, Source
from binidx.order.requests import OverRequest, Request
from binidx.order.source_order import join_ranges
from binidx.storage.open import open_object, read_whole

VIEW_SOURCE_BITS = 40
"""Number of bits for the number of a sample below that of its source, in one int64."""


class ViewOrder(MembersOrder):
    """Some samples of another order, in its order; implements `Order` and `ComposedOrder`.

    Args:
        inner: the other order.
        kept: its samples that stay, ascending, shape (num_kept,), int64; one may stand there several times.
        fields: fields of the identity besides "order", the identity of `inner`: JSON values on which `kept` depends.

    Example:
        >>> ViewOrder(order, np.arange(0, len(order), 2), {"class": "EveryOther"})

    Source: ours.
    """

    def __init__(self, inner: Order, kept: Numbers, fields: Mapping[str, Any]) -> None:
        self.inner, self.kept, self.fields = inner, kept, fields
        self.members, self.is_blend = list_members(inner), isinstance(inner, BlendedOrder)

    @property
    def identity(self) -> Any:
        return {**self.fields, "order": self.inner.identity}

    def __len__(self) -> int:
        return len(self.kept)

    def list_sources(self) -> NDArray[np.int16]:
        if isinstance(self.inner, ComposedOrder):
            return self.inner.list_sources()[self.kept]
        return np.zeros(len(self.kept), np.int16)

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        return self.inner.locate(self.kept[samples])

    def find(self, source: int, sequences: Numbers) -> Numbers:
        return np.flatnonzero(np.isin(self.kept, self.inner.find(source, sequences)))


@dataclass(frozen=True)
class View(OrderOption):
    """Order without the documents of a list, or with these alone.

    Args:
        documents: URI of the list: on each line the number of a document; in a run of several sources the prefix of the
            source, a tab and the number.
        how: "skip" serves the other samples, those without a token of a listed document, in their relative order;
            "rebuild" builds an index without the documents, which is another order.
        keep: True for the listed documents alone: all others leave.
        over: with "skip", the order from which samples leave: "blend", that of the split; or "source", that of each
            source, so that the blend draws from the samples that are left.
        num_samples: with "skip", the least number of samples that must be left; None: one.
        digest: XXH3 of the list, in hex; None: not compared. A saved run has it.

    Raises:
        ConfigError: another list, an unknown document, or an option with another value.
        BlendError: too few samples are left.

    Example:
        >>> order = binidx.View("s3://corpus/drop.txt")
        >>> train = binidx.load_dataset("s3://corpus/en", sequence_length=4096, order=order)

    Source: ours.
    """

    documents: str
    how: Literal["skip", "rebuild"] = "skip"
    keep: bool = False
    over: Literal["blend", "source"] = "blend"
    num_samples: int | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        if self.how not in ("skip", "rebuild") or self.over not in ("blend", "source"):
            raise ConfigError(
                f"order: found how={self.how!r}, over={self.over!r}; needs 'skip' or 'rebuild', 'blend' or 'source'"
            )

    def index_fields(self, options: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return fields for the names of caches of a rebuilt order; none if no document leaves."""
        if not (self.keep or self.read(options).by_source):
            return {}
        return {"view": "rebuild", "documents": self.read(options).digest, "keep": self.keep}

    def pinned(self, options: Mapping[str, Any] | None) -> View:
        """Return the view with the digest of its list, which is read and compared."""
        return replace(self, digest=self.read(options).digest)

    def read(self, options: Mapping[str, Any] | None) -> DocumentList:
        """Return the list, which is read once; raise ConfigError if it is another one than that of the digest."""
        if "_listed" not in vars(self):
            text = read_whole(open_object(self.documents, storage_options=options)).tobytes()
            listed = DocumentList(self.documents, text)
            if self.digest not in (None, listed.digest):
                raise ConfigError(f"{self.documents}: another list (found XXH3 {listed.digest}, need {self.digest})")
            object.__setattr__(self, "_listed", listed)
        cached: DocumentList = vars(self)["_listed"]
        return cached

    @property
    def paths(self) -> Sequence[str]:
        return [self.documents]

    @property
    def uncounted(self) -> str:
        return "the index is built without the listed documents, which are counted here"

    def with_paths(self, names: Mapping[str, str]) -> View:
        return replace(self, documents=names.get(self.documents, self.documents))

    def check_sources(self, names: Collection[str], options: Mapping[str, Any] | None) -> None:
        self.read(options).check_sources(names)

    def choose_sequences(self, source: Source, options: Mapping[str, Any] | None) -> Documents:
        """Return the sequences of a source of which the index of a rebuilt order is built."""
        leaving = self.leaving(source, self.read(options), is_only=True)
        own = np.asarray(source.sequences, np.int32)
        return own[~np.isin(own, leaving)] if len(leaving) else source.sequences

    def request(self, inner: Request) -> Request:
        if self.how == "rebuild":
            return inner.map_sources(lambda source: source.with_documents(self))
        if self.over == "source":
            return inner.map_sources(lambda source: ViewRequest(source, self))
        return ViewRequest(inner, self)

    def leaving(self, source: Source, listed: DocumentList, *, is_only: bool) -> Numbers:
        """Return the sequences of a source whose documents leave, ascending.

        Args:
            source: the sequences.
            listed: the list.
            is_only: whether lines without a prefix are of this source, the only one of its run.
        """
        bounds = index_of(source.dataset).document_indices
        named = listed.documents_of(source.name, len(bounds) - 1, is_only=is_only)
        documents = np.setdiff1d(np.arange(len(bounds) - 1), named) if self.keep else named
        return join_ranges(bounds[documents].astype(np.int64), bounds[documents + 1].astype(np.int64))


@dataclass(frozen=True)
class ViewRequest(OverRequest):
    """Order of another request without the samples of some documents.

    Args:
        inner: see `OverRequest`.
        view: the option, with the list of the documents and the least number of samples that must be left.
    """

    view: View

    @property
    def uncounted(self) -> str:
        return f"counted with the samples that {self.view.documents} leaves out: at most"

    def serve(self, order: Order) -> Order:
        view = self.view
        listed, sources = view.read(self.sources[0].storage_options), order.sources

        def choose(number: int) -> Numbers:
            return view.leaving(sources[number], listed, is_only=len(sources) == 1)

        chosen = map_sources(order, range(len(sources)), choose)  # opened at the same time, if they are read by ranges
        gone = [order.find(number, own) if len(own) else own for number, own in enumerate(chosen)]
        if not len(leaving := np.unique(np.concatenate(gone))) and not view.keep:
            return order
        kept = np.setdiff1d(np.arange(len(order)), leaving, assume_unique=True)
        needed = 1 if view.num_samples is None else view.num_samples
        if len(kept) < needed:
            raise BlendError(
                f"{view.documents}: too few samples are left (found {len(kept):,} of {len(order):,}, need {needed:,}); "
                "raise the number of samples of the split, or list fewer documents"
            )
        return ViewOrder(order, kept, {"class": "View", "keep": view.keep, "documents": listed.digest})


@dataclass(frozen=True)
class DocumentList:
    """Contents of a list of documents.

    Args:
        uri: of the list, for errors.
        text: its bytes.
    """

    uri: str
    text: bytes

    @cached_property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.text)

    @cached_property
    def by_source(self) -> Mapping[str | None, list[int]]:
        """Numbers of documents by the prefix of their source, None where a line has no prefix."""
        documents: dict[str | None, list[int]] = {}
        for number, line in enumerate(self.text.decode("utf-8", "replace").splitlines(), 1):
            prefix, tab, document = line.rpartition("\t")
            if not (document.strip().isdecimal() and len(document.strip()) < 19):
                raise ConfigError(f"{self.uri}: line {number}: found {line[:80]!r}, needs [PREFIX TAB] NUMBER")
            documents.setdefault(prefix if tab else None, []).append(int(document))
        return documents

    def renamed(self, names: Mapping[str, str]) -> DocumentList:
        """Return the list with other prefixes: `names` has the new one of each old one."""
        renamed, documents = replace(self), dict[str | None, list[int]]()
        for prefix, numbers in self.by_source.items():
            documents.setdefault(names.get(prefix or "", prefix), []).extend(numbers)
        vars(renamed)["by_source"] = documents
        return renamed

    def __len__(self) -> int:
        """Return the number of lines."""
        return self.text.count(b"\n")

    def check_sources(self, names: Collection[str]) -> None:
        """Raise ConfigError if a line names no source of a run, or none where there are several."""
        unknown = self.by_source.keys() - {*names, None}
        if unknown or (len(names) > 1 and None in self.by_source):
            wrong = sorted(str(name) for name in unknown)[:1] or ["a number alone"]
            raise ConfigError(f"{self.uri}: found {wrong[0]}, needs the prefix of one of {len(names)} sources")

    def documents_of(self, name: str, count: int, *, is_only: bool) -> Numbers:
        """Return the listed documents of a source, ascending, each once.

        Args:
            name: prefix of the source, as the user wrote it.
            count: number of documents of the source.
            is_only: whether lines without a prefix are of this source, the only one of its run.

        Raises:
            ConfigError: the source has fewer documents.
        """
        numbers = [*self.by_source.get(name, []), *(self.by_source.get(None, []) if is_only else [])]
        documents = np.unique(np.array(numbers, np.int64))
        if len(documents) and documents[-1] >= count:
            raise ConfigError(f"{self.uri}: {name}: document {documents[-1]}, it has {count}, counted from 0")
        return documents


def find_read(reads: Sequence[tuple[Order, int, int]], order: Order) -> tuple[NDArray[np.bool_], int, int]:
    """Return whether each sample of an order was read of other orders, shape (len(order),), and two numbers of others.

    Args:
        reads: each of the other orders, the first position that was read, and the one after the last.
        order: the order that continues the last of them. Both are located whole, in some dozens of bytes a sample.

    Returns:
        The samples; the number of those behind the last read that the order lacks; and the number of those that were
        read of sources of which it has no index, or another one, and which are in neither of the others.
    """
    known: KnownSources = {}
    served = key_samples(known, order, 0, len(order))
    end = len(known) << VIEW_SOURCE_BITS  # samples of other indices have numbers from there on
    last, _, stop = reads[-1]
    read = np.concatenate([key_samples(known, *each) for each in reads])
    rest = key_samples(known, last, stop, len(last))
    left_out = np.isin(rest[rest < end], served, invert=True).sum()
    return np.isin(served, read), int(left_out), len(np.unique(read[read >= end]))


KnownSources = dict[tuple[str, int], int]
"""Name and identity of the order of a source, and the number of equal ones before it in its blend -> its number."""


def key_samples(
    known: KnownSources, order: Order, start: int, stop: int, names: Sequence[str] | None = None
) -> Numbers:
    """Return a number for each of some samples, by which the same samples of several orders are equal.

    Args:
        known: sources of all these orders, to which those of this one are added.
        order: one of the orders.
        start, stop: bounds of the samples.
        names: name of each source, which tells sources of equal identities apart; None: their places do.
    """
    orders = [json.dumps(member.identity, sort_keys=True, default=str) for member in list_members(order)]
    orders = [f"{name} {own}" for name, own in zip(names, orders, strict=True)] if names else orders
    keys = [(own, orders[:number].count(own)) for number, own in enumerate(orders)]  # one may stand there twice
    source, number = order.locate(np.arange(start, stop))
    return np.array([known.setdefault(key, len(known)) << VIEW_SOURCE_BITS for key in keys])[source] + number


def describe_place(order: Order, was_read: NDArray[np.bool_], step_samples: int) -> str:
    """Return the place of an order that continues the reads, in whole steps, and the samples that are read again there.

    Args:
        order: the order.
        was_read: whether each of its samples was read.
        step_samples: number of samples of a step.
    """
    place = (len(was_read) if was_read.all() else int(np.argmin(was_read))) // step_samples * step_samples
    again = np.flatnonzero(was_read[place:]) + place
    text = f"consumed_samples={place} skips none"
    text += f" and reads {len(again):,} again, of its samples {again[0]:,} to {again[-1]:,}" if len(again) else ""
    if isinstance(order, BlendedOrder) and len(again):  # it draws from what views leave of each source
        sources = np.bincount(order.list_sources()[was_read], minlength=len(order.sources)).tolist()
        places = [f"{source.name} at {count:,}" for source, count in zip(order.sources, sources, strict=True)]
        text += f", as no place is that of every source: {', '.join(places)}"
    return text


def without_view(order: Order) -> Order | None:
    """Return the order below a view, or the blend of sources below views; None: there is no view."""
    if isinstance(order, ViewOrder):
        return order.inner
    if isinstance(order, BlendedOrder) and order.has_views and order.windows is None:
        return BlendedOrder(order.members, {name: vars(order)[name] for name in order.array_names}, order.fields)
    return None
