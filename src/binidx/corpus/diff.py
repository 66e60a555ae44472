"""Compare two datasets by their documents: added, removed and repeated ones, and whether the order differs.

    A, B ──► xxh3_128 of the tokens of each document, as int64 ──► 16 buckets ──► equal hashes matched in order

Two documents are equal if their tokens are: sequences, dtype and modes are not compared. The k-th copy of a document in
A is matched with the k-th copy in B; a document without a match was removed or added.

Memory: 16 bytes for each document of B, 24 of A, and about 8 of both while a bucket is sorted.
Time: about 1 us for a document and 1 ns for a token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.corpus.whole_dataset import JsonResult, Options, Prefix, WholeDataset
from binidx.errors import ConfigError
from binidx.format.idx import little_endian
from binidx.storage.location import Location
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

BUCKETS = 16
"""Buckets by the first four bits of a hash; one bucket is sorted at a time."""


@dataclass(frozen=True)
class Difference(JsonResult):
    """Differences between the documents of A and B; pairs of counts are those of A and of B.

    Attributes:
        num_common: matched documents.
        num_removed, num_added: documents without a match in A and in B; `removed`, `added`: the first few numbers.
        num_duplicates: copies of an earlier document.
        num_order_breaks: matched documents whose match in B comes before that of the previous matched document of A;
            0 if the order is equal.
        order_breaks: the numbers in A of the first few of them.
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
        """True if B has the same documents in the same order."""
        return not (self.num_removed or self.num_added or self.num_order_breaks)

    def to_json(self) -> dict[str, Any]:
        return {"same": self.same, **super().to_json()}


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
        ConfigError: the tokens are not integers.
        FormatError: a dataset is not valid.
        ObjectChangedError: a dataset was replaced meanwhile.
    """
    began, watch = time.monotonic(), watch or SilentWatcher()
    datasets = WholeDataset(Location.of(left, left_options)), WholeDataset(Location.of(right, right_options))
    hashes = [hash_documents(dataset, watch) for dataset in datasets]
    numbers, distinct = match_documents(*hashes)
    matched, added = numbers >= 0, np.ones(len(hashes[1]), bool)
    added[numbers[matched]] = False
    removed, new, breaks = np.flatnonzero(~matched), np.flatnonzero(added), find_order_breaks(numbers)
    prefixes = datasets[0].prefix, datasets[1].prefix
    counts = len(hashes[0]), len(hashes[1])
    tokens = datasets[0].index.num_tokens, datasets[1].index.num_tokens
    copies = counts[0] - distinct[0], counts[1] - distinct[1]
    sizes = counts[0] - len(removed), len(removed), len(new), copies, len(breaks)
    named = removed[:few].tolist(), new[:few].tolist(), breaks[:few].tolist()
    return Difference(prefixes, counts, tokens, *sizes, *named, time.monotonic() - began)


def hash_documents(dataset: WholeDataset, watch: ProgressWatcher) -> NDArray[np.uint64]:
    """Return the 128-bit xxh3 hash of each document, of its tokens as little-endian int64; shape (num_documents, 2).

    Args:
        dataset: its index and size are checked, too.
        watch: is advanced by the bytes that are read.
    """
    dtype, plain = little_endian(dataset.index.dtype), dataset.source.open_plain()
    if dtype.kind == "f":
        raise ConfigError(f"{dataset.prefix}: tokens are {dtype.name}, documents are compared as integers")
    dataset.check_index(watch)
    hashes, first = np.empty((dataset.index.num_documents, 2), np.uint64), 0
    watch.begin(f"hash {dataset.prefix}", dataset.num_bytes, 0)

    def widen(data: memoryview) -> memoryview:
        return np.frombuffer(data, dtype).astype("<i8").view(np.uint8).data

    for digests, num_bytes in dataset.hash_documents(plain, xxhash.xxh3_128, widen):
        hashes[first : first + len(digests)] = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
        first += len(digests)
        watch.advance(num_bytes)
    dataset.source.check_unchanged()
    return hashes


def match_documents(left: NDArray[np.uint64], right: NDArray[np.uint64]) -> tuple[NDArray[np.int64], tuple[int, int]]:
    """Match the documents of A with those of B.

    Args:
        left, right: hashes of A and B, shape (num_documents, 2) each.

    Returns:
        For each document of A the number of its match in B, -1 without a match, shape (num_documents of A,); and the
        number of distinct documents in A, and in B.
    """
    numbers, distinct = np.full(len(left), -1, np.int64), [0, 0]
    for bucket in range(BUCKETS):
        in_left, in_right = (np.flatnonzero(hashes[:, 0] >> np.uint64(60) == bucket) for hashes in (left, right))
        hashes = np.concatenate([left[in_left], right[in_right]])
        if not len(hashes):
            continue
        # Stable: for each hash the copies of A come before those of B, both in their order.
        order = np.lexsort((hashes[:, 1], hashes[:, 0]))
        hashes, documents, is_a = hashes[order], np.concatenate([in_left, in_right])[order], order < len(in_left)
        new = np.concatenate([[True], (hashes[1:] != hashes[:-1]).any(1)])
        group, start = np.cumsum(new) - 1, np.flatnonzero(new)
        in_a, in_b = (np.bincount(group[side], minlength=len(start)) for side in (is_a, ~is_a))
        copy = np.arange(len(order)) - start[group]
        at = np.flatnonzero(is_a & (copy < in_b[group]))
        numbers[documents[at]] = documents[at + in_a[group[at]]]
        distinct = [distinct[0] + int(np.count_nonzero(in_a)), distinct[1] + int(np.count_nonzero(in_b))]
    return numbers, (distinct[0], distinct[1])


def find_order_breaks(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of the documents of A whose match in B comes before that of the previous matched document.

    Args:
        numbers: number in B of each document of A, -1 without a match.
    """
    matched = np.flatnonzero(numbers >= 0)
    breaks: NDArray[np.int64] = matched[1:][np.diff(numbers[matched]) < 0]
    return breaks
