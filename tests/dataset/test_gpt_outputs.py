"""What GPT samples can be besides: with the bounds of their documents, and as tokens alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, assert_same_sample, random_lengths, write_with_megatron
from helpers.inter_document_masking import InterDocumentDataset
from helpers.oracle import megatron
from helpers.seeds import seeds
from torch.utils.data import default_collate

import binidx
from binidx.dataset.config import split_indices
from binidx.errors import ConfigError
from binidx.loader.collate import collate
from binidx.run.run_file import SavedTokenizer

FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask",
         "add_extra_token_to_sequence", "drop_last_partial_validation_sequence")  # fmt: skip
DTYPES = (np.uint8, np.int16, np.int32, np.int64, np.uint16)


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    flags = {flag: bool(rng.integers(2)) for flag in FLAGS}
    length = int(rng.choice([1, 2, 3, 8, 17, 64]))
    return {"random_seed": 3, "sequence_length": length, "split": "0,1,0", "tokenizer": TOKENIZER, **flags}


def ours_of(prefix: str, **config: Any) -> Any:
    made = binidx.GPTDatasetConfig(blend=([prefix], None), path_to_cache="memory://outputs", **config)
    low_level = binidx.IndexedDataset(prefix, mmap=made.mmap_bin_files)
    return binidx.GPTDataset(low_level, prefix, all_of(prefix), None, binidx.Split.valid, made)


def theirs_of(prefix: str, **config: Any) -> Any:
    made = megatron.gpt.GPTDatasetConfig(blend=([prefix], None), **config)
    low_level = megatron.indexed.IndexedDataset(prefix)
    split = megatron.utils.Split.valid
    dataset = InterDocumentDataset(low_level, prefix, all_of(prefix), None, split, made)
    dataset.masks_and_position_ids_are_cacheable = False
    return dataset


def all_of(prefix: str) -> Any:
    return split_indices((0.0, 1.0), len(binidx.IndexedDataset(prefix)))


@pytest.mark.parametrize("seed", seeds(10, 30))
def test_bounds_of_documents_are_megatrons(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, int(rng.choice([2, 5, 40])))
    lengths[-1] += 1  # at least one token, or Megatron cannot open it
    prefix = write_with_megatron(tmp_path / "en", lengths, rng, DTYPES[seed % len(DTYPES)])
    compared = 0
    for case in range(10):
        config = random_config(rng)
        if lengths.sum() <= config["add_extra_token_to_sequence"]:
            continue
        ours = ours_of(prefix, inter_document_masking=True, **config)
        try:
            theirs = theirs_of(prefix, path_to_cache=f"{tmp_path}/{case}", **config)
        except AssertionError:  # an empty document comes last
            assert lengths[ours.document_index[-1]] == 0
            continue
        assert len(ours) == len(theirs)
        for idx in [*range(min(len(ours), 12)), len(ours) - 1, None] if len(ours) else []:
            try:
                needed = theirs[idx]
            except RuntimeError:  # more documents, empty ones among them, than the row has room for
                assert (lengths == 0).any() or not config["add_extra_token_to_sequence"]
                continue
            assert_same_sample(ours[idx], needed)
            compared += 1
    assert compared or (lengths == 0).any()


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
def test_a_batch_with_bounds_is_its_samples_stacked(mmap: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prefix = write_with_megatron(tmp_path / "en", rng.integers(0, 30, 100).astype(np.int32), rng)
    flags = dict.fromkeys(FLAGS, True)
    config = {"random_seed": 3, "sequence_length": 24, "split": "0,1,0", "tokenizer": TOKENIZER, **flags}
    ours = ours_of(prefix, inter_document_masking=True, mmap_bin_files=mmap, **config)
    theirs = theirs_of(prefix, path_to_cache=f"{tmp_path}/cache", **config)
    needed = default_collate([theirs[idx] for idx in range(9)])
    assert needed["cu_seqlens"].shape == (9, 25)
    assert_same_sample(collate(ours.__getitems__(range(9))), needed)


def test_bounds_of_a_blend_are_those_of_its_datasets(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lengths = [rng.integers(0, 30, 100).astype(np.int32) for _ in range(2)]
    prefixes = [write_with_megatron(tmp_path / f"s{i}", each, rng) for i, each in enumerate(lengths)]
    blend = binidx.BlendedMegatronDatasetBuilder(
        binidx.GPTDataset, [40, 0, 0], lambda: True,
        binidx.GPTDatasetConfig(
            random_seed=1, sequence_length=24, blend=(prefixes, [1.0, 1.0]), split="1,0,0", tokenizer=TOKENIZER,
            reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, inter_document_masking=True,
        ),
    ).build()[0]  # fmt: skip
    batch = collate(blend.__getitems__(range(16)))
    for row, (source, number) in enumerate(zip(blend.dataset_index, blend.dataset_sample_index[:16], strict=False)):
        sample = blend.datasets[source][int(number)]
        assert_same_sample({name: batch[name][row] for name in sample}, sample)
    text = blend.read_tokens(range(16))
    np.testing.assert_array_equal(text[:, :-1], batch["tokens"].numpy())
    np.testing.assert_array_equal(text[:, 1:], batch["labels"].numpy())


@pytest.mark.parametrize("mmap", [True, False], ids=["mapped", "read"])
@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.uint16])
def test_tokens_alone_are_those_of_the_samples_with_pads_as_they_are(
    dtype: Any, extra: bool, mmap: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", dtype=dtype) as builder:
        for length in rng.integers(0, 20, 60):
            builder.add_document(rng.integers(1, 100, length).astype(dtype), [length])
        builder.finalize(f"{tmp_path}/en.idx")
    config = dict.fromkeys(FLAGS, False) | {"add_extra_token_to_sequence": extra}
    ours = ours_of(f"{tmp_path}/en", random_seed=3, sequence_length=16, split="0,1,0", tokenizer=TOKENIZER,
                   mmap_bin_files=mmap, **config)  # fmt: skip
    text, samples = ours.read_tokens(range(len(ours))), collate(ours.__getitems__(range(len(ours))))
    assert text.dtype == np.int32
    assert text.shape == (len(ours), 17)
    tokens, labels = text[:, :-1], text[:, 1:]
    np.testing.assert_array_equal(np.where(tokens == TOKENIZER.pad, 0, tokens), samples["tokens"])
    np.testing.assert_array_equal(np.where(labels == TOKENIZER.pad, 0, labels), samples["labels"])
    np.testing.assert_array_equal(labels != TOKENIZER.pad, samples["loss_mask"] != 0)
    assert (labels == TOKENIZER.pad).sum(axis=1).max() > 1 or (not extra and (labels[:, -1] == TOKENIZER.pad).all())
    assert ours.read_tokens([]).shape == (0, 17)


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_tokens_that_int32_may_not_hold_are_refused(dtype: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prefix = write_with_megatron(tmp_path / "en", np.full(9, 9, np.int32), rng, dtype)
    ours = ours_of(prefix, random_seed=3, sequence_length=4, split="0,1,0", tokenizer=TOKENIZER,
                   **dict.fromkeys(FLAGS, False))  # fmt: skip
    with pytest.raises(ConfigError, match=rf"en: tokens do not fit int32 .found {np.dtype(dtype).name}"):
        ours.read_tokens([0])


@pytest.mark.parametrize("option", ["eod_mask_loss", "reset_position_ids"])
def test_a_tokenizer_without_eod_is_refused_where_samples_depend_on_it(option: str, tmp_path: Path) -> None:
    prefix = write_with_megatron(tmp_path / "en", np.full(40, 30, np.int32), np.random.default_rng(0))
    asked = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, option: True}
    nothing = SavedTokenizer({"class": "none"})
    dataset = ours_of(prefix, random_seed=1, sequence_length=16, split="0,1,0", tokenizer=nothing, **asked)
    with pytest.raises(ConfigError, match=r"SavedTokenizer: has no eod, which eod_mask_loss, .* need"):
        _ = dataset[0]
