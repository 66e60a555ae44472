"""T5's samples against Megatron Core's, key by key over random options; and the masks that its models take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.masked_datasets import (
    BOS,
    EOS,
    OPTIONS,
    SENTINELS,
    T5,
    WordPieces,
    assert_same_masked,
    build,
    compare,
    megatrons,
    process_group,
    write_sentences,
)
from helpers.oracle import megatron

import binidx
from binidx.errors import ConfigError


@pytest.mark.parametrize("seed", range(8))
def test_samples_are_megatrons(seed: int, tmp_path: Path) -> None:
    assert compare(T5, tmp_path, seed, lambda rng: {"sequence_length_decoder": int(rng.choice([600, 700]))}) > 200


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_sentences(tmp_path / "en", 100, np.random.default_rng(0))


@pytest.mark.parametrize("pad", [0, 1, 7])
def test_a_pad_that_occurs_in_the_text_is_treated_as_megatrons_is(prefix: str, tmp_path: Path, pad: int) -> None:
    options = {**OPTIONS, "sequence_length_decoder": 64, "tokenizer": WordPieces(pad=pad)}
    ours = build(T5, [prefix], **options)[0]
    with process_group(tmp_path):
        needed = megatrons(T5, prefix, binidx.Split.train, 200, str(tmp_path / "cache"), **options)
    for idx in range(40):
        assert_same_masked(ours[idx], needed[idx])


def test_the_two_texts_make_the_one_that_is_stored(tmp_path: Path) -> None:
    prefix = write_sentences(tmp_path / "plain", 100, np.random.default_rng(0), specials=0)
    dataset = build(T5, [prefix])[0]
    for idx in range(50):
        sample = dataset[idx]
        spans: dict[int, list[int]] = {}
        for token in sample["text_dec"][1 : int(sample["dec_mask"].sum())].tolist():
            spans.setdefault(token, []) if token in SENTINELS else spans[next(reversed(spans))].append(token)
        encoder = sample["text_enc"][: int(sample["enc_mask"].sum())].tolist()
        text = [token for each in encoder for token in (spans[each] if each in SENTINELS else [each])]
        first, end = dataset.find_sequences(idx)
        stored = [token for i in range(first, end) for token in dataset.dataset[i].tolist()]
        assert text == stored[: len(text)]
        assert len(text) == len(stored) or sample["truncated"]
        assert sample["text_dec"][0] == BOS
        num_said = int(sample["loss_mask"].sum())
        assert sample["labels"][num_said - 1] == EOS
        np.testing.assert_array_equal(sample["labels"][: num_said - 1], sample["text_dec"][1:num_said])


def test_the_padding_sample_is_sample_0_without_loss(prefix: str) -> None:
    dataset = build(T5, [prefix])[0]
    assert_same_masked(dataset[None], {**dataset[0], "loss_mask": np.zeros(128, np.int64)})


def test_a_sample_that_does_not_fit_is_an_error_with_the_length_needed(prefix: str) -> None:
    with pytest.raises(ConfigError, match=r"sequence_length_decoder: found 3, a sample needs \d+"):
        [*build(T5, [prefix], sequence_length_decoder=3)[0]]
    few = WordPieces(additional_special_tokens_ids=SENTINELS[:1])
    with pytest.raises(ConfigError, match=r"1 additional_special_tokens_ids, a sample has \d+ n-grams"):
        build(T5, [prefix], tokenizer=few)[0].__getitems__(range(100))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"sequence_length_decoder": None}, "sequence_length_decoder: must be given"),
        ({"sequence_length": 3}, "needs 4 or more"),
        ({"tokenizer": WordPieces(additional_special_tokens_ids=[])}, "no additional_special_tokens_ids"),
    ],
)
def test_options_that_cannot_be_are_refused(prefix: str, changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        build(T5, [prefix], **changes)


@pytest.mark.parametrize("flags", [{}, {"NVTE_FLASH_ATTN": "1"}, {"NVTE_FUSED_ATTN": "1"}], ids=str)
@pytest.mark.parametrize("engine", ["local", "1.6.0", "1.7.0", "1.9.9", "1.10.0", "2.1.0+cu12"])
def test_attention_masks_are_megatrons(
    prefix: str, engine: str, flags: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    batch = build(T5, [prefix])[0].__getitems__(range(3))
    keys = ("text_enc", "text_dec", "enc_mask", "dec_mask")
    tensors = [torch.from_numpy(np.stack([sample[key] for sample in batch])) for key in keys]
    how = {"use_local": True} if engine == "local" else {"test_te_version": engine}
    if engine == "1.6.0" and flags:
        with pytest.raises(ConfigError, match=r"before 1\.7 needs 0"):
            T5[0].config_attention_mask(*tensors, **how)
        return
    found = T5[0].config_attention_mask(*tensors, **how)
    needed = megatron.t5.T5MaskedWordPieceDataset.config_attention_mask(*tensors, **how)
    assert_same_masks(found, needed)


def assert_same_masks(found: Any, needed: Any) -> None:
    assert type(found) is type(needed)
    if isinstance(needed, tuple):
        for each, other in zip(found, needed, strict=True):
            assert_same_masks(each, other)
    elif needed is not None:
        assert found.dtype == needed.dtype
        assert torch.equal(found, needed)


def test_without_a_transformer_engine_there_is_a_way_out(prefix: str) -> None:
    tokens = torch.ones((1, 4), dtype=torch.int64)
    with pytest.raises(ConfigError, match="give use_local=True"):
        T5[0].config_attention_mask(tokens, tokens, tokens, tokens)
