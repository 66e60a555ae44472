"""From token ids to what `.bin` and `.idx` hold: Megatron's dtype, its EOD, its rule for texts of no tokens.

    texts         "a b" | ""  | "c"  | ""           ids      5 6 | | 7 |
    documents     ----------  ------   --           tokens   5 6 0 | 7 0 |      EOD 0
                                                    sequence_lengths   3 | 2
                                                    document_indices   0 1 2 2

A text of no tokens is no sequence, and a document without a sequence stays a document and gets no EOD: Megatron Core's
tools/preprocess_data.py, Encoder.encode. With `empty_too` it has one of an EOD, as in its preprocess_data_fast.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from binidx.native.wrap_rows import wrap_rows


class Stored(NamedTuple):
    """Documents as a dataset has them."""

    tokens: NDArray[Any]  # of all sequences
    sequence_lengths: NDArray[np.int32]  # (num_sequences,)
    document_indices: NDArray[np.int64]  # (num_documents + 1,)


def stored(
    ids: NDArray[np.uint32],
    offsets: NDArray[np.int64],
    documents: NDArray[np.int64],
    dtype: DTypeLike,
    eod: int | None = None,
    *,
    empty_too: bool = False,
) -> Stored:
    """The tokens and the index columns of these documents.

    Args:
        ids: what an engine gave, shape (num_ids,).
        offsets: where each text's ids begin, and the end of the last, shape (num_texts + 1,).
        documents: the first text of each document, then num_texts, shape (num_documents + 1,).
        eod: ends each document that has tokens; None: nothing does.
        empty_too: it is all that a document of no tokens has; needs an `eod`.

    Raises:
        FormatError: an id that the dtype does not hold.
    """
    bounds = offsets[documents]
    tokens = wrap_rows(ids, bounds, dtype, suffix=() if eod is None else (eod,), empty_too=empty_too)
    lengths = np.diff(offsets)
    full = lengths > 0
    sequences = np.zeros(len(offsets), np.int64)
    np.cumsum(full, out=sequences[1:])
    document_indices = sequences[documents]
    sequence_lengths = lengths[full].astype(np.int32)
    if eod is not None:
        sequence_lengths[document_indices[1:][np.diff(bounds) > 0] - 1] += 1
    if empty_too:
        empty = np.diff(bounds) == 0
        sequence_lengths = np.insert(sequence_lengths, document_indices[:-1][empty], 1)
        document_indices[1:] += np.cumsum(empty)
    return Stored(tokens, sequence_lengths, document_indices)
