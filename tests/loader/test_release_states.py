"""States of loaders whose samples depend on the release of Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chats import Speaker, random_rows, write_rows
from helpers.letters import EXTRA, WithLetters
from helpers.masked_datasets import BERT, OPTIONS, write_sentences
from helpers.public_names import PUBLIC

import binidx
from binidx.dataset.megatron_releases import MAIN, NEWEST, RELEASES, Rule
from binidx.errors import ConfigError

GPT: dict[str, Any] = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}


def build(kind: str, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "random_seed": 1234,
        "sequence_length": 64,
        "split": "1,0,0",
        "blend": ([URIS[kind]], None),
    }
    chats = {**given, **GPT, "tokenizer": Speaker()}
    cuts = {"fim_rate": 0.5, "fim_spm_rate": 0.5, "fim_extra_tokens": EXTRA, "tokenizer": WithLetters()}
    options = {
        "BERTMaskedWordPieceDataset": {**given, **OPTIONS, "classification_head": True},
        "GPTFIMDataset": {**given, **GPT, **cuts},
        "SFTDataset": chats,
        "VarlenDataset": chats,
    }[kind]
    config = PUBLIC.get(f"{kind}Config", binidx.GPTDatasetConfig)(**{**options, **changes})
    return binidx.BlendedMegatronDatasetBuilder(PUBLIC[kind], [40, 0, 0], lambda: True, config).build()[0]


def loader_of(kind: str, **changes: Any) -> Any:
    return binidx.build_pretraining_data_loader(build(kind, **changes), 0, 4, 0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_sentences(folder / "en", 60, np.random.default_rng(0))
    write_rows(str(folder / "chats.jsonl"), random_rows(0, 20))
    return folder


@pytest.fixture(autouse=True)
def _inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # BERT's identity has the path as it is given


TOKENS, CHATS = "en", "chats.jsonl"
URIS = {"BERTMaskedWordPieceDataset": TOKENS, "GPTFIMDataset": TOKENS, "SFTDataset": CHATS, "VarlenDataset": CHATS}

FINGERPRINTS = {
    "BERTMaskedWordPieceDataset": ("3d482ee9209df3d1", "88e62dad317249be"),
    "GPTFIMDataset": ("91b6308f270539f1", "82e6fa88e6c5f61f"),
    "SFTDataset": ("b3a1eaaa278628c6", "33450a0b974531da"),
    "VarlenDataset": ("2b68d4a05c942e0a", "11c9fe2872825fd8"),
}
"""Fingerprints of states that 2e6bc1de wrote, with its "main" and with its "0.16.1"."""


@pytest.mark.parametrize("kind", FINGERPRINTS)
def test_states_of_2e6bc1de_go_on_with_main_which_is_d98e8a64_and_with_0_16_1(kind: str) -> None:
    for fingerprint, names in zip(FINGERPRINTS[kind], (("main", MAIN), ("0.16.1", "0.16")), strict=True):
        for name in names:
            state = {"consumed_samples": 8, "fingerprint": fingerprint, "total_samples": 40}
            loader = loader_of(kind, megatron_samples=name)
            loader.load_state_dict(state)
            assert loader.consumed_samples == 8
    assert loader_of(kind).state_dict()["fingerprint"] == FINGERPRINTS[kind][0]


@pytest.mark.parametrize("kind", FINGERPRINTS)
def test_a_state_names_its_release_and_never_main(kind: str) -> None:
    names = {"main": MAIN, "0.16.1": "0.16", "0.19.2": "0.19", **{name: name for name in RELEASES}}
    for name, recorded in names.items():
        assert loader_of(kind, megatron_samples=name).state_dict()["megatron_samples"] == recorded
    with pytest.raises(ConfigError, match=r"megatron_samples: found '0\.15', need main, 0\.16, .* or such as 0\.19\.2"):
        build(kind, megatron_samples="0.15")


def test_a_state_of_gpt_samples_has_no_release_as_none_changes_them() -> None:
    config = binidx.GPTDatasetConfig(1, 8, blend=([TOKENS], None), split="1,0,0", tokenizer=Speaker(), **GPT)
    train = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [40, 0, 0], lambda: True, config).build()[0]
    state = binidx.build_pretraining_data_loader(train, 0, 4, 0, 1).state_dict()
    assert [*state] == ["consumed_samples", "fingerprint", "total_samples", "library", "facts"]


HYBRID = {"hybrid_context_parallel": True, "data_parallel_size": 2}
SHARED = {"sequence_parallel_size": 4}


@pytest.mark.parametrize(
    ("kind", "before", "after", "options", "differing"),
    [
        ("BERTMaskedWordPieceDataset", "0.16.1", "0.17", {}, ""),
        ("BERTMaskedWordPieceDataset", "0.17", "0.18", {}, "bert_sorted_ids"),
        ("BERTMaskedWordPieceDataset", "0.18", "main", {}, ""),
        ("GPTFIMDataset", "0.16", "0.17.1", {}, "fim_no_special_tokens"),
        ("GPTFIMDataset", "0.17.1", NEWEST, {}, ""),
        ("SFTDataset", "0.16", "0.17", {}, "sft_no_eod"),
        ("SFTDataset", "0.17", "0.18.2", {}, ""),
        ("SFTDataset", "0.18", "0.19.2", {}, "sft_padded_bounds"),
        ("SFTDataset", "0.16", MAIN, SHARED, "sft_no_eod, sft_padded_bounds, sft_sequence_parallel_padding"),
        ("SFTDataset", "0.19", "main", SHARED, ""),
        ("SFTDataset", "0.19", "main", HYBRID, "sft_hybrid_padding"),
        ("SFTDataset", "main", NEWEST, {**HYBRID, **SHARED}, ""),
        ("SFTDataset", "main", NEWEST, SHARED, "sft_sequence_parallel_padding"),
        ("VarlenDataset", "main", NEWEST, {}, ""),
        ("VarlenDataset", "main", NEWEST, {"varlen_sbhd_validation": True}, "varlen_padding_mask"),
    ],
)
def test_a_run_goes_on_with_a_release_of_equal_samples_and_else_the_rules_that_differ_are_named(
    kind: str, before: str, after: str, options: dict[str, Any], differing: str
) -> None:
    state = {**loader_of(kind, megatron_samples=before, **options).state_dict(), "consumed_samples": 8}
    loader = loader_of(kind, megatron_samples=after, **options)
    if differing:
        with pytest.raises(ConfigError, match=f"{after!r} here, .* in the state; rules that differ: {differing}\\. "):
            loader.load_state_dict(state)
        return
    loader.load_state_dict(state)
    assert loader.consumed_samples == 8
    served = [build(kind, megatron_samples=name, **options)[9] for name in (before, after)]
    for name, value in served[0].items():
        np.testing.assert_array_equal(value, served[1][name])


def test_each_rule_is_followed_by_some_releases_and_not_by_others() -> None:
    for rule in Rule:
        assert len({rule in rules for rules in RELEASES.values()}) == 2, rule
    assert BERT[0].release_rules == {Rule.bert_sorted_ids}
