"""Orders composed of other orders: a blend of sources, in one stage or many and of several lengths.

sample   0  1  2  3  4          source  0  1  0  0  1          number in the source  0  0  1  2  1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from binidx.order.order_protocols import Bounds, ComposedOrder, Numbers, Order, Source, Spans
from binidx.order.ranged_order import LazyOrder
from binidx.order.source_order import SourceOrder, join_ranges, membership, stretches
from binidx.storage.threads import OPENS

Result = TypeVar("Result")

Columns = tuple[Sequence[NDArray[Any]], Bounds, Sequence[NDArray[Any]]]
"""Columns with a value for each sample; bounds of the spans of each sample; columns with a value for each span."""


class MembersOrder(Order):
    """Base of composed orders: spans and epochs of samples, by `locate` and the order of each source.

    Attributes:
        members: the order of each source.
    """

    members: Sequence[Order]

    is_blend = False
    """True if samples are those of a blend, and have a `dataset_id`."""

    @property
    def sources(self) -> Sequence[Source]:
        return [source for member in self.members for source in member.sources]

    @property
    def num_epochs(self) -> int:
        return max(member.num_epochs for member in self.members)

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        def read(source: int, numbers: Numbers) -> Columns:
            spans, bounds = self.members[source].spans(numbers)
            spans[:, 0] = source
            return [], bounds, list(spans.T)

        _, _, _, bounds, columns = gather_columns(self, samples, read)
        return np.stack(columns, axis=1) if columns else np.empty((0, 4), np.int64), bounds

    def epochs(self, samples: Numbers) -> Numbers:
        return gather_columns(self, samples, partial(read_epochs, self))[2][0]


class BlendedOrder(MembersOrder):
    """Samples of several orders, by two arrays.

    Args:
        parts: the order of each source, whose samples are drawn: its own order, or a view of it.
        arrays: "dataset_index", the source of each sample, shape (size,), int16; and "dataset_sample_index", the number
            of the sample in that part, shape (size,), int64. `RangedArray`s are read by ranges.
        fields: fields of the identity before "datasets", the identities of the parts.
        windows: the order whose samples are cut into those of the parts; its identity is that of the data, in the place
            of "datasets". None: the samples are not cut.
        proof: description of the checks that the order has passed; of a blend in stages.
        seams: start of each stage, a `binidx.order.staged.staged_order.Seam`; none without stages.

    Attributes:
        parts, fields, windows, proof, seams: the arguments.
        members: the own order of each source. It is the part, or below it if the part is a view.
        description_hash: md5 of the text with which Megatron names the index; "" if a dataset has opened it.

    Source: Megatron Core, `BlendedDataset`; `windows` are ours.
    """

    array_names = ("dataset_index", "dataset_sample_index")
    is_blend = True
    description_hash = ""

    dataset_index: NDArray[np.int16]
    dataset_sample_index: NDArray[np.int64]

    def __init__(
        self,
        parts: Sequence[Order],
        arrays: Mapping[str, Any],
        fields: Mapping[str, Any],
        *,
        windows: Order | None = None,
        proof: str = "",
        seams: Sequence[Any] = (),
    ) -> None:
        self.parts, self.fields, self.windows, self.proof, self.seams = parts, fields, windows, proof, seams
        self.members = [list_members(part)[0] for part in parts]
        self.has_views = any(part is not member for part, member in zip(parts, self.members, strict=True))
        self.set_arrays(arrays)

    def set_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Replace some of the arrays."""
        vars(self).update(arrays)

    @property
    def identity(self) -> Any:
        if self.windows is not None:
            return {**self.fields, "windows": self.windows.identity}
        return {**self.fields, "datasets": [part.identity for part in self.parts]}

    def __len__(self) -> int:
        return len(self.dataset_index)

    def list_sources(self) -> NDArray[np.int16]:
        return self.dataset_index[:]

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        source: Numbers = self.dataset_index[samples].astype(np.int64)
        number = self.dataset_sample_index[samples].astype(np.int64)
        if self.has_views:  # number in the source's own order, by which masks are seeded
            for dataset_id in np.unique(source).tolist():
                rows = source == dataset_id
                number[rows] = self.parts[dataset_id].locate(number[rows])[1]
        return source, number

    def find(self, source: int, sequences: Numbers) -> Numbers:
        served = self.parts[source].find(0, sequences)
        both = zip(stretches(self.dataset_index), stretches(self.dataset_sample_index), strict=True)
        samples, marks = [np.empty(0, np.int64)], membership(served)
        for (first, ids), (_, numbers) in both:
            rows = np.flatnonzero(ids == source)
            samples.append(first + rows[marks(numbers[rows])])
        return np.concatenate(samples)


