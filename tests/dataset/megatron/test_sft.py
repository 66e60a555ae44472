"""Chat samples by Megatron-LM's rule, from files in any store."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Bucket
from helpers.chats import Speaker, conversation, packed_as_megatron, random_rows, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

import binidx
from binidx.dataset.assemble.chat import SFTDatasetConfig
from binidx.dataset.megatron.sft import SFTDataset
from binidx.errors import ConfigError, FormatError, IndexBuildError
from binidx.loader.collate import collate
from binidx.loader.torch_loader import build_pretraining_data_loader


def same(found: Any, needed: Any) -> None:
    assert [*found] == [*needed]
    for name, value in needed.items():
        np.testing.assert_array_equal(np.asarray(found[name]), value, err_msg=name)
        assert np.asarray(found[name]).dtype == value.dtype, name


def config_of(uri: str, **changes: Any) -> SFTDatasetConfig:
    given: dict[str, Any] = {
        "random_seed": 3, "sequence_length": 64, "blend": ([uri], None), "split": "8,2,0", "tokenizer": Speaker(),
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip
    return SFTDatasetConfig(**{**given, **changes})


def build(config: binidx.GPTDatasetConfig, sizes: Any = (100, None, None)) -> list[Any]:
    return binidx.BlendedMegatronDatasetBuilder(SFTDataset, sizes, lambda: True, config).build()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    length=st.sampled_from([1, 2, 8, 33, 64, 100, 400]),
    ranks=st.sampled_from([1, 2, 4]),
    ends=st.booleans(),
    version=st.sampled_from(["main", "0.16.1"]),
)
def test_a_row_is_packed_as_megatron_packs_it(seed: int, length: int, ranks: int, ends: bool, version: str) -> None:
    (row,), tokenizer = random_rows(seed, 1), Speaker(ends=ends)
    uri = write_rows(f"memory://sft/{seed}.jsonl", [row])
    config = config_of(
        uri, sequence_length=length, context_parallel_size=ranks, split="1,0,0", tokenizer=tokenizer,
        sequence_parallel_size=4 if version == "main" else 0, megatron_samples=version,
    )  # fmt: skip
    found = build(config, (1, 0, 0))[0][0]
    same(found, packed_as_megatron(row, tokenizer, length, 2 * ranks if ranks > 1 else 1, version))


def test_conversations_that_hybrid_context_parallel_ranks_share_are_padded_for_all_of_them(tmp_path: Path) -> None:
    (row,) = random_rows(1, 1)
    options = {"data_parallel_size": 3, "context_parallel_size": 2, "hybrid_context_parallel": True}
    config = config_of(write_rows(f"{tmp_path}/a.jsonl", [row]), sequence_length=400, split="1,0,0", **options)
    same(build(config, (1, 0, 0))[0][0], packed_as_megatron(row, Speaker(), 400, 12))


def test_samples_are_the_rows_of_their_split_over_and_over(tmp_path: Path) -> None:
    rows = random_rows(0, 30)
    train, valid, _ = build(config_of(write_rows(f"{tmp_path}/chat.jsonl", rows)))
    assert (len(train), len(valid)) == (100, 6)
    for idx in (0, 23, 24, 99):
        same(train[idx], packed_as_megatron(rows[idx % 24], Speaker(), 64, 1))
    same(valid[5], packed_as_megatron(rows[29], Speaker(), 64, 1))
    same(pickle.loads(pickle.dumps(train))[7], packed_as_megatron(rows[7], Speaker(), 64, 1))
    assert not train[None]["loss_mask"].any()
    with pytest.raises(IndexError, match=r"chat.jsonl: sample 100, it has 100 in this split"):
        train[100]


def test_shuffled_epochs_serve_each_row_once_in_orders_of_their_own(tmp_path: Path) -> None:
    config = config_of(write_rows(f"{tmp_path}/chat.jsonl", random_rows(0, 30)), split="1,0,0", shuffle=True)
    train, again = (build(config, (90, 0, 0))[0] for _ in range(2))
    order = [train.find_row(idx) for idx in range(90)]
    assert order == [again.find_row(idx) for idx in range(90)]
    epochs = [order[at : at + 30] for at in (0, 30, 60)]
    assert all(sorted(epoch) == [*range(30)] != epoch for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_a_loader_goes_on_with_a_file_that_was_moved_and_not_in_another_order(tmp_path: Path) -> None:
    def loader_of(name: str, seed: int = 0, **changes: Any) -> Any:
        config = config_of(write_rows(f"{tmp_path}/{name}.jsonl", random_rows(seed, 30)), split="1,0,0", **changes)
        return build_pretraining_data_loader(build(config, (60, 0, 0))[0], 0, 4)

    loader = loader_of("a")
    served = [batch["tokens"] for batch in loader]
    other = loader_of("moved", random_seed=9)
    other.load_state_dict({**loader.state_dict(), "consumed_samples": 8})
    assert torch.equal(next(iter(other))["tokens"], served[2])
    for changes in ({"seed": 1}, {"shuffle": True}):
        with pytest.raises(ConfigError, match="resume: state is for fingerprint"):
            loader_of("b", **changes).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("version", ["main", "0.16.1"])
def test_batches_of_a_blend_in_a_store_are_read_ahead_and_have_bounds_of_one_length(version: str, s3: Bucket) -> None:
    rows = [random_rows(seed, 40) for seed in (1, 2)]
    uris = [write_rows(f"{s3.fresh()}/{name}.jsonl", each) for name, each in zip("ab", rows, strict=True)]
    config = config_of(
        uris[0], blend=(uris, [0.3, 0.7]), split="1,0,0", context_parallel_size=2, megatron_samples=version
    )
    blend = build(config, (60, 0, 0))[0]
    loader = build_pretraining_data_loader(blend, 0, 4, look_ahead=3)
    assert loader is not None
    bounds = 0
    for step, batch in zip(range(8), loader, strict=False):
        for row in range(4):
            source, number = int(batch["dataset_id"][row]), blend.dataset_sample_index[4 * step + row]
            needed = packed_as_megatron(rows[source][number], Speaker(), 64, 4, version)
            assert batch["cu_seqlens"][row].unique().tolist() == np.unique(needed["cu_seqlens"]).tolist()
            bounds = max(bounds, len(np.unique(needed["cu_seqlens"])))
            same({name: batch[name][row] for name in ("tokens", "labels", "loss_mask", "position_ids", "max_seqlen")},
                 {name: value for name, value in needed.items() if name != "cu_seqlens"})  # fmt: skip
    assert bounds > 2


def test_an_eod_that_pads_as_well_is_learnt_where_it_ends_a_conversation(tmp_path: Path) -> None:
    row = {"messages": conversation(np.random.default_rng(0))}
    uri = write_rows(f"{tmp_path}/a.jsonl", [row])
    with pytest.warns(UserWarning, match="pad id 5 is also another special token"):
        dataset = build(config_of(uri, tokenizer=Speaker(pad=5, ends=True), split="1,0,0"))[0]
    sample = dataset[0]
    (ends,) = np.nonzero(np.asarray(sample["labels"] == 5) & np.asarray(sample["loss_mask"] == 1))
    assert len(ends) == 1
    assert not sample["loss_mask"][ends[0] + 1 :].any()


def test_rows_of_other_schemas_are_conversations_and_texts_are_learnt_whole(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"instruction": "add", "input": "1 2", "output": "3"},
        {"text": "all of it"},
    ]
    train = build(config_of(write_rows(f"{tmp_path}/mixed.jsonl", rows), split="1,0,0"))[0]
    learnt = [
        "".join(chr(int(t) - 10) for t in s["labels"][s["loss_mask"] == 1] if t > 10)
        for s in map(train.__getitem__, range(3))
    ]
    assert learnt == ["hello", "3", "ll of it"]
    assert train[0]["tokens"][:2].tolist() == [1, 2]  # an empty system message, then the user


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        ({"messages": []}, r"bad.jsonl, row 1 at byte 9\d: messages: needs a list"),
        ({"unknown": 1}, "row 1 at byte .*: found unknown, needs messages, conversations"),
        ({"conversations": [{"from": "human", "value": ["image"]}]}, "value: list, needs text"),
        ([1], "row 1 at byte .*: list, needs a JSON object in each line"),
    ],
)
def test_a_bad_row_is_named_when_it_is_served(row: Any, needed: str, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
    train = build(config_of(write_rows(f"{tmp_path}/bad.jsonl", [good, row]), split="1,0,0"))[0]
    assert train[0]["loss_mask"].any()
    with pytest.raises(FormatError, match=needed):
        train[1]


@pytest.mark.parametrize("name", ["reset_position_ids", "reset_attention_mask", "create_attention_mask"])
def test_masks_that_these_samples_do_not_have_are_refused(name: str, tmp_path: Path) -> None:
    uri = write_rows(f"{tmp_path}/a.jsonl", random_rows(0, 4))
    with pytest.raises(ConfigError, match=f"{name}: found True, packed samples have cu_seqlens"):
        build(config_of(uri, **{name: True}))


def test_what_cannot_be_served_is_refused_at_the_start(tmp_path: Path) -> None:
    uri = write_rows(f"{tmp_path}/a.jsonl", random_rows(0, 4))
    with pytest.raises(IndexBuildError, match="no rows in the valid split, needs 5"):
        build(config_of(uri, split="99,1,0"), (5, 5, 0))
    (train, *_) = build(config_of(uri, tokenizer=type("Plain", (Speaker,), {"tokenize_conversation": property()})()))
    with pytest.raises(ConfigError, match=r"Plain: has no tokenize_conversation; give binidx.megatron.ChatTokenizer"):
        train[0]
    assert collate([build(config_of(uri))[0][0]])["tokens"].shape == (1, 64)
