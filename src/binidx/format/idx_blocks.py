"""An `.idx` read and written in blocks, in a constant amount of memory.

`IndexStream` reads from the first sequence to the last:

    lengths()     lengths and pointers, checked against each other ─► blocks of lengths
    bounds()      document bounds, checked                         ─► blocks of bounds
    documents()   bounds with the lengths and modes of their sequences

Memory: some MB for any index; for one document with more than `BLOCK_VALUES` sequences, 5 bytes for each of them.

`IndexColumns` writes; the pointers are a running sum:

    lengths, modes ──┐
    document bounds ─┴───► spooled columns ─► .idx
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.format.idx import HEADER, check_bounds, check_sequences, format_idx_header, little_endian, parse_idx_counts
from binidx.format.sidecars.dataset_manifest import DatasetCounts
from binidx.storage.adapters import InMemory
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import read_whole
from binidx.storage.ranges import cut

BLOCK_VALUES = 1 << 18
"""Values of a block: 3 MiB of lengths and pointers."""

WHOLE_BYTES = 64 << 10
"""An `.idx` of at most this size (3,000 documents) is read at once."""

SPOOLED_VALUES = 1 << 17
"""Values of a block of a spooled column."""

MEMORY_BYTES = 1 << 18
"""Bytes of a spooled column in memory; more of them go to a file in the temporary directory."""


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


class IndexStream:
    """Reader of an `.idx` in blocks.

    Args:
        reader: reader of the `.idx`. A small one is read at once: thousands of indices would otherwise cost thousands
            of round trips.
        uri: name of the index, for errors.

    Attributes:
        dtype: NumPy type of a token.
        num_sequences, num_documents: counts from the header.
        multimodal: whether modes follow; False without sequences.
        num_tokens: number of tokens, known at the end of `lengths`.

    Raises:
        FormatError: the header breaks a rule of the format (`idx`), or a block does when it is read.
    """

    def __init__(self, reader: RangeReader, uri: str) -> None:
        self.uri = uri
        self.reader = InMemory(reader.uri, read_whole(reader)) if reader.size <= WHOLE_BYTES else reader
        head = self.reader.read([(0, min(HEADER.size, self.size))])[0]
        self.dtype, self.num_sequences, num_bounds, self.multimodal = parse_idx_counts(head, self.size, uri=self.uri)
        self.num_documents = num_bounds - 1
        self.num_tokens = 0

    @property
    def item_bytes(self) -> int:
        """Bytes of one token."""
        return np.dtype(self.dtype).itemsize

    @property
    def counts(self) -> DatasetCounts:
        """Counts and dtype, as a manifest has them; those of the tokens as `num_tokens`."""
        documents, dtype = self.num_documents, self.dtype.__name__
        return {"documents": documents, "sequences": self.num_sequences, "tokens": self.num_tokens, "dtype": dtype}

    @property
    def size(self) -> int:
        """Bytes of the `.idx`."""
        return self.reader.size

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Yield blocks of sequence lengths, checked against the sequence pointers."""
        self.num_tokens = 0
        places = HEADER.size, HEADER.size + 4 * self.num_sequences
        for first, stop in cut((0, self.num_sequences), BLOCK_VALUES):
            lengths, pointers = self._read(("<i4", places[0]), ("<i8", places[1]), first=first, stop=stop)
            start = self.num_tokens * self.item_bytes
            self.num_tokens += check_sequences(lengths, pointers, self.item_bytes, self.uri, first=first, start=start)
            yield lengths

    def bounds(self) -> Iterator[NDArray[np.int64]]:
        """Yield blocks of document bounds, checked; in all there is one more bound than documents."""
        last, place, count = 0, HEADER.size + 12 * self.num_sequences, self.num_documents + 1
        for first, stop in cut((0, count), BLOCK_VALUES):
            (block,) = self._read(("<i8", place), first=first, stop=stop)
            check_bounds(block, self.num_sequences, self.uri, first=first, lowest=last, complete=stop == count)
            last = int(block[-1])
            yield block

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """Yield blocks of modes; none in a dataset of text."""
        for first, stop in cut((0, self.num_sequences if self.multimodal else 0), BLOCK_VALUES):
            yield self._modes(first, stop)

    def check(self) -> int:
        """Read and check the whole index, and return the number of tokens.

        Raises:
            FormatError: a rule of the format is broken.
        """
        for _ in self.bounds():
            pass
        for _ in self.lengths():
            pass
        return self.num_tokens

    def documents(self, count: int | None = None, start: int = 0) -> Iterator[DocumentBlock]:
        """Yield `count` documents from number `start` on, or all, in blocks. No block is checked: call `check` before.

        Args:
            count: None: up to the last one.
        """
        stop_at = self.num_documents if count is None else min(start + count, self.num_documents)
        token, place = self._tokens_before(start), HEADER.size + 12 * self.num_sequences
        for first, stop in cut((start, stop_at), BLOCK_VALUES):
            (bounds,) = self._read(("<i8", place), first=first, stop=stop + 1)
            for low, high in batch_by_size(bounds, BLOCK_VALUES):
                piece = bounds[low : high + 1]
                at, end = int(piece[0]), int(piece[-1])
                (lengths,) = self._read(("<i4", HEADER.size), first=at, stop=end)
                modes = self._modes(at, end) if self.multimodal else None
                yield DocumentBlock(first + low, piece, lengths, modes, token)
                token += int(lengths.sum(dtype=np.int64))

    def _tokens_before(self, document: int) -> int:
        """Return the position of a document in the `.bin`, in tokens; 0 if no sequence follows it."""
        if not document:
            return 0
        (bound,) = self._read(("<i8", HEADER.size + 12 * self.num_sequences), first=document, stop=document + 1)
        if (sequence := int(bound[0])) == self.num_sequences:
            return 0
        (pointer,) = self._read(("<i8", HEADER.size + 4 * self.num_sequences), first=sequence, stop=sequence + 1)
        return int(pointer[0]) // self.item_bytes

    def _modes(self, first: int, stop: int) -> NDArray[np.int8]:
        place = HEADER.size + 12 * self.num_sequences + 8 * (self.num_documents + 1)
        return self._read((np.int8, place), first=first, stop=stop)[0]

    def _read(self, *columns: tuple[DTypeLike, int], first: int, stop: int) -> list[NDArray[Any]]:
        """Read values [first, stop) of columns, each given as its type and first byte, in one vectored read."""
        sizes = [np.dtype(kind).itemsize for kind, _ in columns]
        ranges = [(at + size * first, at + size * stop) for (_, at), size in zip(columns, sizes, strict=True)]
        answers = self.reader.read(ranges)
        return [np.frombuffer(data, kind) for data, (kind, _) in zip(answers, columns, strict=True)]


