"""GPTDataset against Megatron Core's: arrays, identities, and samples key by key, over random configs."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.gpt_data import TOKENIZER, Tokenizer, assert_same_sample, random_lengths, write_with_megatron
from helpers.oracle import megatron
from helpers.seeds import seeds

import binidx
from binidx.dataset.config import split_indices
from binidx.errors import IndexBuildError
from binidx.index import documents
from binidx.order import gpt_order

SEEDS = [0, 1, 1234, 2**31 - 1, 2**31, 2**32 - 1]
ARRAYS = ("document_index", "sample_index", "shuffle_index")
CONFIGS_PER_DATASET = 40


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask",
             "add_extra_token_to_sequence", "drop_last_partial_validation_sequence")  # fmt: skip
    return {
        "random_seed": int(rng.choice(SEEDS)),
        "sequence_length": int(rng.choice([2, 3, 8, 17, 64])),
        "split": str(rng.choice(["1,1,1", "98,1,1", "969, 30, 1", "1,0,0", "0,1,0", "5,4,1"])),
        **{flag: bool(rng.integers(2)) for flag in flags},
        "tokenizer": TOKENIZER,
    }


def random_num_samples(rng: np.random.Generator, tokens: int, sequence_length: int) -> int | None:
    """None, a few, about an epoch, or several epochs: with and without a separate last one."""
    per_epoch = tokens / sequence_length
    return [None, 1, *(int(per_epoch * epochs) for epochs in (1, rng.random() * 2, rng.random() * 6))][rng.integers(5)]


def both(prefix: str, split: binidx.Split, num_samples: int | None, config: dict[str, Any], cache: str) -> Any:
    """The dataset of one split, ours and Megatron's (None where an empty last document trips its own assertion)."""
    ours_config = binidx.GPTDatasetConfig(blend=([prefix], None), path_to_cache=f"memory://{cache}", **config)
    low_level = binidx.IndexedDataset(prefix)
    indices = split_indices(ours_config.split_matrix[split.value], len(low_level))
    theirs_config = megatron.gpt.GPTDatasetConfig(blend=([prefix], None), path_to_cache=cache, **config)
    args = (prefix, indices, num_samples)
    ours = binidx.GPTDataset(low_level, *args, split, ours_config)
    try:
        theirs = megatron.gpt.GPTDataset(
            megatron.indexed.IndexedDataset(prefix), *args, megatron.utils.Split(split.value), theirs_config
        )
    except AssertionError:
        return ours, None
    # With its cache of masks, what Megatron serves depends on which sample it served first: see below.
    theirs.masks_and_position_ids_are_cacheable = False
    return ours, theirs


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_indices_identities_and_samples_are_megatrons(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    lengths = random_lengths(rng, int(rng.choice([1, 2, 5, 30, 200])))
    lengths[0] += 1  # at least one token, or Megatron cannot open it
    prefix = write_with_megatron(tmp_path / "data.v1", lengths, rng)
    compared = 0
    for case in range(CONFIGS_PER_DATASET):
        config = random_config(rng)
        matrix = megatron.gpt.GPTDatasetConfig(blend=([prefix], None), **config).split_matrix
        split = binidx.Split(int(rng.choice([s for s in range(3) if matrix[s]])))
        exposed = split_indices(matrix[split.value], len(lengths))
        tokens = int(lengths[exposed].sum())
        if tokens <= config["add_extra_token_to_sequence"]:
            continue  # Megatron loops for ever
        num_samples = random_num_samples(rng, tokens, config["sequence_length"])
        ours, theirs = both(prefix, split, num_samples, config, str(tmp_path / f"cache{case}"))
        if theirs is None:
            assert lengths[ours.document_index[-1]] == 0
            continue
        compared += 1
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
            assert getattr(ours, name).dtype == getattr(theirs, name).dtype
        assert len(ours) == len(theirs)
        assert ours.unique_description == theirs.unique_description
        assert ours.unique_description_hash == theirs.unique_description_hash
        for idx in [*rng.integers(0, len(ours), 3).tolist(), 0, len(ours) - 1, None] if len(ours) else []:
            assert_same_sample(ours[idx], theirs[idx])
    assert compared or len(lengths) <= 2


def gpt_config(prefix: str, cache: str | None = None, **changes: Any) -> binidx.GPTDatasetConfig:
    defaults: dict[str, Any] = {
        "random_seed": 7, "sequence_length": 8, "split": "1,0,0", "tokenizer": TOKENIZER,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip
    return binidx.GPTDatasetConfig(blend=([prefix], None), path_to_cache=cache, **{**defaults, **changes})


def build(config: binidx.GPTDatasetConfig, sizes: tuple[int | None, ...] = (50, 50, 50)) -> list[Any]:
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    return write_with_megatron(tmp_path / "en", rng.integers(1, 30, 100).astype(np.int32), rng)


def test_a_batch_is_its_samples(prefix: str) -> None:
    dataset = build(gpt_config(prefix))[0]
    for one, batched in zip(map(dataset.__getitem__, range(9)), dataset.__getitems__(range(9)), strict=True):
        assert_same_sample(batched, one)


def test_a_dataset_that_was_read_pickles(prefix: str) -> None:
    dataset = build(gpt_config(prefix))[0]
    before = dataset[3]
    assert_same_sample(pickle.loads(pickle.dumps(dataset))[3], before)


def test_samples_count_from_the_end_too_and_there_are_no_others(prefix: str) -> None:
    dataset = build(gpt_config(prefix))[0]
    assert_same_sample(dataset[-1], dataset[len(dataset) - 1])
    assert_same_sample(dataset[np.int64(2)], dataset[2])
    for idx in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError, match=rf"sample {idx}: out of range .there are {len(dataset)}"):
            dataset[idx]


def test_indices_that_were_replaced_are_the_ones_read(prefix: str) -> None:
    dataset = build(gpt_config(prefix))[0]
    before = dataset[0], dataset[1]
    dataset.shuffle_index = dataset.shuffle_index[::-1].copy()
    dataset.shuffle_index[:2] = dataset.shuffle_index[-1:-3:-1]
    for idx in (0, 1):
        assert_same_sample(dataset[idx], before[idx])
    assert not (dataset[2]["tokens"] == build(gpt_config(prefix))[0][2]["tokens"]).all()


def test_indices_that_do_not_belong_together_are_an_error(prefix: str) -> None:
    dataset = build(gpt_config(prefix))[0]
    dataset.document_index = dataset.document_index + 50
    with pytest.raises(IndexBuildError, match=r"out of bounds of sample_index, document_index or the sequences$"):
        dataset.__getitems__(range(20))
    dataset.document_index = dataset.document_index * 0 + int(np.argmin(dataset.dataset.sequence_lengths))
    with pytest.raises(ValueError, match=rf"{prefix}: .* tokens from .* of sequence \d+, which has \d+$"):
        dataset.__getitems__(range(20))


def test_a_subclass_with_its_own_getitem_is_asked_through_it(prefix: str) -> None:
    class Marked(binidx.GPTDataset):
        def __getitem__(self, idx: int | None) -> Any:
            return {**super().__getitem__(idx), "marked": idx}

    config = gpt_config(prefix)
    dataset = binidx.BlendedMegatronDatasetBuilder(Marked, (50, 0, 0), lambda: True, config).build()[0]
    assert dataset is not None
    assert [sample["marked"] for sample in dataset.__getitems__([3, 4])] == [3, 4]
    blend = binidx.megatron.BlendedDataset([dataset, dataset], [0.5, 0.5], 10, config)
    assert {int(sample["marked"]) for sample in blend.__getitems__(range(4))} == {0, 1}


@pytest.mark.parametrize("option", ["add_extra_token_to_sequence", "drop_last_partial_validation_sequence"])
def test_options_that_megatrons_hash_forgets_do_not_share_an_index(prefix: str, option: str) -> None:
    cache = f"memory://forgotten/{option}"
    for value in (True, False, True):
        shared, own = (
            build(
                gpt_config(prefix, where, split="0,1,0", cache_small_indices=True, **{option: value}),
                (None, None, None),
            )[1]
            for where in (cache, f"{cache}/{value}")
        )
        np.testing.assert_array_equal(shared.sample_index, own.sample_index)


def test_other_indices_of_the_same_split_do_not_share_an_index(prefix: str) -> None:
    config = gpt_config(prefix, "memory://other-indices", cache_small_indices=True)
    low_level = binidx.IndexedDataset(prefix)
    for half in (range(50), range(50, 100)):
        args = (low_level, prefix, np.array(half, np.int32), None, binidx.Split.train, config)
        assert set(binidx.GPTDataset(*args).document_index) == set(half)


def test_mmap_bin_files_decides_how_the_tokens_are_read(prefix: str) -> None:
    mapped, unmapped = (build(gpt_config(prefix, mmap_bin_files=value))[0] for value in (True, False))
    assert type(mapped.dataset.bin_reader) is not type(unmapped.dataset.bin_reader)
    assert_same_sample(unmapped[3], mapped[3])


@pytest.mark.parametrize("tokens_in_split", [0, 1])
def test_samples_asked_of_a_split_without_tokens_are_an_error_that_names_it(
    tmp_path: Path, tokens_in_split: int
) -> None:
    rng = np.random.default_rng(0)
    lengths = np.array([5] * 100 + [0] * (1 - tokens_in_split), dtype=np.int32)
    path = write_with_megatron(tmp_path / "en", lengths, rng)
    config = gpt_config(path, split="999,0,1" if tokens_in_split else "100,0,1")
    with pytest.raises(IndexBuildError, match=r"en, test split of \d sequences"):
        build(config, (10, 10, 10))


def test_megatrons_first_padded_sample_masks_all_later_ones_and_ours_does_not(prefix: str, tmp_path: Path) -> None:
    config = {
        "random_seed": 7, "sequence_length": 8, "split": "0,1,0", "tokenizer": TOKENIZER,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        "create_attention_mask": False, "drop_last_partial_validation_sequence": False,
    }  # fmt: skip
    ours, theirs = both(prefix, binidx.Split.valid, None, config, str(tmp_path))
    theirs.masks_and_position_ids_are_cacheable = True
    padded, full = int(np.argmax(ours.shuffle_index)), int(np.argmin(ours.shuffle_index))
    for dataset in (ours, theirs):
        assert 0 < dataset[padded]["loss_mask"].sum() < 8
    assert ours[full]["loss_mask"].sum() == 8
    assert theirs[full]["loss_mask"].sum() < 8


def test_a_pad_id_that_is_the_eod_is_not_masked_unless_asked(prefix: str) -> None:
    ambiguous = Tokenizer(pad=TOKENIZER.eod)
    for allow in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = gpt_config(prefix, tokenizer=ambiguous, allow_ambiguous_pad_tokens=allow)
            (ours, *_), theirs = build(config), None
            theirs_config = megatron.gpt.GPTDatasetConfig(
                random_seed=7, sequence_length=8, blend=([prefix], None), split="1,0,0", tokenizer=ambiguous,
                reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
                allow_ambiguous_pad_tokens=allow,
            )  # fmt: skip
            builder = megatron.builder.BlendedMegatronDatasetBuilder
            theirs = builder(megatron.gpt.GPTDataset, [50, 50, 50], lambda: True, theirs_config).build()[0]
        assert sum("pad" in str(warning.message) for warning in caught) == 2
        for idx in range(20):
            assert_same_sample(ours[idx], theirs[idx])


def test_megatrons_float32_count_is_wrong_where_ours_is_exact() -> None:
    from binidx.index.document_sample import count_samples

    tokens, length = 3 * 10**9, 17
    assert count_samples(tokens, length, add_extra_token=True, drop_last_partial=False) == -(-(tokens - 1) // length)
    assert int(np.ceil(np.float32(tokens - 1) / length)) != -(-(tokens - 1) // length)


@pytest.mark.parametrize(("num_documents", "cached"), [(100, False), (gpt_order.SMALL, True)])
def test_an_index_that_is_built_sooner_than_fetched_has_no_cache(
    tmp_path: Path, num_documents: int, cached: bool
) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", dtype=np.uint16) as builder:
        builder.add_document(np.ones(num_documents, np.uint16), [1] * num_documents)
        builder.finalize(f"{tmp_path}/en.idx")
    config = gpt_config(f"{tmp_path}/en", f"{tmp_path}/cache", sequence_length=8)
    for _ in range(2):
        dataset = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config).build()[0]
        assert isinstance(dataset, binidx.GPTDataset)
        assert len(dataset) == (num_documents - 1) // 8
    assert (tmp_path / "cache").exists() == cached


def test_indices_that_follow_each_other_are_kept_as_a_range(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, low_level = gpt_config(prefix), binidx.IndexedDataset(prefix)
    needed = np.arange(10, 60, dtype=np.int32)
    array = binidx.GPTDataset(low_level, prefix, needed, 20, binidx.Split.train, config)
    monkeypatch.setattr(documents, "WINDOW", 10)
    ranged = binidx.GPTDataset(low_level, prefix, needed, 20, binidx.Split.train, config)
    assert array.own_sequences is needed
    assert ranged.own_sequences == range(10, 60)
    np.testing.assert_array_equal(ranged.indices, needed)
    assert ranged.indices.dtype == np.int32
    assert ranged.order.identity == array.order.identity
    np.testing.assert_array_equal(ranged.document_index, array.document_index)
