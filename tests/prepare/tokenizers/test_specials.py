"""Special tokens that stood in the text are counted, and those put around it are not."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained_tokenizers import EOT, around, buffers, byte_level, save
from tokenizers import AddedToken

from binidx import describe_tokenizer
from binidx.prepare.tokenizers.engine import count_specials, count_unknown
from binidx.prepare.tokenizers.engine_choice import choose_engine

TEXTS = ["none", f"{EOT}one", "", f"{EOT} <mask> three {EOT}", "<mask>"]


@pytest.mark.parametrize("single", ["$A", f"{EOT} $A", f"{EOT} $A {EOT}"])
def test_special_tokens_in_text_are_counted_by_text(single: str, tmp_path: Path) -> None:
    tokenizer = byte_level(added=[AddedToken("<mask>", special=True), AddedToken("none")], post=around(single))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for policy, expected in (("parse", [0, 1, 0, 3, 1]), ("text", [0] * 5)):
        spec = describe_tokenizer(str(tmp_path), specials=policy)
        ids, offsets = choose_engine(spec).encode(*buffers(TEXTS))
        assert count_specials(ids, offsets, spec).tolist() == expected


def test_what_is_unknown_is_ordinary(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("wordpiece", tmp_path))
    ids, offsets = choose_engine(spec).encode(*buffers(["漢 字", "a [SEP] b"]))
    assert count_specials(ids, offsets, spec).tolist() == [0, 1]


def test_what_is_unknown_is_a_special_token_where_it_is_spelled_out(tmp_path: Path) -> None:
    spec = describe_tokenizer(save("wordpiece", tmp_path))
    texts, offsets = buffers(["漢 字", "a [UNK] b[UNK]", "", "[UN", "K]"])
    assert count_unknown(texts, offsets, spec).tolist() == [0, 2, 0, 0, 0]
    assert count_unknown(texts, offsets[1:], spec).tolist() == [2, 0, 0, 0]
