"""From samples to spans, and from spans to bytes: `native/locate.c`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.errors import IndexBuildError
from binidx.native.arguments import items, pointer


def sample_spans(
    sample_index: NDArray[Any],
    document_index: NDArray[np.int32],
    sequence_lengths: NDArray[np.int32],
    rows: NDArray[np.int64],
    *,
    add_extra_token: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The spans of tokens that samples are made of.

    Args:
        sample_index: shape (num_samples + 1, 2), int32 or int64.
        document_index: shape (num_documents,).
        sequence_lengths: shape (num_sequences,); may be unaligned.
        rows: rows of sample_index, one a sample, shape (B,).

    Returns:
        Spans (sequence, first token, tokens), shape (n, 3); bounds, shape (B + 1,): sample b has spans bounds[b] on.

    Raises:
        IndexBuildError: the indices do not belong together.
    """
    lengths, documents = pointer(sequence_lengths, np.int32), items(document_index, np.int32)
    samples = items(sample_index, sample_index.dtype)
    orders = ffi.new("binidx_orders *")  # borrows the three pointers, which live until the return
    orders.sample_index, orders.num_samples, orders.wide = samples, len(sample_index) - 1, sample_index.itemsize == 8
    orders.document_index, orders.num_documents = documents, len(document_index)
    orders.sequence_lengths, orders.num_sequences = lengths, len(sequence_lengths)
    orders.extra = add_extra_token
    wanted, bounds = items(rows, np.int64), np.empty(len(rows) + 1, np.int64)
    num_spans = lib.binidx_count_spans(orders, wanted, len(rows), items(bounds, np.int64, write=True))
    spans = np.empty((max(num_spans, 0), 3), np.int64)
    if num_spans < 0 or lib.binidx_sample_spans(orders, wanted, len(rows), items(spans, np.int64, write=True)) < 0:
        raise IndexBuildError(f"rows {rows.tolist()}: lead outside sample_index, document_index or the sequences")
    return spans, bounds


def locate_spans(
    sequence_lengths: NDArray[np.int32],
    sequence_pointers: NDArray[np.int64],
    spans: NDArray[np.int64],
    item_bytes: int,
) -> tuple[NDArray[np.int64], int]:
    """Where spans lie in the `.bin`.

    Returns:
        Ranges (start, stop) in bytes, shape (n, 2); the first span that leaves its sequence, or n.
    """
    ranges = np.empty((len(spans), 2), np.int64)
    right = lib.binidx_locate_spans(
        pointer(sequence_lengths, np.int32),
        pointer(sequence_pointers, np.int64),
        len(sequence_lengths),
        item_bytes,
        items(spans, np.int64),
        len(spans),
        items(ranges, np.int64, write=True),
    )
    return ranges, int(right)
