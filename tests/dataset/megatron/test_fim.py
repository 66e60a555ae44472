"""Middles moved to the end: by Megatron-LM's rule given the same draws, and by draws that are a sample's own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.gpt_data import Tokenizer, assert_same_sample
from helpers.letters import EXTRA, IDS, Letters, WithLetters
from hypothesis import given, settings
from hypothesis import strategies as st

import binidx
from binidx.dataset.assemble.fill_in_middle import FIMTransform, GPTFIMDatasetConfig, seed_sample
from binidx.dataset.megatron.gpt_variants import GPTFIMDataset
from binidx.errors import ConfigError
from binidx.loader.collate import collate
from binidx.loader.torch_loader import build_pretraining_data_loader


def model(sample: Any, rng: np.random.RandomState, rate: float, spm: float, split: int | None, fragment: float,
          no_prefix: str | None, version: str) -> Any:  # fmt: skip
    """Megatron-LM's rule, one token at a time, in lists: at d98e8a64, or at core_v0.16.1."""
    letters = Letters()

    def cut(tokens: list[int], rate: float) -> list[int]:
        if not rng.binomial(1, rate):
            return tokens
        text = letters.ids_to_text(tokens, remove_special_tokens=version == "main")
        if no_prefix is not None and text.startswith(no_prefix):
            return tokens
        a, b = sorted(rng.randint(0, len(text) + 1, size=2))
        p, m, s = (letters.text_to_ids(part) for part in (text[:a], text[a:b], text[b:]))
        pre, mid, suf = IDS["<pre>"], IDS["<mid>"], IDS["<suf>"]
        return [pre, suf, *s, mid, *p, *m] if rng.binomial(1, spm) else [pre, *p, suf, *s, mid, *m]

    def segment(tokens: list[int]) -> list[int]:
        if split is None or split not in tokens:
            return cut(tokens, rate)
        if not rng.binomial(1, rate):
            return tokens
        return joined(tokens, split, lambda part: cut(part, fragment))

    def joined(tokens: list[int], end: int, change: Any) -> list[int]:
        out: list[int] = []
        part: list[int] = []
        for token in tokens:
            if token != end:
                part.append(token)
                continue
            if part:
                out += [*change(part), end]
            part = []
        return out + change(part)

    moved = joined(sample, IDS["<eod>"], segment)[: len(sample)]
    return moved + [IDS["<pad>"]] * (len(sample) - len(moved))


@settings(max_examples=300)
@given(
    tokens=st.lists(st.sampled_from([0, 0, 7, 7, 7, 99, *range(1, 60)]), min_size=1, max_size=60),
    rates=st.tuples(*[st.sampled_from([0.0, 0.3, 0.9, 1.0])] * 3),
    split=st.sampled_from([None, 99]),
    no_prefix=st.sampled_from([None, "b", "bb"]),
    number=st.integers(0, 2**40),
    version=st.sampled_from(["main", "0.16.1"]),
)
def test_given_the_same_draws_a_sample_is_megatrons(
    tokens: list[int], rates: Any, split: int | None, no_prefix: str | None, number: int, version: str
) -> None:
    rate, spm, fragment = rates
    config = config_of(
        "en", fim_rate=rate, fim_spm_rate=spm, fim_split_sample=None if split is None else "<file>",
        fim_fragment_rate=fragment, fim_no_prefix=no_prefix, megatron_samples=version,
    )  # fmt: skip
    moved = FIMTransform(config)(np.array(tokens), seed_sample(7, number))
    assert moved.dtype == np.int64
    assert moved.tolist() == model(tokens, seed_sample(7, number), rate, spm, split, fragment, no_prefix, version)


class PlainLetters(Letters):
    """Has no special tokens."""

    def ids_to_text(self, ids: Any) -> str:  # type: ignore[override]
        return super().ids_to_text(ids)


def test_a_tokenizer_that_cannot_leave_special_tokens_out_decodes_all() -> None:
    plain = type("WithPlainLetters", (Tokenizer,), {"_tokenizer": PlainLetters()})()
    tokens, kept = np.arange(1, 30), config_of("en", fim_rate=1.0, megatron_samples="0.16.1")
    found = FIMTransform(config_of("en", fim_rate=1.0, tokenizer=plain))(tokens, seed_sample(7, 1))
    assert found.tolist() == FIMTransform(kept)(tokens, seed_sample(7, 1)).tolist()


def test_as_many_segments_are_cut_as_the_rates_say_and_anywhere() -> None:
    cut = FIMTransform(config_of("en", fim_rate=0.3, fim_spm_rate=0.6))
    count, text = 3000, np.arange(1, 21)
    moved = [cut(np.append(text, np.zeros(10, np.int64)), seed_sample(1, number)).tolist() for number in range(count)]
    begun = [each for each in moved if each[0] == IDS["<pre>"]]
    share, spm = len(begun) / count, np.mean([each[1] == IDS["<suf>"] for each in begun])
    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / count) ** 0.5
    # PSM of an empty prefix looks like SPM: one cut in 41 of 41 * 41 pairs of places, and a little more.
    assert abs(spm - 0.6) < 0.05 + 4 * (0.6 * 0.4 / len(begun)) ** 0.5
    middles = [each.index(IDS["<mid>"]) for each in begun]
    assert len(set(middles)) > 15


