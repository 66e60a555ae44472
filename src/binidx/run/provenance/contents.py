"""Contents of samples: source, epoch, and the documents whose tokens they hold, for many samples at once.

    sample 904 of the run ─ dataset_index ─►  sample 17 of source 2 ─ shuffle, sample, document index ─►  spans
                                                                                   document_indices ─►  documents

Only `read_text` reads tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.blended import BlendedDataset
from binidx.dataset.gpt import GPTDataset
from binidx.errors import ConfigError
from binidx.format.idx import SequenceIndex
from binidx.format.indexed_dataset import IndexedDataset, Span, read_spans
from binidx.storage.threads import OPENS

Numbers = NDArray[np.int64]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Spans:
    """Pieces of documents, in the order of the samples: sample i has pieces bounds[i] up to bounds[i + 1].

    Attributes:
        bounds: shape (n + 1,).
        document: number of the document in its source.
        start: first token of the piece, counted from the beginning of the document.
        length: number of tokens of the piece.
        target: position of the piece's first token in the sample.
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
        source: number of the dataset in `list_sources`, shape (n,).
        sample: number of the sample in that dataset, in serving order, shape (n,).
        epoch: number of complete passes over the source before the sample begins, shape (n,).
    """

    source: Numbers
    sample: Numbers
    epoch: Numbers


@dataclass(frozen=True)
class SampleContents(SampleOrigins):
    """Sources of samples, and the pieces of documents that the samples consist of.

    Attributes:
        spans: the pieces; those of a sample have S + 1 tokens, fewer if it is truncated.
    """

    spans: Spans


@dataclass(frozen=True)
class DocumentContents(SampleOrigins):
    """Sources of n samples, the documents of each sample, and the token offsets at which each sample starts and stops.

    Attributes:
        bounds: sample i consists of pieces of the documents document[bounds[i]:bounds[i + 1]], shape (n + 1,).
        document: document number of each piece, counted in its source; the pieces of sample 0 come first.
        start: offset of each sample's first token in the first document of the sample, shape (n,).
        stop: offset after each sample's last token in the last document of the sample, shape (n,).
    """

    bounds: Numbers
    document: NDArray[Any]
    start: NDArray[Any]
    stop: NDArray[Any]


def list_sources(dataset: Any) -> list[GPTDataset]:
    """Return the GPT datasets that a dataset of the builder consists of, in the order of the blend.

    Raises:
        ConfigError: the dataset contains another kind of dataset.
    """
    found: list[Any] = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    for each in found:
        if not isinstance(each, GPTDataset):
            raise ConfigError(f"order: found a {type(each).__name__}, needs GPT datasets or a blend of them")
    return found


def locate_samples(dataset: Any, numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the source of each sample, and the sample's number in that source; both in the shape of `numbers`."""
    if not isinstance(dataset, BlendedDataset):
        return np.zeros_like(numbers), numbers
    return dataset.dataset_index[numbers].astype(np.int64), dataset.dataset_sample_index[numbers].astype(np.int64)


def trace_origins(dataset: Any, numbers: Numbers) -> SampleOrigins:
    """Return the sources of the samples with these numbers, shape (n,), without their documents."""
    source, sample, (epoch,), _, _ = _gather(dataset, numbers, _epochs_of_source)
    return SampleOrigins(source, sample, epoch)


def trace_contents(dataset: Any, numbers: Numbers) -> SampleContents:
    """Return the contents of the samples with these numbers, shape (n,). Costs about 1 us a sample: cache misses."""
    source, sample, (epoch,), bounds, pieces = _gather(dataset, numbers, _spans_of_source)
    return SampleContents(source, sample, epoch, Spans(bounds, *pieces))


def trace_documents(dataset: Any, numbers: Numbers) -> DocumentContents:
    """Return the documents of the samples with these numbers, shape (n,), without the lengths of inner documents.

    If each document is one sequence, this costs a tenth of `trace_contents`: it looks up no document.
    """
    source, sample, (epoch, start, stop), bounds, (document,) = _gather(dataset, numbers, _ends_of_source)
    return DocumentContents(source, sample, epoch, bounds, document, start, stop)


Columns = tuple[Sequence[NDArray[Any]], Numbers, Sequence[NDArray[Any]]]
"""Columns with a value for each sample; bounds of the pieces of each sample; columns with a value for each piece."""


