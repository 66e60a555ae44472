"""Ids become what Megatron's builder stores for the same documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.oracle import megatron
from hypothesis import given
from hypothesis import strategies as st

from binidx.errors import FormatError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.native.token_files import wrap_rows
from binidx.prepare.tokenizers.engine import Stored, build_stored_tokens

DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 60_000), max_size=5), max_size=4), max_size=6)


def of_lists(documents: list[list[list[int]]], dtype: type, eod: int | None, *, empty_too: bool = False) -> Stored:
    texts = [text for document in documents for text in document]
    ids = np.array([token for text in texts for token in text], np.uint32)
    offsets = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    bounds = np.cumsum([0, *map(len, documents)], dtype=np.int64)
    return build_stored_tokens(ids, offsets, bounds, dtype, eod, empty_too=empty_too)


@given(DOCUMENTS, st.sampled_from([None, 0, 7]), st.sampled_from([np.uint16, np.int32]), st.booleans())
def test_stored_documents_are_those_of_the_loops_that_megatron_has(
    documents: list[list[list[int]]], eod: int | None, dtype: type, fast: bool
) -> None:
    fast = fast and eod is not None
    tokens: list[int] = []
    lengths: list[int] = []
    bounds = [0]
    for document in documents:
        texts = [text for text in document if text]
        if texts and eod is not None:
            texts[-1] = [*texts[-1], eod]
        elif fast and eod is not None:
            texts = [[eod]]
        tokens += [token for text in texts for token in text]
        lengths += map(len, texts)
        bounds.append(len(lengths))
    found = of_lists(documents, dtype, eod, empty_too=fast)
    assert found.tokens.dtype == dtype
    assert found.sequence_lengths.dtype == np.int32
    assert [column.tolist() for column in found] == [tokens, lengths, bounds]


def test_a_dataset_of_stored_documents_reads_back_as_megatron_wrote_it(tmp_path: Path) -> None:
    documents = [[[5, 6], [], [7]], [[]], [], [[8]]]
    builder = megatron.indexed.IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", np.uint16)
    for ids, lengths in (([5, 6, 7, 0], [2, 2]), ([], []), ([], []), ([8, 0], [2])):
        builder.add_document(ids, lengths)
    builder.finalize(f"{tmp_path}/theirs.idx")
    theirs, found = IndexedDataset(f"{tmp_path}/theirs"), of_lists(documents, np.uint16, 0)
    assert theirs.index.sequence_lengths.tolist() == found.sequence_lengths.tolist()
    assert theirs.index.document_indices.tolist() == found.document_indices.tolist()
    assert (tmp_path / "theirs.bin").read_bytes() == found.tokens.tobytes()


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 0xFFFF), (np.int32, 0x7FFFFFFF)])
def test_an_id_that_the_dtype_does_not_hold_is_named(dtype: type, largest: int) -> None:
    assert of_lists([[[1, largest]]], dtype, None).tokens[-1] == largest
    with pytest.raises(FormatError, match=f"token id {largest + 1}: {np.dtype(dtype).name} holds up to {largest}"):
        of_lists([[[1, largest + 1]]], dtype, None)
    with pytest.raises(FormatError, match=f"token id {largest + 1}"):
        of_lists([[[1]]], dtype, largest + 1)


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=4), max_size=6), st.booleans())
def test_rows_are_wrapped_and_those_of_nothing_if_asked(rows: list[list[int]], empty_too: bool) -> None:
    ids = np.array([number for row in rows for number in row], np.uint32)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    found = wrap_rows(ids, offsets, np.uint32, prefix=(1, 2), suffix=(3,), empty_too=empty_too)
    assert found.tolist() == [n for row in rows if row or empty_too for n in (1, 2, *row, 3)]


@pytest.mark.parametrize("offsets", [[0, 3], [-1, 1], [0, 2, 1]])
def test_offsets_that_lead_outside_are_refused(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="needs rising ones within"):
        wrap_rows(np.array([1, 2], np.uint32), np.array(offsets, np.int64), np.uint16)
