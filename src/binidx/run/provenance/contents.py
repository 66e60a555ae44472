"""Contents of samples: source, epoch, and the documents whose tokens they hold, for many samples at once.

    sample 904 of the run ─ dataset_index ─►  sample 17 of source 2 ─ shuffle, sample, document index ─►  spans
                                                                                   document_indices ─►  documents

Only `read_text` reads tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.builder import run_concurrently
from binidx.dataset.gpt import GPTDataset
from binidx.errors import ConfigError
from binidx.format.idx import SequenceIndex
from binidx.format.indexed_dataset import IndexedDataset, Span, read_spans

Numbers = NDArray[np.int64]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Spans:
    """Pieces of documents, in the order of the samples: sample i has pieces bounds[i] up to bounds[i + 1].

    Attributes:
        bounds: shape (n + 1,).
        document: number of the document in its source.
        start: first token of the piece, counted from the beginning of the document.
        length: tokens of the piece.
        target: position of the piece in the sample.
    """

    bounds: Numbers
    document: Numbers
    start: Numbers
    length: Numbers
    target: Numbers


@dataclass(frozen=True)
class SampleOrigins:
    """Sources of n samples.

    Attributes:
        source: number of the dataset in `sources_of`, shape (n,).
        sample: number of the sample there, in the order it is served, shape (n,).
        epoch: complete passes over the source before the sample begins, shape (n,).
    """

    source: Numbers
    sample: Numbers
    epoch: Numbers


@dataclass(frozen=True)
class SampleContents(SampleOrigins):
    """Sources of samples, and the spans of documents in them.

    Attributes:
        spans: the documents; each sample has S tokens of them and the one after, fewer if it is truncated.
    """

    spans: Spans


@dataclass(frozen=True)
class DocumentContents(SampleOrigins):
    """Sources of samples, and the documents in them with the ends of the first and last one.

    Attributes:
        bounds: sample i has document[bounds[i]:bounds[i + 1]], shape (n + 1,).
        document: number of each piece's document in its source.
        start: first token of each sample in its first document, shape (n,).
        stop: one after the last token of each sample in its last document, shape (n,).
    """

    bounds: Numbers
    document: NDArray[Any]
    start: NDArray[Any]
    stop: NDArray[Any]


def sources_of(dataset: Any) -> list[GPTDataset]:
    """Return the GPT datasets of which a dataset of the builder is composed, in their order.

    Raises:
        ConfigError: it contains another kind of dataset.
    """
    found: list[Any] = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    for each in found:
        if not isinstance(each, GPTDataset):
            raise ConfigError(f"order: found a {type(each).__name__}, needs GPT datasets or a blend of them")
    return found


def sources_at(dataset: Any, numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the source of each sample and its number there; both in the shape of `numbers`."""
    if not isinstance(dataset, BlendedDataset):
        return np.zeros_like(numbers), numbers
    return dataset.dataset_index[numbers].astype(np.int64), dataset.dataset_sample_index[numbers].astype(np.int64)


def origins_of(dataset: Any, numbers: Numbers) -> SampleOrigins:
    """Return the sources of these samples, shape (n,), without their documents."""
    datasets = sources_of(dataset)
    source, sample = sources_at(dataset, numbers)
    epoch = np.zeros_like(numbers)
    present = np.unique(source).tolist()
    epochs = of_each(datasets, present, lambda each: datasets[each].find_epochs(sample[source == each]))
    for each, found in zip(present, epochs, strict=True):
        epoch[source == each] = found
    return SampleOrigins(source, sample, epoch)


def contents_of(dataset: Any, numbers: Numbers) -> SampleContents:
    """Return the contents of these samples, shape (n,). Costs about 1 us a sample, most of it cache misses."""
    datasets = sources_of(dataset)
    source, sample = sources_at(dataset, numbers)
    present = np.unique(source).tolist()
    if len(present) == 1:
        epoch, spans = _of_source(datasets[present[0]], sample)
        return SampleContents(source, sample, epoch, spans)
    epoch, counts = np.zeros_like(numbers), np.zeros(len(numbers) + 1, np.int64)
    found: list[tuple[Numbers, Spans]] = []
    places = [np.flatnonzero(source == each) for each in present]
    parts = of_each(datasets, present, lambda each: _of_source(datasets[each], sample[source == each]))
    for here, (epochs, spans) in zip(places, parts, strict=True):
        epoch[here] = epochs
        counts[here + 1] = np.diff(spans.bounds)
        found.append((here, spans))
    return SampleContents(source, sample, epoch, _in_order(np.cumsum(counts), found))


