"""Contents of samples: source, epoch, and the documents whose tokens they hold, for many samples at once.

    sample 904 of the run ─ dataset_index ─►  sample 17 of source 2 ─ shuffle, sample, document index ─►  spans
                                                                                   document_indices ─►  documents

Only `read_text` reads tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from binidx.format.idx import SequenceIndex
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.tokens import index_of, read_spans
from binidx.order.blended_order import Columns, gather_columns, list_members, read_epochs
from binidx.order.order_protocols import Numbers, Order
from binidx.order.ranged_order import LazyOrder
from binidx.order.source_order import SourceOrder

Docs = Literal["ends", "spans"] | None
"""Columns for the documents of a sample: as `RunOrder.table`."""


@dataclass(frozen=True)
class DocumentSpans:
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
        source: number of the source in the order, shape (n,).
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

    spans: DocumentSpans


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


def trace_origins(order: Order, numbers: Numbers) -> SampleOrigins:
    """Return the sources of the samples with these numbers, shape (n,), without their documents.

    Args:
        order: the order of the samples.
        numbers: numbers of the samples in that order, shape (n,).
    """
    source, sample, (epoch,), _, _ = gather_columns(order, numbers, partial(read_epochs, order))
    return SampleOrigins(source, sample, epoch)


def trace_contents(order: Order, numbers: Numbers) -> SampleContents:
    """Return the contents of the samples with these numbers, shape (n,). Costs about 1 us a sample: cache misses.

    Args:
        order: the order of the samples.
        numbers: numbers of the samples in that order, shape (n,).
    """
    source, sample, (epoch,), bounds, pieces = gather_columns(order, numbers, partial(_read_pieces, order))
    return SampleContents(source, sample, epoch, DocumentSpans(bounds, *pieces))


def trace_documents(order: Order, numbers: Numbers) -> DocumentContents:
    """Return the documents of the samples with these numbers, shape (n,), without the lengths of inner documents.

    If each document is one sequence, this costs a tenth of `trace_contents`: it looks up no document.

    Args:
        order: the order of the samples.
        numbers: numbers of the samples in that order, shape (n,).
    """
    source, sample, columns, bounds, (document,) = gather_columns(order, numbers, partial(_read_ends, order))
    epoch, start, stop = columns
    return DocumentContents(source, sample, epoch, bounds, document, start, stop)


def read_text(order: Order, numbers: Numbers) -> list[NDArray[Any]]:
    """Return the stored tokens of samples, S + 1 of each, fewer if it is truncated, by one vectored read.

    Args:
        order: the order of the samples.
        numbers: numbers of the samples in that order, shape (n,).
    """
    spans, bounds = order.spans(numbers)
    rows_of = {source: np.flatnonzero(spans[:, 0] == source) for source in np.unique(spans[:, 0]).tolist()}
    requests = [(order.sources[source].dataset, spans[rows, 1:]) for source, rows in rows_of.items()]
    pieces: list[NDArray[Any]] = [np.empty(0, np.int64)] * len(spans)
    for rows, own in zip(rows_of.values(), read_spans(requests), strict=True):
        for row, piece in zip(rows.tolist(), own, strict=True):
            pieces[row] = piece
    return [np.concatenate(pieces[first:stop]) for first, stop in pairwise(bounds.tolist())]


def _read_pieces(order: Order, source: int, samples: Numbers) -> Columns:
    """Return the epoch of each sample of one source, and the pieces of documents in it as the columns of
    `DocumentSpans`.
    """
    member = list_members(order)[source]
    spans, bounds = member.spans(samples)
    _, sequence, first, length = np.ascontiguousarray(spans.T)
    document, offset = find_documents(index_of(order.sources[source].dataset), sequence)
    before = np.cumsum(length) - length
    target = before - np.repeat(before[bounds[:-1]], np.diff(bounds))
    return [member.epochs(samples)], bounds, [document, offset + first, length, target]


def _read_ends(order: Order, source: int, samples: Numbers) -> Columns:
    """Return epoch, start and stop of each sample of one source, and the document of each of its pieces."""
    member = list_members(order)[source]
    index = member.index if isinstance(member, SourceOrder | LazyOrder) else None
    dataset = order.sources[source].dataset
    if index is not None and (not isinstance(dataset, IndexedDataset) or dataset.documents_are_sequences):
        bounds, documents, starts, stops = index.ends(samples)
        return [member.epochs(samples), starts, stops], bounds, [documents]
    epochs, bounds, (document, start, length, _) = _read_pieces(order, source, samples)
    return [*epochs, start[bounds[:-1]], (start + length)[bounds[1:] - 1]], bounds, [document]


def find_documents(index: SequenceIndex, sequences: Numbers) -> tuple[Numbers, Numbers]:
    """Return the document of each sequence, and the number of tokens of that document before the sequence.

    Args:
        index: the `.idx` of the sequences.
        sequences: numbers of sequences, shape (n,).
    """
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
