"""Two datasets compared by their documents: what was added, removed, repeated, and whether the order is another.

    A, B ──► xxh3_128 of the tokens of each document, as int64 ──► 16 buckets ──► equal ones matched in order

A document is its tokens: how they are cut into sequences, their dtype and their modes are not looked at. The k-th copy
of a document in A is matched with the k-th in B; what finds no match was removed or added.

Memory: 16 bytes a document of B, 24 of A, and some 8 of both while a bucket is sorted.
Price: about 1 us a document and 1 ns a token.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.whole_dataset import Options, Prefix, WholeDataset
from binidx.errors import ConfigError
from binidx.format.idx import little_endian
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.ranges import cut
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

BUCKETS = 16


"""The first four bits of a hash; one bucket is sorted at a time."""


BATCH = 1 << 21


"""Tokens that are read and hashed together: 16 MiB of them as int64."""


@dataclass(frozen=True)
class Difference:
    """What differs, in documents.

    Attributes:
        num_documents: of A and of B.
        num_common: matched ones.
        num_removed, num_added: without a match, in A and in B; the first few are named by their numbers.
        num_duplicates: copies of an earlier document, in A and in B.
        num_order_breaks: matched documents that stand in B before the one that they follow in A; 0: the same order.
        order_breaks: the first few, by their numbers in A.
    """

    prefixes: tuple[str, str]
    num_documents: tuple[int, int]
    num_tokens: tuple[int, int]
    num_common: int
    num_removed: int
    num_added: int
    num_duplicates: tuple[int, int]
    num_order_breaks: int
    removed: list[int]
    added: list[int]
    order_breaks: list[int]
    seconds: float

    @property
    def same(self) -> bool:
        """The same documents in the same order."""
        return not (self.num_removed or self.num_added or self.num_order_breaks)

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return {"same": self.same, **asdict(self)}


def diff_datasets(
    left: Prefix,
    right: Prefix,
    *,
    few: int = 5,
    left_options: Options = None,
    right_options: Options = None,
    watch: ProgressWatcher | None = None,
) -> Difference:
    """Compare the documents of two datasets; all tokens of both are read.

    Args:
        few: how many documents of each kind to name.

    Raises:
        ConfigError: tokens that are no integers.
        FormatError, ObjectChangedError: one is no sound dataset, or changed meanwhile.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    opened = WholeDataset(left, left_options), WholeDataset(right, right_options)
    hashes = [hash_documents(each, watch) for each in opened]
    match = DocumentMatch(hashes[0], hashes[1], few)
    breaks = find_order_breaks(match.places)
    return Difference(
        (opened[0].prefix, opened[1].prefix),
        (len(hashes[0]), len(hashes[1])),
        (opened[0].index.num_tokens, opened[1].index.num_tokens),
        match.num_common,
        len(hashes[0]) - match.num_common,
        len(hashes[1]) - match.num_common,
        (len(hashes[0]) - match.num_distinct[0], len(hashes[1]) - match.num_distinct[1]),
        len(breaks),
        match.removed,
        match.added,
        breaks[:few].tolist(),
        time.monotonic() - began,
    )


def hash_documents(opened: WholeDataset, watch: ProgressWatcher) -> NDArray[np.uint64]:
    """xxh3_128 of the tokens of each document as little-endian int64, shape (num_documents, 2)."""
    index, plain = opened.index, opened.source.open_plain()
    if np.dtype(index.dtype).kind == "f":
        raise ConfigError(f"{opened.prefix}: tokens are {index.dtype.__name__}, documents are compared as integers")
    index.check()
    opened.check_size(plain.size)
    found = np.empty((index.num_documents, 2), np.uint64)
    watch.begin(f"hash {opened.prefix}", index.num_tokens * index.item_bytes, 0)
    for block in index.documents():
        bounds = block.token_bounds()
        for first, stop in _batches(bounds):
            digests = _hash(bounds[first : stop + 1], plain, little_endian(index.dtype))
            found[block.first + first : block.first + stop] = np.frombuffer(digests, ">u8").reshape(-1, 2)
            watch.advance(int(bounds[stop] - bounds[first]) * index.item_bytes)
    opened.check_unchanged()
    return found


