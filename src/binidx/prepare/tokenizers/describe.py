"""From a name to a TokenizerSpec: which kind it is, its size, its EOD, its special tokens.

…/tokenizer.json, a folder of one   json
…/vocab.json, with a merges.txt     json: GPT-2's two files
….model                             sentencepiece
….txt                               wordpiece: Megatron's BertWordPiece, an entry a line
….tiktoken, cl100k_base             tiktoken: a file of ranks, or an encoding that tiktoken has in its cache

Where tiktoken and Hugging Face keep what they have fetched: names are looked up there and never fetched by us.

Source: tiktoken 0.14, load.py; huggingface_hub, "Understand caching".
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from binidx.errors import AccessError, ConfigError, FormatError, MissingDriverError, ObjectNotFoundError
from binidx.json_models import JsonFile
from binidx.prepare.tokenizers.engine import missing
from binidx.prepare.tokenizers.spec import TokenizerSpec, content_digest, fetch_content, fetch_object
from binidx.prepare.tokenizers.tiktoken_engine import ENCODINGS, GPT2, parse_ranks
from binidx.prepare.tokenizers.tokenizer_json import (
    END,
    AddedToken,
    parse_json,
    parse_vocabulary,
    special_tokens,
    unknown_token,
    vocabulary,
    wrapping,
)
from binidx.storage.open import read_document
from binidx.storage.stores.registry import split_query

CONFIG_FILE = "tokenizer_config.json"


Options = Mapping[str, Any] | None


def describe_tokenizer(
    uri: str,
    *,
    eod: str | int | None = None,
    specials: str = "parse",
    post_processor: bool = True,
    pattern: str | None = None,
    lowercase: bool = False,
    merges: str | None = None,
    storage_options: Options = None,
) -> TokenizerSpec:
    """The tokenizer under this name.

    Args:
        uri: as above, in any store; nothing is fetched from hubs.
        eod: the token that ends a document, or its id. By default the `eos_token` of tokenizer_config.json beside a
            tokenizer.json, the EOS of a SentencePiece model, the `<|endoftext|>` of an encoding.
        specials: see TokenizerSpec.
        post_processor: whether texts get what a tokenizer.json puts around them (BOS, EOS), as in Megatron unless its
            `--tokenizer-hf-no-include-special-tokens` is given.
        pattern: what splits text, for a file of ranks without a known name: `gpt2` or a regular expression.
        lowercase: as Megatron's BertWordPieceLowerCase; vocab.txt only.
        merges: merges.txt of Megatron's GPT2BPETokenizer, whose vocab.json is `uri`; its EOD is `<|endoftext|>`.

    Raises:
        ConfigError: the tokenizer is not there, not to be told, or has no such EOD.
        FormatError: its content is not what its name says.
    """
    name, _ = split_query(uri)
    if merges:
        spec, found = _json(uri, post_processor, storage_options, merges)
    elif uri in ENCODINGS:
        spec, found = _ranks(cached_encoding(uri), uri, pattern, storage_options)
    elif name.endswith(".model"):
        spec, found = _sentencepiece(uri, storage_options)
    elif name.endswith(".txt"):
        spec, found = _wordpiece(uri, lowercase, storage_options)
    elif name.endswith(".tiktoken"):
        spec, found = _ranks(uri, name.rpartition("/")[2].removesuffix(".tiktoken"), pattern, storage_options)
    else:
        spec, found = _json(uri, post_processor, storage_options)
    return replace(spec, specials=specials, eod=spec.eod if eod is None else find_eod(uri, found, eod))


def find_eod(uri: str, entries: Mapping[str, int], eod: str | int) -> int:
    """The id of a token that was named.

    Raises:
        ConfigError: the vocabulary does not have it.
    """
    if eod not in (entries if isinstance(eod, str) else entries.values()):
        raise ConfigError(f"{uri}: has no token {eod!r}, needs it as EOD")
    return entries[eod] if isinstance(eod, str) else eod


Described = tuple[TokenizerSpec, Mapping[str, int]]


def _json(uri: str, post_processor: bool, storage_options: Options, merges: str = "") -> Described:
    folder = not split_query(uri)[0].endswith(".json") and not merges
    if folder:
        place, query = split_query(cached_snapshot(uri) or uri)
        uri = f"{place.rstrip('/')}/tokenizer.json{query}"
    content = fetch_content(uri, merges, storage_options)
    parsed = parse_json(uri, content)
    entries = vocabulary(parsed)
    if folder:
        refuse_changes(uri, parsed, _config(uri, storage_options))
    prefix, suffix = wrapping(uri, parsed.get("post_processor")) if post_processor else ((), ())
    spec = TokenizerSpec(
        uri, "json", content_digest(content), len(entries), special_tokens=special_tokens(parsed),
        prefix=prefix, suffix=suffix, merges=merges, unknown=unknown_token(parsed),
        eod=entries.get(END if merges else _eos_token(uri, storage_options) or ""),
    )  # fmt: skip
    return spec, entries


@dataclass
class TokenizerConfig:
    """The fields of a tokenizer_config.json that are read here."""

    eos_token: str | AddedToken | None = None
    added_tokens_decoder: dict[str, AddedToken] | None = None
    add_prefix_space: bool | None = None


CONFIG = JsonFile(TokenizerConfig, open=True)


def refuse_changes(uri: str, parsed: Mapping[str, Any], config: TokenizerConfig) -> None:
    """ConfigError if AutoTokenizer would give other ids than the tokenizer.json alone.

    Source: transformers, PreTrainedTokenizerFast.__init__.
    """
    entries, split = vocabulary(parsed), parsed.get("pre_tokenizer") or {}
    added = [token.content for token in (config.added_tokens_decoder or {}).values()]
    found = [f"adds the token {content!r}" for content in added if content not in entries]
    told = config.add_prefix_space
    if told is not None and split.get("type") == "ByteLevel" and split.get("add_prefix_space", told) != told:
        found.append(f"sets add_prefix_space to {told}")
    if found:
        raise ConfigError(
            f"{uri}: the {CONFIG_FILE} beside it {', '.join(found[:3])}, needed the same in both; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes one that has it"
        )


def _config(uri: str, storage_options: Options) -> TokenizerConfig:
    """The tokenizer_config.json beside a tokenizer.json; empty where there is none."""
    name, query = split_query(uri)
    beside = f"{name.rpartition('/')[0] or '.'}/{CONFIG_FILE}{query}"
    try:
        return CONFIG.decode(read_document(CONFIG, beside, storage_options), beside)
    except (ObjectNotFoundError, AccessError):  # who may not list, or signed one URL, is refused what is not there
        return TokenizerConfig()


def _eos_token(uri: str, storage_options: Options) -> str | None:
    """What the file beside a tokenizer.json calls its `eos_token`."""
    token = _config(uri, storage_options).eos_token
    return token.content if isinstance(token, AddedToken) else token


def _sentencepiece(uri: str, storage_options: Options) -> Described:
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError as error:
        raise MissingDriverError(f"{uri}: {missing('sentencepiece', 'sentencepiece')}") from error
    content = fetch_object(uri, storage_options)
    try:
        model = SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        raise FormatError(f"{uri}: is no SentencePiece model") from error
    entries = {model.id_to_piece(number): number for number in range(model.get_piece_size())}
    eod = model.eos_id()
    spec = TokenizerSpec(uri, "sentencepiece", content_digest(content), len(entries), eod=eod if eod >= 0 else None)
    return spec, entries


def _wordpiece(uri: str, lowercase: bool, storage_options: Options) -> Described:
    content = fetch_object(uri, storage_options)
    entries = parse_vocabulary(uri, content)
    return TokenizerSpec(uri, "wordpiece", content_digest(content), len(entries), lowercase=lowercase), entries


def _ranks(uri: str, name: str, pattern: str | None, storage_options: Options) -> Described:
    content = fetch_object(uri, storage_options)
    entries = parse_ranks(uri, content)
    known = ENCODINGS.get(name)
    if not known and not pattern:
        names = ", ".join(ENCODINGS)
        raise ConfigError(
            f"{uri}: ranks do not say how text is split, needs a pattern (--tiktoken-pattern), or the name of {names}"
        )
    specials = known.special_tokens if known else {}
    largest = max([*entries.values(), *specials.values()])
    spec = TokenizerSpec(
        uri, "tiktoken", content_digest(content), largest + 1, special_tokens=tuple(specials.items()),
        pattern=GPT2 if pattern == "gpt2" else pattern or (known.pattern if known else ""),
        eod=specials.get("<|endoftext|>"),
    )  # fmt: skip
    named = {entry.decode(errors="replace"): rank for entry, rank in entries.items()}
    return spec, {**named, **specials}


def cached_encoding(name: str) -> str:
    """The file of ranks of an encoding, where tiktoken keeps it.

    Raises:
        ConfigError: tiktoken has not fetched it.
    """
    named = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR")
    cache = Path(named) if named else Path(tempfile.gettempdir()) / "data-gym-cache"
    path = cache / hashlib.sha1(ENCODINGS[name].address.encode()).hexdigest()
    if not path.exists():
        raise ConfigError(
            f"{name}: not in {cache}; python -c \"import tiktoken; tiktoken.get_encoding('{name}')\" fetches it"
        )
    return str(path)


def cached_snapshot(name: str) -> str | None:
    """The folder of `org/name` in Hugging Face's cache, as of its branch main; None of what is a URI or a path.

    Raises:
        ObjectNotFoundError: it is nowhere.
    """
    if "://" in name or Path(name).exists():
        return None
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    model = hub / f"models--{name.replace('/', '--')}"
    try:
        return str(model / "snapshots" / (model / "refs" / "main").read_text().strip())
    except OSError as error:
        raise ObjectNotFoundError(
            f"{name}: no file, no folder, and not in {hub}; hf download {name} fetches it"
        ) from error
