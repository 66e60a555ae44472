"""Megatron Core's own classes over our readers, and its builder over our datasets."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Bucket
from helpers.gpt_data import TOKENIZER, assert_same_sample, random_lengths, write_with_megatron
from helpers.oracle import megatron
from hypothesis import given, settings
from hypothesis import strategies as st

import binidx
from binidx.compat.megatron import (
    blended_megatron_dataset_builder,
    gpt_dataset,
    helpers,
    indexed_dataset,
    object_storage_utils,
    utils,
)
from binidx.errors import ConfigError, FormatError, ObjectNotFoundError

RESETS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    """Megatron's blends ask for their rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


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
    ours, theirs = helpers.build_sample_idx(*arguments), megatron.helpers.build_sample_idx(*arguments)
    assert ours.dtype == theirs.dtype
    assert (ours == theirs).all()
    wide = helpers.build_sample_idx_int64(*arguments)
    assert wide.dtype == np.int64
    assert (wide == theirs).all()

    shares, counts = rng.random(5) + 0.01, rng.integers(1, 20, 5).tolist()
    for size, call in (
        (200, lambda lib, a, b: lib.build_blending_indices(a, b, [*(shares / shares.sum())], 5, 200, False)),
        (sum(counts), lambda lib, a, b: lib.build_exhaustive_blending_indices(a, b, counts, 5)),
    ):
        found = [(np.zeros(size, np.int16), np.zeros(size, np.int64)) for _ in range(2)]
        for lib, pair in zip((helpers, megatron.helpers), found, strict=True):
            call(lib, *pair)
        assert all((a == b).all() for a, b in zip(*found, strict=True))


@pytest.mark.usefixtures("quiet")
@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.booleans())
def test_orders_drawn_from_numpys_generator_are_megatrons(seed: int, epochs: int, separate: bool) -> None:
    found = []
    for lib in (gpt_dataset, megatron.gpt):
        rng = np.random.RandomState(seed)
        documents = lib._build_document_index(np.arange(7, 40), epochs, rng, separate)
        found.append([documents, lib._build_shuffle_index(20, 33, rng), lib._build_shuffle_index(33, 33, rng)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours == theirs).all()


def test_shares_of_a_blend_are_megatrons() -> None:
    for surplus in (0.0, 0.005, 0.3):
        for weights in ([0.1, 0.9], [1 / 3, 1 / 3, 1 / 3], [0.07, 0.93]):
            arguments = megatron.utils.normalize(weights), [1000, 33, 0], surplus
            ours = blended_megatron_dataset_builder._get_size_per_split_per_dataset(*arguments)
            assert ours == megatron.builder._get_size_per_split_per_dataset(*arguments)


def test_an_index_is_read_and_written_by_its_private_classes(prefix: str, remote: str, tmp_path: Path) -> None:
    ours, theirs = (
        indexed_dataset._IndexReader(remote + ".idx", False),
        megatron.indexed._IndexReader(prefix + ".idx", False),
    )
    assert (len(ours), ours.dtype, ours.dtype_size) == (len(theirs), theirs.dtype, theirs.dtype_size)
    assert (ours.sequence_count, ours.document_count) == (theirs.sequence_count, theirs.document_count)
    assert [ours[i] for i in range(len(ours))] == [theirs[i] for i in range(len(theirs))]
    for lib in (indexed_dataset, megatron.indexed):
        with lib._IndexWriter(str(tmp_path / lib.__name__), np.int32) as writer:
            writer.write([3, 0, 5], [0, 1, 0], [0, 2, 3])
    written = [(tmp_path / lib.__name__).read_bytes() for lib in (indexed_dataset, megatron.indexed)]
    assert written[0] == written[1]
    assert struct.unpack_from("<Q", written[0], 18) == (3,)


def test_bytes_are_read_by_its_private_readers(prefix: str, remote: str) -> None:
    storage = object_storage_utils.ObjectStorageConfig("/unused")
    theirs = megatron.indexed._MMapBinReader(prefix + ".bin")  # named: what it read dies with it, and the process too
    expected = theirs.read(np.uint16, 20, 6)
    readers = [
        indexed_dataset._MMapBinReader(prefix + ".bin"),
        indexed_dataset._FileBinReader(prefix + ".bin"),
        indexed_dataset.OBJECT_STORAGE_BIN_READERS["s3"](remote + ".bin", storage),
    ]
    for reader in readers:
        assert (reader.read(dtype=np.uint16, count=20, offset=6) == expected).all()


def test_a_datasets_documents_can_be_set_as_megatron_has_it(prefix: str) -> None:
    ours, theirs = indexed_dataset.IndexedDataset(prefix), megatron.indexed.IndexedDataset(prefix)
    before = ours.identity
    for dataset in (ours, theirs):
        dataset.set_document_indices(dataset.get_document_indices()[::2])
    assert (ours.document_indices == theirs.document_indices).all()
    assert ours.identity != before
    assert (ours[5] == theirs[5]).all()


def test_paths_in_stores_are_taken_apart_as_megatron_does(remote: str, tmp_path: Path) -> None:
    from megatron.core.datasets import object_storage_utils as theirs

    ours, config = object_storage_utils, object_storage_utils.ObjectStorageConfig("/cache")
    for path in ("s3://bucket/a/b", "s3://bucket", "msc://profile/a.idx", "/local/s3://x", "gs://bucket/a"):
        assert ours.is_object_storage_path(path) == theirs.is_object_storage_path(path)
        if path.startswith("s3://"):
            assert ours.parse_s3_path(path) == theirs.parse_s3_path(path)
        if ours.is_object_storage_path(path):
            assert ours.get_object_storage_access(path) == theirs.get_object_storage_access(path)
            assert ours.get_index_cache_path(path, config) == theirs.get_index_cache_path(path, config)
    with pytest.raises(ConfigError, match="must begin with"):
        ours.get_index_cache_path("gs://bucket/a", config)
    ours.cache_index_file(remote + ".idx", str(tmp_path / "deep" / "en.idx"))
    assert (tmp_path / "deep" / "en.idx").stat().st_size == 34 + 12 * 80 + 8 * 81
    assert ours.dataset_exists(remote, remote + ".idx", remote + ".bin")
    assert not ours.dataset_exists(remote + "x", remote + "x.idx", remote + "x.bin")


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