def list_members(order: Order) -> Sequence[Order]:
    """Return the order of each source: the members of a composed order, or the order itself."""
    if isinstance(order, SourceOrder):  # a blend has thousands, and `isinstance` with a Protocol takes 20 us
        return [order]
    return order.members if isinstance(order, ComposedOrder) else [order]


def read_epochs(order: Order, source: int, numbers: Numbers) -> Columns:
    """Return the columns, without spans, of samples of one source for `gather_columns`: their epochs.

    Args:
        order: a composed order, or the order of one source.
        source: number of the source.
        numbers: numbers of the samples in that source, shape (n,).
    """
    return [list_members(order)[source].epochs(numbers)], np.zeros(len(numbers) + 1, np.int64), []


def gather_columns(
    order: Order, samples: Numbers, read: Callable[[int, Numbers], Columns]
) -> tuple[Numbers, Numbers, Sequence[NDArray[Any]], Bounds, Sequence[NDArray[Any]]]:
    """Return source and number in the source of each sample, and columns of all samples in the order of `samples`.

    The samples of each source are read together, and the sources concurrently if they read from a store.

    Args:
        order: a composed order, or the order of one source.
        samples: numbers of samples, shape (B,).
        read: called with the number of a source, and the numbers of samples in it; returns their columns.

    Returns:
        The source of each sample, and its number in the source's own order, shape (B,); the columns with a value for
        each sample; the bounds of its spans, shape (B + 1,); the columns with a value for each span.
    """
    source, number = order.locate(samples)
    sources, sizes = np.unique(source, return_counts=True)
    if len(sources) < 2:
        return source, number, *read(int(source[0]) if len(source) else 0, number)
    grouped = np.argsort(source, kind="stable")
    numbers_of = dict(zip(sources.tolist(), np.split(number[grouped], np.cumsum(sizes[:-1])), strict=True))
    parts = map_sources(order, [*numbers_of], lambda source_id: read(source_id, numbers_of[source_id]))
    place = np.empty_like(grouped)  # of each sample among the grouped ones
    place[grouped] = np.arange(len(grouped))
    counts = np.concatenate([np.diff(bounds) for _, bounds, _ in parts])
    stops = np.cumsum(counts)
    spans = join_ranges((stops - counts)[place], stops[place])
    of_samples = [np.concatenate(columns)[place] for columns in zip(*(own for own, _, _ in parts), strict=True)]
    of_spans = [np.concatenate(columns)[spans] for columns in zip(*(own for _, _, own in parts), strict=True)]
    return source, number, of_samples, np.concatenate([[0], np.cumsum(counts[place])]), of_spans


def map_sources(order: Order, sources: Sequence[int], work: Callable[[int], Result]) -> list[Result]:
    """Return the results of `work` for some sources, computed concurrently if they read from a store.

    Args:
        order: the order of all sources.
        sources: numbers of some of its sources.
        work: called with the number of each of them.
    """
    is_lazy = isinstance(list_members(order)[0], LazyOrder)
    return OPENS.map(work, sources) if is_lazy else [work(source) for source in sources]
