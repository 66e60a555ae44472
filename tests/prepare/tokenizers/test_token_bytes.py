"""Bytes of tokens, one after the other, are what the library decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained_tokenizers import KINDS, hard_texts, json_of, plain_texts, save, train_sentencepiece
from tokenizers import Tokenizer, decoders

from binidx import describe_tokenizer
from binidx.errors import ConfigError
from binidx.tokenizers.token_bytes import token_table

BYTE_LEVEL = ["qwen2", "added tokens"]
PIECES = ["sentencepiece-like"]
BLANKS = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize("kind", BYTE_LEVEL + PIECES)
def test_the_table_decodes_as_the_library_does(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(json_of(kind))
    tokenizer.decoder = decoders.ByteLevel() if kind in BYTE_LEVEL else BLANKS
    table = token_table(describe_tokenizer(save(kind, tmp_path)))
    for text in hard_texts(40):
        ids = tokenizer.encode(text).ids
        assert table.decode(ids).decode(errors="replace") == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(table.offsets) == tokenizer.get_vocab_size() + 1


def test_a_text_is_found_in_tokens_of_sentencepiece(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    path = train_sentencepiece(tmp_path / "m.model", model_type="bpe", byte_fallback=True)
    model = SentencePieceProcessor(model_file=path)
    table = token_table(describe_tokenizer(path))
    for text in [*plain_texts()[:5], "雨 🙂 naïve"]:
        words = " ".join(text.split())
        assert table.decode(model.encode(words)).decode().strip() == words


@pytest.mark.parametrize("kind", ["wordpiece"])
def test_tokens_without_bytes_of_their_own_are_refused(kind: str, tmp_path: Path) -> None:
    assert kind in KINDS
    with pytest.raises(ConfigError, match="tokens have no bytes of their own"):
        token_table(describe_tokenizer(save(kind, tmp_path)))
