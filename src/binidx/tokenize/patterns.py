"""The encodings of tiktoken that have a name, and the regular expressions by which they split text.

Source: tiktoken_ext.openai_public of tiktoken 0.14.0, its patterns, special tokens and addresses.
"""

from __future__ import annotations

from typing import NamedTuple

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDING}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Encoding(NamedTuple):
    """What a file of ranks does not say."""

    pattern: str
    special_tokens: dict[str, int]
    address: str = ""


_FOLDER = "https://openaipublic.blob.core.windows.net/encodings"
_CODE = {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
ENCODINGS = {
    "r50k_base": Encoding(GPT2, {"<|endoftext|>": 50256}, f"{_FOLDER}/r50k_base.tiktoken"),
    "p50k_base": Encoding(GPT2, {"<|endoftext|>": 50256}, f"{_FOLDER}/p50k_base.tiktoken"),
    "cl100k_base": Encoding(CL100K, {**_CODE, "<|endofprompt|>": 100276}, f"{_FOLDER}/cl100k_base.tiktoken"),
    "o200k_base": Encoding(
        O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}, f"{_FOLDER}/o200k_base.tiktoken"
    ),
}
