"""Datasets in spawned workers: unpickling raises nothing, the first read does, and the DataLoader reports it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.chats import Speaker, random_rows, write_rows
from helpers.gpt_data import TOKENIZER
from helpers.random_datasets import Document, build_ours

import binidx
from binidx.corpus.merge import merge_virtually
from binidx.dataset.assemble.chat import SFTDatasetConfig
from binidx.dataset.megatron.sft import SFTDataset
from binidx.errors import ObjectChangedError, StorageError
from binidx.packed.packed_files import PackedDatasetBuilder, PackedFiles


def write(prefix: Path, count: int = 3000) -> str:
    return build_ours(prefix, [Document(np.arange(20) + n % 9, [20], []) for n in range(count)], np.uint16)


def build(blend: Any, kind: Any = binidx.GPTDataset, config_class: Any = binidx.GPTDatasetConfig, **given: Any) -> Any:
    config = config_class(**{
        "random_seed": 1, "sequence_length": 8, "blend": blend, "split": "1,0,0", "tokenizer": TOKENIZER,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False, **given,
    })  # fmt: skip
    return binidx.BlendedMegatronDatasetBuilder(kind, [60_000, 0, 0], lambda: True, config).build()[0]


def blend(folder: Path) -> Any:
    return build(([write(folder / "en", 30), write(folder / "de", 30)], [0.5, 0.5]))


def virtual(folder: Path) -> Any:
    merge_virtually([write(folder / "en", 30)], folder / "list")
    return build(([f"{folder}/list"], None))


def chat(folder: Path) -> Any:
    uri = write_rows(f"{folder}/chat.jsonl", random_rows(0, 30))
    return build(([uri], None), SFTDataset, SFTDatasetConfig, sequence_length=64, tokenizer=Speaker())


def packed(folder: Path) -> Any:
    builder = PackedDatasetBuilder(str(folder), "t", 100, 0, np.dtype("<u2"))
    builder.add_array(np.arange(300, dtype=np.uint16))
    builder.write_reminder()
    return PackedFiles(builder.filenames, 10)


def first(dataset: Any) -> Any:
    return dataset.read([0], [0]) if isinstance(dataset, PackedFiles) else dataset[0]


@pytest.mark.parametrize("make", [blend, virtual, chat, packed])
def test_the_first_sample_of_lost_data_is_an_error_and_unpickling_is_not(
    make: Callable[[Path], Any], tmp_path: Path
) -> None:
    pickled = pickle.dumps(make(tmp_path))
    assert len(first(pickle.loads(pickled)))
    for path in [*tmp_path.rglob("*.bin"), *tmp_path.rglob("*.jsonl"), *tmp_path.rglob("*.idx")]:
        path.unlink()
    again = pickle.loads(pickled)
    with pytest.raises(StorageError):
        first(again)


def test_a_loader_reports_data_replaced_before_its_spawned_workers_start(tmp_path: Path) -> None:
    dataset = build(([write(tmp_path / "en")], None))
    assert len(pickle.dumps(dataset)) > 200_000  # more than a pipe holds: the parent waits for the worker to read it
    loader = binidx.build_pretraining_data_loader(dataset, 0, 8, num_workers=1, multiprocessing_context="spawn")
    assert loader is not None
    write(tmp_path / "en", 3001)
    with pytest.raises(ObjectChangedError, match=r"en.idx: .* since it was pickled .*; start again"):
        next(iter(loader))
