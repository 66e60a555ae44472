"""An opened `.idx`: one class, whatever way its columns are read.

    way        columns                                   opened by
    whole      views of the bytes, fully checked         `parse_index`
    mapped     the same, of a map
    ranged     `RangedArray`: rows as they are needed    `open_index`
    streamed   the same, in blocks, from first to last   `lengths`, `bounds`, `modes`, `check`, `documents`
    joined     those of several files, one after another  `virtual`: `concatenate_indices`, `join_indices`

Blocks are checked by the same rules as the whole (`idx`), in a constant amount of memory: some MB for any index; for
one document with more than `BLOCK_VALUES` sequences, 5 bytes for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.format.idx import HEADER, DType, IdxLayout, check_bounds, check_sequences
from binidx.format.idx_blocks import batch_by_size
from binidx.native.gpt_samples import Sequences
from binidx.storage.adapters import InMemory
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import read_whole
from binidx.storage.ranged_arrays import RangedArray, read_rows
from binidx.storage.ranges import cut, stored_reader
from binidx.storage.requests.remote_object import Found

if TYPE_CHECKING:
    from binidx.format.sidecars.dataset_manifest import DatasetCounts

BLOCK_VALUES = 1 << 18
"""Values of a block: 3 MiB of lengths and pointers."""

WHOLE_BYTES = 64 << 10
"""An `.idx` of at most this size (3,000 documents) is read at once: thousands of indices would otherwise cost thousands
of round trips."""


NO_BYTES = InMemory("", b"")


@dataclass(frozen=True, eq=False)
class SequenceIndex:
    """Contents of an `.idx`. Each column is an array in memory, a view of a map, or a `RangedArray`.

    Attributes:
        dtype: NumPy type of a token.
        sequence_lengths: number of tokens of each sequence, shape (num_sequences,), int32.
        sequence_pointers: first byte of each sequence in the `.bin`, shape (num_sequences,), int64.
        document_indices: first sequence of each document, then num_sequences; shape (num_documents + 1,), int64.
        sequence_modes: mode of each sequence, shape (num_sequences,), int8; None when opened as text.
        known_tokens: sum of the lengths, as soon as it is known.
        documents_are_sequences: whether each document is known to be one sequence, without reading the bounds.
        uri: name of the file, for errors.
        reader: reader of the file from which columns are read by ranges; empty for columns in memory.

    Source: Megatron Core, `_IndexReader`, with the same names.
    """

    dtype: type[np.number[Any]]
    sequence_lengths: NDArray[np.int32]
    sequence_pointers: NDArray[np.int64]
    document_indices: NDArray[np.int64]
    sequence_modes: NDArray[np.int8] | None
    known_tokens: int | None = None
    documents_are_sequences: bool = False
    uri: str = ""
    reader: RangeReader = NO_BYTES

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        """Return (first byte, length, mode) of a sequence."""
        mode = None if self.sequence_modes is None else self.sequence_modes[idx]
        return self.sequence_pointers[idx], self.sequence_lengths[idx], mode

    @property
    def dtype_size(self) -> int:
        """Bytes of one token."""
        return np.dtype(self.dtype).itemsize

    @property
    def num_sequences(self) -> int:
        """Number of sequences, S; Megatron's name is `sequence_count`."""
        return len(self)

    sequence_count = num_sequences

    @property
    def document_count(self) -> int:
        """Number of document bounds, D: one more than documents. Megatron's name."""
        return len(self.document_indices)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_indices) - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all tokens in the `.bin`."""
        return self.num_tokens * self.dtype_size

    @property
    def counts(self) -> DatasetCounts:
        """Counts and dtype, as a manifest has them."""
        documents, dtype = self.num_documents, self.dtype.__name__
        return {"documents": documents, "sequences": len(self), "tokens": self.num_tokens, "dtype": dtype}

    @property
    def num_tokens(self) -> int:
        """Sum of the lengths; before they were checked, the end of the last sequence."""
        if (known := self.known_tokens) is None:
            last = range(len(self))[-1:]
            ends = read_rows([self.sequence_lengths, self.sequence_pointers], last.start, last.stop)
            # No cached_property: the lock of Python 3.11's is held while an index of any source is read.
            known = vars(self)["known_tokens"] = int(ends[0].sum() + ends[1].sum() // self.dtype_size)
        return known

    def bind(self) -> Sequences:
        """Return lengths and pointers of all sequences, for C."""
        code = DType.code_from_dtype(self.dtype)
        return Sequences(self.sequence_lengths, self.sequence_pointers, dtype_code=code, item_bytes=self.dtype_size)

    def tokens_before(self, sequence: int) -> int:
        """Return the number of tokens before a sequence; `len(self)` stands for the end."""
        if sequence == len(self):
            return self.num_tokens
        return int(self.sequence_pointers[sequence]) // self.dtype_size

    def tokens_of(self, sequences: range) -> int:
        """Return the number of tokens of consecutive sequences, by two pointers: a sum of 10^8 lengths takes 0.2 s."""
        return self.tokens_before(sequences.stop) - self.tokens_before(sequences.start)

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Yield blocks of sequence lengths, checked against the sequence pointers."""
        total, size = 0, self.dtype_size
        for first, (lengths, pointers) in _blocks(self.sequence_lengths, self.sequence_pointers):
            total += check_sequences(lengths, pointers, size, self.uri, first=first, start=total * size)
            yield lengths
        vars(self)["known_tokens"] = total

    def bounds(self) -> Iterator[NDArray[np.int64]]:
        """Yield blocks of document bounds, checked; in all there is one more bound than documents."""
        last, count = 0, len(self.document_indices)
        for first, (bounds,) in _blocks(self.document_indices):
            complete = first + len(bounds) == count
            check_bounds(bounds, len(self), self.uri, first=first, lowest=last, complete=complete)
            last = int(bounds[-1])
            yield bounds

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Yield blocks of modes; none in a dataset of text."""
        for _, (modes,) in _blocks(self.sequence_modes) if self.sequence_modes is not None else ():
            yield modes

    def check(self) -> int:
        """Read and check all columns, and return the number of tokens.

        Raises:
            FormatError: a rule of the format is broken; the message names the rule and the place.
        """
        for block in (self.lengths(), self.bounds()):
            deque(block, maxlen=0)
        return self.num_tokens

    def documents(self, count: int | None = None, start: int = 0) -> Iterator[DocumentBlock]:
        """Yield `count` documents from number `start` on, or all, in blocks. No block is checked: call `check` before.

        Memory: some MB; for one document with more than `BLOCK_VALUES` sequences, 5 bytes for each of them.

        Args:
            count: None: up to the last one.
        """
        stop_at = self.num_documents if count is None else min(start + count, self.num_documents)
        token = self.tokens_before(int(self.document_indices[start])) if start else 0
        columns = [self.sequence_lengths, *([] if self.sequence_modes is None else [self.sequence_modes])]
        for first, stop in cut((start, stop_at), BLOCK_VALUES):
            (bounds,) = read_rows([self.document_indices], first, stop + 1)
            for low, high in batch_by_size(bounds, BLOCK_VALUES):
                piece = bounds[low : high + 1]
                lengths, *modes = read_rows(columns, int(piece[0]), int(piece[-1]))
                yield DocumentBlock(first + low, piece, lengths, modes[0] if modes else None, token)
                token += int(lengths.sum(dtype=np.int64))


def _blocks(*columns: Any) -> Iterator[tuple[int, list[NDArray[Any]]]]:
    """Yield (number of the first row, rows) of each block of neighbouring columns; arrays are one block."""
    size = BLOCK_VALUES if isinstance(columns[0], RangedArray) else max(1, len(columns[0]))
    for first, stop in cut((0, len(columns[0])), size):
        yield first, read_rows(columns, first, stop)


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """Neighbouring documents.

    Attributes:
        first: number of the first document.
        bounds: first sequence of each document, then the end, shape (num_documents + 1,).
        lengths: tokens of each sequence of these documents, shape (num_sequences,).
        modes: mode of each sequence of these documents; None in a dataset of text.
        start: number of tokens in the `.bin` before the first document.
    """

    first: int
    bounds: NDArray[np.int64]
    lengths: NDArray[np.int32]
    modes: NDArray[np.int8] | None
    start: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def token_bounds(self) -> NDArray[np.int64]:
        """Return the position in the `.bin`, in tokens, of each document, then the end, shape (num_documents + 1,)."""
        ends = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        positions: NDArray[np.int64] = ends[self.bounds - self.bounds[0]] + self.start
        return positions


def parse_index(buffer: Any, *, uri: str, multimodal: bool = False, num_tokens: int | None = None) -> SequenceIndex:
    """Return the columns of a whole `.idx` as views of `buffer`, fully checked.

    Args:
        buffer: bytes of the file, anything with the buffer protocol.
        uri: name of the file, for errors.
        multimodal: whether to return the modes, which must then be there.
        num_tokens: number of tokens of these bytes, if they were fully checked before; then only the header is.

    Raises:
        FormatError: a rule of the format is broken; the message names the rule and the place.
    """
    view = memoryview(buffer).cast("B")
    layout = IdxLayout.parse(view, len(view), uri=uri, multimodal=multimodal)
    lengths, pointers, bounds, modes = (np.frombuffer(view, kind, count, at) for at, kind, count in layout.columns)
    columns = lengths, pointers, bounds, modes if multimodal else None
    index = SequenceIndex(layout.dtype, *columns, num_tokens, uri=uri)
    if num_tokens is None:
        index.check()
    return index


@dataclass(frozen=True)
class CheckedIndex:
    """Facts about an `.idx` that was fully checked before.

    Attributes:
        num_sequences, digest: "num_sequences" and "index_digest" of `IndexedDataset.identity`.
        documents_are_sequences: whether each document is known to be one sequence.
        found: the checked version of the `.idx` in its store; None: open whatever has its name now.
    """

    num_sequences: int
    digest: str
    documents_are_sequences: bool
    found: Found | None


def open_index(reader: RangeReader, uri: str, checked: CheckedIndex | None = None) -> SequenceIndex:
    """Return an `.idx` whose columns are read by ranges; only the header is checked.

    Args:
        reader: reader of the file.
        uri: name of the file, for errors.
        checked: facts about the file, if it was checked before; the number of tokens is then read with the header.

    Raises:
        FormatError: the header breaks a rule, or has another number of sequences than `checked`.
    """
    if reader.size <= WHOLE_BYTES:
        reader = InMemory(reader.uri, read_whole(reader))
    ends = list[Range]()
    if checked and (count := checked.num_sequences):
        places = IdxLayout(np.uint8, count, 1).columns[:2]
        ends = [RangedArray(reader, at, kind, (count,)).range(count - 1, count) for at, kind, _ in places]
    header, *values = stored_reader(reader).read([(0, min(HEADER.size, reader.size)), *ends])
    layout = IdxLayout.parse(header, reader.size, uri=uri)
    if checked and layout.num_sequences != checked.num_sequences:
        raise FormatError(f"{uri}: {layout.num_sequences} sequences, needed {checked.num_sequences}")
    length, pointer = (int.from_bytes(value, "little", signed=True) for value in values) if values else (0, 0)
    num_tokens = length + pointer // np.dtype(layout.dtype).itemsize if values else None
    arrays: Any = (RangedArray(reader, at, kind, (count,)) for at, kind, count in layout.columns)
    lengths, pointers, bounds, modes = arrays
    columns = lengths, pointers, bounds, modes if layout.has_modes else None
    one_each = bool(checked and checked.documents_are_sequences)
    return SequenceIndex(layout.dtype, *columns, num_tokens, one_each, uri, reader)
