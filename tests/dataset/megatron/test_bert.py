"""BERT's samples against Megatron Core's, key by key over random options."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.masked_datasets import (
    BERT,
    CLS,
    MASK,
    NUM_TOKENS,
    OPTIONS,
    PAD,
    SEP,
    WordPieces,
    assert_same_masked,
    build,
    compare,
    megatrons,
    process_group,
    write_sentences,
)

import binidx
from binidx.dataset.assemble.sentences import trim
from binidx.errors import ConfigError


@pytest.mark.parametrize("version", ["main", "0.16.1"])
@pytest.mark.parametrize("seed", range(4))
def test_samples_are_megatrons(seed: int, version: str, tmp_path: Path) -> None:
    def own(rng: np.random.Generator) -> dict[str, Any]:
        return {"classification_head": bool(rng.integers(2))}

    assert compare(BERT, tmp_path, seed, own, megatron_samples=version) > 200


def test_processes_whose_tokenizers_have_other_orders_make_the_same_samples_unlike_those_of_0_16_1(prefix: str) -> None:
    found = [samples_of_a_process(prefix, hash_seed) for hash_seed in "12"]
    assert len({each["order of ids"] for each in found}) == 2
    assert len({each["main"] for each in found}) == 1
    assert len({each["0.16.1"] for each in found}) == 2


def samples_of_a_process(prefix: str, hash_seed: str) -> dict[str, str]:
    """What `helpers/bert_process.py` prints in a process in which strings have other hashes."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "helpers.bert_process", prefix]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_sentences(tmp_path / "en", 100, np.random.default_rng(0))


@pytest.mark.parametrize("pad", [0, 1, MASK, 7])
def test_a_pad_that_occurs_in_the_text_is_treated_as_megatrons_is(prefix: str, tmp_path: Path, pad: int) -> None:
    options = {**OPTIONS, "classification_head": True, "tokenizer": WordPieces(pad=pad)}
    ours = build(BERT, [prefix], **options)[0]
    with process_group(tmp_path):
        needed = megatrons(BERT, prefix, binidx.Split.train, 200, str(tmp_path / "cache"), **options)
    for idx in range(40):
        assert_same_masked(ours[idx], needed[idx])


def test_without_a_pad_of_its_own_the_labels_are_megatrons_too(prefix: str, tmp_path: Path) -> None:
    options = {**OPTIONS, "classification_head": False, "tokenizer": WordPieces(pad=WordPieces().eos)}
    with process_group(tmp_path):
        with pytest.warns(UserWarning, match="pad"):
            ours = build(BERT, [prefix], **options)[0]
        with pytest.warns(UserWarning, match="pad"):
            needed = megatrons(BERT, prefix, binidx.Split.train, 200, str(tmp_path / "cache"), **options)
    for idx in range(40):
        assert_same_masked(ours[idx], needed[idx])


def test_a_sample_is_cls_a_sep_b_sep_and_its_labels_undo_the_masks(prefix: str) -> None:
    dataset = build(BERT, [prefix])[0]
    hidden = 0
    for idx in range(50):
        sample = dataset[idx]
        length = int(sample["padding_mask"].tolist().count(1))
        text = np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])[:length]
        assert (text[0], text[-1]) == (CLS, SEP)
        types = sample["types"]
        assert types[length:].tolist() == [PAD] * (64 - length)
        assert (np.diff(types[:length]) >= 0).all()
        first, end = dataset.find_sequences(idx)
        stored = np.concatenate([dataset.dataset[i] for i in range(first, end)])
        if not sample["truncated"] and not sample["is_random"]:
            joint = int((types[:length] == 0).sum())
            np.testing.assert_array_equal(np.concatenate([text[1 : joint - 1], text[joint:-1]]), stored)
        hidden += int(sample["loss_mask"].sum())
        assert sample["loss_mask"].sum() <= max(1, 0.15 * 64)
    assert hidden > 50


def test_the_padding_sample_is_sample_0_without_loss(prefix: str) -> None:
    dataset = build(BERT, [prefix])[0]
    assert_same_masked(dataset[None], {**dataset[0], "loss_mask": np.zeros(64, np.int64)})


@pytest.mark.parametrize(("lengths", "target"), [((0, 9), 4), ((9, 0), 4), ((5, 5), 10), ((300, 2), 3), ((1, 1), 1)])
def test_trimming_takes_from_the_longer_run_as_megatrons_loop_does(lengths: tuple[int, int], target: int) -> None:
    runs = [list(range(length)) for length in lengths]
    rng = np.random.RandomState(3)
    while sum(map(len, runs)) > target:
        longer = runs[0] if len(runs[0]) > len(runs[1]) else runs[1]
        del longer[0 if rng.random() < 0.5 else -1]
    kept = trim(*lengths, target, np.random.RandomState(3))
    assert [list(range(length))[slice(*bounds)] for length, bounds in zip(lengths, kept, strict=True)] == runs


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"classification_head": None}, "classification_head: must be given"),
        ({"sequence_length": 4}, "needs 5 or more"),
    ],
)
def test_options_that_cannot_be_are_refused(prefix: str, changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        build(BERT, [prefix], **changes)


def test_random_tokens_are_any_of_the_vocabulary(prefix: str) -> None:
    dataset = build(BERT, [prefix], masking_probability=0.9, masking_max_ngram=1)[0]
    seen = set()
    for idx in range(100):
        sample = dataset[idx]
        changed = (sample["loss_mask"] == 1) & (sample["text"] != MASK) & (sample["text"] != sample["labels"])
        seen |= set(sample["text"][changed].tolist())
    assert len(seen) > 30
    assert seen <= set(range(NUM_TOKENS + 6))
