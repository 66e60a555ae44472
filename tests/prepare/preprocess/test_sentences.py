"""Sentences are those of NLTK's Punkt, document by document, and newlines stay where they are asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.trained_tokenizers import buffers, plain_texts

from binidx.errors import ConfigError
from binidx.prepare.preprocess.tokenize_part import load_punkt, split_sentences
from binidx.prepare.text.batch import Batch


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A Punkt model of this machine's text, where NLTK looks for it: nothing is fetched."""
    import nltk
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    folder = tmp_path_factory.mktemp("nltk")
    trainer = PunktTrainer("\n".join(plain_texts()))
    place = folder / "tokenizers" / "punkt_tab" / "english"
    place.parent.mkdir(parents=True)
    place.mkdir(mode=0o700)
    nltk.data.path.insert(0, str(folder))
    save_punkt_params(trainer.get_params(), str(place))


def cut(
    texts: list[str], documents: list[int], keep_newlines: bool = False, **most: int
) -> tuple[list[str], list[int]]:
    rows = np.arange(len(documents) - 1)
    batch = Batch("text", *buffers(texts), np.array(documents), rows, rows)
    found = split_sentences(batch, load_punkt("english", keep_newlines), **most)
    bounds = zip(found.offsets, found.offsets[1:], strict=False)
    return [found.texts[start:stop].tobytes().decode() for start, stop in bounds], found.documents.tolist()


def sentences_of(text: str, keep_newlines: bool = False) -> list[str]:
    return cut([text], [0, 1], keep_newlines)[0]


def test_each_sentence_is_a_text_of_its_document() -> None:
    found = cut(["One is. Two is.", "", "Three – é. ", "Four"], [0, 1, 3, 3, 4])
    assert found == (["One is.", "Two is.", "Three – é.", "Four"], [0, 2, 3, 3, 4])


def test_the_sentences_of_real_text_are_punkts() -> None:
    from nltk.tokenize.punkt import PunktTokenizer

    punkt = PunktTokenizer("english")
    for text in plain_texts()[:40]:
        assert sentences_of(text) == punkt.tokenize(text)


def test_newlines_stay_with_the_sentence_before() -> None:
    text = "This is it.\n\nThat was it.  End"
    assert sentences_of(text) == ["This is it.", "That was it.", "End"]
    assert sentences_of(text, keep_newlines=True) == ["This is it.\n\n", "That was it.  ", "End"]


def test_a_long_text_is_cut_first() -> None:
    assert cut(["One is. Two is."], [0, 1], most=10)[0] == ["One is.", "Tw", "o is."]


def test_a_language_without_a_model_says_where_it_comes_from() -> None:
    for language in ("nonsense", "../english"):
        with pytest.raises(ConfigError, match=r"no Punkt model of .* python -m nltk.downloader punkt_tab"):
            load_punkt(language, False)


def test_without_nltk_the_error_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "nltk.py").write_text("raise ImportError")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from binidx.prepare.preprocess.tokenize_part import load_punkt\nload_punkt('english', False)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDriverError: sentences: nltk is not installed; pip install 'binidx[sentences]'" in found.stderr
