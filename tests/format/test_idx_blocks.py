"""An .idx in blocks says what the whole one says; what it refuses is in test_idx.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.random_datasets import build_ours, random_documents

from binidx.format import idx
from binidx.format.idx import open_index
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.open import open_object


@pytest.fixture(params=[1, 3, 7, 1 << 18])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(idx, "BLOCK_VALUES", request.param)
    return int(request.param)


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("count", [0, 1, 40, 3000])  # more than WHOLE_BYTES of index
def test_blocks_joined_are_the_index(tmp_path: Path, count: int, multimodal: bool, block: int) -> None:
    documents = random_documents(np.random.default_rng(count), np.uint16, count)
    prefix = build_ours(tmp_path / "en", documents, np.uint16, multimodal)
    whole, stream = IndexedDataset(prefix, multimodal=multimodal).index, open_index(open_object(f"{prefix}.idx"), "")
    assert stream.check() == whole.num_tokens
    assert (stream.num_sequences, stream.num_documents) == (len(whole), count)
    assert np.array_equal(np.concatenate([[], *stream.lengths()]), whole.sequence_lengths)
    assert np.array_equal(np.concatenate(list(stream.bounds())), whole.document_indices)
    if multimodal:
        assert np.array_equal(np.concatenate([np.zeros(0), *stream.modes()]), whole.sequence_modes)
    for limit in (None, 0, 5):
        found = [
            (each.first + n, int(start), int(stop))
            for each in stream.documents(limit)
            for n, (start, stop) in enumerate(zip(each.token_bounds()[:-1], each.token_bounds()[1:], strict=True))
        ]
        ends = np.cumsum([0, *(len(each.tokens) for each in documents[:limit])]).tolist()
        assert found == [(n, ends[n], ends[n + 1]) for n in range(len(ends) - 1)]