def documents_in(dataset: Any, numbers: Numbers) -> DocumentContents:
    """Return the documents of these samples, shape (n,), without the lengths of the inner documents.

    If each document is one sequence, this costs a tenth of `contents_of`: it looks up no document.
    """
    datasets = sources_of(dataset)
    source, sample = sources_at(dataset, numbers)
    present = np.unique(source).tolist() if len(datasets) > 1 else [0]
    places = [np.flatnonzero(source == each) if len(present) > 1 else slice(None) for each in present]
    parts = [_ends_of_source(datasets[each], sample[here]) for each, here in zip(present, places, strict=True)]
    if len(parts) == 1:
        epoch, *rest = parts[0]
        return DocumentContents(source, sample, epoch, *rest)
    epoch, start, stop = (np.zeros(len(numbers), np.int64) for _ in range(3))
    counts = np.zeros(len(numbers) + 1, np.int64)
    for here, (epochs, bounds, _, starts, stops) in zip(places, parts, strict=True):
        epoch[here], start[here], stop[here] = epochs, starts, stops
        counts[1:][here] = np.diff(bounds)
    whole = np.cumsum(counts)
    document = np.empty(int(whole[-1]), np.int64)
    for here, (_, bounds, documents, *_) in zip(places, parts, strict=True):
        document[_into(whole[:-1][here], bounds)] = documents
    return DocumentContents(source, sample, epoch, whole, document, start, stop)


def read_text(dataset: Any, numbers: Numbers) -> list[NDArray[Any]]:
    """Return the stored tokens of samples, S and the one after, fewer if one is truncated, by one vectored read."""
    datasets = sources_of(dataset)
    source, sample = sources_at(dataset, numbers)
    wanted: list[tuple[IndexedDataset, list[Span]]] = []
    places: list[tuple[Numbers, Numbers]] = []
    present = np.unique(source).tolist()
    found = of_each(datasets, present, lambda each: datasets[each].orders.spans(sample[source == each]))
    for each, (spans, bounds) in zip(present, found, strict=True):
        here = np.flatnonzero(source == each)
        wanted.append((datasets[each].dataset, [(sequence, first, count) for sequence, first, count in spans.tolist()]))
        places.append((here, bounds))
    text: list[NDArray[Any]] = [np.empty(0, np.int64)] * len(numbers)
    for (here, bounds), pieces in zip(places, read_spans(wanted), strict=True):
        for place, first, stop in zip(here.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            text[place] = np.concatenate(pieces[first:stop])
    return text


def of_each(datasets: Sequence[GPTDataset], present: Sequence[int], work: Callable[[int], Result]) -> list[Result]:
    """Return the results of `work` for some sources, computed concurrently if they read from a store."""
    if datasets[0].access == "load":
        return [work(each) for each in present]
    return run_concurrently([functools.partial(_without_check, work, each) for each in present], [True][: len(present)])


def _without_check(work: Callable[[int], Result], number: int, _: object) -> Result:
    return work(number)


def _of_source(dataset: GPTDataset, samples: Numbers) -> tuple[Numbers, Spans]:
    """Return epoch and pieces of samples of one source."""
    spans, bounds = dataset.orders.spans(samples)
    document, offset = documents_of(dataset.dataset.index, np.ascontiguousarray(spans[:, 0]))
    length = np.ascontiguousarray(spans[:, 2])
    before = np.cumsum(length) - length
    target = before - np.repeat(before[bounds[:-1]], np.diff(bounds))
    return dataset.find_epochs(samples), Spans(bounds, document, offset + spans[:, 1], length, target)


def _ends_of_source(dataset: GPTDataset, samples: Numbers) -> tuple[Numbers, Numbers, Any, Any, Any]:
    """Return epoch, bounds, documents, starts and stops of samples of one source."""
    if not dataset.dataset.documents_are_sequences:
        epoch, spans = _of_source(dataset, samples)
        ends = spans.start + spans.length
        return epoch, spans.bounds, spans.document, spans.start[spans.bounds[:-1]], ends[spans.bounds[1:] - 1]
    return dataset.find_epochs(samples), *dataset.orders.ends(samples)


def documents_of(index: SequenceIndex, sequences: Numbers) -> tuple[Numbers, Numbers]:
    """Return the document of each sequence, and the number of tokens of that document before the sequence."""
    if index.documents_are_sequences:
        return sequences, np.zeros_like(sequences)
    bounds = index.document_indices
    inside = sequences.max(initial=-1) < len(bounds) - 1
    # As many documents as sequences, one in each: two looks instead of a search.
    if inside and (bounds[sequences] == sequences).all() and (bounds[sequences + 1] == sequences + 1).all():
        return sequences, np.zeros_like(sequences)
    document = bounds.searchsorted(sequences, side="right") - 1
    bytes_before = index.sequence_pointers[sequences] - index.sequence_pointers[bounds[document]]
    return document.astype(np.int64), bytes_before // index.dtype_size


def _into(firsts: Numbers, bounds: Numbers) -> Numbers:
    """Return the target positions of consecutive pieces, those of each sample from its first position on."""
    return np.repeat(firsts - bounds[:-1], np.diff(bounds)) + np.arange(int(bounds[-1]))


def _in_order(bounds: Numbers, found: list[tuple[Numbers, Spans]]) -> Spans:
    """Merge the pieces of all sources in the order of their samples."""
    columns = [np.empty(int(bounds[-1]), np.int64) for _ in range(4)]
    for here, own in found:
        into = _into(bounds[here], own.bounds)
        for column, part in zip(columns, (own.document, own.start, own.length, own.target), strict=True):
            column[into] = part
    return Spans(bounds, *columns)
