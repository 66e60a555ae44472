"""Sample index: the start of each sample (`native/sample_index.c`), also while its documents are shuffled
(`native/document_sample.c`).
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import count, items, pointer
from binidx.native.permutations import RandomState

WINDOW = 2**18
"""Documents of one window of a sample index that threads build; their lengths take 1 MiB."""


class SampleArrays:
    """C's `binidx_samples` over arrays that it keeps alive.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned.
        document_index: sequences in reading order, shape (num_documents,).
        sequence_length: tokens from one start to the next.
        num_tokens: of all documents in document_index.
        num_samples: samples of the index.
        add_extra_token: a sample holds the first token of the next one too.
        subject, first: name of document_index in errors, and number of its first document.
    """

    def __init__(
        self,
        sequence_lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sequence_length: int = 1,
        num_tokens: int = 0,
        num_samples: int = 0,
        *,
        add_extra_token: bool = False,
        subject: str = "document_index",
        first: int = 0,
    ) -> None:
        if document_index.ndim != 1:
            raise TypeError(f"{subject}: {document_index.ndim}-D, needs 1-D")
        self.lengths, self.documents, self.subject, self.first = sequence_lengths, document_index, subject, first
        self._borrowed = pointer(sequence_lengths, np.int32), items(document_index, np.int32)
        self.c = samples = ffi.new("binidx_samples *")
        samples.sequence_lengths, samples.document_index = self._borrowed
        samples.num_sequences, samples.num_documents = len(sequence_lengths), len(document_index)
        samples.sequence_length, samples.extra = count("sequence_length", sequence_length, 1), int(add_extra_token)
        samples.num_tokens, samples.num_samples = count("num_tokens", num_tokens), count("num_samples", num_samples)

    def check(self, code: int, found: int) -> int:
        """Return `code`, or raise the error that a negative one stands for."""
        if code >= 0:
            return code
        if code == lib.BINIDX_BAD_TOKENS:
            raise self.wrong_tokens(found)
        document = self.documents[found]
        if code == lib.BINIDX_BAD_DOCUMENT:
            subject = f"{self.subject}[{self.first + found}]"
            raise IndexBuildError(f"{subject}: {document}, needs 0 <= sequence < {len(self.lengths)}")
        assert code == lib.BINIDX_BAD_LENGTH
        raise IndexBuildError(f"sequence_lengths[{document}]: {self.lengths[document]}, needs 0 or more tokens")

    def wrong_tokens(self, found: int) -> IndexBuildError:
        """Return the error that the documents hold another number of tokens than was counted."""
        counted = f"{self.c.num_samples} samples over {self.c.num_tokens}"
        return IndexBuildError(f"sample index: the documents hold {found} tokens, needs those counted: {counted}")


def check_rows(rows: NDArray[Any], num_samples: int) -> None:
    """Raise TypeError or ValueError unless `rows` has num_samples + 1 pairs of int32 or int64."""
    if rows.ndim != 2 or rows.shape[1] != 2 or len(rows) < 1:
        raise TypeError(f"rows: shape {rows.shape}, needs (num_samples + 1, 2)")
    if rows.dtype not in (np.int32, np.int64):
        raise TypeError(f"rows: {rows.dtype}, needs int32 or int64")
    if len(rows) != num_samples + 1:
        raise ValueError(f"rows: {len(rows)}, needs {num_samples + 1}")


def token_sum(sequence_lengths: NDArray[np.int32], documents: NDArray[np.int32], first: int = 0) -> int:
    """Return `int(np.sum(sequence_lengths[documents], dtype=np.int64))` without a copy; raises as `fill_sample_rows`.

    `first` is the number of documents[0] in error messages.
    """
    samples = SampleArrays(sequence_lengths, documents, subject="documents", first=first)
    return _gather(samples, 0, len(documents), ffi.NULL)


def fill_sample_rows(samples: SampleArrays, rows: NDArray[Any], threads: int = 1) -> None:
    """Fill `rows` with the start of each sample, see `index.document_sample`.

    Args:
        rows: int32 or int64, shape (num_samples + 1, 2).
        threads: windows of documents whose lengths are gathered at once; each takes 2 MiB.

    Raises:
        IndexBuildError: a document number or length is out of range, or the lengths have another sum.
    """
    check_rows(rows, samples.c.num_samples)
    if count("threads", threads, 1) > 1 and len(samples.documents) > WINDOW:
        _fill_in_parts(samples, rows, threads)
        return
    build = lib.binidx_sample_index_4 if rows.itemsize == 4 else lib.binidx_sample_index_8
    found = ffi.new("int64_t *")
    samples.check(build(samples.c, items(rows, rows.dtype, 2, write=True), found), found[0])


def _fill_in_parts(samples: SampleArrays, rows: NDArray[Any], threads: int) -> None:
    """Gather the lengths of windows in threads; write their rows in order, so that the first error is raised."""
    put = lib.binidx_sample_rows_4 if rows.itemsize == 4 else lib.binidx_sample_rows_8
    out, token, firsts = items(rows, rows.dtype, 2, write=True), 0, range(0, len(samples.documents), WINDOW)

    def gather(first: int) -> tuple[NDArray[np.int32], int]:
        lengths = np.empty(min(WINDOW, len(samples.documents) - first), np.int32)
        return lengths, _gather(samples, first, len(lengths), items(lengths, np.int32, write=True))

    with ThreadPoolExecutor(threads) as pool:
        pending = deque(pool.submit(gather, first) for first in firsts[: 2 * threads])
        for number, first in enumerate(firsts):
            lengths, tokens = pending.popleft().result()
            pending.extend(pool.submit(gather, later) for later in firsts[number + 2 * threads :][:1])
            put(samples.c, items(lengths, np.int32), first, len(lengths), token, tokens, out)
            token += tokens
    put_end(samples, rows, token)


def _gather(samples: SampleArrays, first: int, size: int, lengths: Any) -> int:
    found = ffi.new("int64_t *")
    return samples.check(lib.binidx_gather_lengths(samples.c, first, size, lengths, found), found[0])


def put_end(samples: SampleArrays, rows: NDArray[Any], tokens: int) -> None:
    """Write the row of an incomplete last sample, after all others; `tokens` are those of the documents."""
    check_rows(rows, samples.c.num_samples)
    put = lib.binidx_sample_end_4 if rows.itemsize == 4 else lib.binidx_sample_end_8
    if tokens != samples.c.num_tokens or put(samples.c, items(rows, rows.dtype, 2, write=True)) < 0:
        raise samples.wrong_tokens(tokens)


MOST_RECORDS = 2**32
"""Largest number of records: the targets of their shuffle are drawn as 32 bits."""


def fill_records(samples: SampleArrays, records: NDArray[np.int64]) -> int:
    """Fill records of 8 bytes with the documents of `samples` and their lengths; return their tokens.

    Raises:
        IndexBuildError: a document number or length is out of range.
    """
    if len(records) != len(samples.documents):
        raise ValueError(f"{len(samples.documents)} documents, {len(records)} records")
    found = ffi.new("int64_t *")
    return samples.check(lib.binidx_fill_records(samples.c, _records(records), found), found[0])


def shuffle_records(
    samples: SampleArrays,
    rng: RandomState,
    records: NDArray[np.int64],
    first: int,
    token: int,
    num_tokens: int,
    rows: NDArray[Any],
) -> None:
    """Shuffle records; write their documents into the index of `samples` from `first` on, and the rows that start in
    them.

    Args:
        samples: its document_index is written to; all other documents and rows stay.
        rng: draws one shuffle, that of `rng.shuffle(records)`.
        records: shape (count,), at most MOST_RECORDS; overwritten.
        first: position of the first in the document index.
        token: tokens of all documents before it.
        num_tokens: tokens of the records.
        rows: int32 or int64, shape (num_samples + 1, 2).
    """
    check_rows(rows, samples.c.num_samples)
    documents = samples.documents[count("first", first) :][: len(records)]
    if len(documents) != len(records) or len(records) > MOST_RECORDS:
        raise ValueError(f"{len(documents)} documents from {first} on, {len(records)} records")
    shuffle = lib.binidx_shuffle_records_4 if rows.itemsize == 4 else lib.binidx_shuffle_records_8
    shuffle(
        samples.c,
        rng._rng,
        _records(records),
        first,
        len(records),
        count("token", token),
        count("num_tokens", num_tokens),
        items(documents, np.int32, write=True),
        items(rows, rows.dtype, 2, write=True),
    )


def _records(records: NDArray[np.int64]) -> Any:
    items(records, np.int64)  # refuses what is not aligned and contiguous
    return ffi.from_buffer("binidx_record[]", records, require_writable=True)
