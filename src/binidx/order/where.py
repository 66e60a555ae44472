"""The samples that hold tokens of given documents: the way back from a document to all who saw it.

    documents ─► sequences ─► places in document_index ─► rows of sample_index ─► shuffle_index ─► the blend

Cost: one pass over each of document_index, shuffle_index and the blend's two indices, STRETCH elements at a time: a
second for 300 million documents where they are mapped, and what reading them costs where they are not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.gpt import GPTDataset
from binidx.order.samples import contents_of, sources_of

Numbers = NDArray[np.int64]

STRETCH = 1 << 22
"""Elements looked at together, so that what is found on the way stays small."""


def samples_with(dataset: Any, source: int, documents: Sequence[int]) -> Numbers:
    """The numbers of the samples with a token of one of these documents of a source, rising.

    Raises:
        IndexError: there is no such source or document.
    """
    sources = sources_of(dataset)
    if not 0 <= source < len(sources):
        raise IndexError(f"source {source}: the run has {len(sources)}, counted from 0")
    served = _served(sources[source], np.unique(np.asarray(documents, np.int64)))
    numbers = _numbers_of(dataset, source, served)
    return numbers[_holding(dataset, numbers, documents)]


def _served(dataset: GPTDataset, documents: Numbers) -> Numbers:
    """The samples, as the source serves them, that may hold a token of the documents; rising."""
    places = places_of(dataset.document_index, _sequences_of(dataset, documents))
    # Row j ends where row j + 1 starts, and may take its last token from there: both ends count.
    first = np.maximum(_starting_until(dataset.sample_index, places - 1) - 1, 0)
    last = np.minimum(_starting_until(dataset.sample_index, places), len(dataset.sample_index) - 1)
    rows = [np.arange(low, high) for low, high in zip(first.tolist(), last.tolist(), strict=True)]
    return places_of(dataset.shuffle_index, np.unique(np.concatenate([np.empty(0, np.int64), *rows])))


def _starting_until(sample_index: Any, places: Numbers) -> Numbers:
    """How many rows start at each place of document_index or before it."""
    # Of its own type, or all of it would be made into another.
    found: Numbers = sample_index[:, 0].searchsorted(places.astype(sample_index.dtype), side="right")
    return found


def _sequences_of(dataset: GPTDataset, documents: Numbers) -> Numbers:
    bounds = dataset.dataset.document_indices
    count = len(bounds) - 1
    if len(documents) and not (documents[0] >= 0 and documents[-1] < count):
        raise IndexError(f"{dataset.dataset_path}: documents {documents[0]} to {documents[-1]}, it has {count}")
    ranges = [np.arange(bounds[each], bounds[each + 1]) for each in documents.tolist()]
    return np.concatenate([np.empty(0, np.int64), *ranges])


def places_of(index: NDArray[Any], values: Numbers) -> Numbers:
    """Where an index holds one of the values, which rise; rising."""
    if not len(values):
        return np.empty(0, np.int64)
    found = [first + np.flatnonzero(_among(part, values)) for first, part in _stretches(index)]
    return np.concatenate([np.empty(0, np.int64), *found])


def _among(part: NDArray[Any], values: Numbers) -> NDArray[np.bool_]:
    """Whether each element is one of the values; one run of values, the usual case, costs two comparisons."""
    if len(values) == int(values[-1] - values[0]) + 1:
        inside: NDArray[np.bool_] = (part >= values[0]) & (part <= values[-1])
        return inside
    return np.isin(part, values)


def _stretches(index: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    for first in range(0, len(index), STRETCH):
        yield first, index[first : first + STRETCH]


def _numbers_of(dataset: Any, source: int, served: Numbers) -> Numbers:
    """The numbers under which the run has these samples of a source."""
    if not isinstance(dataset, BlendedDataset):
        return served
    found = []
    stretches = zip(_stretches(dataset.dataset_index), _stretches(dataset.dataset_sample_index), strict=True)
    for (first, ids), (_, samples) in stretches:
        here = np.flatnonzero(ids == source)
        found.append(first + here[np.isin(samples[here], served)])
    return np.concatenate([np.empty(0, np.int64), *found])


def _holding(dataset: Any, numbers: Numbers, documents: Sequence[int]) -> NDArray[np.bool_]:
    """Which of the samples really hold a token: one may end right before a document, or pass an empty one."""
    spans = contents_of(dataset, numbers).spans
    hits = np.isin(spans.document, documents) & (spans.length > 0)
    total = np.concatenate([[0], np.cumsum(hits)])
    return total[spans.bounds[1:]] > total[spans.bounds[:-1]]
