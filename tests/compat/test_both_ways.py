"""Megatron Core's own classes over our readers, and its builder over our datasets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample, random_lengths, write_with_megatron
from helpers.oracle import megatron
from hypothesis import given, settings
from hypothesis import strategies as st

import binidx
from binidx.compat.megatron import (
    blended_megatron_dataset_builder,
    gpt_dataset,
    helpers_cpp,
    indexed_dataset,
    utils,
)
from binidx.errors import ConfigError, FormatError, ObjectNotFoundError

RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    rng = np.random.default_rng(6)
    return write_with_megatron(tmp_path_factory.mktemp("corpus") / "en", rng.integers(0, 40, 80).astype(np.int32), rng)


@pytest.fixture(scope="module")
def remote(s3: Bucket, prefix: str) -> str:
    uri = f"{s3.fresh()}/en"
    with indexed_dataset.IndexedDatasetBuilder(uri + ".bin", dtype=np.uint16) as builder:
        builder.add_index(prefix)
        builder.finalize(uri + ".idx")
    return uri


@pytest.fixture
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def options(prefix: str, **more: Any) -> dict[str, Any]:
    return {
        "random_seed": 5, "sequence_length": 12, "blend": ([prefix], None), "split": "8,2,0", "tokenizer": TOKENIZER,
        **RESETS, **more,
    }  # fmt: skip


def test_megatrons_gpt_dataset_reads_s3_through_our_indexed_dataset(prefix: str, remote: str, tmp_path: Path) -> None:
    class Through(megatron.gpt.GPTDataset):
        @staticmethod
        def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
            return indexed_dataset.IndexedDataset(dataset_path, mmap=False)

    build = megatron.builder.BlendedMegatronDatasetBuilder
    config = megatron.gpt.GPTDatasetConfig(**options(remote), path_to_cache=str(tmp_path / "a"))
    ours, _, _ = build(Through, [40, 5, 0], lambda: True, config).build()
    config = megatron.gpt.GPTDatasetConfig(**options(prefix), path_to_cache=str(tmp_path / "b"))
    theirs, _, _ = build(megatron.gpt.GPTDataset, [40, 5, 0], lambda: True, config).build()
    for number in range(len(theirs)):
        assert_same_sample(ours[number], theirs[number])


def test_megatrons_builder_and_blend_take_our_datasets(prefix: str, remote: str, tmp_path: Path) -> None:
    made = []
    for kind, each in ((gpt_dataset, remote), (megatron.gpt, prefix)):
        blend = {"blend": ([each, each], [0.2, 0.8]), "path_to_cache": str(tmp_path / kind.__name__)}
        config = kind.GPTDatasetConfig(**options(each, **blend))
        build = megatron.builder.BlendedMegatronDatasetBuilder(kind.GPTDataset, [30, 5, 0], lambda: True, config)
        made.append(build.build())
    for ours, theirs in zip(*(each[:2] for each in made), strict=True):
        assert type(ours) is megatron.blended.BlendedDataset
        assert [*ours.dataset_index] == [*theirs.dataset_index]
        for number in range(len(theirs)):
            assert_same_sample(ours[number], theirs[number])


def test_one_dataset_is_built_by_the_builders_parts_as_scripts_do(prefix: str) -> None:
    config = gpt_dataset.GPTDatasetConfig(**options(prefix))
    builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder(
        gpt_dataset.GPTDataset, [20, 4, 0], lambda: True, config
    )
    [train, valid, test] = builder._build_megatron_dataset_splits(prefix, config.split_matrix, [20, 4, 0])
    [whole, *_] = builder._build_blended_dataset_splits()
    assert test is None
    assert len(valid) >= 4
    low_level = gpt_dataset.GPTDataset.build_low_level_dataset(prefix, config)
    alone = builder.build_generic_dataset(
        gpt_dataset.GPTDataset, lambda: True, True, low_level, prefix, train.indices, 20, utils.Split.train, config
    )
    for number in range(20):
        assert_same_sample(alone[number], train[number])
        assert_same_sample(whole[number], train[number])


@pytest.mark.usefixtures("quiet")
@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.booleans())
def test_helpers_give_megatrons_arrays(seed: int, drop: bool, extra: bool) -> None:
    rng = np.random.default_rng(seed)
    sizes = random_lengths(rng, 30) + 1
    documents = np.tile(np.arange(30, dtype=np.int32), 2)
    rng.shuffle(documents)
    arguments = sizes, documents, int(rng.integers(1, 30)), 2, int(sizes.sum()), drop, extra
    ours, theirs = helpers_cpp.build_sample_idx_int32(*arguments), megatron.helpers.build_sample_idx(*arguments)
    assert ours.dtype == theirs.dtype
    assert (ours == theirs).all()
    wide = helpers_cpp.build_sample_idx_int64(*arguments)
    assert wide.dtype == np.int64
    assert (wide == theirs).all()

    shares, counts = rng.random(5) + 0.01, rng.integers(1, 20, 5).tolist()
    for size, call in (
        (200, lambda lib, a, b: lib.build_blending_indices(a, b, [*(shares / shares.sum())], 5, 200, False)),
        (sum(counts), lambda lib, a, b: lib.build_exhaustive_blending_indices(a, b, counts, 5)),
    ):
        found = [(np.zeros(size, np.int16), np.zeros(size, np.int64)) for _ in range(2)]
        for lib, pair in zip((helpers_cpp, megatron.helpers), found, strict=True):
            call(lib, *pair)
        assert all((a == b).all() for a, b in zip(*found, strict=True))


def test_an_index_is_read_by_its_private_class(prefix: str, remote: str) -> None:
    ours, theirs = (
        indexed_dataset._IndexReader(remote + ".idx", False),
        megatron.indexed._IndexReader(prefix + ".idx", False),
    )
    assert (len(ours), ours.dtype, ours.dtype_size) == (len(theirs), theirs.dtype, theirs.dtype_size)
    assert (ours.sequence_count, ours.document_count) == (theirs.sequence_count, theirs.document_count)
    assert [ours[i] for i in range(len(ours))] == [theirs[i] for i in range(len(theirs))]


def test_a_datasets_documents_can_be_set_as_megatron_has_it(prefix: str) -> None:
    ours, theirs = indexed_dataset.IndexedDataset(prefix), megatron.indexed.IndexedDataset(prefix)
    before = ours.identity
    for dataset in (ours, theirs):
        dataset.set_document_indices(dataset.get_document_indices()[::2])
    assert (ours.document_indices == theirs.document_indices).all()
    assert ours.identity != before
    assert (ours[5] == theirs[5]).all()


def test_failures_say_what_is_wrong_and_are_the_builtins_too(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ObjectNotFoundError):
        indexed_dataset.IndexedDataset(str(tmp_path / "not-there"))
    config = gpt_dataset.GPTDatasetConfig(**{**options(prefix), "blend": None})
    build = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
    with pytest.raises(ConfigError, match="for made-up tokens build MockGPTDataset"):
        build(gpt_dataset.GPTDataset, [1, 1, 1], lambda: True, config).build()
    with (
        pytest.raises(FormatError),
        indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "b.bin"), np.uint16) as builder,
    ):
        builder.add_document([70000], [1])
    with pytest.raises(NotImplementedError, match="neither __getitem__ nor spans"):
        Bare(None, None, np.arange(3), 1, binidx.Split.train, config)[0]


class Bare(gpt_dataset.MegatronDataset):
    def __len__(self) -> int:
        return 3
