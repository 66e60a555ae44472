"""What docs/reference/masked-datasets.md shows runs, and does what it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.masked_datasets import TOKENIZER, write_sentences
from helpers.pages import python_blocks, read_page

import binidx

PAGE = read_page("reference/masked-datasets")
IMAGE = np.array([2, 10, 20], np.int32)  # six bytes of a file and two of padding


def test_the_examples_run(tmp_path: Path) -> None:
    write_sentences(tmp_path / "sentences", 200, np.random.default_rng(0))
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/pairs.bin", np.int32, multimodal=True) as builder:
        for each in range(5):
            builder.add_document([each + 2, 3, *IMAGE.tolist()], [2, 3], [0, 1])
        builder.finalize(f"{tmp_path}/pairs.idx")
    names: dict[str, Any] = {"binidx": binidx, "base": str(tmp_path), "tokenizer": TOKENIZER, "decode": pixels}
    for example in python_blocks(PAGE):
        exec(example, names)
    listed = re.search(r"sample = train\[0\]  # (.*)", PAGE)
    assert listed
    assert listed[1].split(", ") == ["text", "types", "labels", "is_random", "padding_mask", "loss_mask", "truncated"]
    assert sorted(names["sample"]) == sorted(listed[1].split(", "))
    batches = [*names["loader"]]
    assert [batch["image"].shape for batch in batches] == [(8, 3, 2, 2)] * 2
    assert len({int(row[0]) for batch in batches for row in batch["tokens"]}) == 5
    assert names["AlwaysMask"]._get_token_mask is not binidx.megatron.BERTMaskedWordPieceDataset._get_token_mask


def pixels(content: bytes) -> torch.Tensor:
    assert content == IMAGE[1:].tobytes()[:-2]
    return torch.zeros(3, 2, 2)
