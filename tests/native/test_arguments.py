"""What binidx.native refuses before it takes a pointer."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from binidx.errors import IndexBuildError
from binidx.native import blend_index, gpt_samples, token_files
from binidx.native.gpt_samples import GPTRows, Recipe
from binidx.native.sample_index import SampleArrays

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
    def fill(
        sequence_lengths: Any = LENGTHS,
        document_index: Any = DOCUMENTS,
        sequence_length: int = 3,
        num_tokens: int = 7,
        rows: Any = ROWS,
    ) -> None:
        arguments = sequence_lengths, document_index, sequence_length, num_tokens
        SampleArrays(*arguments, add_extra_token=True).fill_starts(rows)

    fill()
    with pytest.raises(error, match=message):
        fill(**change)


def test_blends_refuse_outputs_of_another_length() -> None:
    with pytest.raises(ValueError, match="2 weights, 5 and 6 rows"):
        blend_index.blend_weighted(np.array([0.5, 0.5]), np.empty(5, np.int16), np.empty(6, np.int64))
    with pytest.raises(ValueError, match="2 sizes of 4 in all, 5 rows"):
        blend_index.blend_exhaustive(np.array([3, 1]), np.empty(5, np.int16), np.empty(5, np.int64))
    with pytest.raises(ValueError, match="2 sizes of 2 in all"):
        blend_index.blend_exhaustive(np.array([3, -1]), np.empty(2, np.int16), np.empty(2, np.int64))


def test_checks_refuse_lengths_and_pointers_that_do_not_match() -> None:
    with pytest.raises(ValueError, match="2 lengths, 3 pointers"):
        token_files.count_valid_sequences(LENGTHS, np.zeros(3, np.int64), 2)


def test_arrays_of_another_shape_are_refused() -> None:
    """With no second axis, (4, 0), their memory is empty, however long they are."""
    weights, sequences = (
        np.array([0.5, 0.5]),
        gpt_samples.Sequences(LENGTHS, np.array([0, 6]), dtype_code=8, item_bytes=2),
    )
    shuffled, rows = np.array([0, 1]), np.zeros((3, 2), np.int32)
    calls: list[Callable[[], object]] = [
        lambda: blend_index.blend_weighted(weights, np.empty((4, 0), np.int16), np.empty(4, np.int64)),
        lambda: blend_index.blend_weighted(weights, np.empty(4, np.int16), np.empty((4, 0), np.int64)),
        lambda: blend_index.blend_exhaustive(np.array([3, 1]), np.empty((4, 0), np.int16), np.empty(4, np.int64)),
        lambda: sequences.locate(np.zeros((3, 2), np.int64)),
        lambda: sequences.locate(np.zeros(3, np.int64)),
        lambda: gpt_samples.GPTIndex(np.zeros((4, 0), np.int64), rows, DOCUMENTS, sequences, add_extra_token=True),
        lambda: gpt_samples.GPTIndex(shuffled, rows, np.zeros((4, 0), np.int32), sequences, add_extra_token=True),
        lambda: gpt_samples.GPTIndex(shuffled, rows.astype(np.int16), DOCUMENTS, sequences, add_extra_token=True),
        lambda: fill(bounds=np.zeros((2, 0), np.int64)),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="needs"):
            call()


def fill(
    bounds: NDArray[np.int64] | None = None,
    dtype_code: int = 8,
    item_bytes: int = 2,
) -> None:
    bounds = np.array([0, 1]) if bounds is None else bounds
    GPTRows(Recipe(4, pad=0), 1).fill(
        [np.zeros(2, np.uint16)], bounds, [0], dtype_code=dtype_code, item_bytes=item_bytes
    )


@pytest.mark.parametrize(("dtype_code", "item_bytes"), [(8, 0), (8, -2), (5, 1), (8, 4), (9, 2), (0, 1)])
def test_bytes_of_a_token_are_those_of_its_dtype(dtype_code: int, item_bytes: int) -> None:
    with pytest.raises(ValueError, match="bytes of a token"):
        gpt_samples.Sequences(LENGTHS, np.array([0, 6]), dtype_code=dtype_code, item_bytes=item_bytes)
    with pytest.raises(ValueError, match="bytes of a token"):
        fill(dtype_code=dtype_code, item_bytes=item_bytes)


CYCLE = """
import gc, sys
import numpy as np
from binidx.native.arguments import Mapped, borrow

gc.disable()
view = memoryview(bytearray(8))
pointer = Mapped(view, disk=False) if sys.argv[1] == "mapped" else borrow(view)
cycle = [view, pointer]
cycle.append(cycle)
del view, pointer, cycle
assert gc.collect() > 0
"""


@pytest.mark.parametrize("kind", ["mapped", "borrowed"])
def test_a_cycle_of_garbage_with_a_view_and_a_pointer_into_it_is_freed(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", CYCLE, kind], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
