"""The shuffle index against Megatron's."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index.document_sample import build_document_index, shuffle_dtype
from binidx.index.documents import WINDOW
from binidx.index.gpt_indices import build_shuffle_index
from binidx.native.permutations import RandomState


def test_equals_megatrons() -> None:
    rng = np.random.default_rng(4)
    for _ in range(1000):
        seed, total = int(rng.integers(2**32)), int(rng.integers(0, rng.choice([3, 30, 2000])))
        first = total if rng.integers(2) else int(rng.integers(0, total + 1))
        found = build_shuffle_index(first, total, RandomState(seed))
        needed = megatron.gpt._build_shuffle_index(first, total, np.random.RandomState(seed))
        assert found.dtype == needed.dtype == np.uint32
        assert (found == needed).all()


def test_one_generator_goes_from_the_document_index_to_the_shuffle_index() -> None:
    documents = np.arange(700, dtype=np.int32)
    for seed in [0, 1, 2**31, 2**32 - 1]:
        ours, theirs = RandomState(seed), np.random.RandomState(seed)
        build_document_index(documents, 3, ours, True)
        megatron.gpt._build_document_index(documents, 3, theirs, True)
        needed = megatron.gpt._build_shuffle_index(900, 1300, theirs)
        assert (build_shuffle_index(900, 1300, ours) == needed).all()


def test_the_dtype_changes_where_megatrons_does() -> None:
    assert [shuffle_dtype(total) for total in (0, 2**32 - 3, 2**32 - 2, 2**33)] == [
        np.uint32,
        np.uint32,
        np.int64,
        np.int64,
    ]


def test_is_built_in_the_file_it_ends_in(tmp_path: Path) -> None:
    out = np.lib.format.open_memmap(tmp_path / "shuffle_index.npy", "w+", np.uint32, (70_000,))
    needed = build_shuffle_index(69_000, 70_000, RandomState(1))
    assert build_shuffle_index(69_000, 70_000, RandomState(1), out=out) is out
    out.flush()
    assert (np.load(tmp_path / "shuffle_index.npy") == needed).all()


def test_nothing_larger_than_the_index_is_allocated() -> None:
    tracemalloc.start()
    index = build_shuffle_index(900_000, 1_000_000, RandomState(1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < index.nbytes + 20 * WINDOW


def test_refuses_an_out_of_another_dtype() -> None:
    with pytest.raises(IndexBuildError, match=r"shape \(10,\) of int32, need contiguous \(10,\) of uint32"):
        build_shuffle_index(5, 10, RandomState(0), out=np.zeros(10, np.int32))


@pytest.mark.parametrize(("first", "total"), [(-1, 5), (6, 5), (0, -1)])
def test_a_first_part_larger_than_the_whole_is_an_error(first: int, total: int) -> None:
    with pytest.raises(IndexBuildError, match=f"{first} of {total} samples, need 0 to all of them"):
        build_shuffle_index(first, total, RandomState(0))
