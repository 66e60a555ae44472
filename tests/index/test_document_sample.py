"""Both indices of one shuffle against the two functions that build one each, and against Megatron's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index import document_sample as index_of_both
from binidx.index.document_sample import (
    EpochPlan,
    build_document_and_sample_index,
    build_document_index,
    build_sample_index,
    plan_epochs,
)
from binidx.native import sample_index
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


def one_by_one(
    lengths: np.ndarray, documents: np.ndarray, plan: EpochPlan, rng: RandomState, length: int, **options: bool
) -> tuple[np.ndarray, np.ndarray]:
    index = build_document_index(documents, plan.num_epochs, rng, plan.separate_final_epoch)
    return index, build_sample_index(lengths, index, length, plan.num_tokens, **options)


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("drop", [True, False])
def test_equals_the_two_functions_and_megatron(extra: bool, drop: bool) -> None:
    rng, separate = np.random.default_rng(2 * extra + drop), 0
    options = {"add_extra_token": extra, "drop_last_partial": drop}
    for seed in range(1000):
        lengths, documents, plan, length = random_case(rng, extra, drop)
        ours, apart, theirs = RandomState(seed), RandomState(seed), np.random.RandomState(seed)
        found = build_document_and_sample_index(lengths, documents, plan, ours, length, add_extra_token=extra)
        needed = one_by_one(lengths, documents, plan, apart, length, **options)
        for array, needed_array in zip(found, needed, strict=True):
            assert array.dtype == needed_array.dtype
            assert (array == needed_array).all()
        assert ours.state[1] == apart.state[1]
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
    index, rows = build_document_and_sample_index(nothing, nothing, plan, RandomState(0), 4)
    assert index.shape == (0,)
    assert rows.tolist() == [[0, 0]]


def test_documents_without_tokens_are_shuffled_too() -> None:
    plan = plan_epochs(0, 4, None, add_extra_token=False, drop_last_partial=False)
    lengths, documents = np.zeros(50, np.int32), np.arange(50, dtype=np.int32)
    index, rows = build_document_and_sample_index(lengths, documents, plan, RandomState(1), 4, add_extra_token=False)
    assert (index == build_document_index(documents, 1, RandomState(1), False)).all()
    assert rows.tolist() == [[0, 0]]


def test_wide_rows_are_the_same_numbers() -> None:
    rng = np.random.default_rng(8)
    for seed in range(200):
        lengths = random_lengths(rng)
        documents, rows = np.arange(len(lengths), dtype=np.int32), []
        records = np.empty(len(lengths), np.int64)
        tokens = sample_index.fill_records(sample_index.SampleArrays(lengths, documents), records)
        samples = sample_index.SampleArrays(
            lengths, np.empty(3 * len(lengths), np.int32), 7, 3 * tokens, 3 * tokens // 7
        )
        for dtype in (np.int32, np.int64):
            rows.append(np.zeros((3 * tokens // 7 + 1, 2), dtype))
            for part in (2, 0, 1):
                place = part * len(lengths), part * tokens, tokens
                sample_index.shuffle_records(samples, RandomState(seed), records.copy(), *place, rows[-1])
        assert (rows[0] == rows[1]).all()
        assert (rows[0] == build_sample_index(lengths, samples.documents, 7, 3 * tokens, add_extra_token=False)).all()


def test_too_many_documents_for_records_take_the_two_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_of_both, "MOST_RECORDS", 999)
    lengths, documents = np.arange(1, 501, dtype=np.int32), np.arange(500, dtype=np.int32)
    for epochs, asked in ((2, 2000), (3, 4200)):
        plan = plan_epochs(int(lengths.sum()), 64, asked, add_extra_token=True, drop_last_partial=True)
        assert plan.num_epochs == epochs
        found = build_document_and_sample_index(lengths, documents, plan, RandomState(1), 64)
        needed = one_by_one(lengths, documents, plan, RandomState(1), 64)
        assert all((array == needed_array).all() for array, needed_array in zip(found, needed, strict=True))


def test_the_order_of_records_is_that_of_their_documents() -> None:
    lengths, documents = np.array([7, 8, 9], np.int32), np.array([2, 0], np.int32)
    records = np.empty(2, np.int64)
    assert sample_index.fill_records(sample_index.SampleArrays(lengths, documents), records) == 16
    assert records.view(np.int32).reshape(2, 2).tolist() == [[2, 9], [0, 7]]


def test_out_may_lie_in_npy_files(tmp_path: Path) -> None:
    lengths, documents = np.arange(1, 301, dtype=np.int32), np.arange(300, dtype=np.int32)
    plan = plan_epochs(int(lengths.sum()), 64, 2000, add_extra_token=True, drop_last_partial=True)
    needed = build_document_and_sample_index(lengths, documents, plan, RandomState(3), 64)
    out = tuple(
        np.lib.format.open_memmap(tmp_path / f"{n}.npy", "w+", array.dtype, array.shape)
        for n, array in enumerate(needed)
    )
    found: Any = build_document_and_sample_index(lengths, documents, plan, RandomState(3), 64, out=out)  # type: ignore[arg-type]
    assert all(array is given for array, given in zip(found, out, strict=True))
    for n, array in enumerate(needed):
        out[n].flush()
        np.save(tmp_path / "saved.npy", array)
        assert (tmp_path / f"{n}.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()


def test_documents_of_another_integer_dtype_and_unaligned_lengths_are_taken() -> None:
    lengths, documents = np.array([5, 6, 7], np.int32), np.array([2, 0, 1])
    unaligned = np.frombuffer(b"ab" + lengths.tobytes(), np.uint8)[2:].view("<i4")
    plan = plan_epochs(18, 4, 9, add_extra_token=True, drop_last_partial=True)
    needed = one_by_one(lengths, documents.astype(np.int32), plan, RandomState(0), 4)
    for given in (documents, np.array([2, 9, 0, 9, 1, 9], np.int32)[::2]):
        found = build_document_and_sample_index(unaligned, given, plan, RandomState(0), 4)
        assert all((array == needed_array).all() for array, needed_array in zip(found, needed, strict=True))


PLAN = EpochPlan(2, 7, 3, True, 1)


@pytest.mark.parametrize(
    ("lengths", "documents", "plan", "message"),
    [
        ([3, 4], [0, 2], PLAN, r"documents\[1\]: 2, needs 0 <= sequence < 2"),
        ([3, 4], [-1, 0], PLAN, r"documents\[0\]: -1, needs 0 <= sequence < 2"),
        ([3, -4], [0, 1], PLAN, r"sequence_lengths\[1\]: -4, needs 0 or more tokens"),
        ([3, 4], [0, 1, 1], PLAN, "found 11 tokens, need those of the plan: 7"),
        ([3, 4], [], PLAN, "documents: found 0 tokens"),
        ([3, 4], [0, 1], EpochPlan(0, 7, 3, True, 1), "found 0 epochs, need at least 1"),
    ],
)
def test_missing_sequences_are_errors(lengths: list[int], documents: list[int], plan: EpochPlan, message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build_document_and_sample_index(
            np.array(lengths, np.int32), np.array(documents, np.int32), plan, RandomState(0), 4
        )


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (np.array([0, 2**31]), "found numbers from 0 to 2147483648, need 0 to 2147483647"),
        (np.array([0.5]), "1-D float64, need 1-D integers"),
        (np.array([[1]], np.int32), "2-D int32"),
    ],
)
def test_invalid_document_numbers_are_errors(documents: np.ndarray, message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build_document_and_sample_index(np.ones(2, np.int32), documents, PLAN, RandomState(0), 4)


@pytest.mark.parametrize(
    ("shapes", "needed"), [(((3,), (4, 2)), r"\(4,\)"), (((4,), (3, 2)), r"\(4, 2\)"), (((4,), (4,)), r"\(4, 2\)")]
)
def test_an_out_of_another_shape_is_an_error(shapes: tuple[tuple[int, ...], tuple[int, ...]], needed: str) -> None:
    out = np.empty(shapes[0], np.int32), np.empty(shapes[1], np.int32)
    with pytest.raises(IndexBuildError, match=rf"out: found shape .*, need contiguous {needed} of int32"):
        build_document_and_sample_index(
            np.array([3, 4], np.int32), np.arange(2, dtype=np.int32), PLAN, RandomState(0), 4, out=out
        )


def test_records_of_another_number_are_refused() -> None:
    samples = sample_index.SampleArrays(np.ones(3, np.int32), np.zeros(3, np.int32), 4, 3, 1)
    rows, records = np.empty((2, 2), np.int32), np.empty(3, np.int64)
    with pytest.raises(ValueError, match="3 documents, 2 records"):
        sample_index.fill_records(samples, records[:2])
    with pytest.raises(ValueError, match="2 documents from 1 on, 3 records"):
        sample_index.shuffle_records(samples, RandomState(0), records, 1, 0, 3, rows)
    with pytest.raises(ValueError, match="rows: 1, needs 2"):
        sample_index.shuffle_records(samples, RandomState(0), records, 0, 0, 3, rows[:1])
    with pytest.raises(TypeError, match="contiguous int64"):
        sample_index.fill_records(samples, np.empty(6, np.int64)[::2])


def test_two_builds_at_once_give_the_same_bytes() -> None:
    lengths = np.random.default_rng(0).integers(0, 2000, 50_000).astype(np.int32)
    documents = np.arange(len(lengths), dtype=np.int32)
    plan = plan_epochs(int(lengths.sum()), 512, 150_000, add_extra_token=True, drop_last_partial=True)

    def build(seed: int) -> bytes:
        arrays = build_document_and_sample_index(lengths, documents, plan, RandomState(seed), 512)
        return b"".join(array.tobytes() for array in arrays)

    needed = [build(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(build, [0, 1, 2, 3] * 3)) == needed * 3
