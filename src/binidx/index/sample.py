"""Where samples start: cuts in the stream of shuffled documents, one every `sequence_length` tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx import native
from binidx.errors import IndexBuildError
from binidx.index.documents import Documents, check_documents, in_threads, window, windows

INT32_MAX = 2**31 - 1


def count_samples(num_tokens: int, sequence_length: int, *, add_extra_token: bool, drop_last_partial: bool) -> int:
    """How many samples a stream of tokens holds: floor, or ceil if the last may be short, of (tokens - extra) / length.

    Source: Megatron Core, build_sample_idx. There the ceil is taken of a float32, and so wrong from about 2**24 tokens
    on; counts stay integers here.
    """
    if sequence_length < 1:
        raise IndexBuildError(f"sequence_length: {sequence_length}, needs at least 1")
    tokens = max(num_tokens - add_extra_token, 0)
    return tokens // sequence_length if drop_last_partial else -(-tokens // sequence_length)


def count_tokens(sequence_lengths: NDArray[np.int32], documents: Documents, *, threads: int = 1) -> int:
    """Tokens of these documents: `int(np.sum(sequence_lengths[documents], dtype=np.int64))` without the copy.

    Raises:
        IndexBuildError: documents names a sequence there is not, or one with a length below 0.
    """

    def tokens(first: int) -> int:
        return native.token_sum(sequence_lengths, window(documents, first), first)

    check_documents(documents, signs=False)
    return sum(in_threads(tokens, windows(len(documents)), threads))


def row_dtype(num_documents: int) -> type[np.int32] | type[np.int64]:
    """What holds the rows of so many documents. Megatron looks at the lengths as well; an int32 always fits."""
    return np.int32 if num_documents <= INT32_MAX else np.int64


def build_sample_index(
    sequence_lengths: NDArray[np.int32],
    document_index: NDArray[np.int32],
    sequence_length: int,
    num_tokens: int,
    *,
    add_extra_token: bool = True,
    drop_last_partial: bool = True,
    threads: int = 1,
) -> NDArray[np.int32] | NDArray[np.int64]:
    """Where each sample starts in the stream of shuffled documents.

    Args:
        sequence_lengths: tokens in each stored sequence, shape (num_sequences,); may be unaligned, as mapped.
        document_index: sequences in reading order, over all epochs, shape (num_documents,).
        sequence_length: tokens from one start to the next.
        num_tokens: of all documents in document_index.
        add_extra_token: a sample holds the first token of the next one too, as its last label.
        drop_last_partial: leave out a last sample that the stream cannot fill.
        threads: work on so many parts at once, each in 1 MiB of its own; the rows are the same.

    Returns:
        Shape (num_samples + 1, 2): position in document_index, token offset there; the last row is where a sample after
        the last would start. int32 if positions and lengths fit, else int64.

    Raises:
        IndexBuildError: document_index names a sequence there is not, or its documents do not hold num_tokens.

    Source: Megatron Core, build_sample_idx, row for row. Where it stores an offset of -1 (a last sample cut short, an
    empty document after its end, an extra token) the row is the end of the last document that has tokens.
    """
    num_samples = count_samples(
        num_tokens, sequence_length, add_extra_token=add_extra_token, drop_last_partial=drop_last_partial
    )
    rows: NDArray[Any] = np.empty((num_samples + 1, 2), row_dtype(len(document_index)))
    native.sample_index(
        sequence_lengths,
        document_index,
        sequence_length,
        num_tokens,
        rows,
        add_extra_token=add_extra_token,
        threads=threads,
    )
    return rows