def _batches(bounds: NDArray[np.int64]) -> Iterator[Range]:
    """Runs of documents that have at most `BATCH` tokens together, or are one document."""
    first, last = 0, len(bounds) - 1
    while first < last:
        stop = int(np.searchsorted(bounds, bounds[first] + BATCH, "right")) - 1
        stop = max(first + 1, min(stop, last))
        yield first, stop
        first = stop


def _hash(bounds: NDArray[np.int64], plain: RangeReader, dtype: np.dtype[Any]) -> bytes:
    """The digests of the documents between these tokens, 16 bytes each."""
    first, stop = int(bounds[0]), int(bounds[-1])
    if len(bounds) == 2:
        digest = xxhash.xxh3_128()
        for part in cut((first, stop), BATCH):
            digest.update(_as_int64(plain, part, dtype))
        return digest.digest()
    view, places = _as_int64(plain, (first, stop), dtype), ((bounds - first) * 8).tolist()
    return b"".join(xxhash.xxh3_128_digest(view[start:end]) for start, end in itertools.pairwise(places))


def _as_int64(plain: RangeReader, tokens: Range, dtype: np.dtype[Any]) -> memoryview:
    """The bytes of tokens [start, stop), each widened to 8."""
    (data,) = plain.read([(tokens[0] * dtype.itemsize, tokens[1] * dtype.itemsize)])
    return np.frombuffer(data, dtype).astype("<i8").view(np.uint8).data


class DocumentMatch:
    """Which document of B each one of A is.

    Args:
        left, right: their hashes, shape (num_documents, 2) each.
        few: how many without a match to keep.

    Attributes:
        places: number in B of each document of A, -1: it has none. Shape (num_documents of A,).
        num_common: how many have one.
        num_distinct: different documents in A and in B.
        removed, added: the first few without a match.
    """

    def __init__(self, left: NDArray[np.uint64], right: NDArray[np.uint64], few: int) -> None:
        self.places = np.full(len(left), -1, np.int64)
        self.removed: list[int] = []
        self.added: list[int] = []
        self.num_common, self.num_distinct = 0, [0, 0]
        for bucket in range(BUCKETS):
            ours, theirs = (np.flatnonzero(each[:, 0] >> np.uint64(60) == bucket) for each in (left, right))
            hashes = np.concatenate([left[ours], right[theirs]])
            self._match(ours, theirs, hashes, few)

    def _match(self, ours: NDArray[np.int64], theirs: NDArray[np.int64], hashes: NDArray[np.uint64], few: int) -> None:
        """Sort all, so that of each hash the copies of A stand before those of B, both in their order."""
        if not len(hashes):
            return
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable
        hashes, numbers = hashes[order], np.concatenate([ours, theirs])[order]
        is_a, place = order < len(ours), np.arange(len(order))
        new = np.concatenate([[True], (hashes[1:] != hashes[:-1]).any(1)])
        group, start = np.cumsum(new) - 1, np.flatnonzero(new)
        in_a, in_b = (np.bincount(group[side], minlength=len(start)) for side in (is_a, ~is_a))
        copy = place - start[group]
        matched_a = is_a & (copy < in_b[group])
        unmatched_b = ~is_a & (copy - in_a[group] >= in_a[group])
        at = np.flatnonzero(matched_a)
        self.places[numbers[at]] = numbers[at + in_a[group[at]]]
        self.num_common += len(at)
        for side, count in enumerate((in_a, in_b)):
            self.num_distinct[side] += int(np.count_nonzero(count))
        self.removed = _first(self.removed, numbers[is_a & ~matched_a], few)
        self.added = _first(self.added, numbers[unmatched_b], few)


def _first(known: list[int], more: NDArray[np.int64], few: int) -> list[int]:
    """The lowest few of both."""
    return sorted([*known, *np.sort(more)[:few].tolist()])[:few]


def find_order_breaks(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """The documents of A whose match stands before that of the matched document ahead of them."""
    matched = np.flatnonzero(places >= 0)
    found: NDArray[np.int64] = matched[1:][np.diff(places[matched]) < 0]
    return found
