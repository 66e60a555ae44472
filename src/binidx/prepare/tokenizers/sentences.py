"""`--split-sentences`: each sentence of a text becomes a text of its own, by the Punkt model of NLTK, as in Megatron.

    texts      "One. Two."  "Three."     two documents
    sentences  "One." "Two." "Three."    documents 0 2 3

Text is cut every million characters first, wherever that is: Punkt's time grows faster than its text.

Source: Megatron-LM, tools/preprocess_data.py (Encoder.split and its rule for newlines); Kiss and Strunk 2006 for Punkt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, MissingDriverError
from binidx.prepare.tokenizers.engine import missing, text_strings

MOST_CHARACTERS = 1_000_000


KEEPS_NEWLINES = r"\S*%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"


"""What ends a sentence, with the blanks after it in the sentence."""


class Sentences(NamedTuple):
    """As in text.Batch."""

    texts: NDArray[np.uint8]  # (num_bytes,)
    offsets: NDArray[np.int64]  # (num_sentences + 1,)
    documents: NDArray[np.int64]  # (num_documents + 1,)


class SentenceSplitter:
    """Cuts texts into sentences. Pickles as its two arguments.

    Raises:
        MissingDriverError: NLTK is not installed.
        ConfigError: its model of this language is not there.
    """

    def __init__(self, language: str = "english", keep_newlines: bool = False) -> None:
        self.language, self.keep_newlines = language, keep_newlines
        self._tokenize = open_punkt(language, keep_newlines)

    def __reduce__(self) -> tuple[type[SentenceSplitter], tuple[str, bool]]:
        return SentenceSplitter, (self.language, self.keep_newlines)

    def split(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64], documents: NDArray[np.int64]) -> Sentences:
        """The sentences of all texts, of the same documents."""
        rows = [self.sentences_of(text) for text in text_strings(texts, offsets)]
        encoded = [sentence.encode() for row in rows for sentence in row]
        found = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        firsts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return Sentences(np.frombuffer(b"".join(encoded), np.uint8), found, firsts[documents])

    def sentences_of(self, text: str) -> list[str]:
        """One after the other; none in an empty text."""
        pieces = (text[start : start + MOST_CHARACTERS] for start in range(0, len(text), MOST_CHARACTERS))
        return [sentence for piece in pieces for sentence in self._tokenize(piece)]


def open_punkt(language: str, keep_newlines: bool) -> Callable[[str], list[str]]:
    """What cuts a text."""
    try:
        from nltk.tokenize.punkt import PunktLanguageVars, PunktSentenceTokenizer, PunktTokenizer
    except ImportError as error:
        raise MissingDriverError(f"sentences: {missing('nltk', 'sentences')}") from error
    try:
        punkt: Any = PunktTokenizer(language)
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"sentences: NLTK has no Punkt model of {language!r} here; python -m nltk.downloader punkt_tab fetches them"
        ) from error
    if keep_newlines:
        rules = type("KeepsNewlines", (PunktLanguageVars,), {"_period_context_fmt": KEEPS_NEWLINES})
        punkt = PunktSentenceTokenizer(train_text=punkt._params, lang_vars=rules())
    cut: Callable[[str], list[str]] = punkt.tokenize
    return cut
