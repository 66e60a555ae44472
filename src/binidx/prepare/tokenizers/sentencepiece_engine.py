"""SentencePiece: the reference for a .model of any type.

Control symbols inside text are text to it, as Megatron's SentencePiece tokenizer has it: the three policies are one.
"""

from __future__ import annotations

import importlib.util

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.tokenizers.engine import Encoded, flat, missing, text_strings
from binidx.prepare.tokenizers.spec import TokenizerSpec


class SentencePiece:
    """A .model through Google's library, which gives lists of ints."""

    name = "sentencepiece"

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind != "sentencepiece":
            return f"reads a .model, not {spec.kind}"
        return None if importlib.util.find_spec("sentencepiece") else missing("sentencepiece", "sentencepiece")

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.processor = SentencePieceProcessor(model_proto=content)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        return flat(self.processor.encode(text_strings(texts, offsets), out_type=int, num_threads=1))

    def decode(self, ids: list[int]) -> str:
        text: str = self.processor.decode(ids)
        return text
