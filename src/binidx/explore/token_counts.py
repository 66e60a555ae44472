"""Counts over a dataset: lengths, exact, the most frequent tokens of some places, equal documents of a part."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.ranges import cut

BLOCK = 1 << 20
"""Lengths counted at once."""

SHORT = 1 << 16
"""Longest sequence that is counted in an array of all lengths."""

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
PLACES, PLACE_TOKENS, MOST_TOKENS = 256, 4096, 30
"""Places of a dataset whose tokens are counted, tokens of each, and the most frequent ones."""

COMPARED_DOCUMENTS, COMPARED_TOKENS = 1 << 16, 1 << 23
"""Most documents that are compared with each other, and tokens of them."""


@dataclass(frozen=True)
class LengthCounts:
    """Numbers of sequences by their length.

    Attributes:
        lengths: lengths that occur, ascending, shape (n,).
        counts: sequences of each length, shape (n,).
    """

    lengths: NDArray[np.int64]
    counts: NDArray[np.int64]

    @property
    def percentiles(self) -> dict[str, int]:
        """Percentiles of the lengths (nearest rank) and their maximum, as `binidx inspect` prints them."""
        if not len(self.lengths):
            return {}
        total = np.cumsum(self.counts)
        places = np.searchsorted(total, np.array(PERCENTILES) / 100 * total[-1])
        values = [*self.lengths[places].tolist(), int(self.lengths[-1])]
        return dict(zip([*map(str, PERCENTILES), "max"], values, strict=True))

    @property
    def bars(self) -> list[tuple[int, int, int]]:
        """(shortest, longest, sequences) of each power of two, from the shortest to the longest sequence."""
        powers = [length.bit_length() for length in self.lengths.tolist()]
        sizes = np.bincount(powers, self.counts).astype(np.int64).tolist() if powers else []
        return [(1 << power >> 1, (1 << power) - 1, size) for power, size in enumerate(sizes) if power >= powers[0]]


@functools.lru_cache(maxsize=64)
def count_lengths(dataset: IndexedDataset) -> LengthCounts:
    """Count the sequences of each length. Costs 0.6 s for 10^8, and memory for a block of them."""
    counts, long = np.zeros(SHORT + 1, np.int64), [np.empty(0, np.int32)]
    for rows in cut((0, len(dataset)), BLOCK):
        part = np.asarray(dataset.index.sequence_lengths[slice(*rows)])
        own = np.bincount(part[part <= SHORT])
        counts[: len(own)] += own
        long.append(part[part > SHORT])
    more, numbers = np.unique(np.concatenate(long), return_counts=True)
    lengths = np.flatnonzero(counts)
    return LengthCounts(np.append(lengths, more), np.append(counts[lengths], numbers))


@dataclass(frozen=True)
class FrequentTokens:
    """Most frequent tokens in some places of a dataset.

    Attributes:
        most: (token, times), the most frequent first.
        num_tokens: number of tokens that were counted.
        is_whole: whether these are all tokens.
    """

    most: Sequence[tuple[int, int]]
    num_tokens: int
    is_whole: bool


@functools.lru_cache(maxsize=64)
def count_frequent_tokens(dataset: IndexedDataset) -> FrequentTokens:
    """Count tokens in evenly spaced sequences, up to a million tokens, by one vectored read; all of a small dataset."""
    index = dataset.index
    is_whole = index.num_tokens <= PLACES * PLACE_TOKENS and len(index) <= BLOCK
    places = np.arange(len(index)) if is_whole else np.unique(np.linspace(0, len(index) - 1, PLACES).astype(np.int64))
    lengths = np.asarray(index.sequence_lengths[places], np.int64)
    shown = lengths if is_whole else np.minimum(lengths, PLACE_TOKENS)
    spans = np.column_stack([places, np.zeros_like(places), shown])
    pieces = dataset.read(spans[shown > 0])
    tokens, times = np.unique(np.concatenate(pieces) if pieces else np.empty(0, np.int64), return_counts=True)
    most = np.argsort(-times, kind="stable")[:MOST_TOKENS]
    return FrequentTokens(
        list(zip(tokens[most].tolist(), times[most].tolist(), strict=True)), int(times.sum()), is_whole
    )


@dataclass(frozen=True)
class EqualDocuments:
    """Documents with the same tokens: their numbers, ascending, and the number of tokens of each."""

    documents: Sequence[int]
    num_tokens: int


@dataclass(frozen=True)
class Duplicates:
    """Equal documents among consecutive ones.

    Attributes:
        documents: numbers of the documents that were compared with each other.
        groups: documents of two and more with the same tokens, the largest groups first.
    """

    documents: range
    groups: Sequence[EqualDocuments]

    @property
    def num_copies(self) -> int:
        """Number of documents that have the tokens of an earlier one."""
        return sum(len(group.documents) - 1 for group in self.groups)


def token_bounds(dataset: IndexedDataset, documents: range) -> list[int]:
    """Return the bounds of consecutive documents in the tokens of all documents, n + 1."""
    sequences = dataset.index.document_indices[documents.start : documents.stop + 1]
    return [*map(int, dataset.index.tokens_before(sequences))]


def read_token_ranges(dataset: IndexedDataset, ranges: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the tokens in some ranges of those of all documents, by one vectored read."""
    size = dataset.index.dtype_size
    views = dataset.bin_reader.read([(start * size, stop * size) for start, stop in ranges])
    return [np.frombuffer(view, dataset.dtype).tolist() for view in views]


@functools.lru_cache(maxsize=4)
def find_duplicates(dataset: IndexedDataset, first: int) -> Duplicates:
    """Compare documents from `first` on by hashes of their tokens, as many as the limits allow, by one read.

    A document alone above the limit of tokens is compared with none; documents without tokens are left out.
    """
    index = dataset.index
    stop = min(first + COMPARED_DOCUMENTS, len(index.document_indices) - 1)
    bounds = np.array(token_bounds(dataset, range(first, stop)))
    ends = bounds - bounds[0]
    count = int(ends.searchsorted(COMPARED_TOKENS, "right")) - 1
    start, item = int(bounds[0]) * index.dtype_size, index.dtype_size
    (stored,) = dataset.bin_reader.read([(start, start + int(ends[count]) * item)])
    same = defaultdict[bytes, list[int]](list)
    for number in range(count):
        if text := stored[int(ends[number]) * item : int(ends[number + 1]) * item]:
            same[xxhash.xxh3_128_digest(text)].append(number)
    groups = sorted((each for each in same.values() if len(each) > 1), key=len, reverse=True)
    shown = [EqualDocuments([first + n for n in each], int(ends[each[0] + 1] - ends[each[0]])) for each in groups]
    return Duplicates(range(first, first + max(count, min(1, len(ends) - 1))), shown)
