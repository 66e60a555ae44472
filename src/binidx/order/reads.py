"""Tokens that samples read: the one answer to what a model saw, for every command and page.

    sample 904 of the run ─ locate ─►  sample 17 of source 2 ─ spans ─►  (sequence, first token, number of tokens)
    of S = 8 inputs                                                ─ cut ─►  tokens that are inputs, of each span

    tokens      a a a b b b b b c        S + 1 = 9
    inputs      3     5         0        c is only the last label

- An input is one of the first S tokens of a sample, S being the order's own `sequence_length`. The token after them
  is only a label: a document of which a sample holds no other token was not read by it.
- Where the pieces of a sample are separate documents (`ends_documents`), the last token of each piece is an input
  without a label.
- Pads and separators are no tokens of a source, so no span has them. Masks are made of the tokens: a token whose loss
  or attention is masked is an input.
- A token that comes again, in another epoch or twice in one sample, is read again.
- Tokens that `drop_last` leaves out are in no sample, and samples behind the last whole batch in no step: both are
  not read. Iterations to skip read their samples without training them: see `Reading.trained`.

Only `read_text` reads tokens from files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from binidx.forks import cached_property
from binidx.format.indexed_dataset import IndexedDataset, as_pair
from binidx.format.tokens import index_of, read_spans
from binidx.order.blended_order import Columns, Result, gather_columns, list_members, map_sources, read_epochs
from binidx.order.order_protocols import Bounds, ComposedOrder, Numbers, Order
from binidx.order.source_order import SourceOrder, join_ranges, place_spans, sorted_unique


@dataclass(frozen=True)
class SampleOrigins:
    """Sources of n samples.

    Attributes:
        source: number of the source in the order, shape (n,); -1 of a block of packed files whose dataset is not known.
        sample: number of the sample in that source's own order, shape (n,).
        epoch: number of complete passes over the source before the sample begins, shape (n,).
    """

    source: Numbers
    sample: Numbers
    epoch: Numbers


@dataclass(frozen=True)
class TokenReads(SampleOrigins):
    """Tokens that n samples read: pieces of documents, those of sample i from bounds[i] to before bounds[i + 1].

    Attributes:
        bounds: shape (n + 1,).
        sequence, first: number of each piece's sequence in its source, and the piece's first token there.
        document, start: number of its document, and its first token counted from the beginning of that.
        length: number of its tokens. Those of a sample are S + 1, fewer if it is truncated.
        target: position of its first token in the sample.
        inputs: number of its tokens, from the first on, that are inputs; 0 of a piece that is only a label.
    """

    bounds: Bounds
    sequence: Numbers
    first: Numbers
    document: Numbers
    start: Numbers
    length: Numbers
    target: Numbers
    inputs: Numbers

    @property
    def owner(self) -> Numbers:
        """Number of the sample of each piece, counted from 0 in these samples."""
        return np.repeat(np.arange(len(self.source)), np.diff(self.bounds))

    @property
    def piece_source(self) -> Numbers:
        """Source of each piece."""
        return np.repeat(self.source, np.diff(self.bounds))

    def join_sequences(self) -> TokenReads:
        """Return the reads with one piece for neighbouring sequences of a document; none of the pieces is empty."""
        continues = (np.diff(self.document) == 0) & (np.diff(self.owner) == 0) & (self.start[1:] > self.start[:-1])
        firsts = np.flatnonzero(np.concatenate([np.ones(min(len(self.owner), 1), np.bool_), ~continues]))
        sums = {name: np.add.reduceat(getattr(self, name), firsts) for name in ("length", "inputs")}
        names = "sequence", "first", "document", "start", "target"
        kept = {name: getattr(self, name)[firsts] for name in names}
        return replace(self, bounds=np.searchsorted(firsts, self.bounds), **kept, **sums)


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


class TokenPlaces(NamedTuple):
    """Places of the tokens of B samples in the files of their sources, the last label among them.

    Attributes:
        sources: number of the source of each sample, shape (B,).
        bounds: sample i has the pieces bounds[i] up to bounds[i + 1], shape (B + 1,).
        starts: first byte of each piece in the plain bytes of the source, shape (n,).
        num_tokens: of each piece, shape (n,).
    """

    sources: Numbers
    bounds: Bounds
    starts: Numbers
    num_tokens: Numbers


@dataclass(frozen=True)
class OrderReads:
    """Tokens that the samples of an order read.

    Args:
        order: the order of the samples.
    """

    order: Order

    @cached_property
    def members(self) -> Sequence[Order]:
        """The order of each source."""
        return list_members(self.order)

    def map_sources(self, sources: Sequence[int], work: Callable[[int], Result]) -> list[Result]:
        """Return the results of `work` for some sources: see `blended_order.map_sources`."""
        return map_sources(self.order, sources, work)

    def list_sources(self) -> NDArray[np.int16]:
        """Return the source of every sample, shape (num_samples,)."""
        order = self.order
        return order.list_sources() if isinstance(order, ComposedOrder) else np.broadcast_to(np.int16(0), len(order))

    def trace(self, samples: Numbers) -> TokenReads:
        """Return the tokens that samples read, shape (n,). Costs about 1 us a sample: cache misses.

        Args:
            samples: numbers of samples, shape (n,).
        """
        source, sample, (epoch,), bounds, pieces = gather_columns(self.order, samples, self._read_pieces)
        return TokenReads(source, sample, epoch, bounds, *pieces)

    def trace_origins(self, samples: Numbers) -> SampleOrigins:
        """Return the sources of samples, shape (n,), without their documents."""
        source, sample, (epoch,), _, _ = gather_columns(self.order, samples, partial(read_epochs, self.order))
        return SampleOrigins(source, sample, epoch)

    def trace_documents(self, samples: Numbers) -> DocumentContents:
        """Return the documents of samples, shape (n,), without the lengths of inner documents.

        If each document is one sequence, this costs a tenth of `trace`: it looks up no document.
        """
        source, sample, columns, bounds, (document,) = gather_columns(self.order, samples, self._read_ends)
        epoch, start, stop = columns
        return DocumentContents(source, sample, epoch, bounds, document, start, stop)

    def count_inputs(self, samples: Numbers, sources: NDArray[np.integer]) -> Numbers:
        """Return the number of input tokens of each sample, shape (n,); without its spans where all samples are full.

        Args:
            samples: numbers of samples, shape (n,).
            sources: source of each, shape (n,).
        """
        lengths = [member.full_length if isinstance(member, SourceOrder) else None for member in self.members]
        inputs: Numbers = np.array([-1 if length is None else length for length in lengths])[sources]
        if len(rest := np.flatnonzero(inputs < 0)):
            _, _, _, bounds, (*_, counts) = gather_columns(self.order, samples[rest], self._read_spans)
            inputs[rest] = np.diff(np.concatenate([[0], np.cumsum(counts)])[bounds])
        return inputs

    def locate(self, samples: Numbers) -> TokenPlaces:
        """Return where the tokens of samples, shape (n,), are stored."""

        def locate(source: int, numbers: Numbers) -> Columns:
            spans, bounds = self.members[source].spans(numbers)
            stored = as_pair(self.order.sources[source].dataset)
            return [], bounds, [stored.locate_all(np.ascontiguousarray(spans[:, 1:]))[:, 0], spans[:, 3]]

        source, _, _, bounds, (starts, counts) = gather_columns(self.order, samples, locate)
        return TokenPlaces(source, bounds, starts, counts)

    def read_text(self, samples: Numbers) -> list[NDArray[Any]]:
        """Return the stored tokens of samples, S + 1 of each, fewer if it is truncated, by one vectored read.

        Args:
            samples: numbers of samples, shape (n,).
        """
        spans, bounds = self.order.spans(samples)
        rows_of = {source: np.flatnonzero(spans[:, 0] == source) for source in np.unique(spans[:, 0]).tolist()}
        requests = [(self.order.sources[source].dataset, spans[rows, 1:]) for source, rows in rows_of.items()]
        pieces: list[NDArray[Any]] = [np.empty(0, np.int64)] * len(spans)
        for rows, own in zip(rows_of.values(), read_spans(requests), strict=True):
            for row, piece in zip(rows.tolist(), own, strict=True):
                pieces[row] = piece
        return [np.concatenate(pieces[first:stop]) for first, stop in pairwise(bounds.tolist())]

    def find(self, source: int, documents: Sequence[int] | Numbers) -> Numbers:
        """Return the numbers of the samples with a token of one of these documents of a source, ascending.

        A sample of which the token is only the last label is among them.

        Args:
            source: number of the source in the order.
            documents: numbers of documents in that source.

        Raises:
            IndexError: there is no such source or document.
        """
        if not 0 <= source < len(self.order.sources):
            raise IndexError(f"source {source}: the run has {len(self.order.sources)}, counted from 0")
        return self.order.find(source, self.sequences_of(source, sorted_unique(np.asarray(documents, np.int64))))

    def sequences_of(self, source: int, documents: Numbers) -> Numbers:
        """Return the numbers of the sequences of some documents of a source, which are in ascending order.

        Args:
            source: number of the source in the order.
            documents: numbers of documents, ascending, shape (n,).

        Raises:
            IndexError: there is no such document.
        """
        bounds, name = index_of(self.order.sources[source].dataset).document_indices, self.order.sources[source].name
        count = len(bounds) - 1
        if len(documents) and not (documents[0] >= 0 and documents[-1] < count):
            wrong = documents[0] if documents[0] < 0 else documents[-1]
            raise IndexError(f"{name}: document {wrong}, it has {count}, counted from 0")
        return join_ranges(bounds[documents].astype(np.int64), bounds[documents + 1].astype(np.int64))

    def find_documents(self, source: int, sequences: Numbers) -> tuple[Numbers, Numbers]:
        """Return the document of each sequence of a source, and the tokens of that document before the sequence.

        Args:
            source: number of the source in the order.
            sequences: numbers of sequences, shape (n,).
        """
        index = index_of(self.order.sources[source].dataset)
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

    def _read_spans(self, source: int, samples: Numbers) -> Columns:
        """Return sequence, first token, length, position in the sample and number of inputs of the pieces of samples.

        Args:
            source: number of one source; -1 of samples without a source, which have no pieces.
            samples: numbers of the samples in that source, shape (n,).
        """
        if source < 0:
            return [], np.zeros(len(samples) + 1, np.int64), [np.empty(0, np.int64)] * 5
        member = self.members[source]
        spans, bounds = member.spans(samples)
        if isinstance(member, SourceOrder):
            target, limit = member.place_spans(samples, spans, bounds), member.sequence_length
        else:
            target, limit = place_spans(spans, bounds), None
        _, sequence, first, length = np.ascontiguousarray(spans.T)
        inputs = length if limit is None else np.clip(limit - target, 0, length)
        return [], bounds, [sequence, first, length, target, inputs]

    def _read_pieces(self, source: int, samples: Numbers) -> Columns:
        """Return the epoch of each sample of one source, and its pieces as the columns of `TokenReads`."""
        _, bounds, (sequence, first, length, target, inputs) = self._read_spans(source, samples)
        if source < 0:
            return [np.zeros_like(samples)], bounds, [sequence] * 7
        document, offset = self.find_documents(source, sequence)
        epochs = self.members[source].epochs(samples)
        return [epochs], bounds, [sequence, first, document, offset + first, length, target, inputs]

    def _read_ends(self, source: int, samples: Numbers) -> Columns:
        """Return epoch, start and stop of each sample of one source, and the document of each of its pieces."""
        member = self.members[source]
        index = member.index if isinstance(member, SourceOrder) else None
        dataset = self.order.sources[source].dataset
        if index is not None and (not isinstance(dataset, IndexedDataset) or dataset.documents_are_sequences):
            bounds, documents, starts, stops = index.ends(samples)
            return [member.epochs(samples), starts, stops], bounds, [documents]
        epochs, bounds, (_, _, document, start, length, *_) = self._read_pieces(source, samples)
        return [*epochs, start[bounds[:-1]], (start + length)[bounds[1:] - 1]], bounds, [document]
