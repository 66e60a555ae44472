"""The samples of masked datasets against Megatron's C++."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.errors import IndexBuildError
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.masked_samples import (
    build_blocks_mapping,
    build_mapping,
    build_masked_sample_index,
    plan_mapping,
    short_ratio,
)
from binidx.native.mappings import MaskedDocuments, shuffle_mapping_rows

FEW = 2**31 - 2
MANY = 10**15


def random_documents(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Bounds and lengths: empty documents, single sentences, empty and long sentences among them."""
    sentences = rng.integers(0, rng.choice([2, 4, 30]), rng.integers(1, rng.choice([3, 60])))
    docs = np.cumsum([rng.integers(3), *sentences])
    sizes = rng.integers(0, rng.choice([3, 40, 300]), docs[-1] + rng.integers(3)).astype(np.int32)
    sizes[rng.random(len(sizes)) < rng.choice([0, 0.02])] = rng.choice([512, 513, 2000])
    return docs, sizes


def assert_same(found: np.ndarray, needed: np.ndarray) -> None:
    assert found.dtype == needed.dtype
    assert found.shape == needed.shape
    assert (found == needed).all()


def test_mappings_are_megatrons() -> None:
    rng = np.random.default_rng(0)
    rows = 0
    for _ in range(4000):
        docs, sizes = random_documents(rng)
        epochs, samples = (int(rng.integers(1, 5)), MANY) if rng.integers(2) else (FEW, int(rng.integers(1, 300)))
        probability = float(rng.choice([0.0, 1.0, 0.1, 0.4, 0.3, 1e-3, rng.random()]))
        if epochs == FEW and build_mapping(docs, sizes, 1, MANY, 9, 0.0, 1, False, 1).size == 0:
            continue  # Megatron goes through 2^31 epochs
        least = int(rng.integers(1, 4))
        if epochs == FEW and build_mapping(docs, sizes, 1, MANY, 9, 0.0, 1, False, least).size == 0:
            continue
        seed = int(rng.choice([0, 1, 1234, 2**31 - 2, -5, rng.integers(2**31 - 1)]))
        args = (docs, sizes, epochs, samples, int(rng.integers(2, 600)), probability, seed, False, least)
        needed = megatron.helpers.build_mapping(*args)
        assert_same(build_mapping(*args), needed)
        rows += len(needed)
    assert rows > 100_000


def test_blocks_are_megatrons() -> None:
    rng = np.random.default_rng(1)
    rows = 0
    for _ in range(2000):
        docs, sizes = random_documents(rng)
        titles = rng.integers(0, 50, len(docs) - 1).astype(np.int32)
        epochs = int(rng.integers(1, 5))
        args = (epochs, int(rng.integers(1, 300)), int(rng.integers(2, 600)), int(rng.integers(2**31 - 1)), False)
        one = bool(rng.integers(2))
        needed = megatron.helpers.build_blocks_mapping(docs, sizes, titles, *args, one)
        assert_same(build_blocks_mapping(docs, sizes, titles, *args, one), needed)
        rows += len(needed)
    assert rows > 20_000


def test_verbose_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    docs, sizes = np.array([0, 0, 1, 3, 5]), np.array([5, 6, 600, 7, 8], np.int32)
    found = build_mapping(docs, sizes, 1, MANY, 128, 0.1, 5, True, 2)
    assert capsys.readouterr().out == ""
    assert_same(found, build_mapping(docs, sizes, 1, MANY, 128, 0.1, 5, False, 2))
    assert_same(found, megatron.helpers.build_mapping(docs, sizes, 1, MANY, 128, 0.1, 5, True, 2))


def test_beyond_32_bits_of_sequences_the_same_rows_are_uint64() -> None:
    rng = np.random.default_rng(2)
    docs, sizes = random_documents(rng)
    documents = MaskedDocuments(docs, sizes, sequence_length=64, least=1, short_ratio=3)
    made, epochs = documents.count(7, 2, MANY)
    narrow, wide = np.empty((made, 3), np.uint32), np.empty((made, 3), np.uint64)
    for rows in (narrow, wide):
        documents.fill(rows, 7, epochs)
        shuffle_mapping_rows(rows, 8)
    assert (narrow == wide).all()
    documents.c.num_sequences = 2**32
    assert plan_mapping(documents, 7, None).dtype == np.uint64
    with pytest.raises(TypeError, match="needs uint64 for 4294967296 sequences"):
        documents.fill(narrow, 7, epochs)


