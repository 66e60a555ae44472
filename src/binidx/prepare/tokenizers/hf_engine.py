"""Hugging Face `tokenizers`: the reference engine for a tokenizer.json and for WordPiece vocabularies.

Its fastest call, `encode_batch_fast`, computes no offsets but still makes a Python list of ints for each text: 0.015 s
for 10^6 tokens, whose encoding takes 0.8 s.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.tokenizers.engine import Encoded, concatenate_ids, decode_texts, missing_package
from binidx.prepare.tokenizers.spec import TokenizerSpec
from binidx.prepare.tokenizers.tokenizer_json import wordpiece_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer


# The library keeps some 100 bytes a token until its batch is through.
BATCH_BYTES = 1 << 18


class HuggingFace:
    """Engine for any tokenizer.json. It uses one thread, as a job has many processes."""

    name = "hf"
    reference_for: tuple[str, ...] = ("json", "wordpiece")

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind not in ("json", "wordpiece"):
            return f"reads a tokenizer.json or a vocab.txt, not {spec.kind}"
        return missing_package("tokenizers", "tokenizers")

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        # The library's threads would compete with the other processes of the job; it reads the variable at each call.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        if spec.kind == "wordpiece":
            content = wordpiece_json(spec.uri, content, lowercase=spec.lowercase)
        self.tokenizer = load_tokenizer(content, spec.specials == "text")
        self.wrapped = bool(spec.prefix or spec.suffix)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        return concatenate_ids(list(self._ids(decode_texts(texts, offsets), offsets)))

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text

    def _ids(self, texts: list[str], offsets: NDArray[np.int64]) -> Iterator[list[int]]:
        first = 0
        while first < len(texts):
            stop = max(first + 1, int(np.searchsorted(offsets, offsets[first] + BATCH_BYTES)))
            for encoding in self.tokenizer.encode_batch_fast(texts[first:stop], add_special_tokens=self.wrapped):
                yield encoding.ids
            first = stop


@functools.lru_cache(maxsize=1)
def load_tokenizer(content: bytes, specials_as_text: bool) -> Tokenizer:
    """Return the library's tokenizer, without the file's truncation and padding, which Megatron ignores, too.

    The last one is cached: a process uses it as its reference, and gigatoken for texts with new code points.
    """
    from tokenizers import Tokenizer

    tokenizer: Tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = specials_as_text
    return tokenizer
