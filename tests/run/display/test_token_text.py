"""Pieces of a text together are the text and all of its ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.trained_tokenizers import hard_texts, plain_texts, save

from binidx import describe_tokenizer
from binidx.prepare.tokenizers.engine_choice import reference_engine
from binidx.run.display.sample_text import INCOMPLETE, TokenText
from binidx.storage.location import Location
from binidx.tokenizers.library import open_decoder


@pytest.mark.parametrize("kind", ["cl100k", "wordpiece"])
def test_pieces_are_the_text_and_all_of_its_ids(kind: str, tmp_path: Path) -> None:
    name = save(kind, tmp_path)
    spec = describe_tokenizer(name)
    decode, text = open_decoder(spec), TokenText.open(Location("none"), name)
    engine = reference_engine(spec)
    for given in [plain_texts()[0][:500], *hard_texts(30)[:30], "🙂👍🏽 東京 naïve"]:
        data = np.frombuffer(given.encode(), np.uint8)
        ids = engine.encode(data, np.array([0, len(data)]))[0].tolist()
        pieces = list(text.pieces(ids))
        assert [number for piece in pieces for number in piece.ids] == ids
        assert [piece.first for piece in pieces] == np.cumsum([0, *(len(piece.ids) for piece in pieces)])[:-1].tolist()
        shown = "".join(piece.text for piece in pieces if not piece.is_special)
        # Tokenizers put blanks between words, but not after a special token, which they leave out.
        assert "".join(shown.replace(INCOMPLETE, "").split()) == "".join(decode(ids).replace(INCOMPLETE, "").split())


def test_without_a_tokenizer_ids_are_shown_and_the_reason(tmp_path: Path) -> None:
    text = TokenText.open(Location(f"{tmp_path}/none"))
    assert [piece.text for piece in text.pieces([5, 7])] == ["5", "7"]
    assert "not found" in text.reason or "no such" in text.reason