def write(prefix: str) -> str:
    rng = np.random.default_rng(0)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for length in rng.integers(5, 60, 80):
            builder.add_document(np.append(rng.integers(1, 60, length), 0), [length + 1])
        builder.finalize(f"{prefix}.idx")
    return prefix


def config_of(prefix: str, **changes: Any) -> GPTFIMDatasetConfig:
    given: dict[str, Any] = {
        "random_seed": 5, "sequence_length": 32, "blend": ([prefix], None), "split": "8,2,0",
        "tokenizer": WithLetters(),
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
        "fim_rate": 0.5, "fim_spm_rate": 0.5, "fim_extra_tokens": EXTRA,
    }  # fmt: skip
    return GPTFIMDatasetConfig(**{**given, **changes})


def build(config: GPTFIMDatasetConfig, cls: Any = GPTFIMDataset) -> Any:
    return binidx.BlendedMegatronDatasetBuilder(cls, [200, 20, 0], lambda: True, config).build()


def test_a_sample_is_the_same_whatever_was_read_before_it(tmp_path: Path) -> None:
    config = config_of(write(f"{tmp_path}/en"))
    (train, valid, _), (plain, *_) = build(config), build(config, binidx.GPTDataset)
    in_order = [train[idx] for idx in range(40)]
    again = pickle.loads(pickle.dumps(train))
    for idx in np.random.default_rng(0).permutation(40).tolist():
        assert_same_sample(again[idx], in_order[idx])
    batch = collate(train.__getitems__(range(40)))
    for idx, sample in enumerate(in_order):
        assert_same_sample({name: column[idx] for name, column in batch.items()}, sample)
    moved = [bool((sample["tokens"] == IDS["<pre>"]).any()) for sample in in_order]
    assert 10 < sum(moved) < 40
    for idx in np.flatnonzero(~np.array(moved)).tolist():
        if plain[idx]["tokens"][0] != IDS["<eod>"] and not (in_order[idx]["labels"] == IDS["<pre>"]).any():
            assert_same_sample(in_order[idx], plain[idx])
    assert not train[None]["loss_mask"].any()
    assert_same_sample({**train[None], "loss_mask": in_order[0]["loss_mask"]}, in_order[0])
    assert valid[0]["tokens"].shape == (32,)


def test_ids_beyond_the_stored_type_stay_what_they_are(tmp_path: Path) -> None:
    train = build(config_of(write(f"{tmp_path}/en"), fim_rate=1.0))[0]
    assert train.dataset.index.dtype is np.uint16
    assert int(train[3]["tokens"].max()) > 90_000


def test_samples_read_ahead_from_a_store_are_those_read_one_by_one(s3: Bucket) -> None:
    prefixes = [write(f"{s3.fresh()}/{name}") for name in ("en", "code")]
    blend = build(config_of(prefixes[0], blend=(prefixes, [0.4, 0.6])))[0]
    loader = build_pretraining_data_loader(blend, 0, 4, look_ahead=3)
    assert loader is not None
    for step, batch in zip(range(6), loader, strict=False):
        assert_same_sample(batch, collate([blend[idx] for idx in range(4 * step, 4 * step + 4)]))


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"fim_rate": None}, "fim_rate: found None"),
        ({"fim_spm_rate": 1.5}, "fim_spm_rate: found 1.5"),
        ({"fim_split_sample": "<file>"}, "fim_fragment_rate: found None"),
        ({"fim_extra_tokens": {"prefix": "<pre>"}}, "found no middle, suffix, pad, eod"),
        ({"inter_document_masking": True}, "inter_document_masking: found True"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], needed: str) -> None:
    with pytest.raises(ConfigError, match=needed):
        config_of("en", **changes)


def test_tokens_that_the_tokenizer_does_not_know_are_named(tmp_path: Path) -> None:
    prefix = write(f"{tmp_path}/en")
    with pytest.raises(ConfigError, match="the tokenizer has no <eos>"):
        build(config_of(prefix, fim_extra_tokens={**EXTRA, "eod": "<eos>"}))[0][0]
    with pytest.raises(ConfigError, match=r"'<nothing>' is .* to the tokenizer, needs one token"):
        build(config_of(prefix, fim_split_sample="<nothing>", fim_fragment_rate=0.5))[0][0]
    with pytest.raises(ConfigError, match="Tokenizer: has no tokens_to_ids"):
        build(config_of(prefix, tokenizer=Tokenizer()))[0][0]
