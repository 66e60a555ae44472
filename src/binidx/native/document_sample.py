"""The document index and the sample index of one shuffle: `native/document_sample.c`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import count, items
from binidx.native.random_state import RandomState
from binidx.native.sample_index import Samples, check_rows

MOST_RECORDS = 2**32
"""Steps of a shuffle whose targets are drawn as 32 bits."""


def fill_records(samples: Samples, records: NDArray[np.int64]) -> int:
    """Documents of `samples` and their lengths as records of 8 bytes, shape (num_documents,); returns their tokens.

    Raises:
        IndexBuildError: a document that is not there, or a length below 0.
    """
    if len(records) != len(samples.documents):
        raise ValueError(f"{len(samples.documents)} documents, {len(records)} records")
    found = ffi.new("int64_t *")
    return samples.check(lib.binidx_fill_records(samples.c, _records(records), found), found[0])


def shuffle_records(
    samples: Samples,
    rng: RandomState,
    records: NDArray[np.int64],
    first: int,
    token: int,
    num_tokens: int,
    rows: NDArray[Any],
) -> None:
    """Shuffle records, put their documents into the index of `samples` from `first` on, and the rows that they decide.

    Args:
        samples: its document_index is written to; all other documents and rows stay.
        rng: draws one shuffle, that of `rng.shuffle(records)`.
        records: shape (count,), at most MOST_RECORDS; spent by the call.
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
