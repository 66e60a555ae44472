"""What binidx.native refuses before it takes a pointer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from binidx import native
from binidx.errors import IndexBuildError

LENGTHS, DOCUMENTS = np.array([3, 4], np.int32), np.array([1, 0], np.int32)
ROWS = np.empty((3, 2), np.int32)
READ_ONLY = np.empty((3, 2), np.int32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"sequence_lengths": LENGTHS.astype(np.int64)}, TypeError, "int32 array, found 1-D int64"),
        ({"sequence_lengths": LENGTHS.astype(">i4")}, TypeError, "int32 array, found 1-D >i4"),
        ({"document_index": DOCUMENTS.astype(np.uint32)}, TypeError, "contiguous int32 array, found uint32"),
        ({"document_index": np.zeros(4, np.int32)[::2]}, TypeError, "contiguous int32"),
        ({"document_index": np.zeros((2, 1), np.int32)}, TypeError, "2-D"),
        ({"rows": np.empty((3, 2), np.uint32)}, TypeError, "uint32, needs int32 or int64"),
        ({"rows": np.empty((3, 3), np.int32)}, TypeError, r"shape \(3, 3\)"),
        ({"rows": np.empty((0, 2), np.int32)}, TypeError, r"shape \(0, 2\)"),
        ({"rows": READ_ONLY}, ValueError, "read-only"),
        ({"sequence_length": 0}, ValueError, "sequence_length: 0, needs 1 <="),
        ({"num_tokens": -1}, ValueError, "num_tokens: -1"),
        ({"num_tokens": 2**64}, ValueError, "num_tokens: 18446744073709551616"),
        ({"rows": np.empty((5, 2), np.int32)}, IndexBuildError, "hold 7 tokens, needs those counted: 4 samples over 7"),
    ],
)
def test_sample_index_refuses(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {
        "sequence_lengths": LENGTHS,
        "document_index": DOCUMENTS,
        "sequence_length": 3,
        "num_tokens": 7,
        "rows": ROWS,
    }
    native.sample_index(**arguments, add_extra_token=True)
    with pytest.raises(error, match=message):
        native.sample_index(**(arguments | change), add_extra_token=True)


def test_blends_refuse_outputs_of_another_length() -> None:
    with pytest.raises(ValueError, match="2 weights, 5 and 6 rows"):
        native.blend_weighted(np.array([0.5, 0.5]), np.empty(5, np.int16), np.empty(6, np.int64))
    with pytest.raises(ValueError, match="2 sizes of 4 in all, 5 rows"):
        native.blend_exhaustive(np.array([3, 1]), np.empty(5, np.int16), np.empty(5, np.int64))
    with pytest.raises(ValueError, match="2 sizes of 2 in all"):
        native.blend_exhaustive(np.array([3, -1]), np.empty(2, np.int16), np.empty(2, np.int64))


def test_checks_refuse_lengths_and_pointers_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="2 lengths, 3 pointers"):
        native.check_sequences(LENGTHS, np.zeros(3, np.int64), 2)
