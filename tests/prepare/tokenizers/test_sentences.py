"""Sentences are those of NLTK's Punkt, document by document, and newlines stay where they are asked for."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import nltk
import numpy as np
import pytest
from helpers.trained_tokenizers import buffers, plain_texts
from nltk.tokenize.punkt import PunktTokenizer, PunktTrainer, save_punkt_params

from binidx.errors import ConfigError
from binidx.prepare.tokenizers import sentences
from binidx.prepare.tokenizers.sentences import SentenceSplitter


@pytest.fixture(scope="module", autouse=True)
def model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A Punkt model of this machine's text, where NLTK looks for it: nothing is fetched."""
    folder = tmp_path_factory.mktemp("nltk")
    trainer = PunktTrainer("\n".join(plain_texts()))
    place = folder / "tokenizers" / "punkt_tab" / "english"
    place.parent.mkdir(parents=True)
    place.mkdir(mode=0o700)
    nltk.data.path.insert(0, str(folder))
    save_punkt_params(trainer.get_params(), str(place))


def cut(splitter: SentenceSplitter, texts: list[str], documents: list[int]) -> tuple[list[str], list[int]]:
    found = splitter.split(*buffers(texts), np.array(documents))
    bounds = zip(found.offsets, found.offsets[1:], strict=False)
    return [found.texts[start:stop].tobytes().decode() for start, stop in bounds], found.documents.tolist()


def test_each_sentence_is_a_text_of_its_document() -> None:
    found = cut(SentenceSplitter(), ["One is. Two is.", "", "Three – é. ", "Four"], [0, 1, 3, 3, 4])
    assert found == (["One is.", "Two is.", "Three – é.", "Four"], [0, 2, 3, 3, 4])


def test_the_sentences_of_real_text_are_punkts() -> None:
    punkt = PunktTokenizer("english")
    for text in plain_texts()[:40]:
        assert SentenceSplitter().split_text(text) == punkt.tokenize(text)


def test_newlines_stay_with_the_sentence_before() -> None:
    text = "This is it.\n\nThat was it.  End"
    assert SentenceSplitter().split_text(text) == ["This is it.", "That was it.", "End"]
    assert SentenceSplitter(keep_newlines=True).split_text(text) == ["This is it.\n\n", "That was it.  ", "End"]


def test_a_long_text_is_cut_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentences, "MOST_CHARACTERS", 10)
    assert SentenceSplitter().split_text("One is. Two is.") == ["One is.", "Tw", "o is."]


def test_a_splitter_pickles() -> None:
    again = pickle.loads(pickle.dumps(SentenceSplitter(keep_newlines=True)))
    assert again.split_text("This is it.\nOne.") == ["This is it.\n", "One."]


def test_a_language_without_a_model_says_where_it_comes_from() -> None:
    for language in ("nonsense", "../english"):
        with pytest.raises(ConfigError, match=r"no Punkt model of .* python -m nltk.downloader punkt_tab"):
            SentenceSplitter(language)


def test_without_nltk_the_error_names_the_extra(tmp_path: Path) -> None:
    (tmp_path / "nltk.py").write_text("raise ImportError")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    code += "from binidx.prepare.tokenizers.sentences import SentenceSplitter\nSentenceSplitter()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MissingDriverError: sentences: nltk is not installed; pip install 'binidx[sentences]'" in found.stderr
