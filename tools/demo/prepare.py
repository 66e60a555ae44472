"""Documents to a .bin/.idx pair on this disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import binidx

from .tokenizer import DemoTokenizer


@dataclass(frozen=True)
class Written:
    """Counts of a written dataset; `tokens` includes the EOD of each document."""

    documents: int
    text_bytes: int
    tokens: int

    def __add__(self, other: Written) -> Written:
        return Written(self.documents + other.documents, self.text_bytes + other.text_bytes, self.tokens + other.tokens)


def write_dataset(prefix: str, documents: Iterable[str], tokenizer: DemoTokenizer) -> Written:
    """Tokenize documents into `prefix.bin` and `prefix.idx`, an EOD after each; the prefix is a path or any URI."""
    written = Written(0, 0, 0)
    dtype = binidx.DType.optimal_dtype(tokenizer.vocab_size)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype) as builder:
        for text in documents:
            tokens = [*tokenizer.encode(text), tokenizer.eod]
            builder.add_document(tokens, [len(tokens)])
            written += Written(1, len(text.encode()), len(tokens))
        builder.finalize(f"{prefix}.idx")
    return written
