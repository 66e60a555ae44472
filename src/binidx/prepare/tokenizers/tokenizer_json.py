"""What a tokenizer.json says about itself, without the library that runs it.

Source: the serialisation of Hugging Face tokenizers; processors/template.rs, bert.rs, roberta.rs and sequence.rs for
what is put around a text.

GPT-2's two files, `vocab.json` and `merges.txt`, as the tokenizer.json that Hugging Face makes of them.

Source: transformers, GPT2Tokenizer; tokenizers, models/bpe/model.rs, which reads merges.txt.

A WordPiece vocabulary as the tokenizer.json of a BERT: what Megatron's BertWordPiece tokenizers read.

Nothing is put around a text and no special token is found in it: both are those tokenizers' way (tokenize() of Google's
BERT; [CLS] and [SEP] are put in by the dataset).
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
    """A token that is found in the text before it is split."""

    content: str
    special: bool = False


@dataclass
class TokenizerModel:
    """The model's fields that are read here; a vocabulary in a list is Unigram's."""

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
    """A normalizer or pre-tokenizer."""

    type: str


@dataclass
class TemplateIds:
    """The ids of a special token of a template."""

    ids: list[int]


@dataclass
class PostProcessor:
    """A post-processor, with the fields of every kind that is known here."""

    type: str
    cls: tuple[str, int] | None = None
    sep: tuple[str, int] | None = None
    single: list[dict[str, dict[str, Any]]] | None = None
    special_tokens: dict[str, TemplateIds] | None = None
    processors: list[PostProcessor] | None = None

    def __post_init__(self) -> None:
        wanted = {
            "BertProcessing": ("cls", "sep"),
            "RobertaProcessing": ("cls", "sep"),
            "TemplateProcessing": ("single", "special_tokens"),
            "Sequence": ("processors",),
        }
        if missing := [name for name in wanted.get(self.type, ()) if getattr(self, name) is None]:
            raise ValueError(f"{self.type}: missing required field {', '.join(missing)}")
        named = [piece["SpecialToken"].get("id") for piece in self.single or [] if "SpecialToken" in piece]
        if unknown := [name for name in named if name not in (self.special_tokens or {})]:
            raise ValueError(f"single: found {unknown[0]!r}, needs one of special_tokens")


@dataclass
class TokenizerFile:
    """The fields of a tokenizer.json that are read here."""

    model: TokenizerModel
    added_tokens: list[AddedToken] | None = None
    normalizer: PipelineStep | None = None
    pre_tokenizer: PipelineStep | None = None
    post_processor: PostProcessor | None = None


TOKENIZER_FILE = JsonFile(TokenizerFile, hint="needed a tokenizer.json; a vocab.json needs --merge-file", open=True)


def parse_json(uri: str, content: bytes) -> dict[str, Any]:
    """The file's object.

    Raises:
        FormatError: it is not a tokenizer.json.
        ConfigError: its tokenizer draws lots.
    """
    whole: dict[str, Any] = TOKENIZER_FILE.parse(content, uri)
    dropout = TOKENIZER_FILE.convert(whole, uri).model.dropout
    if dropout:
        raise ConfigError(f"{uri}: merges with dropout {dropout} differ from run to run, needs none")
    return whole


def vocabulary(parsed: Mapping[str, Any]) -> dict[str, int]:
    """Every entry and its id, added tokens too."""
    return {**model_vocabulary(parsed), **{token["content"]: token["id"] for token in added_tokens(parsed)}}


def model_vocabulary(parsed: Mapping[str, Any]) -> dict[str, int]:
    """The model's own entries."""
    entries: dict[str, int] | list[tuple[str, float]] = parsed["model"]["vocab"]
    if isinstance(entries, dict):
        return entries
    return {piece: number for number, (piece, _) in enumerate(entries)}  # Unigram: an id is a place


def added_tokens(parsed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens that are found in the text before it is split, with the ids that the library gives them.

    It does not read an id that stands there: what the model has keeps the model's, others follow on its last, in order.
    """
    entries, given = model_vocabulary(parsed), dict[str, int]()
    tokens = parsed.get("added_tokens") or []
    for token in tokens:
        content, last = token["content"], max(given.values(), default=-1)
        following = last + 1 if last >= len(entries) else len(entries)
        given[content] = entries.get(content, given.get(content, following))
    return [{**token, "id": given[token["content"]]} for token in tokens]


def special_tokens(parsed: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """The added tokens that are marked special, without the one for what is unknown: ordinary text gives it."""
    model = parsed["model"]
    unknown = model.get("unk_token")
    return tuple(
        (token["content"], token["id"])
        for token in added_tokens(parsed)
        if token.get("special") and token["content"] != unknown and token["id"] != model.get("unk_id")
    )


def unknown_token(parsed: Mapping[str, Any]) -> str:
    """The special token for what is unknown, as it is spelled out in a text; "" where there is none."""
    told = dict(special_tokens(parsed))
    tokens = (token["content"] for token in added_tokens(parsed) if token.get("special"))
    return next((content for content in tokens if content not in told), "")


def wrapping(uri: str, processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids that the post-processor puts before and behind every text.

    Raises:
        ConfigError: it is of a kind whose effect on a text is not known here.
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
            before, behind = wrapping(uri, inner)
            prefix, suffix = before + prefix, suffix + behind
        return prefix, suffix
    raise ConfigError(f"{uri}: post-processor {kind}, needs one of ByteLevel, Template-, Bert- or RobertaProcessing")


def _template(uri: str, processor: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`[BOS] $A [EOS]`, as ids; the text must stand in it once."""
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
        raise ConfigError(f"{uri}: its template has the text {texts} times, needs it once")
    return tuple(before), tuple(behind)


END = "<|endoftext|>"


"""The one special token, if the vocabulary has it."""


VOCAB_FILE = JsonFile(dict[str, int], hint="needed a vocab.json, an object of entries and their ids")


def gpt2_json(uri: str, vocab: bytes, merges: bytes) -> bytes:
    """The tokenizer.json.

    Raises:
        FormatError: they are no such files.
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
    """Pairs of entries, in their order."""
    # Lines of bytes end at newlines alone; those of a str at others too, which a merge may have.
    lines = [line.decode(errors="replace") for line in merges.splitlines()]
    pairs = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    for pair in pairs:
        if len(pair) != 2 or any(part not in entries for part in (*pair, "".join(pair))):
            raise FormatError(f"merges of {uri}: {' '.join(pair)!r}, needs two entries of it whose union is a third")
    return pairs


UNKNOWN = "[UNK]"


LONGEST_WORD = 200


def parse_vocabulary(uri: str, content: bytes) -> dict[str, int]:
    """Entries by line.

    Raises:
        FormatError: it is no such file.
    """
    # Lines of bytes end at newlines alone; those of a str at U+2028 and others too, which an entry may have.
    lines = (line.decode(errors="replace") for line in content.splitlines())
    entries = {line.strip(): number for number, line in enumerate(lines)}
    if UNKNOWN not in entries:
        raise FormatError(f"{uri}: is no WordPiece vocabulary, needs an entry a line and {UNKNOWN} among them")
    return entries


def wordpiece_json(uri: str, content: bytes, *, lowercase: bool) -> bytes:
    """The tokenizer.json."""
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
