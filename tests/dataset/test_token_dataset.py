"""A source of tokens is anything with `Tokens.read`: a toy of 20 lines is trained on like a `.bin`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER
from helpers.random_datasets import Document, build_ours
from numpy.typing import NDArray

import binidx
from binidx.dataset.assemble.gpt_rows import GPTAssemble
from binidx.dataset.megatron.mock import MockGPTLowLevelDataset
from binidx.dataset.token_dataset import TokenDataset
from binidx.errors import ConfigError
from binidx.format.indexed_dataset import IndexedDataset, as_pair
from binidx.format.tokens import Tokens, index_of, read_spans
from binidx.loader.torch_loader import build_pretraining_data_loader
from binidx.order.gpt_order import GPTOrder, GPTParameters
from binidx.order.source_order import StoredSource
from binidx.testing import check_order

LENGTHS = [3, 17, 1, 40, 9]
PARAMETERS = GPTParameters("GPTDataset", 30, random_seed=5, sequence_length=8)


class ToyTokens:
    """Sequences in a list; nothing but `Tokens`."""

    path_prefix = "toy"
    dtype: np.dtype[Any] = np.dtype(np.int64)

    def __init__(self, sequences: list[NDArray[np.int64]]) -> None:
        self.sequences_in_memory = sequences

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        return np.array([*map(len, self.sequences_in_memory)], np.int32)

    @property
    def identity(self) -> dict[str, Any]:
        return {"toy": self.sequence_lengths.tolist()}

    def read(self, spans: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        return [self.sequences_in_memory[sequence][first:][:count] for sequence, first, count in spans.tolist()]


def toy() -> ToyTokens:
    return ToyTokens([np.arange(100 * number, 100 * number + length) for number, length in enumerate(LENGTHS)])


def order_of(tokens: Tokens) -> GPTOrder:
    return GPTOrder(PARAMETERS, StoredSource("toy", tokens, range(len(LENGTHS))), None)


def dataset_of(tokens: Tokens) -> TokenDataset:
    options: dict[str, Any] = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = binidx.GPTDatasetConfig(random_seed=5, sequence_length=8, tokenizer=TOKENIZER, **options)
    return TokenDataset(order_of(tokens), [tokens], [GPTAssemble.of(config, -1)])


def stored(folder: Path) -> IndexedDataset:
    documents = [Document(tokens, [len(tokens)], []) for tokens in toy().sequences_in_memory]
    return IndexedDataset(build_ours(folder / "toy", documents, np.int64))


def test_a_toy_source_is_trained_on_like_the_same_tokens_in_a_bin(tmp_path: Path) -> None:
    found, needed = dataset_of(toy()), dataset_of(stored(tmp_path))
    assert isinstance(toy(), Tokens)
    assert len(found) == len(needed) == 34
    _, bounds = found.order.spans(np.arange(34))
    assert np.diff(bounds).max() > 1, "no sample across documents"
    for one, other in zip(found.__getitems__(range(-1, 34)), needed.__getitems__(range(-1, 34)), strict=True):
        assert one.keys() == other.keys()
        assert all((one[name] == other[name]).all() for name in one)
    assert (found[7]["tokens"] == needed[7]["tokens"]).all()
    again: TokenDataset = pickle.loads(pickle.dumps(found))
    assert (again[7]["labels"] == needed[7]["labels"]).all()
    loader: Any = build_pretraining_data_loader(found, 0, 4)
    assert sum(len(batch["tokens"]) for batch in loader) == 32


def test_the_order_of_a_toy_source_keeps_the_contract() -> None:
    check_order(order_of(toy()))


def test_each_sequence_of_a_source_without_an_index_is_a_document(tmp_path: Path) -> None:
    index, needed = index_of(toy()), index_of(stored(tmp_path))
    for name in ("sequence_lengths", "sequence_pointers", "document_indices", "num_tokens", "dtype"):
        np.testing.assert_array_equal(getattr(index, name), getattr(needed, name))


def test_toys_and_files_are_read_together(tmp_path: Path) -> None:
    spans = np.array([[3, 2, 4], [0, 0, 3]])
    for own in read_spans([(toy(), spans), (stored(tmp_path), spans)]):
        assert [piece.tolist() for piece in own] == [[302, 303, 304, 305], [0, 1, 2]]


def test_errors_name_a_source_without_an_index() -> None:
    dataset = dataset_of(toy())
    with pytest.raises(IndexError, match="toy: sample 34, it has 34 in this split"):
        TokenDataset(dataset.order, dataset.tokens, [lambda tokens: []])[34]
    with pytest.raises(ConfigError, match=r"toy: tokens do not fit int32 \(found int64\)"):
        dataset.read_text([0])
    with pytest.raises(ConfigError, match=r"toy: ToyTokens, needs a \.bin/\.idx pair"):
        as_pair(toy())
    with pytest.raises(ConfigError, match=r"mock: MockGPTLowLevelDataset, needs a \.bin/\.idx pair"):
        as_pair(MockGPTLowLevelDataset(TOKENIZER))
