"""tiktoken: byte-level BPE by ranks, and the reference for files of ranks.

It takes no tokenizer.json: gigatoken gives the same ids for those several times faster.
"""

from __future__ import annotations

import base64
import importlib.util

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.tokenize.engine import Encoded, missing, strings, surround
from binidx.tokenize.spec import TokenizerSpec


class Tiktoken:
    """Byte-level BPE by the ranks of a file, its text split by the pattern of the spec."""

    name = "tiktoken"

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind != "tiktoken":
            return f"reads a file of ranks, not {spec.kind}"
        return None if importlib.util.find_spec("tiktoken") else missing("tiktoken", "tiktoken")

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        from tiktoken import Encoding

        self.spec = spec
        specials, ranks = dict(spec.special_tokens), parse_ranks(spec.uri, content)
        self.encoding = Encoding("binidx", pat_str=spec.pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.allowed = set() if spec.specials == "text" else set(specials)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        encode, allowed = self.encoding.encode_to_numpy, self.allowed
        rows = [encode(text, allowed_special=allowed, disallowed_special=()) for text in strings(texts, offsets)]
        bounds = np.zeros(len(offsets), np.int64)
        np.cumsum([len(row) for row in rows], out=bounds[1:])
        return surround(np.concatenate(rows) if rows else np.empty(0, np.uint32), bounds, self.spec)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


def parse_ranks(uri: str, content: bytes) -> dict[bytes, int]:
    """Return the bytes and id of each entry of a file of ranks: lines of base64 and a number.

    Raises:
        FormatError: it is no such file.
    """
    try:
        rows = (line.split() for line in content.splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
    except ValueError as error:
        raise FormatError(f"{uri}: is no file of ranks: {error}") from error
