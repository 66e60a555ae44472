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


class SampleArrays:
    """Documents whose tokens are cut into samples: the C struct `binidx_samples`, and the arrays that it borrows.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned.
        document_index: sequences in reading order, shape (num_documents,).
        sequence_length: tokens from one start of a sample to the next.
        num_tokens: tokens of all documents in document_index.
        add_extra_token: a sample holds the first token of the next one too.
        subject, first: errors name a document as `subject[number]`, where `first` is the number of document_index[0].
    """

    def __init__(
        self,
        sequence_lengths: NDArray[np.int32],
        document_index: NDArray[np.int32],
        sequence_length: int = 1,
        num_tokens: int = 0,
        *,
        add_extra_token: bool = False,
        subject: str = "document_index",
        first: int = 0,
    ) -> None:
        if document_index.ndim != 1:
            raise TypeError(f"{subject}: {document_index.ndim}-D, needs 1-D")
        self._lengths, self._documents, self._subject, self._first = sequence_lengths, document_index, subject, first
        self._borrowed = pointer(sequence_lengths, np.int32), items(document_index, np.int32)
        self._c = samples = ffi.new("binidx_samples *")
        samples.sequence_lengths, samples.document_index = self._borrowed
        samples.num_sequences, samples.num_documents = len(sequence_lengths), len(document_index)
        samples.sequence_length, samples.extra = count("sequence_length", sequence_length, 1), int(add_extra_token)
        samples.num_tokens = count("num_tokens", num_tokens)

    def count_tokens(self) -> int:
        """Return `int(np.sum(sequence_lengths[document_index], dtype=np.int64))` without a copy.

        Raises:
            IndexBuildError: a document number or length is out of range.
        """
        return self._gather(0, len(self._documents), ffi.NULL)

    def fill_starts(self, rows: NDArray[Any], threads: int = 1, window: int = 2**18) -> None:
        """Fill `rows` with the start of each sample, see `index.document_sample`.

        Args:
            rows: int32 or int64, shape (num_samples + 1, 2).
            threads: windows of documents that are processed at once; each takes 1 MiB.
            window: documents of a window: their lengths, 1 MiB, stay in a core's cache.

        Raises:
            IndexBuildError: a document number or length is out of range, or the lengths do not add up to num_tokens.
            TypeError: rows have another shape or dtype.
        """
        if rows.ndim != 2 or rows.shape[1] != 2 or len(rows) < 1:
            raise TypeError(f"rows: shape {rows.shape}, needs (num_samples + 1, 2)")
        if rows.dtype not in (np.int32, np.int64):
            raise TypeError(f"rows: {rows.dtype}, needs int32 or int64")
        self._c.num_samples = count("num_samples", len(rows) - 1)
        if count("threads", threads, 1) > 1 and len(self._documents) > window:
            self._fill_in_parts(rows, threads, window)
            return
        build = lib.binidx_sample_index_4 if rows.itemsize == 4 else lib.binidx_sample_index_8
        detail = ffi.new("int64_t *")
        self._check(build(self._c, items(rows, rows.dtype, 2, write=True), detail), detail[0])

    def _fill_in_parts(self, rows: NDArray[Any], threads: int, window: int) -> None:
        """Fill `rows` in threads: for each window, gather its lengths, wait for the tokens before it, write its rows.

        Windows start in order, so a running thread computes each awaited sum: no deadlock, and the first error in the
        order of the documents is raised.
        """
        put = lib.binidx_sample_rows_4 if rows.itemsize == 4 else lib.binidx_sample_rows_8
        out, own = items(rows, rows.dtype, 2, write=True), threading.local()

        def start() -> None:
            own.scratch = np.empty(window, np.int32)

        def work(first: int, before: Future[int], after: Future[int]) -> None:
            size, lengths = min(window, len(self._documents) - first), items(own.scratch, np.int32, write=True)
            tokens = _pass_on(after, before, lambda: self._gather(first, size, lengths))
            put(self._c, lengths, first, size, before.result(), tokens, out)

        ends: list[Future[int]] = [Future()]
        ends[0].set_result(0)
        with ThreadPoolExecutor(threads, initializer=start) as pool:
            for first in range(0, max(len(self._documents), 1), window):
                ends.append(Future())
                pool.submit(work, first, *ends[-2:])
        put_end = lib.binidx_sample_end_4 if rows.itemsize == 4 else lib.binidx_sample_end_8
        if (tokens := ends[-1].result()) != self._c.num_tokens or put_end(self._c, out) < 0:
            raise self._wrong_tokens(tokens)

    def _gather(self, first: int, size: int, lengths: Any) -> int:
        """Write the lengths of `size` documents from number `first` on to the C array `lengths`; return their sum."""
        detail = ffi.new("int64_t *")
        return self._check(lib.binidx_gather_lengths(self._c, first, size, lengths, detail), detail[0])

    def _check(self, code: int, detail: int) -> int:
        """Return the result `code` of a C function; raise an error if it is negative.

        Args:
            detail: position in document_index, or number of tokens, that the function returned with an error.
        """
        if code >= 0:
            return code
        if code == lib.BINIDX_BAD_TOKENS:
            raise self._wrong_tokens(detail)
        document = self._documents[detail]
        if code == lib.BINIDX_BAD_DOCUMENT:
            subject = f"{self._subject}[{self._first + detail}]"
            raise IndexBuildError(f"{subject}: {document}, needs 0 <= sequence < {len(self._lengths)}")
        assert code == lib.BINIDX_BAD_LENGTH
        raise IndexBuildError(f"sequence_lengths[{document}]: {self._lengths[document]}, needs 0 or more tokens")

    def _wrong_tokens(self, num_tokens: int) -> IndexBuildError:
        """Return the error for documents that hold `num_tokens` tokens instead of the given number."""
        counted = f"{self._c.num_samples} samples over {self._c.num_tokens}"
        return IndexBuildError(f"sample index: the documents hold {num_tokens} tokens, needs those counted: {counted}")


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
