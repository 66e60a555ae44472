"""An `.idx` read from its first sequence to its last, in blocks: nothing of it stays in memory.

    lengths()     lengths and pointers, checked against each other ─► blocks of lengths
    bounds()      document bounds, checked                         ─► blocks of bounds
    documents()   bounds with the lengths and modes of their sequences, for who looks at single documents

Memory: some MB, whatever the index holds; of one document that has more than `BLOCK_VALUES` sequences, 5 bytes a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.errors import FormatError
from binidx.format.idx import HEADER, parse_idx_counts
from binidx.native import token_files
from binidx.storage.adapters import InMemory
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import read_whole
from binidx.storage.ranges import cut

BLOCK_VALUES = 1 << 18


"""Values looked at together: 3 MiB of lengths and pointers."""


WHOLE_BYTES = 64 << 10


"""Bytes of an `.idx` that is read whole: 3,000 documents."""


@dataclass(frozen=True, eq=False)
class DocumentBlock:
    """Neighbouring documents.

    Attributes:
        first: number of the first one.
        bounds: first sequence of each, then the end, shape (num_documents + 1,) int64; the first may be any number.
        lengths: tokens of each of their sequences, shape (num_sequences,) int32.
        modes: of each of them, int8; None where there are none.
        start: first token of the first one in the `.bin`.
    """

    first: int
    bounds: NDArray[np.int64]
    lengths: NDArray[np.int32]
    modes: NDArray[np.int8] | None
    start: int

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def token_bounds(self) -> NDArray[np.int64]:
        """First token of each document in the `.bin`, then the end, shape (num_documents + 1,)."""
        ends = np.zeros(len(self.lengths) + 1, np.int64)
        np.cumsum(self.lengths, out=ends[1:])
        found: NDArray[np.int64] = ends[self.bounds - self.bounds[0]] + self.start
        return found


class IndexStream:
    """An index, block by block.

    Args:
        reader: of the bytes of an `.idx`. A small one is read at once: a thousand of them would else be thousands of
            round trips.
        uri: what errors call it.

    Attributes:
        dtype: NumPy type of a token.
        num_sequences, num_documents: counts, of the header.
        multimodal: whether modes follow; False where there is no sequence.
        num_tokens: known once `lengths` came to its end.

    Raises:
        FormatError: its header breaks a rule; while it is read: `idx` names the rules.
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
    def size(self) -> int:
        """Bytes of the `.idx`."""
        return self.reader.size

    def lengths(self) -> Iterator[NDArray[np.int32]]:
        """Tokens of each sequence."""
        self.num_tokens = 0
        places = HEADER.size, HEADER.size + 4 * self.num_sequences
        for first, stop in cut((0, self.num_sequences), BLOCK_VALUES):
            lengths, pointers = self._read(("<i4", places[0]), ("<i8", places[1]), first=first, stop=stop)
            self.num_tokens += self._check_lengths(first, lengths, pointers)
            yield lengths

    def bounds(self) -> Iterator[NDArray[np.int64]]:
        """First sequence of each document, then their number: one more than documents."""
        last, place = 0, HEADER.size + 12 * self.num_sequences
        for first, stop in cut((0, self.num_documents + 1), BLOCK_VALUES):
            (block,) = self._read(("<i8", place), first=first, stop=stop)
            self._check_bounds(first, last, block)
            last = int(block[-1])
            yield block
        if last != self.num_sequences:
            raise FormatError(
                f"{self.uri}: last document bound is {last}, needed {self.num_sequences} "
                "(the writer forgot end_document?)"
            )

    def modes(self) -> Iterator[NDArray[np.int8]]:
        """The mode of each sequence; nothing where there are none."""
        for first, stop in cut((0, self.num_sequences if self.multimodal else 0), BLOCK_VALUES):
            yield self._modes(first, stop)

    def check(self) -> int:
        """Read it all, and check it; its tokens.

        Raises:
            FormatError: a rule is broken.
        """
        for _ in self.bounds():
            pass
        for _ in self.lengths():
            pass
        return self.num_tokens

    def documents(self, count: int | None = None) -> Iterator[DocumentBlock]:
        """The first `count` documents, or all. `check` first: here no pointer is read."""
        stop_at = self.num_documents if count is None else min(count, self.num_documents)
        token, place = 0, HEADER.size + 12 * self.num_sequences
        for first, stop in cut((0, stop_at), BLOCK_VALUES):
            (bounds,) = self._read(("<i8", place), first=first, stop=stop + 1)
            for low, high in _few_sequences(bounds):
                piece = bounds[low : high + 1]
                at, end = int(piece[0]), int(piece[-1])
                (lengths,) = self._read(("<i4", HEADER.size), first=at, stop=end)
                modes = self._modes(at, end) if self.multimodal else None
                yield DocumentBlock(first + low, piece, lengths, modes, token)
                token += int(lengths.sum(dtype=np.int64))

    def _modes(self, first: int, stop: int) -> NDArray[np.int8]:
        place = HEADER.size + 12 * self.num_sequences + 8 * (self.num_documents + 1)
        return self._read((np.int8, place), first=first, stop=stop)[0]

    def _read(self, *columns: tuple[DTypeLike, int], first: int, stop: int) -> list[NDArray[Any]]:
        """Values [first, stop) of columns, each a type and the byte where it starts: one vectored read."""
        sizes = [np.dtype(kind).itemsize for kind, _ in columns]
        ranges = [(at + size * first, at + size * stop) for (_, at), size in zip(columns, sizes, strict=True)]
        answers = self.reader.read(ranges)
        return [np.frombuffer(data, kind) for data, (kind, _) in zip(answers, columns, strict=True)]

    def _check_lengths(self, first: int, lengths: NDArray[np.int32], pointers: NDArray[np.int64]) -> int:
        start = self.num_tokens * self.item_bytes
        right, num_tokens = token_files.count_valid_sequences(lengths, pointers - start, self.item_bytes)
        if right == len(lengths):
            return num_tokens
        if lengths[right] < 0:
            raise FormatError(f"{self.uri}: sequence {first + right} has length {lengths[right]}, needed 0 or more")
        needed = start + num_tokens * self.item_bytes
        raise FormatError(f"{self.uri}: sequence {first + right} starts at byte {pointers[right]}, needed {needed}")

    def _check_bounds(self, first: int, lowest: int, block: NDArray[np.int64]) -> None:
        if first == 0 and block[0] != 0:
            raise FormatError(f"{self.uri}: first document bound is {block[0]}, needed 0")
        right = token_files.count_valid_documents(block, self.num_sequences) if block[0] >= lowest else 0
        if right < len(block):
            before = block[right - 1] if right else lowest
            raise FormatError(
                f"{self.uri}: document bound {first + right} is {block[right]}, needed {before} to {self.num_sequences}"
            )


def _few_sequences(bounds: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Runs of documents that have at most `BLOCK_VALUES` sequences together, or are one document."""
    low, last = 0, len(bounds) - 1
    while low < last:
        high = int(np.searchsorted(bounds, bounds[low] + BLOCK_VALUES, "right")) - 1
        high = max(low + 1, min(high, last))
        yield low, high
        low = high
