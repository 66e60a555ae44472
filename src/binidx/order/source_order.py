"""Order of one source by an index of spans: the base of the orders that are built for one dataset."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.format.tokens import Tokens
from binidx.index.documents import Documents
from binidx.order.order_protocols import Bounds, Numbers, Source, SpanIndex, Spans

STRETCH = 1 << 22
"""Number of index elements searched together, so that intermediate results stay small."""

MANY = 1000
"""Number of values from which on a table is faster than a search among them."""


@dataclass(slots=True)
class StoredSource:
    """Sequences of one split of an opened dataset; implements `Source`.

    Args:
        name: prefix, as the user wrote it.
        dataset: the sequences.
        sequences: those of the split, shape (num_in_split,).
    """

    name: str
    dataset: Tokens
    sequences: Documents

    @property
    def prefix(self) -> str:
        return self.dataset.path_prefix


class SourceOrder(ABC):
    """Order of one source.

    Args:
        source: the sequences.
    """

    array_names: Sequence[str] = ()
    """Attributes that are arrays of the index."""

    ends_documents = False
    """True if the last token of each piece has no label: the next piece is of another document."""

    sequence_length: int | None = None
    """S, number of input tokens of a full sample; None if samples have no fixed length: all tokens are inputs."""

    full_length: int | None = None
    """`sequence_length` if all samples are full, so that their inputs are known without their spans; else None."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "index"}  # has addresses of this process

    def set_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Replace some of the arrays, as scripts of Megatron do with the attributes of a dataset."""
        vars(self).pop("index", None)
        vars(self).update(arrays)

    @property
    def sources(self) -> Sequence[Source]:
        return [self.source]

    @property
    @abstractmethod
    def identity(self) -> Any: ...

    @property
    def index(self) -> SpanIndex | None:
        """Arrays that C translates to spans; None if the order has its own `spans`."""
        return None

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of one pass over the sequences: all, unless a subclass repeats them."""
        return len(self)

    @property
    def num_epochs(self) -> int:
        """Number of epochs in the samples, the last of them perhaps in part."""
        return -(-len(self) // max(1, self.samples_per_epoch))

    def epochs(self, samples: Numbers) -> Numbers:
        return samples // max(1, self.samples_per_epoch)

    @abstractmethod
    def candidates(self, sequences: Numbers) -> Numbers:
        """Return the samples that may have a token of some sequences, ascending; all that have one are among them."""

    def locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        return np.zeros_like(samples), samples

    def spans(self, samples: Numbers) -> tuple[Spans, Bounds]:
        assert self.index is not None, f"{type(self).__name__} has neither an index nor its own spans"
        spans, bounds = self.index.spans(samples)
        return with_source(0, spans), bounds

    def place_spans(self, samples: Numbers, spans: Spans, bounds: Bounds) -> Numbers:
        """Return the position of the first token of each span in its sample: spans follow each other by default.

        Args:
            samples: shape (B,).
            spans, bounds: those of the samples.
        """
        return place_spans(spans, bounds)

    def find(self, source: int, sequences: Numbers) -> Numbers:
        samples = self.candidates(sequences)
        found, marks = [np.empty(0, np.int64)], membership(sequences)
        for _, part in stretches(samples):
            spans, bounds = self.spans(part)
            found.append(part[samples_with_hits(marks(spans[:, 1]) & (spans[:, 3] > 0), bounds)])
        return np.concatenate(found)


def with_source(source: int, spans: Numbers) -> Spans:
    """Return spans (sequence, first token, number of tokens), shape (n, 3), with the number of their source.

    Args:
        source: the number.
        spans: of that source.
    """
    rows = np.empty((len(spans), 4), np.int64)
    rows[:, 0], rows[:, 1:] = source, spans
    return rows


def place_spans(spans: Spans, bounds: Bounds) -> Numbers:
    """Return the position of the first token of each span in its sample, if spans follow each other."""
    before = np.concatenate([[0], np.cumsum(spans[:, 3])])
    positions: Numbers = before[:-1] - np.repeat(before[bounds[:-1]], np.diff(bounds))
    return positions


def join_ranges(starts: Numbers, stops: Numbers) -> Numbers:
    """Return the numbers from each start to before its stop, one range after the other.

    Args:
        starts, stops: of each range, shape (n,), int64.
    """
    lengths = stops - starts
    ends = np.cumsum(lengths)
    numbers: Numbers = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return numbers


def samples_with_hits(hits: NDArray[np.bool_], bounds: Bounds) -> NDArray[np.bool_]:
    """Return which samples have a span that `hits` marks, shape (B,).

    Args:
        hits: True for the spans to look for, shape (n,).
        bounds: sample i has the spans bounds[i] up to bounds[i + 1], shape (B + 1,).
    """
    total = np.concatenate([[0], np.cumsum(hits)])
    has_hit: NDArray[np.bool_] = total[bounds[1:]] > total[bounds[:-1]]
    return has_hit


def find_positions(index: NDArray[Any], values: Numbers) -> Numbers:
    """Return, in ascending order, the positions at which an index holds one of `values`.

    Args:
        index: shape (m,), of any integer dtype; read `STRETCH` elements at a time.
        values: shape (n,), int64.
    """
    if not len(values):
        return np.empty(0, np.int64)
    marks = membership(values)
    positions = [first + np.flatnonzero(marks(part)) for first, part in stretches(index)]
    return np.concatenate([np.empty(0, np.int64), *positions])


def membership(values: Numbers) -> Callable[[NDArray[Any]], NDArray[np.bool_]]:
    """Return a function that marks the elements of an array, none negative, that are among `values`.

    Many values become a table of a byte for each number up to the largest: `np.isin` sorts them for each array, which
    takes a hundred times as long for a million.
    """
    if len(values) < MANY:
        return partial(np.isin, test_elements=values)
    table = np.zeros(int(values.max()) + 2, np.bool_)
    table[values] = True
    return lambda part: table.take(part, mode="clip")


def sorted_unique(values: NDArray[Any]) -> NDArray[Any]:
    """Return `np.unique(values)`, which takes ten times as long for millions of integers: it hashes them first."""
    ordered = np.sort(values)
    distinct: NDArray[Any] = ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]
    return distinct


def stretches(index: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield the parts of `STRETCH` elements of an index, each with the number of its first element."""
    for first in range(0, len(index), STRETCH):
        yield first, index[first : first + STRETCH]
