"""Fields of a tokenizer.json, read without the library that runs it, and two older formats converted to it.

GPT-2's `vocab.json` and `merges.txt`, and BERT's WordPiece `vocab.txt`, become the tokenizer.json that Hugging Face
makes of them. A WordPiece tokenizer gets no post-processor and no special tokens, as in Megatron's BertWordPiece: the
dataset adds [CLS] and [SEP].

Source: the serialisation of Hugging Face tokenizers: processors/template.rs, bert.rs, roberta.rs and sequence.rs for
the post-processor, models/bpe/model.rs for merges.txt; transformers, GPT2Tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from binidx.errors import ConfigError, FormatError
from binidx.json_models import JsonFile


@dataclass
class AddedToken:
    """Token that the library finds in the text before it splits it."""

    content: str
    special: bool = False


@dataclass
class TokenizerModel:
    """Used fields of a model; Unigram has its vocabulary in a list."""

    vocab: dict[str, int] | list[tuple[str, float]]
    type: str | None = None
    merges: list[str | tuple[str, str]] | None = None
    unk_token: str | None = None
    unk_id: int | None = None
    dropout: float | None = None

    def __post_init__(self) -> None:
        if not self.vocab:
            raise ValueError("vocab: found no entry")


@dataclass
class PipelineStep:
    """Normalizer or pre-tokenizer."""

    type: str


@dataclass
class TemplateIds:
    """Ids of a special token in a template."""

    ids: list[int]


@dataclass
class PostProcessor:
    """Post-processor, with the fields of all known kinds."""

    type: str
    cls: tuple[str, int] | None = None
    sep: tuple[str, int] | None = None
    single: list[dict[str, dict[str, Any]]] | None = None
    special_tokens: dict[str, TemplateIds] | None = None
    processors: list[PostProcessor] | None = None

    def __post_init__(self) -> None:
        required = {
            "BertProcessing": ("cls", "sep"),
            "RobertaProcessing": ("cls", "sep"),
            "TemplateProcessing": ("single", "special_tokens"),
            "Sequence": ("processors",),
        }
        if missing := [name for name in required.get(self.type, ()) if getattr(self, name) is None]:
            raise ValueError(f"{self.type}: missing required field {', '.join(missing)}")
        named = [piece["SpecialToken"].get("id") for piece in self.single or [] if "SpecialToken" in piece]
        if unknown := [name for name in named if name not in (self.special_tokens or {})]:
            raise ValueError(f"single: found {unknown[0]!r}, needs one of special_tokens")


@dataclass
class TokenizerFile:
    """Used fields of a tokenizer.json."""

    model: TokenizerModel
    added_tokens: list[AddedToken] | None = None
    normalizer: PipelineStep | None = None
    pre_tokenizer: PipelineStep | None = None
    post_processor: PostProcessor | None = None


TOKENIZER_FILE = JsonFile(TokenizerFile, hint="give a tokenizer.json; a vocab.json needs --merge-file", open=True)


def parse_json(uri: str, content: bytes) -> dict[str, Any]:
    """Return the object of a tokenizer.json.

    Raises:
        FormatError: not a tokenizer.json.
        ConfigError: a tokenizer with dropout, whose ids are random.
    """
    whole: dict[str, Any] = TOKENIZER_FILE.parse(content, uri)
    dropout = TOKENIZER_FILE.convert(whole, uri).model.dropout
    if dropout:
        raise ConfigError(f"{uri}: random merges (found dropout {dropout}, need none); set it to null")
    return whole


def vocabulary(parsed: Mapping[str, Any]) -> dict[str, int]:
    """Return all entries with their ids, added tokens included."""
    return {**model_vocabulary(parsed), **{token["content"]: token["id"] for token in added_tokens(parsed)}}


def model_vocabulary(parsed: Mapping[str, Any]) -> dict[str, int]:
    """Return the entries of the model."""
    entries: dict[str, int] | list[tuple[str, float]] = parsed["model"]["vocab"]
    if isinstance(entries, dict):
        return entries
    return {piece: number for number, (piece, _) in enumerate(entries)}  # Unigram: an id is a position


def added_tokens(parsed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the added tokens with the ids that the library assigns.

    The library ignores the ids in the file: an entry of the model keeps the model's id, others follow in order.
    """
    entries, given = model_vocabulary(parsed), dict[str, int]()
    tokens = parsed.get("added_tokens") or []
    for token in tokens:
        content, last = token["content"], max(given.values(), default=-1)
        following = last + 1 if last >= len(entries) else len(entries)
        given[content] = entries.get(content, given.get(content, following))
    return [{**token, "id": given[token["content"]]} for token in tokens]