def batch_by_size(bounds: NDArray[np.int64], most: int) -> Iterator[Range]:
    """Yield runs (first, stop) of neighbouring items, each of at most `most` units in all, or of one larger item.

    Args:
        bounds: unit at which each item begins, then the end, shape (num_items + 1,).
    """
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = int(np.searchsorted(bounds, bounds[first] + most, "right")) - 1
        stop = max(first + 1, min(stop, last))
        yield first, stop
        first = stop


class SpooledColumn:
    """Append-only column of integers. Memory: 256 KiB; then `itemsize` bytes of disk for each value.

    Args:
        dtype: stored type; appended values must fit it.
    """

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = little_endian(dtype)
        # A buffer of our own over a raw file: a forked child that exits flushes the buffers of file objects again.
        self._buffer = bytearray()
        self._file: Any = None
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def extend(self, values: Sequence[int] | NDArray[Any], plus: int = 0) -> None:
        """Append values in blocks: a mapped array is not copied as a whole.

        Args:
            values: integers that fit the dtype, shape (n,).
            plus: number that is added to each value.

        Raises:
            OSError: the disk is full; the number of appended values is then undefined.
        """
        for start in range(0, len(values), SPOOLED_VALUES):
            block = np.asarray(values[start : start + SPOOLED_VALUES], self.dtype)
            self._buffer += (block + plus if plus else block).tobytes()
            if len(self._buffer) > MEMORY_BYTES:
                self._spill()
        self._count += len(values)

    def blocks(self) -> Iterator[NDArray[Any]]:
        """Yield all values in arrays of at most `SPOOLED_VALUES`; the column can be extended afterwards."""
        if self._file is not None:
            self._spill()
        size = self.dtype.itemsize
        for first, stop in cut((0, self._count * size), SPOOLED_VALUES * size):
            data = os.pread(self._file.fileno(), stop - first, first) if self._file else bytes(self._buffer[first:stop])
            yield np.frombuffer(data, self.dtype)

    def close(self) -> None:
        """Free the memory and the file."""
        self._buffer = bytearray()
        if self._file is not None:
            self._file.close()

    def _spill(self) -> None:
        if self._file is None:
            self._file = TemporaryFile(buffering=0)  # noqa: SIM115
        rest = memoryview(self._buffer)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._buffer = bytearray()


