"""Tokens of real text: their statistics decide what compression gains, and noise has none.

By default the English that every Python carries: its language reference and the docstrings of its library (1.9 MB, as
`make demo` reads them). BINIDX_BENCH_TEXT names a folder of .txt files to be read instead: books, say. A byte-level BPE
with the 50,257 entries of GPT-2 is trained on the text itself. Short texts that follow one another are one document, of
1,000 tokens or more. Documents come in a random order, each once before any comes again: a frame of 64 KiB holds a few
per cent of the text, so that a second copy hardly ever helps it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from demo.corpus import EOD, build_corpus, train_bpe
from numpy.typing import NDArray

import binidx

VOCAB_SIZE = 50_257
LEAST_CHARACTERS = 4000


def documents() -> tuple[str, list[str]]:
    """What text it is, and its documents."""
    folder = os.environ.get("BINIDX_BENCH_TEXT")
    if folder:
        return f"the texts of {Path(folder).name}/", [path.read_text() for path in sorted(Path(folder).glob("*.txt"))]
    return "Python's manual and docstrings", build_corpus()["en"]


def tokenize(directory: Path) -> tuple[str, list[NDArray[Any]]]:
    """What text it is, and the tokens of each of its documents, with an EOD at the end."""
    name, texts = documents()
    texts = list(joined(texts))
    tokenizer = train_bpe(texts, directory / "tokenizer.json", vocab_size=VOCAB_SIZE)
    eod = tokenizer.token_to_id(EOD)
    encoded = [np.array([*tokenizer.encode(text).ids, eod], np.uint16) for text in texts]
    count, size = sum(map(len, encoded)), sum(len(text.encode()) for text in texts)
    return f"{name}, {size / 1e6:.1f} MB, {size / count:.1f} bytes a token", encoded


def joined(texts: list[str]) -> Iterator[str]:
    """Neighbours together until they are long enough."""
    document = ""
    for text in texts:
        document += text + "\n"
        if len(document) >= LEAST_CHARACTERS:
            yield document
            document = ""
    if document:
        yield document


def write_text(prefix: Path, encoded: list[NDArray[Any]], num_tokens: int, dtype: type, **options: Any) -> str:
    """A dataset of at least so many tokens: `prefix` ends in .bin or .bin.zst, and so does the file."""
    with binidx.IndexedDatasetBuilder(prefix, dtype, **options) as builder:
        for document in _shuffled(encoded, num_tokens):
            builder.add_document(document.astype(dtype), [len(document)])
        name = str(prefix).removesuffix(".zst").removesuffix(".bin")
        builder.finalize(f"{name}.idx")
    return name


def _shuffled(encoded: list[NDArray[Any]], num_tokens: int) -> Iterator[NDArray[Any]]:
    order, count, seed = list(encoded), 0, 0
    while count < num_tokens:
        random.Random(seed).shuffle(order)
        seed += 1
        for document in order:
            yield document
            count += len(document)
            if count >= num_tokens:
                return
