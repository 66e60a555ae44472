"""What Megatron-LM's own unit tests of its datasets ask, asked of ours in their place."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from binidx.compat.megatron.blended_dataset import BlendedDataset
from binidx.compat.megatron.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from binidx.compat.megatron.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from binidx.compat.megatron.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from binidx.compat.megatron.multimodal_dataset import MockMultimodalDataset, MultimodalDatasetConfig
from binidx.compat.megatron.utils import compile_helpers, get_blend_from_list
from binidx.errors import ConfigError, FormatError

ALL_RESET = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
NO_RESET = dict.fromkeys(ALL_RESET, False)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Megatron's own, which has no pad and raises at the question."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(metadata_path={"library": "null"}, vocab_size=8192)


def build(kind: Any, sizes: Any, config: Any) -> Any:
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()


def test_mock_gpt_dataset(tokenizer: Any) -> None:
    compile_helpers()
    options = {"random_seed": 1234, "sequence_length": 128, "tokenizer": tokenizer, **ALL_RESET}
    datasets = build(MockGPTDataset, [100, 100, 100], GPTDatasetConfig(**options, split="990,9,1"))
    firsts = [np.stack([dataset[i]["tokens"].numpy() for i in range(10)]) for dataset in datasets]
    for one, other in itertools.combinations(firsts, 2):
        assert not np.array_equal(one, other)
    assert np.array_equal(firsts[0], np.stack([datasets[0][i]["tokens"].numpy() for i in range(10)]))

    partial = {"drop_last_partial_validation_sequence": False, "add_extra_token_to_sequence": False}
    valid = build(MockGPTDataset, [0, None, 0], GPTDatasetConfig(**options, **partial, split="990,10,0"))[1]
    sample = valid[int(valid.shuffle_index.argmax())]
    last = sample["labels"].shape[0] - torch.flip(sample["labels"], [0]).argmax() - 1
    assert sample["tokens"][last] != tokenizer.eod
    assert sample["labels"][last] == tokenizer.eod
    assert last < sample["labels"].shape[0] - 1
    assert (sample["labels"][last + 1 :] == 0).all()
    assert not sample["loss_mask"][last + 1 :].any()
    assert not valid[None]["loss_mask"].any()


def test_mock_multimodal_dataset(tokenizer: Any) -> None:
    config = MultimodalDatasetConfig(
        random_seed=1234, sequence_length=64, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=True,
        image_h=33, image_w=36, split="990,9,1", tokenizer=tokenizer, mid_level_dataset_surplus=0.005,
    )  # fmt: skip
    for dataset in build(MockMultimodalDataset, [10, 10, 10], config):
        assert dataset[0]["image"].shape == torch.Size([3, 33, 36])
        assert "tokens" in dataset[0]


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("dataset"), np.random.default_rng(0)
    for name in range(10):
        builder = IndexedDatasetBuilder(f"{folder}/file_{name}.bin", dtype=DType.optimal_dtype(8192))
        for length in rng.integers(50, 100, rng.integers(10, 20)).tolist():
            builder.add_document([*map(str, rng.integers(0, 8192, length))], [length])
        builder.finalize(f"{folder}/file_{name}.idx")
    return [f"{folder}/file_{name}" for name in range(10)]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("surplus", [0.005, 0])
def test_fast_builder(weighted: bool, surplus: float, prefixes: list[str], tokenizer: Any, tmp_path: Path) -> None:
    def blend(names: list[str]) -> Any:
        pairs = [[str(weight), name] for weight, name in zip(range(10, 20), names, strict=False)]
        return get_blend_from_list([*itertools.chain(*pairs)] if weighted and len(names) > 1 else names)

    counts = {}
    for prefix in prefixes:
        index = IndexedDataset(prefix).index
        counts[prefix] = (index.sequence_count, index.document_count)
    options = {
        "random_seed": 1234, "sequence_length": 5, "path_to_cache": str(tmp_path), "tokenizer": tokenizer, **NO_RESET,
        "blend_per_split": [blend(prefixes[:6]), blend(prefixes[6:9]), blend(prefixes[9:])],
        "create_attention_mask": False, "mid_level_dataset_surplus": surplus,
    }  # fmt: skip
    slow = build(GPTDataset, [100, 10, 10], GPTDatasetConfig(**options))
    for fast_cache_load, defer, known in itertools.product([True, False], [True, False], [counts, None]):
        config = GPTDatasetConfig(
            **options, fast_cache_load=fast_cache_load, defer_npy_index_mmap=defer, sequences_per_dataset=known
        )
        for one, other in zip(slow, build(GPTDataset, [100, 10, 10], config), strict=True):
            assert len(one) == len(other)
            for number in (0, -1):
                assert torch.equal(one[number]["tokens"], other[number]["tokens"])
            pairs = zip(getattr(one, "datasets", [one]), getattr(other, "datasets", [other]), strict=True)
            if isinstance(one, BlendedDataset):
                assert np.array_equal(one.dataset_index, other.dataset_index)
                assert np.array_equal(one.dataset_sample_index, other.dataset_sample_index)
            for a, b in pairs:
                assert np.array_equal(a.document_index, b.document_index)
                assert np.array_equal(a.sample_index, b.sample_index)
                assert np.array_equal(a.shuffle_index, b.shuffle_index)
                assert np.array_equal(a.dataset.index.sequence_pointers, b.dataset.index.sequence_pointers)


@pytest.mark.parametrize("kind", [AssertionError, ConfigError])
def test_a_config_error_of_a_build_is_an_assertion_error(
    kind: type[Exception], prefixes: list[str], tokenizer: Any
) -> None:
    blends = [(prefixes[:2], [1.0, 2.0]), None, None]
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=5, tokenizer=tokenizer, blend_per_split=blends, **NO_RESET
    )  # fmt: skip
    with pytest.raises(kind, match="sizes: found None for train"):
        build(GPTDataset, [None, None, None], config)


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize(("count", "mmap"), [(0, False), (2, False), (2, True)])
def test_empty_indexed_dataset_slices(tmp_path: Path, multimodal: bool, count: int, mmap: bool) -> None:
    prefix = str(tmp_path / "data")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32, multimodal=multimodal)
    if count:
        builder.add_document([1, 2, 3], [1, 2], modes=[0, 1] if multimodal else None)
    builder.finalize(prefix + ".idx")
    dataset = IndexedDataset(prefix, multimodal=multimodal, mmap=mmap)
    for wanted in (slice(count, None), slice(count + 5, None), slice(1, 0), slice(0, 0)):
        sequences, modes = dataset[wanted] if multimodal else (dataset[wanted], np.array([], np.int8))
        assert sequences == []
        assert modes.tolist() == []
    with pytest.raises(ValueError, match="contiguous"):
        _ = dataset[::2]
    if multimodal:
        assert dataset.sequence_modes.tolist() == [0, 1][:count]


def test_a_multimodal_builder_lists_lengths_and_modes(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/mm.bin", dtype=np.int32, multimodal=True)
    builder.add_document(np.array([1, 2, 3, 4, 5], np.int32), [3, 2])
    builder.add_document(np.array([8], np.int32), [1], modes=[4])
    assert builder.sequence_lengths == [3, 2, 1]
    assert builder.sequence_modes == [0, 0, 4]
    builder.close()
    with pytest.raises(ValueError, match="the builder is closed"):
        _ = builder.sequence_lengths
    with IndexedDatasetBuilder(f"{tmp_path}/text.bin") as text:
        assert text.sequence_modes is None


@pytest.mark.parametrize("multimodal", [False, True])
@pytest.mark.parametrize("eod_token", [None, 7])
def test_documents_of_an_awkward_array(multimodal: bool, eod_token: int | None, tmp_path: Path) -> None:
    ak = pytest.importorskip("awkward")
    documents, modes = [[1, 2, 3], [], [4], [5, 6]], [1, 0, 2, 3] if multimodal else None
    one, other = f"{tmp_path}/one", f"{tmp_path}/other"
    for prefix in (one, other):
        with IndexedDatasetBuilder(prefix + ".bin", np.uint16, multimodal) as builder:
            builder.add_item([9])  # belongs to the first document of the array, as in Megatron
            if prefix == one:
                builder.add_documents(ak.Array(documents), modes, eod_token, chunk_size=3)
            else:
                for place, document in enumerate(documents):
                    tokens = document + ([] if eod_token is None else [eod_token])
                    builder.add_document(tokens, [len(tokens)], modes and modes[place : place + 1])
            builder.add_documents(ak.Array([]))
            builder.finalize(prefix + ".idx")
    for suffix in (".bin", ".idx"):
        assert Path(one + suffix).read_bytes() == Path(other + suffix).read_bytes()


def test_an_awkward_array_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    ak = pytest.importorskip("awkward")
    with IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.uint16) as builder:
        with pytest.raises(FormatError, match="token 70000 at position 1, uint16 holds"):
            builder.add_documents(ak.Array([[1], [70000]]))
        with pytest.raises(FormatError, match="token 65536 at position 0, uint16 holds"):
            builder.add_documents(ak.Array([[1], [2]]), eod_token=65536)
        with pytest.raises(FormatError, match="1 modes, needed one for each of 2 documents"):
            builder.add_documents(ak.Array([[1], [2]]), [0])


def test_a_script_of_another_version_says_the_same_by_other_names(tokenizer: Any) -> None:
    options = {"random_seed": 1, "sequence_length": 8, "tokenizer": tokenizer, **NO_RESET}
    older = GPTDatasetConfig(**options, s3_cache_path="/cache")
    assert older.object_storage_cache_path == "/cache"
    newer = GPTDatasetConfig(**options, dynamic_context_parallel=True, context_parallel_size=2, data_parallel_size=2)
    assert newer.hybrid_context_parallel
    assert newer.padding_multiple == 8
    made_up = GPTDatasetConfig(**options, sft_mock_dataset_config_json="{}")  # for Megatron's MockSFTDataset
    assert made_up.sft_mock_dataset_config_json == "{}"
    with pytest.raises(TypeError, match="goldfish_loss"):  # of a fork, whose change to the samples would be lost
        GPTDatasetConfig(**options, goldfish_loss=True)