class IndexColumns:
    """Columns of an `.idx` that is being written; values are not checked.

    Args:
        dtype: type of a token.
        multimodal: whether each sequence has a mode.
    """

    def __init__(self, dtype: DTypeLike, multimodal: bool = False) -> None:
        self.dtype, self.multimodal = dtype, multimodal
        self.lengths, self.modes, self._bounds = SpooledColumn("i4"), SpooledColumn("i1"), SpooledColumn("i8")
        self._bounds.extend([0])
        self._last_bound = 0

    @property
    def num_open(self) -> int:
        """Number of sequences after the last document bound."""
        return len(self.lengths) - self._last_bound

    @property
    def num_documents(self) -> int:
        return len(self._bounds) - 1

    def counts(self) -> dict[str, int]:
        """Count the tokens; return the numbers of documents, sequences and tokens, as a manifest has them."""
        tokens = sum(int(block.sum(dtype=np.int64)) for block in self.lengths.blocks())
        return {"documents": self.num_documents, "sequences": len(self.lengths), "tokens": tokens}

    def add(
        self, lengths: Sequence[int] | NDArray[np.int32], ends: NDArray[np.int64], modes: NDArray[np.int8] | None = None
    ) -> None:
        """Append whole documents.

        Args:
            lengths: tokens of each sequence, shape (num_sequences,).
            ends: end of each document, counted in these sequences, shape (num_documents,).
            modes: mode of each sequence, shape (num_sequences,); None in a dataset of text.
        """
        before = len(self.lengths)
        self.lengths.extend(lengths)
        if modes is not None:
            self.modes.extend(modes)
        self.add_bounds(ends, plus=before)

    def end_document(self) -> None:
        """Add a bound after the last sequence."""
        self.add_bounds([len(self.lengths)], plus=0)

    def add_bounds(self, bounds: Sequence[int] | NDArray[np.int64], *, plus: int) -> None:
        """Add document bounds; sequences added later belong to a new document.

        Args:
            bounds: end of each document in sequences, shape (num_documents,), ascending.
            plus: number that is added to each bound.
        """
        if len(bounds):
            self._bounds.extend(bounds, plus=plus)
            self._last_bound = int(bounds[-1]) + plus

    def format(self) -> Iterator[bytes]:
        """Yield the bytes of the `.idx`."""
        yield format_idx_header(self.dtype, len(self.lengths), len(self._bounds))
        pointers = _pointers(self.lengths.blocks(), np.dtype(self.dtype).itemsize)
        for blocks in (self.lengths.blocks(), pointers, self._bounds.blocks(), self.modes.blocks()):
            yield from (block.tobytes() for block in blocks)

    def close(self) -> None:
        """Free the memory and the files."""
        for column in (self.lengths, self.modes, self._bounds):
            column.close()


def _pointers(lengths: Iterator[NDArray[np.int32]], item_bytes: int) -> Iterator[NDArray[Any]]:
    """Yield blocks of sequence pointers, from blocks of sequence lengths."""
    start = 0
    for block in lengths:
        ends = np.cumsum(block, dtype=np.int64) + start
        start = int(ends[-1])
        yield ((ends - block) * item_bytes).astype("<i8", copy=False)