def special_tokens(parsed: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return the added tokens that are marked special, but for the unknown token, which ordinary text yields."""
    model = parsed["model"]
    unknown = model.get("unk_token")
    return tuple(
        (token["content"], token["id"])
        for token in added_tokens(parsed)
        if token.get("special") and token["content"] != unknown and token["id"] != model.get("unk_id")
    )


def unknown_token(parsed: Mapping[str, Any]) -> str:
    """Return the content of the special unknown token; "" if there is none."""
    others = dict(special_tokens(parsed))
    tokens = (token["content"] for token in added_tokens(parsed) if token.get("special"))
    return next((content for content in tokens if content not in others), "")


def surrounding_ids(uri: str, processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor adds before and behind every text.

    Raises:
        ConfigError: a post-processor of an unknown kind.
    """
    kind = processor["type"] if processor else None
    if processor is None or kind == "ByteLevel":  # ByteLevel moves offsets only
        return (), ()
    if kind in ("BertProcessing", "RobertaProcessing"):
        return (processor["cls"][1],), (processor["sep"][1],)
    if kind == "TemplateProcessing":
        return _template(uri, processor)
    if kind == "Sequence":
        prefix: tuple[int, ...] = ()
        suffix: tuple[int, ...] = ()
        for inner in processor["processors"]:
            before, behind = surrounding_ids(uri, inner)
            prefix, suffix = before + prefix, suffix + behind
        return prefix, suffix
    raise ConfigError(
        f"{uri}: unknown post-processor (found {kind}, need one of ByteLevel, Template-, Bert- or RobertaProcessing)"
    )


def _template(uri: str, processor: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and behind the text in a template such as `[BOS] $A [EOS]`."""
    before: list[int] = []
    behind: list[int] = []
    texts = 0
    for piece in processor["single"]:
        if "SpecialToken" not in piece:  # a Sequence
            texts += 1
            continue
        ids = processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
        (behind if texts else before).extend(ids)
    if texts != 1:
        raise ConfigError(f"{uri}: bad template (found the text {texts} times, need it once)")
    return tuple(before), tuple(behind)


END = "<|endoftext|>"
"""GPT-2's only special token, if the vocabulary has it."""

VOCAB_FILE = JsonFile(dict[str, int], hint="give a vocab.json, an object of entries and their ids")


def gpt2_json(uri: str, vocab: bytes, merges: bytes) -> bytes:
    """Return the tokenizer.json of GPT-2's two files.

    Raises:
        FormatError: not such files.
    """
    entries = VOCAB_FILE.decode(vocab, uri)
    end = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "vocab": entries, "merges": _merges(uri, merges, entries),
    }  # fmt: skip
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "pre_tokenizer": level,
        "added_tokens": [{"id": entries[END], "content": END, **end}] if END in entries else [],
        "post_processor": {**level, "trim_offsets": False}, "decoder": level, "model": model,
    }).encode()  # fmt: skip


def _merges(uri: str, merges: bytes, entries: dict[str, int]) -> list[list[str]]:
    # Only newlines end a line of bytes; in a str other characters do, too, which a merge may contain.
    lines = [line.decode(errors="replace") for line in merges.splitlines()]
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    for pair in pairs:
        if len(pair) != 2 or any(part not in entries for part in (*pair, "".join(pair))):
            raise FormatError(
                f"merges of {uri}: bad line (found {' '.join(pair)!r}, need two entries whose concatenation is a third)"
            )
    return pairs


UNKNOWN = "[UNK]"
LONGEST_WORD = 200


def parse_vocabulary(uri: str, content: bytes) -> dict[str, int]:
    """Return the entries of a WordPiece vocab.txt with their line numbers.

    Raises:
        FormatError: not such a file.
    """
    # Only newlines end a line of bytes; in a str other characters do, too, which an entry may contain.
    lines = (line.decode(errors="replace") for line in content.splitlines())
    entries = {line.strip(): number for number, line in enumerate(lines)}
    if UNKNOWN not in entries:
        raise FormatError(f"{uri}: not a WordPiece vocabulary (need an entry a line, {UNKNOWN} among them)")
    return entries


def wordpiece_json(uri: str, content: bytes, *, lowercase: bool) -> bytes:
    """Return the tokenizer.json of a WordPiece vocab.txt."""
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    model = {
        "type": "WordPiece", "unk_token": UNKNOWN, "continuing_subword_prefix": "##",
        "max_input_chars_per_word": LONGEST_WORD, "vocab": parse_vocabulary(uri, content),
    }  # fmt: skip
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None,
        "normalizer": {**normalizer, "strip_accents": lowercase, "lowercase": lowercase},
        "pre_tokenizer": {"type": "BertPreTokenizer"}, "model": model,
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    }).encode()  # fmt: skip
