"""Kinds of datasets as orders: the contract, views over them, and what a subclass of the user replaces."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.chats import Speaker, random_rows, write_rows
from helpers.masked_datasets import BERT, T5, write_sentences
from helpers.masked_datasets import build as build_masked

import binidx
from binidx.errors import ConfigError
from binidx.testing import check_order

S = 32
GPT: dict[str, Any] = {"random_seed": 3, "sequence_length": S, "split": "1,0,0", "tokenizer": Speaker()}


def build(kind: Any, config: Any, num_samples: int | None) -> Any:
    return binidx.BlendedMegatronDatasetBuilder(kind, [num_samples, None, None], lambda: True, config).build()[0]


def chats(where: Path, kind: Any = binidx.SFTDataset, num_samples: int = 75, **options: Any) -> Any:
    uri = write_rows(f"{where}/chat.jsonl", random_rows(1, 30))
    return build(kind, binidx.SFTDatasetConfig(**GPT, blend=([uri], None), **options), num_samples)


def sentences(where: Path, kind: Any) -> Any:
    write_sentences(where / "sentences", 60, np.random.default_rng(2))
    return build_masked(kind, [f"{where}/sentences"], (300, 0, 0))[0]


def pairs(where: Path) -> Any:
    rng = np.random.default_rng(4)
    with binidx.IndexedDatasetBuilder(f"{where}/pairs.bin", np.int32, multimodal=True) as builder:
        for _ in range(40):
            lengths = rng.integers(0, 20, rng.integers(0, 5)).tolist()
            builder.add_document(rng.integers(1, 900, sum(lengths)), lengths, rng.integers(0, 3, len(lengths)).tolist())
        builder.finalize(f"{where}/pairs.idx")
    config = binidx.MultimodalDatasetConfig(**GPT, blend=([f"{where}/pairs"], None), image_h=1, image_w=1)
    return build(binidx.MultimodalDataset, config, 90)


KINDS: dict[str, Callable[[Path], Any]] = {
    "chats": chats,
    "shuffled chats": lambda where: chats(where, shuffle=True),
    "chats of their own length": lambda where: chats(where, binidx.VarlenDataset),
    "BERT": lambda where: sentences(where, BERT),
    "T5": lambda where: sentences(where, T5),
    "text and images": pairs,
}


def equal(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name in one:
        many = isinstance(one[name], list)
        for left, right in zip(one[name] if many else [one[name]], other[name] if many else [other[name]], strict=True):
            np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_keeps_the_contract_of_orders(name: str, tmp_path: Path) -> None:
    dataset = KINDS[name](tmp_path)
    check_order(dataset.order)
    check_order(pickle.loads(pickle.dumps(dataset)).order, seed=1)


@pytest.mark.parametrize("name", KINDS)
def test_spans_and_assemble_of_one_sample_are_what_a_batch_serves(name: str, tmp_path: Path) -> None:
    dataset = KINDS[name](tmp_path)
    numbers = [0, len(dataset) - 1, 7, None]
    for idx, sample in zip(numbers, dataset.__getitems__(numbers), strict=True):
        equal(dataset.assemble(idx, dataset.dataset.read(dataset.spans(idx))), sample)
    equal(dataset[-3], dataset[len(dataset) - 3])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_view_leaves_out_rows_of_chats(shuffle: bool, tmp_path: Path) -> None:
    inner = chats(tmp_path, shuffle=shuffle)
    (tmp_path / "list.txt").write_text("3\n11\n")
    viewed = chats(tmp_path, shuffle=shuffle, order=binidx.View(f"{tmp_path}/list.txt"))
    check_order(viewed.order)
    kept = [number for number in range(len(inner)) if inner.find_row(number) not in (3, 11)]
    assert len(viewed) == len(kept) < len(inner)
    for number, original in enumerate(kept):
        equal(viewed[number], inner[original])


def test_an_order_with_an_index_of_its_own_is_refused_where_it_would_be_ignored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="order: SFTDataset has an order of its own; leave it, or skip documents"):
        chats(tmp_path, order="first_fit")
    (tmp_path / "list.txt").write_text("3\n")
    with pytest.raises(ConfigError, match="order: SFTDataset has an order of its own"):
        chats(tmp_path, order=binidx.View(f"{tmp_path}/list.txt", how="rebuild"))
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.int32) as builder:
        builder.add_document(np.arange(200), [200])
        builder.finalize(f"{tmp_path}/en.idx")
    config = binidx.GPTDatasetConfig(**GPT, blend=([f"{tmp_path}/en"], None), order="first_fit")
    with pytest.raises(ConfigError, match="order: BestFitGPTDataset packs documents by itself; use GPTDataset"):
        build(binidx.BestFitGPTDataset, config, 3)


class Reversed(binidx.GPTDataset):
    """Serves the tokens of each sample from its last span to its first; both methods call the built-in one."""

    def spans(self, idx: int | None) -> Any:
        return super().spans(idx)[::-1]

    def assemble(self, idx: int | None, sequences: Any) -> Any:
        return {**super().assemble(idx, sequences), "number": torch.tensor(-1 if idx is None else idx)}


def test_methods_of_a_user_may_call_those_that_they_replace(tmp_path: Path) -> None:
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/en.bin", np.int32) as builder:
        for first in range(40):
            builder.add_document(np.arange(first * 100 + 50, first * 100 + 61), [11])
        builder.finalize(f"{tmp_path}/en.idx")
    config = binidx.GPTDatasetConfig(**GPT, blend=([f"{tmp_path}/en"], None))
    plain, changed = (build(kind, config, 30) for kind in (binidx.GPTDataset, Reversed))
    check_order(changed.order)
    assert changed.order_identity["class"] == "Reversed"
    for number in range(len(plain)):
        spans = plain.spans(number)
        assert changed.spans(number) == spans[::-1]
        tokens = np.concatenate(plain.dataset.read(spans[::-1]))
        sample = changed[number]
        np.testing.assert_array_equal(sample["tokens"], tokens[:S])
        assert sample["number"] == number
    assert not changed[None]["loss_mask"].any()
    changed.shuffle_index = changed.shuffle_index[::-1].copy()
    assert changed.spans(0) == plain.spans(len(plain) - 1)[::-1]
