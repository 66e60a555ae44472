"""From a name to a TokenizerSpec: which kind it is, its size, its EOD, its special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.tokenize.spec import TokenizerSpec, digest_of, fetch
from binidx.tokenize.tokenizer_json import parse_json, special_tokens, vocabulary, wrapping

CONFIG_FILE = "tokenizer_config.json"


def describe_tokenizer(
    uri: str,
    *,
    eod: str | int | None = None,
    specials: str = "parse",
    post_processor: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> TokenizerSpec:
    """The tokenizer under this name.

    Args:
        uri: a tokenizer.json anywhere, or the folder that it is in.
        eod: the token that ends a document, or its id; by default the `eos_token` of tokenizer_config.json beside it.
        specials: see TokenizerSpec.
        post_processor: whether texts get what the tokenizer puts around them (BOS, EOS), as in Megatron unless its
            `--tokenizer-hf-no-include-special-tokens` is given.
    """
    if not uri.endswith(".json"):
        uri = f"{uri.rstrip('/')}/tokenizer.json"
    content = fetch(uri, storage_options)
    parsed = parse_json(uri, content)
    entries = vocabulary(parsed)
    prefix, suffix = wrapping(uri, parsed.get("post_processor")) if post_processor else ((), ())
    return TokenizerSpec(
        uri=uri,
        kind="json",
        digest=digest_of(content),
        vocab_size=len(entries),
        eod=find_eod(uri, entries, _eos_token(uri, storage_options) if eod is None else eod),
        special_tokens=special_tokens(parsed),
        prefix=prefix,
        suffix=suffix,
        specials=specials,
    )


def find_eod(uri: str, entries: Mapping[str, int], eod: str | int | None) -> int | None:
    """The id of a token that was named.

    Raises:
        ConfigError: the vocabulary does not have it.
    """
    if isinstance(eod, str):
        if eod not in entries:
            raise ConfigError(f"{uri}: has no token {eod!r}, needs it as EOD")
        return entries[eod]
    return eod


def _eos_token(uri: str, storage_options: Mapping[str, Any] | None) -> str | None:
    """What the file beside a tokenizer.json calls its `eos_token`."""
    try:
        config = json.loads(fetch(f"{uri.rpartition('/')[0] or '.'}/{CONFIG_FILE}", storage_options))
    except ObjectNotFoundError:
        return None
    token = config.get("eos_token")
    content: str | None = token["content"] if isinstance(token, dict) else token
    return content
