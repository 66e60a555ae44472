"""A source of tokens is anything with `Tokens.read`: a toy of 20 lines is trained on like a `.bin`."""

from __future__ import annotations

import pickle
from collections.abc import Callable
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
from binidx.errors import ConfigError, FormatError, IndexBuildError
from binidx.format.indexed_dataset import IndexedDataset, as_pair
from binidx.format.tokens import Tokens, index_of, read_spans
from binidx.loader.torch_loader import build_pretraining_data_loader
from binidx.order.gpt_order import GPTOrder, GPTParameters, GPTRule
from binidx.order.order_protocols import Source
from binidx.order.requests import SourceRequest
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


class WrongReads(ToyTokens):
    """Toy whose reads another function changes."""

    def __init__(self, change: Callable[[list[NDArray[np.int64]]], Any]) -> None:
        super().__init__(toy().sequences_in_memory)
        self.change = change

    def read(self, spans: NDArray[np.int64]) -> Any:
        return self.change(super().read(spans))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda pieces: [piece[:-1] for piece in pieces], r"int64, shape \(8,\), strides \(8,\)"),
        (lambda pieces: [np.append(piece, 1) for piece in pieces], r"int64, shape \(10,\), strides \(8,\)"),
        (lambda pieces: [piece[None] for piece in pieces], r"int64, shape \(1, 9\), .*"),
        (lambda pieces: [piece.astype(np.int32) for piece in pieces], r"int32, shape \(9,\), .*"),
        (lambda pieces: [np.repeat(piece, 2)[::2] for piece in pieces], r"int64, shape \(9,\), strides \(16,\)"),
        (lambda pieces: [piece.tolist() for piece in pieces], "list"),
    ],
)
def test_a_source_that_reads_other_tokens_than_asked_is_an_error(change: Any, found: str) -> None:
    order = GPTOrder(PARAMETERS, StoredSource("toy", tokens := WrongReads(change), range(3, 4)), None)
    dataset = TokenDataset(order, [tokens], dataset_of(toy()).assembles)
    needed = rf"toy: WrongReads.read: wrong for 9 tokens from \d+ of sequence 3 \(found {found}, "
    with pytest.raises(FormatError, match=needed + r"need a contiguous array of int64, shape \(9,\)\)"):
        dataset[0]
    with pytest.raises(FormatError, match=needed):
        read_spans([(tokens, np.array([[3, 0, 9]])), (toy(), np.array([[3, 0, 9]]))])


def test_a_source_that_reads_too_few_spans_is_an_error() -> None:
    tokens = WrongReads(lambda pieces: pieces[:-1])
    with pytest.raises(FormatError, match=r"toy: WrongReads.read: wrong number of arrays \(found 1, need 2, one for"):
        read_spans([(tokens, np.array([[3, 0, 9], [1, 0, 2]]))])


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("sequence_lengths", np.array(LENGTHS), "found int64, shape .5,., .*, needs a contiguous array of int32"),
        ("sequence_lengths", np.array(LENGTHS * 2, np.int32)[::2], "found int32, shape .5,., strides .8,., needs"),
        ("sequence_lengths", LENGTHS, "found list, needs"),
        ("dtype", np.int64, "found <class 'numpy.int64'>, needs a numpy.dtype: uint8, .*, uint16"),
        ("dtype", np.dtype(np.uint32), "found dtype.'uint32'., needs"),
        ("dtype", np.dtype(">i4"), "found dtype.'>i4'., needs"),
        ("identity", object(), "found <object object at .*>, needs a mapping of JSON values"),
        ("identity", {"path": Path("toy")}, ".* JSON values .Object of type PosixPath is not JSON"),
    ],
)
def test_a_source_with_a_member_of_another_type_is_an_error_when_it_is_opened(
    member: str, value: Any, message: str
) -> None:
    wrong = type("Wrong", (ToyTokens,), {member: value})

    class WrongDataset(binidx.GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path: str | None, config: binidx.GPTDatasetConfig) -> Tokens:
            opened: Tokens = wrong(toy().sequences_in_memory)
            return opened

    config = binidx.GPTDatasetConfig(random_seed=5, sequence_length=8, tokenizer=TOKENIZER, blend="toy", split="1,0,0")
    with pytest.raises(ConfigError, match=f"toy: Wrong.{member}: {message}"):
        binidx.BlendedMegatronDatasetBuilder(WrongDataset, [30, 0, 0], lambda: True, config).build()


class ChosenSequences:
    """Rule that chooses the sequences it is made of."""

    def __init__(self, sequences: Any) -> None:
        self.sequences = sequences

    def index_fields(self, options: Any) -> dict[str, Any]:
        return {"chosen": str(self.sequences)}

    def choose_sequences(self, source: Source, options: Any) -> Any:
        return self.sequences


def choose(sequences: Any) -> StoredSource:
    fields = {"num_samples": None}
    request = SourceRequest("GPTDataset", "toy", "toy", None, "train", None, fields, GPTRule(PARAMETERS))
    return request.with_documents(ChosenSequences(sequences)).choose_sequences(StoredSource("toy", toy(), range(5)))


def test_a_rule_chooses_sequences_that_repeat_and_stand_in_any_order() -> None:
    for chosen in ([3, 1, 3], np.array([3, 1, 3], np.uint8), np.array([3, 1, 3])):
        order, needed = (GPTOrder(PARAMETERS, choose(own), None) for own in (chosen, np.array([3, 1, 3], np.int32)))
        assert order.num_tokens == 97 * order.num_epochs
        samples = np.arange(len(order))
        for found, own in zip(order.spans(samples), needed.spans(samples), strict=True):
            np.testing.assert_array_equal(found, own)
        assert order.identity == needed.identity
        check_order(order)
    with pytest.raises(IndexBuildError, match=r"documents.1.: 5, needs 0 <= sequence < 5"):
        len(GPTOrder(PARAMETERS, choose([0, 5]), None))


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        (None, "found 0-D object, need 1-D integers"),
        ([True, False, True, False, True], "found 1-D bool, need 1-D integers"),
        ([[1, 2]], "found 2-D int64, need 1-D integers"),
        ([1.0], "found 1-D float64, need 1-D integers"),
        ([-1, 2], "found numbers from -1 to 2, need 0 to 2147483647"),
    ],
)
def test_a_rule_that_chooses_other_things_than_sequences_is_an_error_that_names_it(
    sequences: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"toy: ChosenSequences.choose_sequences: documents: {message}"):
        choose(sequences)
