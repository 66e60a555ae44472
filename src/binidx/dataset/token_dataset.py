"""Samples of a batch from an order, the tokens of its sources, and a function that assembles them.

sample numbers ─ order ─► spans of each source ─ one vectored read ─► pieces ─ assemble ─► samples
mapped `.bin`  ───────────────────────── one call of C for each source ──────────────────► rows of the batch
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from binidx.dataset.torch_bridge import Sample
from binidx.errors import ConfigError, IndexBuildError
from binidx.format.idx import DType
from binidx.format.tokens import SequencesInFiles, StoredTokens, Tokens, read_spans
from binidx.native.gpt_samples import GPTIndex, GPTRows, Recipe, Rows, TextRows
from binidx.order.blended_order import list_members
from binidx.order.order_protocols import Bounds, ComposedOrder, Numbers, Order, SpanIndex
from binidx.order.source_order import SourceOrder
from binidx.storage.interfaces import RangeReader

INT32_DTYPES = {DType.code_from_dtype(dtype) for dtype in (np.uint8, np.int8, np.int16, np.int32, np.uint16)}


class SourceRows(NamedTuple):
    """Samples of one source in a batch.

    Attributes:
        source: number of the source.
        numbers: numbers of the samples in the source's own order; None is the padding sample: sample 0 without loss.
        rows: row of each sample in the batch.
    """

    source: int
    numbers: Sequence[int | None]
    rows: Sequence[int]

    def served(self) -> list[int]:
        """Return the numbers of the samples whose tokens are read, 0 for the padding sample."""
        return [number or 0 for number in self.numbers]


class SourceTokens(NamedTuple):
    """Stored tokens of the samples of one source in a batch.

    Attributes:
        of: the samples.
        spans: (sequence, first token, number of tokens) of each piece, shape (n, 3).
        bounds: sample i has the pieces bounds[i] up to bounds[i + 1], shape (len(of.rows) + 1,).
        pieces: tokens of each span, 1-D, of the stored dtype.
    """

    of: SourceRows
    spans: Numbers
    bounds: Bounds
    pieces: Sequence[NDArray[Any]]


class Assemble(Protocol):
    """Function that makes the samples of a whole batch of stored tokens; it reads nothing."""

    def __call__(self, tokens: SourceTokens) -> Sequence[Sample]:
        """Return the samples of one source, in the order of `tokens.of.numbers`."""


class SampleAssemble(ABC):
    """Assemble function that makes one sample at a time."""

    @abstractmethod
    def make(self, number: int | None, spans: Numbers, pieces: Sequence[NDArray[Any]]) -> dict[str, Any]:
        """Return a sample.

        Args:
            number: of the sample in the source's own order; None is the padding sample: sample 0 without loss.
            spans: (sequence, first token, number of tokens) of each piece, shape (n, 3).
            pieces: tokens of each span, 1-D, of the stored dtype.
        """

    def __call__(self, tokens: SourceTokens) -> Sequence[Sample]:
        samples = zip(tokens.of.numbers, pairwise(tokens.bounds.tolist()), strict=True)
        return [
            self.make(number, tokens.spans[first:stop], tokens.pieces[first:stop]) for number, (first, stop) in samples
        ]


@runtime_checkable
class RowAssemble(Protocol):
    """Assemble function whose rows C fills; two that are equal share the rows of a batch."""

    recipe: Recipe

    def finish(self, rows: GPTRows) -> Sequence[Sample]:
        """Return the samples of filled rows."""

    def finish_one(self, rows: GPTRows) -> Sample:
        """Return the sample of a filled row without a batch axis."""


class TokenDataset:
    """Samples of an order.

    Args:
        order: spans of the tokens of each sample.
        tokens: the sequences of each source of the order, of any kind: only `Tokens.read` is needed.
        assembles: function of each source that makes its samples.
    """

    def __init__(self, order: Order, tokens: Sequence[Tokens], assembles: Sequence[Any]) -> None:
        self.order, self.tokens, self.assembles = order, tokens, assembles
        self.members, self.is_composed = list_members(order), isinstance(order, ComposedOrder)
        first = assembles[0]
        is_shared = isinstance(first, RowAssemble) and all(other is first or other == first for other in assembles)
        self.row_assemble: RowAssemble | None = first if is_shared else None

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, idx: int | None) -> Sample:
        if self.row_assemble is None:
            return self.__getitems__([idx])[0]
        # Written without a batch axis: taking the sample out of a batch of one costs a quarter more.
        rows = GPTRows(self.row_assemble.recipe, None)
        self._fill(rows, self._divide([idx]) if self.is_composed else [SourceRows(0, [idx], [0])])
        return self.row_assemble.finish_one(rows)

    def __getitems__(self, idxs: Sequence[int | None]) -> Sequence[Sample]:
        """Return the samples of a batch, whose tokens are read at once.

        Args:
            idxs: numbers of samples; None is the padding sample.

        Returns:
            The samples in the order of `idxs`.
        """
        return self._make_samples(self._divide(idxs), len(idxs))

    def read_with_sources(self, idxs: Sequence[int]) -> tuple[Numbers, Sequence[Sample]]:
        """Return the number of the source of each sample, shape (B,), int64; and the samples, read at once."""
        parts, sources = self._divide(idxs), np.empty(len(idxs), np.int64)
        for part in parts:
            sources[part.rows] = part.source
        return sources, self._make_samples(parts, len(idxs))

    def _make_samples(self, parts: Sequence[SourceRows], num_rows: int) -> Sequence[Sample]:
        if self.row_assemble is not None:
            self._fill(rows := GPTRows(self.row_assemble.recipe, num_rows), parts)
            return self.row_assemble.finish(rows)
        batch: list[Sample] = [{}] * num_rows
        read = self._read([self._resolve(part) for part in parts])
        if not self.is_composed:
            samples: Sequence[Sample] = self.assembles[0](read[0])
            return samples
        for tokens in read:
            for row, sample in zip(tokens.of.rows, self.assembles[tokens.of.source](tokens), strict=True):
                batch[row] = sample
        return batch

    def read_text(self, idxs: Sequence[int]) -> NDArray[np.int32]:
        """Return only the tokens of samples.

        Args:
            idxs: numbers of samples, B of them.

        Returns:
            int32, shape (B, S + 1), with pads.

        Raises:
            ConfigError: the tokens are stored as float or int64, or the samples are not rows of stored tokens.
        """
        if self.row_assemble is None:
            raise ConfigError("read_tokens: cannot serve tokens alone (needs one sequence_length and GPT samples)")
        for dataset in self.tokens:
            if DType.code_from_dtype(dataset.dtype) not in INT32_DTYPES:
                raise ConfigError(
                    f"{dataset.path_prefix}: tokens do not fit int32 (found {dataset.dtype.name}); "
                    "read the samples, whose tokens are int64"
                )
        self._fill(rows := TextRows(self.row_assemble.recipe, len(idxs)), self._divide(idxs))
        return rows.text

    def _divide(self, idxs: Sequence[int | None]) -> list[SourceRows]:
        """Return the samples of each source in a batch."""
        if not self.is_composed:
            return [SourceRows(0, idxs, range(len(idxs)))]
        sources, numbers = self.order.locate(np.array([idx or 0 for idx in idxs], np.int64))
        places = {source: np.flatnonzero(sources == source).tolist() for source in np.unique(sources).tolist()}
        located = numbers.tolist()
        return [
            SourceRows(source, [None if idxs[row] is None else located[row] for row in rows], rows)
            for source, rows in places.items()
        ]

    def _fill(self, rows: Rows, parts: Sequence[SourceRows]) -> None:
        """Write the samples of a batch to their rows; tokens that are not mapped are read in one vectored read."""
        unmapped = [part for part in parts if not self._fill_from_map(rows, part)]
        if unmapped:
            for tokens in self._read(unmapped):
                fill_from_tokens(rows, tokens)
        for _, numbers, places in parts:
            if None in numbers and isinstance(rows, GPTRows):
                padding = [place for number, place in zip(numbers, places, strict=True) if number is None]
                rows.loss_mask.reshape(rows.num_rows, -1)[padding] = 0.0

    def _fill_from_map(self, rows: Rows, part: SourceRows) -> bool:
        """Fill rows in one call of C; return False, with nothing written, if some tokens are not memory-mapped."""
        dataset = self.tokens[part.source]
        if not isinstance(dataset, SequencesInFiles) or (reader := dataset.mapped_reader) is None:
            return False
        index, served = self._index(part.source), part.served()
        try:
            if isinstance(index, GPTIndex):
                return reader.read_into(lambda about: rows.read(index, about, served, part.rows))
            spans, bounds = self._spans(part.source, served)
            return reader.read_into(lambda about: rows.read_spans(dataset.sequences, about, spans, bounds, part.rows))
        except IndexBuildError:
            for tokens in self._read([part]):  # step by step: its errors name the sample or span
                fill_from_tokens(rows, tokens)
            raise

    def _index(self, source: int) -> SpanIndex | None:
        """Return the index from which the spans of a source follow; None if its order has its own `spans`."""
        member = self.members[source]
        return member.index if isinstance(member, SourceOrder) else None

    def _spans(self, source: int, numbers: Sequence[int]) -> tuple[Numbers, Bounds]:
        """Return (sequence, first token, number of tokens) of spans, shape (n, 3), and the bounds of each sample."""
        if (index := self._index(source)) is not None:
            return index.spans(numbers)
        spans, bounds = self.members[source].spans(np.asarray(numbers, np.int64))
        return np.ascontiguousarray(spans[:, 1:]), bounds

    def _resolve(self, part: SourceRows) -> SourceRows:
        """Return samples whose negative numbers count from the end; raise IndexError for one that does not exist."""
        size = len(self.members[part.source])
        for number in part.numbers:
            if number is not None and not -size <= number < size:
                prefix = self.tokens[part.source].path_prefix
                raise IndexError(f"{prefix}: sample {number}, it has {size} in this split")
        numbers = [None if number is None else number % size for number in part.numbers]
        return SourceRows(part.source, numbers, part.rows)

    def _read(self, parts: Sequence[SourceRows]) -> list[SourceTokens]:
        """Return the tokens of samples, read at once for all sources."""
        located = [self._spans(part.source, part.served()) for part in parts]
        datasets = [self.tokens[part.source] for part in parts]
        pieces = read_spans([(dataset, spans) for dataset, (spans, _) in zip(datasets, located, strict=True)])
        return [
            SourceTokens(part, spans, bounds, own)
            for part, (spans, bounds), own in zip(parts, located, pieces, strict=True)
        ]


def locate_stored(
    order: Order, tokens: Sequence[Tokens], samples: Numbers
) -> Iterator[tuple[RangeReader, NDArray[np.int64], Numbers]]:
    """Yield where the tokens of samples are stored.

    Args:
        order: spans of the tokens of each sample.
        tokens: the sequences of each source of the order.
        samples: numbers of samples, shape (B,).

    Yields:
        Of each source in files with some of them: its reader; the ranges of bytes, shape (n, 2); and the place of each
        range's sample in `samples`, shape (n,).
    """
    spans, bounds = order.spans(samples)
    places = np.repeat(np.arange(len(samples)), np.diff(bounds))
    for source in np.unique(spans[:, 0]).tolist():
        rows, stored = np.flatnonzero(spans[:, 0] == source), tokens[source]
        if isinstance(stored, StoredTokens):
            yield stored.bin_reader, stored.locate_all(np.ascontiguousarray(spans[rows, 1:])), places[rows]


def fill_from_tokens(rows: Rows, tokens: SourceTokens, places: Sequence[int] | None = None) -> None:
    """Fill rows of a batch with stored tokens.

    Args:
        rows: filled in place.
        tokens: the tokens of the samples of one source.
        places: the row of each sample; None: those of the batch.
    """
    dtype = tokens.pieces[0].dtype if tokens.pieces else np.dtype(np.int32)
    code, places = DType.code_from_dtype(dtype), tokens.of.rows if places is None else places
    rows.fill(tokens.pieces, tokens.bounds, places, dtype_code=code, item_bytes=dtype.itemsize)
