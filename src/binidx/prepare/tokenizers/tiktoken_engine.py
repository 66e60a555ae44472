"""tiktoken: byte-level BPE by ranks, the reference engine for files of ranks.

The named encodings bring the regular expression that splits text and the special tokens, which a file of ranks lacks.
A tokenizer.json is not for this engine: gigatoken gives the same ids several times faster.

Source: tiktoken_ext.openai_public of tiktoken 0.14.0: patterns, special tokens and addresses.
"""

from __future__ import annotations

import base64
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.prepare.text.batch import cumulative_offsets
from binidx.prepare.tokenizers.engine import Encoded, add_special_ids, decode_texts, missing_package
from binidx.prepare.tokenizers.spec import TokenizerSpec

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class NamedEncoding(NamedTuple):
    """Properties of an encoding that a file of ranks lacks."""

    pattern: str
    special_tokens: dict[str, int]
    address: str = ""


_FOLDER = "https://openaipublic.blob.core.windows.net/encodings"
_CODE = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}

ENCODINGS = {
    "r50k_base": NamedEncoding(GPT2, {"<|endoftext|>": 50256}, f"{_FOLDER}/r50k_base.tiktoken"),
    "p50k_base": NamedEncoding(GPT2, {"<|endoftext|>": 50256}, f"{_FOLDER}/p50k_base.tiktoken"),
    "cl100k_base": NamedEncoding(CL100K, {**_CODE, "<|endofprompt|>": 100276}, f"{_FOLDER}/cl100k_base.tiktoken"),
    "o200k_base": NamedEncoding(
        O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, f"{_FOLDER}/o200k_base.tiktoken"
    ),
}


class Tiktoken:
    """Engine for byte-level BPE by the ranks of a file; the spec's pattern splits the text."""

    name = "tiktoken"
    reference_for: tuple[str, ...] = ("tiktoken",)

    @classmethod
    def refusal(cls, spec: TokenizerSpec, content: bytes) -> str | None:
        if spec.kind != "tiktoken":
            return f"reads a file of ranks, not {spec.kind}"
        return missing_package("tiktoken", "tiktoken")

    def __init__(self, spec: TokenizerSpec, content: bytes) -> None:
        from tiktoken import Encoding

        self.spec = spec
        specials, ranks = dict(spec.special_tokens), parse_ranks(spec.uri, content)
        self.encoding = Encoding("binidx", pat_str=spec.pattern, mergeable_ranks=ranks, special_tokens=specials)
        self.allowed = set() if spec.specials == "text" else set(specials)

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        encode, allowed = self.encoding.encode_to_numpy, self.allowed
        rows = [encode(text, allowed_special=allowed, disallowed_special=()) for text in decode_texts(texts, offsets)]
        ids = np.concatenate([np.empty(0, np.uint32), *rows])
        return add_special_ids(ids, cumulative_offsets([len(row) for row in rows]), self.spec)

    def decode(self, ids: list[int]) -> str:
        return self.encoding.decode(ids)


def parse_ranks(uri: str, content: bytes) -> dict[bytes, int]:
    """Return the bytes and id of each entry of a file of ranks: lines of base64 and a number.

    Raises:
        FormatError: not a file of ranks.
    """
    try:
        rows = (line.split() for line in content.splitlines() if line)
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in rows}
    except ValueError as error:
        raise FormatError(f"{uri}: not a file of ranks ({error}); correct the name") from error
