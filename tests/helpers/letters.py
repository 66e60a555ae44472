"""A tokenizer whose texts can be cut anywhere, for fill in the middle."""

from __future__ import annotations

from typing import Any

import numpy as np
from helpers.gpt_data import Tokenizer

EXTRA = {"prefix": "<pre>", "middle": "<mid>", "suffix": "<suf>", "pad": "<pad>", "eod": "<eod>"}
IDS = {"<eod>": 0, "<pre>": 90_001, "<mid>": 90_002, "<suf>": 90_003, "<pad>": 90_004, "<file>": 99}


class Letters:
    """A tokenizer of pairs of letters, so that a cut within a pair changes the number of tokens; "z" is <file>.

    Token 7 is special: it may be left out of texts.
    """

    def tokens_to_ids(self, tokens: Any) -> Any:
        return IDS.get(tokens) if isinstance(tokens, str) else [IDS.get(token) for token in tokens]

    def ids_to_text(self, ids: Any, remove_special_tokens: bool = False) -> str:
        kept = [i for i in np.asarray(ids).tolist() if i < 1000 and not (remove_special_tokens and i == 7)]
        return "".join(chr(97 + i % 26) + chr(97 + i // 26 % 26) for i in kept)

    def text_to_ids(self, text: str) -> list[int]:
        return [1 + sum(text[at : at + 2].encode()) % 88 for at in range(0, len(text), 2)]


class WithLetters(Tokenizer):
    @property
    def _tokenizer(self) -> Letters:
        return Letters()
