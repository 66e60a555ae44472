"""Where samples start: `native/sample_index.c`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import count, items, pointer


def sample_index(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_tokens: int,
    rows: NDArray[Any],
    *,
    add_extra_token: bool,
) -> None:
    """Fill `rows`: where each sample starts, see `index.sample.build_sample_index`.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned.
        document_index: sequences in reading order, shape (num_documents,).
        sequence_length: tokens from one start to the next.
        num_tokens: of all documents in document_index.
        rows: int32 or int64, shape (num_samples + 1, 2).
        add_extra_token: a sample holds the first token of the next one too.

    Raises:
        IndexBuildError: a document number, a length, or the sum of the lengths is not what it must be.
    """
    if rows.ndim != 2 or rows.shape[1] != 2 or len(rows) < 1:
        raise TypeError(f"rows: shape {rows.shape}, needs (num_samples + 1, 2)")
    if document_index.ndim != 1 or rows.dtype not in (np.int32, np.int64):
        raise TypeError(f"document_index: {document_index.ndim}-D, rows: {rows.dtype}; need 1-D, int32 or int64")
    lengths, documents = pointer(sequence_lengths, np.int32), items(document_index, np.int32)
    samples = ffi.new(
        "binidx_samples *"
    )  # borrows both pointers: `lengths` and `documents` stay alive until the return
    samples.sequence_lengths, samples.num_sequences = lengths, len(sequence_lengths)
    samples.document_index, samples.num_documents = documents, len(document_index)
    samples.sequence_length, samples.extra = count("sequence_length", sequence_length, 1), int(add_extra_token)
    samples.num_tokens, samples.num_samples = count("num_tokens", num_tokens), len(rows) - 1
    build = lib.binidx_sample_index_4 if rows.itemsize == 4 else lib.binidx_sample_index_8
    found = ffi.new("int64_t *")
    code = build(samples, items(rows, rows.dtype, write=True), found)
    if code < 0:
        counted = f"{len(rows) - 1} samples over {num_tokens}"
        raise _sample_error(code, found[0], sequence_lengths, document_index, counted)


def _sample_error(
    code: int, found: int, lengths: NDArray[np.int32], documents: NDArray[np.int32], counted: str
) -> IndexBuildError:
    """What a negative code of the sample index means."""
    if code == lib.BINIDX_BAD_TOKENS:
        return IndexBuildError(f"sample index: the documents hold {found} tokens, needs those counted: {counted}")
    document = documents[found]
    if code == lib.BINIDX_BAD_DOCUMENT:
        return IndexBuildError(f"document_index[{found}]: {document}, needs 0 <= sequence < {len(lengths)}")
    assert code == lib.BINIDX_BAD_LENGTH
    return IndexBuildError(f"sequence_lengths[{document}]: {lengths[document]}, needs 0 or more tokens")
