"""SentencePiece: the reference engine for a .model of any type.

The library treats control symbols inside text as text, as Megatron's SentencePiece tokenizer does, so the three
policies for special tokens are the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from binidx.prepare.tokenizers.engine import Encoded, concatenate_ids, decode_texts, missing_package
from binidx.prepare.tokenizers.spec import TokenizerSpec


class SentencePiece:
    """Engine for a .model through Google's library, which returns lists of ints."""

    name = "sentencepiece"
    reference_for: tuple[str, ...] = ("sentencepiece",)

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind != "sentencepiece":
            return f"reads a .model, not {spec.kind}"
        return missing_package("sentencepiece", "sentencepiece")

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        from sentencepiece import SentencePieceProcessor

        self.processor = SentencePieceProcessor(model_proto=content)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        return concatenate_ids(self.processor.encode(decode_texts(texts, offsets), out_type=int, num_threads=1))

    def decode(self, ids: list[int]) -> str:
        text: str = self.processor.decode(ids)
        return text
