"""Chat samples of their own length, by Megatron-LM's rule; and batches of them in one row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chats import IGNORE, Speaker, conversation, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import binidx
from binidx.dataset.megatron.sft import VarlenDataset
from binidx.errors import ConfigError, FormatError
from binidx.loader.collate import collate
from binidx.loader.torch_loader import build_pretraining_data_loader


def as_megatron(messages: Any, tokenizer: Speaker, length: int, multiple: int, rows: bool) -> dict[str, Any]:
    """Source: NVIDIA/Megatron-LM at d48bd6be, its branch dev, `VarlenDataset.__getitem__`, on lists."""
    if isinstance(messages, str):
        tokens = tokenizer.tokenize(messages)
        targets = [*tokens]
    else:
        tokens, targets = (each.tolist() for each in tokenizer.tokenize_conversation(messages, True, False))
    if not tokens:
        tokens, targets = [tokenizer.eod] * 2, [tokenizer.eod] * 2
    if len(tokens) > length + 1:
        tokens, targets = tokens[: length + 1], targets[: length + 1]
        if tokens[-1] != tokenizer.eod:
            tokens[-1] = targets[-1] = tokenizer.eod
    if tokens[-1] != tokenizer.eod:
        tokens.append(tokenizer.eod)
        targets.append(tokenizer.eod)
    original = len(tokens) - 1
    while len(tokens) <= length if rows else (len(tokens) - 1) % multiple:
        tokens.append(tokenizer.pad)  # type: ignore[arg-type]
        targets.append(tokenizer.pad)  # type: ignore[arg-type]
    padded = len(tokens) - 1
    labels = np.array(targets[1:], np.int64)
    lengths = {"original_seq_len": np.array([original], np.int32), "padded_seq_len": np.array([padded], np.int32)}
    return {
        "tokens": np.array(tokens[:-1], np.int64),
        "labels": labels,
        "loss_mask": ((np.arange(padded) < original) & (labels != IGNORE)).astype(np.float32),
        "position_ids": np.arange(padded),
        **({"padding_mask": np.arange(padded) >= original} if rows else lengths),
    }


def same(found: Any, needed: Any) -> None:
    assert [*found] == [*needed]
    for name, value in needed.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value, err_msg=name)
        assert np.asarray(found[name]).dtype == value.dtype, name


def build(uri: str, size: int = 1, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "random_seed": 3, "sequence_length": 64, "blend": ([uri], None), "split": "1,0,0", "tokenizer": Speaker(),
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip
    config = binidx.GPTDatasetConfig(**{**given, **changes})
    return binidx.BlendedMegatronDatasetBuilder(VarlenDataset, [size, 0, 0], lambda: True, config).build()[0]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    length=st.sampled_from([1, 5, 16, 64]),
    ranks=st.sampled_from([1, 2]),
    rows=st.booleans(),
    text=st.booleans(),
    pad=st.sampled_from([6, 10 + ord("b"), 10 + ord("e")]),
)
def test_a_conversation_is_a_sample_as_in_megatron(
    seed: int, length: int, ranks: int, rows: bool, text: bool, pad: int
) -> None:
    rng, tokenizer = np.random.default_rng(seed), Speaker(pad=pad)
    messages: Any = "abc"[: rng.integers(4)] * 3 if text else conversation(rng, int(rng.integers(1, 4)))
    whole = len(messages if text else tokenizer.tokenize_conversation(messages, True, False)[0])
    if whole == length + 1:
        return  # one EOD too many in Megatron: see below
    uri = write_rows(f"memory://varlen/{seed}.jsonl", [{"text" if text else "messages": messages}])
    options = {"sequence_length": length, "context_parallel_size": ranks, "varlen_sbhd_validation": rows}
    needed = as_megatron(messages, tokenizer, length, 2 * ranks if ranks > 1 else 1, rows)
    same(build(uri, tokenizer=tokenizer, **options)[0], needed)
    needed.pop("padding_mask", None)
    needed["loss_mask"][needed["labels"] == pad] = 0
    same(build(uri, tokenizer=tokenizer, megatron_samples="0.16.1", **options)[0], needed)


def test_an_eod_that_is_the_pad_is_trained_on_at_the_end_of_a_conversation_alone(tmp_path: Path) -> None:
    uri = write_rows(f"{tmp_path}/a.jsonl", [{"text": "abc"}])
    options = {"tokenizer": Speaker(pad=5), "allow_ambiguous_pad_tokens": True, "varlen_sbhd_validation": True}
    with pytest.warns(UserWarning, match="pad id 5 is also another special token"):
        sample = build(uri, sequence_length=6, **options)[0]
    assert sample["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert sample["padding_mask"].tolist() == [False, False, False, True, True, True]


def test_a_text_of_one_eod_predicts_another_where_megatrons_sample_is_empty(tmp_path: Path) -> None:
    uri = write_rows(f"{tmp_path}/a.jsonl", [{"text": "a"}])
    tokenizer = Speaker(eod=10 + ord("a"))
    assert len(as_megatron("a", tokenizer, 4, 1, False)["tokens"]) == 0
    sample = build(uri, sequence_length=4, tokenizer=tokenizer)[0]
    assert [sample[name].tolist() for name in ("tokens", "labels", "loss_mask")] == [[107], [107], [1]]


def test_a_conversation_that_fits_but_for_its_eod_is_cut_off_where_megatrons_is_too_long(tmp_path: Path) -> None:
    uri = write_rows(f"{tmp_path}/a.jsonl", [{"text": "abcde"}])
    sample = build(uri, sequence_length=4)[0]
    assert len(as_megatron("abcde", Speaker(), 4, 1, False)["tokens"]) == 5
    assert sample["tokens"].tolist() == Speaker().tokenize("abcd")
    assert sample["labels"].tolist() == [*Speaker().tokenize("bcd"), Speaker().eod]


def test_messages_become_roles_and_texts_after_a_system_message(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi", "name": "x"}, {"role": "assistant", "content": None}]
    parts = [{"role": "user", "content": [{"type": "image"}]}]
    dataset = build(write_rows(f"{tmp_path}/a.jsonl", [{"messages": said}, {"messages": parts}]), 2)
    plain = [{"role": r, "content": c} for r, c in (("system", ""), ("user", "hi"), ("assistant", ""))]
    same(dataset[0], as_megatron(plain, Speaker(), 64, 1, False))
    with pytest.raises(FormatError, match="content: list, needs text"):
        dataset[1]


def test_a_batch_is_one_row_with_the_bounds_of_its_samples(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    uris = [write_rows(f"{tmp_path}/{n}.jsonl", [{"messages": conversation(rng)} for _ in range(9)]) for n in "ab"]
    blend = build(uris[0], 12, blend=(uris, [1.0, 1.0]), context_parallel_size=2, data_parallel_size=2,
                  hybrid_context_parallel=True)  # fmt: skip
    samples = [blend[idx] for idx in range(4)]
    loader = build_pretraining_data_loader(blend, 0, 4)
    assert loader is not None
    batch = next(iter(loader))
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert batch[name].shape[0] == 1
        np.testing.assert_array_equal(batch[name][0], np.concatenate([sample[name] for sample in samples]))
    bounds, padded = batch["cu_seqlens"][0], batch["cu_seqlens_padded"][0]
    assert np.diff(bounds).tolist() == [int(sample["original_seq_len"]) for sample in samples]
    assert np.diff(padded).tolist() == [len(sample["tokens"]) for sample in samples]
    assert not (padded % 8).any()
    assert batch["max_seqlen"].tolist() == [max(len(sample["tokens"]) for sample in samples)]
    assert batch["dataset_id"].tolist() == [int(sample["dataset_id"]) for sample in samples]
    for start, length in zip(padded.tolist(), np.diff(bounds).tolist(), strict=False):
        assert batch["position_ids"][0, start : start + length].tolist() == [*range(length)]
    assert collate(samples)["tokens"].shape == batch["tokens"].shape


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, 1),
        ({"context_parallel_size": 1, "sequence_parallel_size": 4}, 4),
        ({"context_parallel_size": 4}, 8),
        ({"context_parallel_size": 4, "sequence_parallel_size": 2, "data_parallel_size": 3}, 16),
        ({"context_parallel_size": 1, "data_parallel_size": 1, "hybrid_context_parallel": True}, 2),
        ({"context_parallel_size": 2, "data_parallel_size": 4, "hybrid_context_parallel": True}, 16),
    ],
)
def test_sequences_are_padded_for_the_ranks_that_share_them(options: dict[str, Any], needed: int) -> None:
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=8, blend=(["a"], None), split="1,0,0", tokenizer=Speaker(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, **options,
    )  # fmt: skip
    assert config.padding_multiple == needed


def test_made_up_chats_are_refused() -> None:
    with pytest.raises(ConfigError, match="sft_mock_dataset_config_json: mock chats are not supported"):
        build("a.jsonl", sft_mock_dataset_config_json="{}")
