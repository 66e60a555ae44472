"""Ids of a tokenizer's special tokens on which samples depend."""

from __future__ import annotations

import warnings
from typing import Any

NO_PAD = -1
"""Pad id of tokenizers without one; no stored token has it."""


def choose_pad_token(tokenizer: Any, allow_ambiguous: bool) -> int:
    """Return the pad id; -1 if there is none, or if it is also another special token and that is not allowed.

    Source: Megatron Core, with its two warnings.
    """
    pad = find_token(tokenizer, "pad")
    if pad is None or pad not in _special_tokens(tokenizer):
        return NO_PAD if pad is None else pad
    if allow_ambiguous:
        warnings.warn(f"pad id {pad} is also another special token, and all of them are masked", stacklevel=2)
        return pad
    warnings.warn(
        f"pad id {pad} is also another special token: pad tokens in the data are not masked; give the tokenizer "
        "a pad id of its own, or set allow_ambiguous_pad_tokens",
        stacklevel=2,
    )
    return NO_PAD


def find_token(tokenizer: Any, name: str) -> int | None:
    """Return the id of a special token such as "pad" or "eod"; None if the tokenizer has none."""
    try:
        token: int | None = getattr(tokenizer, name)
    except Exception:  # tokenizers without the token raise errors of any class
        return None
    return token


def _special_tokens(tokenizer: Any) -> list[Any]:
    try:
        tokens = [token for name, token in tokenizer.special_tokens_dict.items() if name != "pad_token"]
    except (AttributeError, IndexError, ValueError):
        tokens = []
    return tokens or [find_token(tokenizer, "eos"), find_token(tokenizer, "eod")]
