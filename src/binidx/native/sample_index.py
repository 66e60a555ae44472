"""Sample index: the start of each sample (`native/sample_index.c`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import count, items, pointer

WINDOW = 2**18
"""Documents of one window of a sample index that threads build: their lengths, 1 MiB, stay in a core's cache."""


class SampleArrays:
    """C struct `binidx_samples` over NumPy arrays, which this object keeps alive; arguments as in `fill_sample_index`.

    Errors name a document as `subject[number]`, where `first` is the number of document_index[0].
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
        """Return the result `code` of a C function; raise an error if it is negative.

        Args:
            found: position in document_index, or number of tokens, that the function returned with an error.
        """
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
        """Return the error for documents that hold `found` tokens instead of `num_tokens`."""
        counted = f"{self.c.num_samples} samples over {self.c.num_tokens}"
        return IndexBuildError(f"sample index: the documents hold {found} tokens, needs those counted: {counted}")


def fill_sample_index(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_tokens: int,
    rows: NDArray[Any],
    *,
    add_extra_token: bool,
    threads: int = 1,
) -> None:
    """Fill `rows` with the start of each sample, see `index.document_sample`.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned.
        document_index: sequences in reading order, shape (num_documents,).
        sequence_length: tokens from one start to the next.
        num_tokens: tokens of all documents in document_index.
        rows: int32 or int64, shape (num_samples + 1, 2).
        add_extra_token: a sample holds the first token of the next one too.
        threads: windows of documents that are processed at once; each takes 1 MiB.

    Raises:
        IndexBuildError: a document number or length is out of range, or the lengths do not add up to num_tokens.
        TypeError: rows have another shape or dtype.
    """
    if rows.ndim != 2 or rows.shape[1] != 2 or len(rows) < 1:
        raise TypeError(f"rows: shape {rows.shape}, needs (num_samples + 1, 2)")
    if rows.dtype not in (np.int32, np.int64):
        raise TypeError(f"rows: {rows.dtype}, needs int32 or int64")
    samples = SampleArrays(
        sequence_lengths,
        document_index,
        sequence_length,
        num_tokens,
        len(rows) - 1,
        add_extra_token=add_extra_token,
    )
    if count("threads", threads, 1) > 1 and len(document_index) > WINDOW:
        _fill_in_parts(samples, rows, threads)
        return
    build = lib.binidx_sample_index_4 if rows.itemsize == 4 else lib.binidx_sample_index_8
    found = ffi.new("int64_t *")
    samples.check(build(samples.c, items(rows, rows.dtype, 2, write=True), found), found[0])


def token_sum(sequence_lengths: NDArray[np.int32], documents: NDArray[np.int32], first: int = 0) -> int:
    """Return `int(np.sum(sequence_lengths[documents], dtype=np.int64))` without a copy.

    It raises as `fill_sample_index`; `first` is the number of documents[0] in error messages.
    """
    samples = SampleArrays(sequence_lengths, documents, subject="documents", first=first)
    return _gather(samples, 0, len(documents), ffi.NULL)


def _fill_in_parts(samples: SampleArrays, rows: NDArray[Any], threads: int) -> None:
    """Fill `rows` in threads: for each window of documents, gather lengths, wait for the tokens before it, write rows.

    Windows start in order, so a running thread computes each awaited sum: no deadlock, and the first error in the order
    of the documents is raised.
    """
    put = lib.binidx_sample_rows_4 if rows.itemsize == 4 else lib.binidx_sample_rows_8
    out, own = items(rows, rows.dtype, 2, write=True), threading.local()

    def start() -> None:
        own.scratch = np.empty(WINDOW, np.int32)

    def work(first: int, before: Future[int], after: Future[int]) -> None:
        size, lengths = min(WINDOW, len(samples.documents) - first), items(own.scratch, np.int32, write=True)
        tokens = _pass_on(after, before, lambda: _gather(samples, first, size, lengths))
        put(samples.c, lengths, first, size, before.result(), tokens, out)

    ends: list[Future[int]] = [Future()]
    ends[0].set_result(0)
    with ThreadPoolExecutor(threads, initializer=start) as pool:
        for first in range(0, max(len(samples.documents), 1), WINDOW):
            ends.append(Future())
            pool.submit(work, first, *ends[-2:])
    put_end = lib.binidx_sample_end_4 if rows.itemsize == 4 else lib.binidx_sample_end_8
    if (tokens := ends[-1].result()) != samples.c.num_tokens or put_end(samples.c, out) < 0:
        raise samples.wrong_tokens(tokens)


def _pass_on(after: Future[int], before: Future[int], gather: Callable[[], int]) -> int:
    """Return the tokens of a window, which `gather` counts; set `after` to `before` plus these, or to the error."""
    try:
        tokens = gather()
        total = before.result() + tokens
    except BaseException as error:
        after.set_exception(before.exception() or error)
        raise
    after.set_result(total)
    return tokens


def _gather(samples: SampleArrays, first: int, size: int, lengths: Any) -> int:
    found = ffi.new("int64_t *")
    return samples.check(lib.binidx_gather_lengths(samples.c, first, size, lengths, found), found[0])
