"""Sentence splitting (`--split-sentences`) with NLTK's Punkt model, as in Megatron: each sentence becomes a text.

    texts      "One. Two."  "Three."     two documents
    sentences  "One." "Two." "Three."    documents 0 2 3

Texts are first cut into pieces of a million characters, because Punkt's time grows faster than its text.

Source: Megatron-LM, tools/preprocess_data.py (Encoder.split and its rule for newlines); Kiss and Strunk 2006 for Punkt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, MissingDriverError
from binidx.prepare.text.batch import cumulative_offsets
from binidx.prepare.tokenizers.engine import decode_texts

MOST_CHARACTERS = 1_000_000
KEEPS_NEWLINES = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"
"""Pattern of the end of a sentence that keeps the blanks after it in the sentence."""


class Sentences(NamedTuple):
    """Texts, offsets and documents as in a Batch, with a text for each sentence."""

    texts: NDArray[np.uint8]  # (num_bytes,)
    offsets: NDArray[np.int64]  # (num_sentences + 1,)
    documents: NDArray[np.int64]  # (num_documents + 1,)


class SentenceSplitter:
    """Splitter of texts into sentences. Pickles as its two arguments.

    Raises:
        MissingDriverError: NLTK is not installed.
        ConfigError: NLTK has no model of this language here.
    """

    def __init__(self, language: str = "english", keep_newlines: bool = False) -> None:
        self.language, self.keep_newlines = language, keep_newlines
        self._tokenize = load_punkt(language, keep_newlines)

    def __reduce__(self) -> tuple[type[SentenceSplitter], tuple[str, bool]]:
        return SentenceSplitter, (self.language, self.keep_newlines)

    def split(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64], documents: NDArray[np.int64]) -> Sentences:
        """Return the sentences of all texts, in the same documents."""
        rows = [self.split_text(text) for text in decode_texts(texts, offsets)]
        encoded = [sentence.encode() for row in rows for sentence in row]
        found, firsts = cumulative_offsets(list(map(len, encoded))), cumulative_offsets(list(map(len, rows)))
        return Sentences(np.frombuffer(b"".join(encoded), np.uint8), found, firsts[documents])

    def split_text(self, text: str) -> list[str]:
        """Return the sentences of a text; none if it is empty."""
        pieces = (text[start : start + MOST_CHARACTERS] for start in range(0, len(text), MOST_CHARACTERS))
        return [sentence for piece in pieces for sentence in self._tokenize(piece)]


def load_punkt(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """Return the function that splits a text."""
    try:
        from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer, PunktTokenizer
    except ImportError as error:
        raise MissingDriverError("sentences: nltk is not installed; pip install 'binidx[sentences]'") from error
    try:
        punkt: Any = PunktTokenizer(language)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"sentences: no Punkt model of {language!r} in NLTK's data; python -m nltk.downloader punkt_tab fetches it"
        ) from error
    if keep_newlines:
        rules = type("KeepsNewlines", (PunktLanguageVars,), {"_period_context_fmt": KEEPS_NEWLINES})
        punkt = PunktSentenceTokenizer(train_text=punkt._params, lang_vars=rules())
    cut: Callable[[str], list[str]] = punkt.tokenize
    return cut
