"""tiktoken: byte-level BPE from ranks, six times as fast as the reference; itself the reference for files of ranks.

A tokenizer.json is taken where its ids are provably the same: `ranks.py` has the proof.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from binidx.tokenize.engine import Encoded, missing, strings, surround
from binidx.tokenize.ranks import NotRanks, Ranks, ranks_of
from binidx.tokenize.spec import TokenizerSpec

if TYPE_CHECKING:
    from tiktoken import Encoding


class Tiktoken:
    """Byte-level BPE whose ids rise in the order of its merges, text split by a pattern that is known."""

    name = "tiktoken"

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind not in ("json", "tiktoken"):
            return f"reads a tokenizer.json or a file of ranks, not {spec.kind}"
        if not importlib.util.find_spec("tiktoken"):
            return missing("tiktoken", "tiktoken")
        try:
            ranks_of(spec, content)
        except NotRanks as reason:
            return str(reason)
        return None

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        ranks = ranks_of(spec, content)
        self.spec = spec
        self.encoding = load(ranks)
        # What is added but not special is found in every text, as in a tokenizer.json.
        self.allowed = set(ranks.added) - (set(dict(spec.special_tokens)) if spec.specials == "text" else set())

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        encode, allowed = self.encoding.encode_to_numpy, self.allowed
        rows = [encode(text, allowed_special=allowed, disallowed_special=()) for text in strings(texts, offsets)]
        bounds = np.zeros(len(offsets), np.int64)
        np.cumsum([len(row) for row in rows], out=bounds[1:])
        return surround(np.concatenate(rows) if rows else np.empty(0, np.uint32), bounds, self.spec)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


def load(ranks: Ranks) -> Encoding:
    """The library's tokenizer."""
    from tiktoken import Encoding

    return Encoding("binidx", pat_str=ranks.pattern, mergeable_ranks=ranks.mergeable, special_tokens=ranks.added)