def test_lengths_and_bounds_may_be_unaligned_as_in_an_idx() -> None:
    rng = np.random.default_rng(3)
    docs, sizes = random_documents(rng)
    raw = [np.frombuffer(b"xx" + array.tobytes(), array.dtype, offset=2) for array in (docs, sizes)]
    found = [MaskedDocuments(*arrays, sequence_length=50, least=1).count(1, 1, MANY) for arrays in (raw, (docs, sizes))]
    assert found[0] == found[1]


def planned(num_samples: int | None, sizes: list[int], docs: list[int], **options: Any) -> Any:
    documents = MaskedDocuments(
        np.array(docs), np.array(sizes, np.int32), **{"sequence_length": 10, "least": 1, **options}
    )
    return plan_mapping(documents, 3, num_samples)


def test_without_a_number_of_samples_there_is_one_epoch() -> None:
    plan = planned(None, [5] * 12, [0, 6, 12])
    assert (plan.num_epochs, plan.num_samples) == (1, 6)
    writer = ArrayWriter()
    build_masked_sample_index(writer, plan)
    assert sorted(writer.arrays["sample_index"][:, 0].tolist()) == [0, 2, 4, 6, 8, 10]


def test_epochs_are_whole() -> None:
    assert planned(7, [5] * 12, [0, 6, 12]).num_samples == 12
    assert planned(6, [5] * 12, [0, 6, 12]).num_samples == 6
    assert planned(0, [5] * 12, [0, 6, 12]).num_samples == 0


def test_samples_requested_of_documents_without_any_are_an_error_and_no_endless_loop() -> None:
    with pytest.raises(IndexBuildError, match=r"found 0 samples in 2 documents, need 1: .* 2 or more sequences"):
        planned(1, [5, 5], [0, 1, 2], least=2)
    assert planned(None, [5, 5], [0, 1, 2], least=2).num_samples == 0


@pytest.mark.parametrize("bounds", [[0, 3, 2], [-1, 2], [0, 13]])
def test_bounds_that_fall_or_leave_the_sequences_are_an_error(bounds: list[int]) -> None:
    with pytest.raises(IndexBuildError, match=r"document \d: sequences -?\d+ to \d+, needs bounds that rise within 12"):
        planned(None, [5] * 12, bounds)


def test_bounds_that_change_under_the_reader_are_an_error() -> None:
    docs, sizes = np.array([0, 6, 12]), np.full(12, 5, np.int32)
    documents = MaskedDocuments(docs, sizes, sequence_length=10, least=1)
    rows = np.empty((documents.count(1, 1, MANY)[0], 3), np.uint32)
    for changed in ([0, 6, 13], [0, 6, 6]):
        docs[:] = changed
        with pytest.raises(IndexBuildError, match="changed while they were read"):
            documents.fill(rows, 1, 1)
    docs[:] = [0, 6, 12]
    sizes[:] = 100
    with pytest.raises(IndexBuildError, match="changed while they were read"):
        documents.fill(rows, 1, 1)


def test_a_ratio_is_rounded_as_c_does() -> None:
    assert [short_ratio(p) for p in (0, 0.4, 0.1, 1.0, 2 / 3, 5e-324)] == [0, 3, 10, 1, 2, 2**52]


def test_arguments_out_of_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match="sequence_length: 1"):
        planned(None, [5], [0, 1], sequence_length=1)
    with pytest.raises(ValueError, match="least: 0"):
        planned(None, [5], [0, 1], least=0)
    with pytest.raises(ValueError, match="titles: 0, needs one for each of 1"):
        planned(None, [5], [0, 1], titles=np.empty(0, np.int32))
    with pytest.raises(TypeError, match="needs 12, 16, 24 or 32"):
        shuffle_mapping_rows(np.zeros((3, 2), np.uint32), 1)
    with pytest.raises(TypeError, match="rows: int64"):
        MaskedDocuments(np.array([0, 1]), np.array([5], np.int32), sequence_length=9, least=1).fill(
            np.empty((1, 3), np.int64), 1, 1
        )


@pytest.mark.parametrize("num_samples", [2**53 - 1, 2**53 - 2, 2**53, 2**60])
def test_fewer_than_two_to_the_53_samples_are_counted(num_samples: int) -> None:
    """Two samples an epoch: numbers of samples below the limit are exact, from it on they are refused."""
    sizes = np.full(4, 5, np.int32)
    documents = MaskedDocuments(np.array([0, 2, 4]), sizes, sequence_length=9, least=1)
    assert documents.count(1, 1, 10) == (2, 1)
    epochs = num_samples // 2
    if 2 * epochs < 2**53:
        assert documents.count(1, epochs, 2**53 - 1) == (2 * epochs, epochs)
    else:
        with pytest.raises(IndexBuildError, match=f"{2**52} epochs of samples, needs less than 2\\*\\*53 samples"):
            documents.count(1, min(epochs, 2**53 - 1), 2**53 - 1)
