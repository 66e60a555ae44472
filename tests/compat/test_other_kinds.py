"""BERT, T5, multimodal, fill-in-the-middle and chat datasets under Megatron's names."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chats import Speaker, random_rows, write_rows
from helpers.gpt_data import TOKENIZER, assert_same_sample, write_with_megatron
from helpers.masked_datasets import (
    BERT,
    OPTIONS,
    OWN,
    SORTED,
    T5,
    assert_same_masked,
    megatrons,
    process_group,
    write_sentences,
)
from helpers.oracle import megatron

import binidx
from binidx.compat.megatron import (
    bert_dataset,
    blended_megatron_dataset_builder,
    fim_dataset,
    gpt_dataset,
    multimodal_dataset,
    sft_dataset,
    t5_dataset,
)

RESETS = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
build = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder


@pytest.mark.parametrize(
    ("kind", "cls", "configured", "own", "theirs"),
    [
        (BERT, bert_dataset.BERTMaskedWordPieceDataset, bert_dataset.BERTMaskedWordPieceDatasetConfig,
         {}, {"tokenizer": SORTED}),
        (BERT, bert_dataset.BERTMaskedWordPieceDataset, bert_dataset.BERTMaskedWordPieceDatasetConfig,
         {"megatron_samples": "0.16.1"}, {}),
        (T5, t5_dataset.T5MaskedWordPieceDataset, t5_dataset.T5MaskedWordPieceDatasetConfig, {}, {}),
    ],
)  # fmt: skip
def test_masked_samples_are_megatrons(
    kind: Any, cls: Any, configured: Any, own: Any, theirs: Any, tmp_path: Path
) -> None:
    class Marked(cls):  # type: ignore[misc]
        """With a __getitem__ of its own, as users write it."""

        def __getitem__(self, idx: int) -> Any:
            return {**super().__getitem__(idx), "number": idx}

    Marked.__name__ = cls.__name__
    prefix, options = write_sentences(tmp_path / "en", 100, np.random.default_rng(0)), {**OPTIONS, **OWN[kind]}
    with process_group(tmp_path):
        config = configured(blend=([prefix], None), **options, **own)
        [ours, *_] = build(Marked, [200, 0, 0], lambda: True, config).build()
        needed = megatrons(kind, prefix, binidx.Split.train, 200, str(tmp_path / "cache"), **{**options, **theirs})
    assert ours.unique_description == needed.unique_description
    assert len(ours) == len(needed)
    for number in range(0, len(needed), 7):
        sample = ours[number]
        assert sample.pop("number") == number
        assert_same_masked(sample, needed[number])


def test_made_up_images_are_megatrons() -> None:
    made = []
    for lib in (multimodal_dataset, megatron.multimodal):
        options = {"random_seed": 1, "sequence_length": 64, "tokenizer": TOKENIZER, **RESETS}
        config = lib.MultimodalDatasetConfig(
            **options, image_h=4, image_w=6, preprocess_func=lambda x: {**x, "a": x["image"] + 1}
        )
        theirs = megatron.builder.BlendedMegatronDatasetBuilder
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made.append(
                (build if lib is multimodal_dataset else theirs)(
                    lib.MockMultimodalDataset, [20, 20, 20], lambda: True, config
                ).build()[0]
            )
    for number in (0, 3, 19):
        assert_same_sample(made[0][number], made[1][number])


class Letters:
    vocab_size, eod, pad = 1000, 0, 999
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012

    def tokens_to_ids(self, tokens: Any) -> Any:
        return 7 if isinstance(tokens, str) else [7 for _ in tokens]

    def ids_to_text(self, ids: Any) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    def text_to_ids(self, text: str) -> list[int]:
        return [int(each) for each in text.split()]


def test_fill_in_the_middle_is_ours_with_megatrons_defaults(tmp_path: Path) -> None:
    prefix = write_with_megatron(tmp_path / "en", np.full(40, 30, np.int32), np.random.default_rng(0))
    names = {name: name for name in ("prefix", "middle", "suffix", "pad", "eod")}
    options = {
        "random_seed": 1, "sequence_length": 24, "split": "1,0,0", "blend": ([prefix], None), "tokenizer": Letters(),
        **RESETS, "fim_rate": 0.9, "fim_spm_rate": 0.5, "fim_extra_tokens": names,
    }  # fmt: skip
    [named, *_] = build(
        fim_dataset.GPTFIMDataset, [30, 0, 0], lambda: True, fim_dataset.GPTFIMDatasetConfig(**options)
    ).build()
    config = binidx.megatron.GPTFIMDatasetConfig(**options, create_attention_mask=True)
    [ours, *_] = binidx.BlendedMegatronDatasetBuilder(
        binidx.megatron.GPTFIMDataset, [30, 0, 0], lambda: True, config
    ).build()
    assert isinstance(named, gpt_dataset.GPTDataset)
    for number in range(30):
        assert_same_sample(named[number], ours[number])
    assert (named[0]["tokens"] == 7).any()


def test_chats_are_ours_with_nothing_said_but_the_mask(tmp_path: Path) -> None:
    write_rows(f"{tmp_path}/chat.jsonl", random_rows(1, 30))
    options = {
        "random_seed": 1, "sequence_length": 48, "split": "1,0,0", "blend": ([f"{tmp_path}/chat.jsonl"], None),
        "tokenizer": Speaker(), "create_attention_mask": False, **RESETS,
    }  # fmt: skip
    [named, *_] = build(
        sft_dataset.SFTDataset, [30, 0, 0], lambda: True, gpt_dataset.GPTDatasetConfig(**options)
    ).build()
    builder = binidx.BlendedMegatronDatasetBuilder(
        binidx.megatron.SFTDataset, [30, 0, 0], lambda: True, binidx.GPTDatasetConfig(**options)
    )
    [ours, *_] = builder.build()
    assert isinstance(named, torch.utils.data.Dataset)
    for number in range(30):
        assert_same_sample(named[number], ours[number])
    assert sft_dataset.IGNORE_INDEX == -100