def _gather(
    dataset: Any, numbers: Numbers, of_source: Callable[[GPTDataset, Numbers], Columns]
) -> tuple[Numbers, Numbers, Sequence[NDArray[Any]], Numbers, Sequence[NDArray[Any]]]:
    """Return source and number in the source of each sample, and the columns of all samples in the order of `numbers`.

    Args:
        of_source: returns the columns of some samples of one source.
    """
    datasets = list_sources(dataset)
    source, sample = locate_samples(dataset, numbers)
    present = np.unique(source).tolist() if len(datasets) > 1 and len(numbers) else [0]
    if len(present) == 1:
        return source, sample, *of_source(datasets[present[0]], sample)
    places = {each: np.flatnonzero(source == each) for each in present}
    parts = map_sources(datasets, present, lambda each: of_source(datasets[each], sample[places[each]]))
    counts = np.zeros(len(numbers), np.int64)
    for here, (_, bounds, _) in zip(places.values(), parts, strict=True):
        counts[here] = np.diff(bounds)
    whole = np.concatenate([[0], np.cumsum(counts)])
    rows, pieces = (
        [np.empty(length, np.int64) for _ in columns]
        for length, columns in ((len(numbers), parts[0][0]), (int(whole[-1]), parts[0][2]))
    )
    for here, (own_rows, bounds, own_pieces) in zip(places.values(), parts, strict=True):
        into = np.repeat(whole[here] - bounds[:-1], np.diff(bounds)) + np.arange(int(bounds[-1]))
        for column, own in zip(rows, own_rows, strict=True):
            column[here] = own
        for column, own in zip(pieces, own_pieces, strict=True):
            column[into] = own
    return source, sample, rows, whole, pieces


def read_text(dataset: Any, numbers: Numbers) -> list[NDArray[Any]]:
    """Return the stored tokens of samples, S + 1 of each, fewer if it is truncated, by one vectored read."""
    datasets = list_sources(dataset)
    source, sample = locate_samples(dataset, numbers)
    wanted: list[tuple[IndexedDataset, list[Span]]] = []
    places: list[tuple[Numbers, Numbers]] = []
    present = np.unique(source).tolist()
    found = map_sources(datasets, present, lambda each: datasets[each].orders.spans(sample[source == each]))
    for each, (spans, bounds) in zip(present, found, strict=True):
        here = np.flatnonzero(source == each)
        wanted.append((datasets[each].dataset, [(sequence, first, count) for sequence, first, count in spans.tolist()]))
        places.append((here, bounds))
    text: list[NDArray[Any]] = [np.empty(0, np.int64)] * len(numbers)
    for (here, bounds), pieces in zip(places, read_spans(wanted), strict=True):
        for place, first, stop in zip(here.tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            text[place] = np.concatenate(pieces[first:stop])
    return text


def map_sources(datasets: Sequence[GPTDataset], present: Sequence[int], work: Callable[[int], Result]) -> list[Result]:
    """Return the results of `work` for some sources, computed concurrently if they read from a store."""
    return [work(each) for each in present] if datasets[0].access == "load" else OPENS.map(work, present)


def _epochs_of_source(dataset: GPTDataset, samples: Numbers) -> Columns:
    """Return the epoch of each sample of one source, and no pieces."""
    return [dataset.find_epochs(samples)], np.zeros(len(samples) + 1, np.int64), []


def _spans_of_source(dataset: GPTDataset, samples: Numbers) -> Columns:
    """Return the epoch of each sample of one source, and the pieces of documents in it as the columns of `Spans`."""
    spans, bounds = dataset.orders.spans(samples)
    document, offset = find_documents(dataset.dataset.index, np.ascontiguousarray(spans[:, 0]))
    length = np.ascontiguousarray(spans[:, 2])
    before = np.cumsum(length) - length
    target = before - np.repeat(before[bounds[:-1]], np.diff(bounds))
    return [dataset.find_epochs(samples)], bounds, [document, offset + spans[:, 1], length, target]


def _ends_of_source(dataset: GPTDataset, samples: Numbers) -> Columns:
    """Return epoch, start and stop of each sample of one source, and the document of each of its pieces."""
    if dataset.dataset.documents_are_sequences:
        bounds, documents, starts, stops = dataset.orders.ends(samples)
        return [dataset.find_epochs(samples), starts, stops], bounds, [documents]
    epochs, bounds, (document, start, length, _) = _spans_of_source(dataset, samples)
    return [*epochs, start[bounds[:-1]], (start + length)[bounds[1:] - 1]], bounds, [document]


def find_documents(index: SequenceIndex, sequences: Numbers) -> tuple[Numbers, Numbers]:
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
