"""What a tokenizer.json says about itself, without the library that runs it.

Source: the serialisation of Hugging Face tokenizers; processors/template.rs, bert.rs, roberta.rs and sequence.rs for
what is put around a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from binidx.errors import ConfigError
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
