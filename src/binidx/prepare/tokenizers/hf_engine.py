"""Hugging Face `tokenizers`: the reference for a tokenizer.json and for WordPiece vocabularies.

Its fastest call, `encode_batch_fast`, computes no offsets but still makes a Python list of ints of each text: 0.015 s
for 10^6 tokens, where encoding them takes 0.8 s.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.tokenizers.engine import Encoded, flat, missing, text_strings
from binidx.prepare.tokenizers.spec import TokenizerSpec
from binidx.prepare.tokenizers.tokenizer_json import wordpiece_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# An Encoding keeps some 100 bytes a token until its batch is through.
BATCH_BYTES = 1 << 18


class HuggingFace:
    """Any tokenizer.json. One thread: processes are what a job has many of."""

    name = "hf"

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind not in ("json", "wordpiece"):
            return f"reads a tokenizer.json or a vocab.txt, not {spec.kind}"
        return None if importlib.util.find_spec("tokenizers") else missing("tokenizers", "tokenizers")

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        # Its threads would compete with the other processes of the job; read by the library at each call.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if spec.kind == "wordpiece":
            content = wordpiece_json(spec.uri, content, lowercase=spec.lowercase)
        self.tokenizer = open_json(content, spec.specials == "text")
        self.wrapped = bool(spec.prefix or spec.suffix)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        return flat(list(self._ids(text_strings(texts, offsets), offsets)))

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text

    def _ids(self, texts: list[str], offsets: NDArray[np.int64]) -> Iterator[list[int]]:
        for first, stop in batch_texts(offsets, BATCH_BYTES):
            for encoding in self.tokenizer.encode_batch_fast(texts[first:stop], add_special_tokens=self.wrapped):
                yield encoding.ids


@functools.lru_cache(maxsize=1)
def open_json(content: bytes, specials_as_text: bool) -> Tokenizer:
    """The library's tokenizer. A tokenizer.json may ask for cut or padded texts, which Megatron does not follow.

    The last one is kept: a process has it as its reference, and gigatoken for the texts that are unsettled.
    """
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = specials_as_text
    return tokenizer


def batch_texts(offsets: NDArray[np.int64], num_bytes: int) -> Iterator[tuple[int, int]]:
    """Neighbouring texts, (first, stop), of `num_bytes` or a little more together."""
    first, last = 0, len(offsets) - 1
    while first < last:
        stop = min(last, int(np.searchsorted(offsets, offsets[first] + num_bytes)))
        yield first, max(stop, first + 1)
        first = max(stop, first + 1)
