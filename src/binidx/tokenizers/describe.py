"""Describe a tokenizer by its name: its kind, size, EOD and special tokens.

…/tokenizer.json, or its folder     json
…/vocab.json, with a merges.txt     json: GPT-2's two files
….model                             sentencepiece
….txt                               wordpiece: Megatron's BertWordPiece, an entry a line

Names of Hugging Face's models are looked up in its local cache. Nothing is downloaded.

Source: huggingface_hub, "Understand caching".
"""

from __future__ import annotations

import difflib
import glob
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from binidx.errors import (
    AccessError,
    ConfigError,
    FormatError,
    MissingDriverError,
    ObjectNotFoundError,
    trims_traceback,
)
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.open import read_document
from binidx.storage.stores.registry import split_query
from binidx.tokenizers.library import missing_package
from binidx.tokenizers.spec import (
    END,
    AddedToken,
    TokenizerSpec,
    content_digest,
    fetch_content,
    fetch_object,
    parse_json,
    parse_vocabulary,
    special_tokens,
    surrounding_ids,
    vocabulary,
)

CONFIG_FILE = "tokenizer_config.json"


@trims_traceback
def describe_tokenizer(
    uri: str,
    *,
    eod: str | int | None = None,
    specials: str = "parse",
    post_processor: bool = True,
    lowercase: bool = False,
    merges: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TokenizerSpec:
    """Return the description of a tokenizer.

    Args:
        uri: name of the tokenizer (see the module's table), in any store.
        eod: token that ends a document, or its id. Default: the `eos_token` of tokenizer_config.json beside a
            tokenizer.json, or the EOS of a SentencePiece model.
        specials: policy for special tokens inside text: `parse`, `text` or `error`; see TokenizerSpec.
        post_processor: whether texts get the ids of a tokenizer.json's post-processor (BOS, EOS), as in Megatron
            without `--tokenizer-hf-no-include-special-tokens`.
        lowercase: whether texts are lowercased, as by Megatron's BertWordPieceLowerCase; vocab.txt only.
        merges: URI of the merges.txt of Megatron's GPT2BPETokenizer, whose vocab.json is `uri`; its EOD is
            `<|endoftext|>`.
        storage_options: fsspec's options of the store.

    Returns:
        A TokenizerSpec, with the sha256 of the tokenizer's content.

    Raises:
        ConfigError: a tokenizer whose ids are ambiguous or random, or an EOD that is not in the vocabulary.
        ObjectNotFoundError: no such file, and no such model in Hugging Face's cache.
        FormatError: the content contradicts the name.
        MissingDriverError: sentencepiece is needed and not installed.

    Example:
        >>> describe_tokenizer("s3://models/llama/tokenizer.json", eod="<|end_of_text|>")  # doctest: +SKIP

    Source: ours; ids as Megatron Core's tokenizers give them.
    """
    location, (name, _) = Location.of(uri, storage_options), split_query(uri)
    if merges:
        spec, entries = _describe_json(location, post_processor, merges)
    elif name.endswith(".model"):
        spec, entries = _describe_sentencepiece(location)
    elif name.endswith(".txt"):
        spec, entries = _describe_wordpiece(location, lowercase)
    else:
        spec, entries = _describe_json(location, post_processor)
    if eod is not None:
        if eod not in (entries if isinstance(eod, str) else entries.values()):
            raise ConfigError(f"{uri}: no token {eod!r} in the vocabulary; give another EOD")
        spec = replace(spec, eod=entries[eod] if isinstance(eod, str) else eod)
    return replace(spec, specials=specials)


Description = tuple[TokenizerSpec, Mapping[str, int]]
"""Spec of a tokenizer, and entry -> id."""


def _describe_json(location: Location, post_processor: bool, merges: str = "") -> Description:
    uri = location.uri
    folder = not split_query(uri)[0].endswith(".json") and not merges
    if folder:
        path, query = split_query(find_cached_snapshot(uri) or uri)
        uri = f"{path.rstrip('/')}/tokenizer.json{query}"
    location = Location(uri, location.options)
    content = fetch_content(location, merges)
    parsed = parse_json(uri, content)
    entries = vocabulary(parsed)
    config = TokenizerConfig() if merges else _read_config(location)
    if folder:
        check_config(uri, parsed, config)
    specials, unknown = special_tokens(parsed)
    prefix, suffix = surrounding_ids(uri, parsed.get("post_processor")) if post_processor else ((), ())
    spec = TokenizerSpec(
        uri, "json", content_digest(content), len(entries), special_tokens=specials,
        prefix=prefix, suffix=suffix, merges=merges, unknown=unknown,
        eod=entries.get(END if merges else _content(config.eos_token) or ""),
    )  # fmt: skip
    return spec, entries


@dataclass
class TokenizerConfig:
    """Fields of a tokenizer_config.json that binidx reads."""

    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None
    added_tokens_decoder: dict[str, AddedToken] | None = None
    add_prefix_space: bool | None = None
    legacy: bool | None = None
    tokenizer_class: str | None = None


CONFIG = JsonFile(TokenizerConfig, open=True)

GENERIC = (None, "TokenizersBackend", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "PythonBackend")
"""Values of `tokenizer_class` with which AutoTokenizer uses a tokenizer.json unchanged."""


def check_config(uri: str, parsed: Mapping[str, Any], config: TokenizerConfig) -> None:
    """Raise ConfigError if AutoTokenizer would give other ids than the tokenizer.json alone.

    Args:
        uri: of the tokenizer.json.
        parsed: content of the tokenizer.json.
        config: content of the tokenizer_config.json beside it.

    Source: transformers 5, TokenizersBackend and AutoTokenizer.from_pretrained.
    """
    entries, split = vocabulary(parsed), parsed.get("pre_tokenizer") or {}
    added = [token.content for token in (config.added_tokens_decoder or {}).values()]
    faults = [f"adds the token {content!r}" for content in added if content not in entries]
    space = config.add_prefix_space
    if space is not None and split.get("type") == "ByteLevel" and split.get("add_prefix_space", space) != space:
        faults.append(f"sets add_prefix_space to {space}")
    if not faults and config.tokenizer_class not in GENERIC and not _equals_rebuilt(parsed, config):
        faults.append(f"names {config.tokenizer_class}, which transformers 5 rebuilds with steps and tokens of its own")
    if faults:
        raise ConfigError(
            f"{uri}: the {CONFIG_FILE} beside it {', '.join(faults[:3])}; "
            "AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) writes a tokenizer.json that agrees with it; "
            "named instead of its folder, a tokenizer.json is used alone"
        )


TOKEN_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

REBUILT = {
    "LlamaTokenizer": "<s> </s> <unk> - - - -",
    "GemmaTokenizer": "<bos> <eos> <unk> <pad> - - <mask>",
    "GPT2Tokenizer": f"{END} {END} {END} - - - -",
    "GPTNeoXTokenizer": f"{END} {END} {END} <|padding|> - - -",
    "Qwen2Tokenizer": f"- {END} {END} {END} - - -",
}
"""Class that transformers 5 rebuilds from the vocabulary of a file -> default of each of TOKEN_ROLES, - for none."""


def _equals_rebuilt(parsed: Mapping[str, Any], config: TokenizerConfig) -> bool:
    """Return whether the class that a config names, as transformers 5 builds it, gives the ids of a tokenizer.json.

    Such a class takes the vocabulary of the file, and its own normalizer, pre-tokenizer and special tokens.
    """
    name = (config.tokenizer_class or "").removesuffix("Fast")
    normalizer, split = (_plain(parsed.get(step)) for step in ("normalizer", "pre_tokenizer"))
    if name == "LlamaTokenizer" and '"ByteLevel"' in json.dumps([split, parsed.get("decoder")]):
        return True  # AutoTokenizer uses such a file unchanged
    if name not in REBUILT or (normalizer, split) != _steps(name, config):
        return False
    roles = zip(TOKEN_ROLES, REBUILT[name].split(), strict=True)
    named = {_content(getattr(config, f"{role}_token")) or default for role, default in roles} - {"-"}
    own = {token["content"] for token in parsed.get("added_tokens") or []}
    decoder = own if config.added_tokens_decoder is None else map(_content, config.added_tokens_decoder.values())
    model = parsed["model"]
    byte_fallback = name in ("LlamaTokenizer", "GemmaTokenizer")
    same_model = model.get("byte_fallback", False) == byte_fallback and not model.get("ignore_merges", False)
    return named | own == own == own & set(decoder) and same_model


def _steps(name: str, config: TokenizerConfig) -> tuple[Any, Any]:
    """Return the normalizer and pre-tokenizer that a class of REBUILT has with a config."""
    space = config.add_prefix_space
    level = {"type": "ByteLevel", "add_prefix_space": bool(space), "use_regex": True}
    if name == "LlamaTokenizer":
        scheme = "never" if space is False else "always" if config.legacy else "first"
        return None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    if name == "GemmaTokenizer":
        split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        return {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, split
    if name == "GPT2Tokenizer":
        return None, level
    if name == "GPTNeoXTokenizer":
        return {"type": "NFC"}, level
    split = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}
    return {"type": "NFC"}, [split, {**level, "use_regex": False}]


def _plain(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer without fields that change no id, with the defaults of missing fields."""
    if not isinstance(step, dict):
        return step
    if step.get("type") == "Sequence" and "pretokenizers" in step:
        return [_plain(inner) for inner in step["pretokenizers"]]
    default: dict[str, Any] = {"use_regex": True} if step.get("type") == "ByteLevel" else {}
    return {**default, **{name: value for name, value in step.items() if name != "trim_offsets"}}


def _content(token: str | AddedToken | None) -> str | None:
    return token.content if isinstance(token, AddedToken) else token


def _read_config(location: Location) -> TokenizerConfig:
    """Return the tokenizer_config.json beside a tokenizer.json; an empty one if there is none."""
    name, query = split_query(location.uri)
    file = Location(f"{name.rpartition('/')[0] or '.'}/{CONFIG_FILE}{query}", location.options)
    try:
        return CONFIG.decode(read_document(CONFIG, file), file.uri)
    except (ObjectNotFoundError, AccessError):  # a store may deny access to missing objects
        return TokenizerConfig()


def _describe_sentencepiece(location: Location) -> Description:
    if missing := missing_package("sentencepiece"):
        raise MissingDriverError(f"{location}: {missing}")
    from sentencepiece import SentencePieceProcessor

    content, uri = fetch_object(location), location.uri
    try:
        model = SentencePieceProcessor(model_proto=content)
        entries = {model.id_to_piece(number): number for number in range(model.get_piece_size())}
    except (RuntimeError, UnicodeDecodeError) as error:  # the latter: a message, or an entry
        raise FormatError(f"{uri}: not a SentencePiece model, or damaged; correct the name or restore it") from error
    eod = model.eos_id()
    spec = TokenizerSpec(uri, "sentencepiece", content_digest(content), len(entries), eod=eod if eod >= 0 else None)
    return spec, entries


def _describe_wordpiece(location: Location, lowercase: bool) -> Description:
    content, uri = fetch_object(location), location.uri
    entries = parse_vocabulary(uri, content)
    return TokenizerSpec(uri, "wordpiece", content_digest(content), len(entries), lowercase=lowercase), entries


def find_cached_snapshot(name: str) -> str | None:
    """Return the folder of `org/name` at its branch main in Hugging Face's cache; None for a URI or an existing path.

    Raises:
        ObjectNotFoundError: neither a path nor in the cache.
    """
    if Path(name).is_file():
        raise ConfigError(f"{name}: found a file of no known kind, need {TOKENIZER_KINDS}")
    if "://" in name or Path(name).exists():
        return None
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")
    model = hub / f"models--{name.replace('/', '--')}"
    try:
        return str(model / "snapshots" / (model / "refs" / "main").read_text().strip())
    except OSError as error:
        near = difflib.get_close_matches(name, glob.glob(os.path.join(glob.escape(os.path.dirname(name)), "*")), 1, 0.8)
        way = f"did you mean {near[0]}?" if near else f"hf download {name} fetches it"
        raise ObjectNotFoundError(f"{name}: no file, no folder, and not in {hub}; {way}") from error


TOKENIZER_KINDS = "a tokenizer.json, a .model of SentencePiece, a vocab.txt, or a folder with a tokenizer.json"
