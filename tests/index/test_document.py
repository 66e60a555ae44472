"""The document index against Megatron's."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index.document_sample import build_document_index
from binidx.native.permutations import RandomState


def test_equals_megatrons_and_leaves_the_generator_where_megatron_does() -> None:
    rng = np.random.default_rng(3)
    for _ in range(1000):
        seed, num_epochs = int(rng.integers(2**32)), int(rng.integers(1, 6))
        documents = np.sort(rng.choice(2000, rng.integers(0, rng.choice([3, 30, 900])), replace=False)).astype(np.int32)
        separate = bool(rng.integers(2))
        ours, theirs = RandomState(seed), np.random.RandomState(seed)
        found = build_document_index(documents, num_epochs, ours, separate)
        needed = megatron.gpt._build_document_index(documents, num_epochs, theirs, separate)
        assert found.dtype == needed.dtype == np.int32
        assert (found == needed).all()
        assert ours.state[1] == theirs.get_state()[2]


def test_a_separate_final_epoch_lies_behind_the_others() -> None:
    documents = np.arange(10, dtype=np.int32)
    index = build_document_index(documents, 3, RandomState(1), True)
    assert sorted(index[:20]) == sorted([*range(10)] * 2)
    assert sorted(index[20:]) == [*range(10)]


def test_one_epoch_is_shuffled_once_separate_or_not() -> None:
    documents = np.arange(100, dtype=np.int32)
    once, other = (build_document_index(documents, 1, RandomState(1), separate) for separate in (True, False))
    assert (once == other).all()


def test_the_documents_themselves_stay_in_order() -> None:
    documents = np.arange(100, dtype=np.int32)
    build_document_index(documents, 1, RandomState(1), False)
    assert (documents == np.arange(100)).all()


def test_nothing_larger_than_the_index_is_allocated() -> None:
    documents = np.arange(100_000, dtype=np.int32)
    tracemalloc.start()
    index = build_document_index(documents, 4, RandomState(1), True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.01 * index.nbytes


def test_int64_numbers_are_not_copied_either() -> None:
    documents = np.arange(1_000_000)
    tracemalloc.start()
    index = build_document_index(documents, 2, RandomState(1), False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.02 * index.nbytes


def test_is_built_in_the_file_it_ends_in(tmp_path: Path) -> None:
    documents = np.arange(700, dtype=np.int32)
    out = np.lib.format.open_memmap(tmp_path / "document_index.npy", "w+", np.int32, (2100,))
    needed = build_document_index(documents, 3, RandomState(1), True)
    assert build_document_index(documents, 3, RandomState(1), True, out=out) is out
    out.flush()
    assert (np.load(tmp_path / "document_index.npy") == needed).all()


@pytest.mark.parametrize("out", [np.zeros(19, np.int32), np.zeros(20), np.zeros((4, 5), np.int32), np.zeros(40)[::2]])
def test_refuses_an_out_of_another_shape(out: np.ndarray) -> None:
    with pytest.raises(IndexBuildError, match=r"need contiguous \(20,\) of int32"):
        build_document_index(np.arange(10), 2, RandomState(1), True, out=out)


def test_int64_numbers_are_taken_when_int32_holds_them() -> None:
    index = build_document_index(np.array([2**31 - 1]), 2, RandomState(0), False)
    assert index.tolist() == [2**31 - 1] * 2


@pytest.mark.parametrize(
    ("documents", "num_epochs", "message"),
    [
        (np.array([0, 2**31]), 1, "numbers from 0 to 2147483648, need 0 to 2147483647"),
        (np.array([0, 2**32], np.uint64), 1, "to 4294967296"),
        (np.array([-1, 0], np.int32), 1, "numbers from -1 to 0"),
        (np.array([0.5]), 1, "1-D float64, need 1-D integers"),
        (np.array([[1]]), 1, "2-D int64"),
        (np.array([1]), 0, "0 epochs, need at least 1"),
    ],
)
def test_invalid_document_numbers_are_errors(documents: np.ndarray, num_epochs: int, message: str) -> None:
    with pytest.raises(IndexBuildError, match=message):
        build_document_index(documents, num_epochs, RandomState(0), False)
