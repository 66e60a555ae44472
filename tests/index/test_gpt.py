"""The three indices of a GPT dataset: Megatron's, however they are built."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.oracle import megatron

from binidx.index import documents
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_files import IndexFiles
from binidx.index.document_sample import EpochPlan, count_tokens, plan_epochs
from binidx.index.gpt_indices import ARRAYS, build_gpt_index
from binidx.native.permutations import RandomState
from binidx.storage.location import Location

SEQUENCE_LENGTH = 64
LENGTHS = np.random.default_rng(0).integers(0, 30, 300_000).astype(np.int32)
LENGTHS[::40] *= 10  # longer than a sample
DOCUMENTS = range(1000, 290_000)
"""More than one window of documents, in which threads build."""


def plan_of(epochs: float) -> EpochPlan:
    tokens = count_tokens(LENGTHS, DOCUMENTS)
    asked = int(epochs * tokens / SEQUENCE_LENGTH)
    return plan_epochs(tokens, SEQUENCE_LENGTH, asked, add_extra_token=True, drop_last_partial=True)


def theirs(plan: EpochPlan, seed: int) -> dict[str, np.ndarray]:
    rng, exposed = np.random.RandomState(seed), np.array(DOCUMENTS, np.int32)
    index = megatron.gpt._build_document_index(exposed, plan.num_epochs, rng, plan.separate_final_epoch)
    arguments = (SEQUENCE_LENGTH, plan.num_epochs, plan.tokens_per_epoch, True, True)
    samples = megatron.helpers.build_sample_idx(LENGTHS, index, *arguments)
    first = plan.num_samples_sans_final_epoch if plan.separate_final_epoch else plan.num_samples
    return dict(
        zip(ARRAYS, (index, samples, megatron.gpt._build_shuffle_index(first, plan.num_samples, rng)), strict=True)
    )


def in_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    return b"".join(arrays[name].tobytes() for name in ARRAYS)


def ours(
    plan: EpochPlan,
    seed: int,
    directory: Path | None = None,
    given: Any = DOCUMENTS,
    threads: int = 1,
    **sizes: int,
) -> Any:
    place = ArrayWriter(directory and IndexFiles(Location.of(directory), "0f"), **sizes)
    build_gpt_index(place, LENGTHS, given, plan, RandomState(seed), SEQUENCE_LENGTH, threads=threads)
    return place.arrays


@pytest.mark.parametrize("shuffled_in_file", [2**30, 0])
@pytest.mark.parametrize("epochs", [0.5, 2.9, 3.1])
@pytest.mark.parametrize("threads", [1, 3])
def test_equal_megatrons_in_memory_and_in_files(
    shuffled_in_file: int, epochs: float, threads: int, tmp_path: Path
) -> None:
    plan = plan_of(epochs)
    needed = theirs(plan, 7)
    array = np.array(DOCUMENTS, np.int64)
    in_files = ours(plan, 7, tmp_path, threads=threads, shuffled_in_file=shuffled_in_file)
    for found in (ours(plan, 7, threads=threads), in_files, ours(plan, 7, None, array)):
        for name in ARRAYS:
            assert found[name].dtype == needed[name].dtype
            assert (found[name] == needed[name]).all()
    for name in ARRAYS:
        np.save(tmp_path / "saved.npy", needed[name])
        assert (tmp_path / f"0f-{name}.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()


@pytest.mark.parametrize("shuffled_in_file", [2**30, 0])
def test_two_builds_at_once_on_two_threads_each_give_the_same_bytes(shuffled_in_file: int, tmp_path: Path) -> None:
    plan = plan_of(2.9)

    def build(seed: int) -> bytes:
        directory = tmp_path / str(seed % 2)  # two builders write the same names at once, too
        return in_bytes(ours(plan, seed, directory, threads=2, shuffled_in_file=shuffled_in_file))

    needed = [in_bytes(theirs(plan, seed)) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(build, [0, 1, 2, 3] * 2)) == needed * 2


def test_a_range_is_its_numbers_without_their_memory() -> None:
    for numbers in (range(0), range(5, 9), range(3, 600_000), range(9, 1, -2)):
        array = np.empty(len(numbers), np.int32)
        documents.fill_numbers(array, numbers, 2)
        assert array.tolist() == [*numbers]
        assert documents.documents_digest(array.astype(np.int64)) == documents.documents_digest(numbers)
        assert documents.as_range(array) == (numbers if numbers.step == 1 and len(numbers) else pytest.approx(array))


@pytest.mark.parametrize("changed", [0, 1, 300_000, 599_999])
def test_numbers_with_one_exception_are_no_range(changed: int) -> None:
    array = np.arange(600_000, dtype=np.int32)
    array[changed] += 1
    assert documents.as_range(array) is array
