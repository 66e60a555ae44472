"""The document and sample index of a GPT dataset against Megatron's, over random data."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.document_sample import EpochPlan, plan_epochs
from binidx.index.gpt_indices import build_gpt_index
from binidx.native.permutations import RandomState


def random_lengths(rng: np.random.Generator) -> np.ndarray:
    """A third of them sometimes 0, one of them long."""
    lengths = rng.integers(0, rng.choice([2, 8, 60, 300]), rng.integers(1, rng.choice([3, 40, 400]))).astype(np.int32)
    lengths[rng.random(len(lengths)) < rng.choice([0, 0.3, 0.9])] = 0
    lengths[rng.integers(len(lengths))] = rng.choice([1, 5, 2000])
    return lengths


def random_case(rng: np.random.Generator, extra: bool, drop: bool) -> tuple[np.ndarray, np.ndarray, EpochPlan, int]:
    """Lengths, some of their numbers, one to seven epochs of them with the last separate as it comes, a length."""
    lengths, length = random_lengths(rng), int(rng.integers(1, rng.choice([3, 10, 200])))
    documents = np.flatnonzero(rng.random(len(lengths)) < rng.choice([0.5, 1])).astype(np.int32)
    tokens, epochs = int(lengths[documents].sum()), rng.choice([0.3, 1, 3.4, 6.9])
    asked = int(epochs * tokens / length) if rng.integers(4) else None
    return lengths, documents, plan_epochs(tokens, length, asked, add_extra_token=extra, drop_last_partial=drop), length


def build(
    lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan, seed: int, length: int, *, extra: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    writer = ArrayWriter()
    build_gpt_index(writer, lengths, documents, plan, RandomState(seed), length, add_extra_token=extra)
    return writer.arrays["document_index"], writer.arrays["sample_index"]


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_equals_megatron(extra: bool, drop: bool) -> None:
    rng, separate = np.random.default_rng(2 * extra + drop), 0
    for seed in range(1000):
        lengths, documents, plan, length = random_case(rng, extra, drop)
        found = build(lengths, documents, plan, seed, length, extra=extra)
        theirs = np.random.RandomState(seed)
        index = megatron.gpt._build_document_index(documents, plan.num_epochs, theirs, plan.separate_final_epoch)
        assert (found[0] == index).all()
        if plan.tokens_per_epoch and (drop or lengths[index[-1]]):  # where Megatron gives an answer at all
            arguments = (lengths, index, length, plan.num_epochs, plan.tokens_per_epoch, drop, extra)
            assert (found[1] == megatron.helpers.build_sample_idx(*arguments)).all()
        separate += plan.separate_final_epoch
    assert separate > 50


def test_no_documents_are_one_row() -> None:
    nothing = np.empty(0, np.int32)
    plan = plan_epochs(0, 4, None, add_extra_token=True, drop_last_partial=False)
    index, rows = build(nothing, nothing, plan, 0, 4)
    assert index.shape == (0,)
    assert rows.tolist() == [[0, 0]]


def test_documents_without_tokens_are_shuffled_too() -> None:
    plan = plan_epochs(0, 4, None, add_extra_token=False, drop_last_partial=False)
    lengths, documents = np.zeros(50, np.int32), np.arange(50, dtype=np.int32)
    index, rows = build(lengths, documents, plan, 1, 4, extra=False)
    assert sorted(index) == documents.tolist() != index.tolist()
    assert rows.tolist() == [[0, 0]]


def test_documents_of_another_integer_dtype_and_unaligned_lengths_are_taken() -> None:
    lengths, documents = np.array([5, 6, 7], np.int32), np.array([2, 0, 1])
    unaligned = np.frombuffer(b"ab" + lengths.tobytes(), np.uint8)[2:].view("<i4")
    plan = plan_epochs(18, 4, 9, add_extra_token=True, drop_last_partial=True)
    needed = build(lengths, documents.astype(np.int32), plan, 0, 4)
    for given in (documents, np.array([2, 9, 0, 9, 1, 9], np.int32)[::2]):
        found = build(unaligned, given, plan, 0, 4)
        assert all((array == needed_array).all() for array, needed_array in zip(found, needed, strict=True))


PLAN = EpochPlan(2, 7, 3, True, 1)


@pytest.mark.parametrize(
    ("lengths", "documents", "plan", "message"),
    [
        ([3, 4], [0, 2], PLAN, r"document_index\[\d\]: 2, needs 0 <= sequence < 2"),
        ([3, 4], [-1, 0], PLAN, "found numbers from -1 to 0"),
        ([3, -4], [0, 1], PLAN, r"sequence_lengths\[1\]: -4, needs 0 or more tokens"),
        ([3, 4], [0, 1, 1], PLAN, "the documents hold 22 tokens, needs those counted: 3 samples over 14"),
        ([3, 4], [], PLAN, "the documents hold 0 tokens"),
        ([3, 4], [0, 1], EpochPlan(0, 7, 3, True, 1), "found 0 epochs, need at least 1"),
    ],
)
def test_missing_sequences_are_errors(lengths: list[int], documents: list[int], plan: EpochPlan, message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build(np.array(lengths, np.int32), np.array(documents, np.int32), plan, 0, 4)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (np.array([0, 2**31]), "found numbers from 0 to 2147483648, need 0 to 2147483647"),
        (np.array([0.5, 0.5]), "1-D float64, need 1-D integers"),
        (np.array([[1], [1]], np.int32), "2-D int32"),
    ],
)
def test_invalid_document_numbers_are_errors(documents: np.ndarray, message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build(np.ones(2, np.int32), documents, PLAN, 0, 4)
