"""The page on kinds of datasets: its examples run, and its names are there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from helpers.chats import Speaker, random_rows, write_rows
from helpers.gpt_data import Tokenizer
from helpers.pages import python_blocks, read_page
from helpers.public_names import PUBLIC

import binidx

PAGE = read_page("reference/datasets")


class WithText(Tokenizer):
    """A token is a character; <pre> and its like are beyond them."""

    def tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [["<eod>", "<pre>", "<mid>", "<suf>", "<pad>"].index(token) for token in tokens]

    def ids_to_text(self, ids: Any) -> str:
        return "".join(map(chr, np.asarray(ids).tolist()))

    def text_to_ids(self, text: str) -> list[int]:
        return [*map(ord, text)]


def test_the_examples_run(tmp_path: Path) -> None:
    (tmp_path / "args.txt").write_text("0.5 a 0.5 b")
    (tmp_path / "args.json").write_text(json.dumps({"train": ["a"], "valid": "b c", "test": None}))
    with binidx.IndexedDatasetBuilder(f"{tmp_path}/code.bin", np.uint16) as builder:
        for text in ["def area(r): return 3.14 * r * r"] * 99:
            builder.add_document([*map(ord, text), 0], [len(text) + 1])
        builder.finalize(f"{tmp_path}/code.idx")
    write_rows(f"{tmp_path}/chat.jsonl", random_rows(0, 50))
    known = {"folder": str(tmp_path), "tokenizer": WithText(), "chat_tokenizer": Speaker()}
    for example in python_blocks(PAGE):
        exec(example, found := dict(known))
        if "blend" in found:
            assert found["blend"] == (["a", "b"], [0.5, 0.5])
            assert found["blend_per_split"] == [(["a"], None), (["b", "c"], None), None]
        else:
            assert len(found["train"]) >= 100
    assert found["batch"]["tokens"].shape == (4, 64)
    assert not (found["batch"]["cu_seqlens"] % 4).any()


def test_every_kind_it_names_is_public() -> None:
    named = set(re.findall(r"`((?:[A-Z]\w*Dataset|ChatTokenizer|MegatronFullValidationSampler)(?:Config)?)\b", PAGE))
    assert len(named) > 8
    assert {*named} <= {*PUBLIC}
