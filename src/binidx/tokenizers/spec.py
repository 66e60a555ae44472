"""Descriptions of tokenizers, small enough for a manifest and for every task of a job.

    kind            uri names                        its reference engine
    json            a tokenizer.json, or its folder  tokenizers
                    a vocab.json, with a merges.txt
    wordpiece       a vocab.txt, one entry a line    tokenizers
    sentencepiece   a .model                         sentencepiece

The content stays in its store; `read_content` fetches it and compares its digest. Nothing is downloaded from hubs.

Special tokens inside text: an `<|endoftext|>` on a web page becomes the special id, as in Megatron, and ends the
document in training. `TokenizerSpec.specials` chooses another policy; `count_specials` finds such texts.

A tokenizer.json is read without the library that runs it. Two older formats, GPT-2's `vocab.json` with `merges.txt` and
BERT's WordPiece `vocab.txt`, become the tokenizer.json that Hugging Face makes of them. A WordPiece tokenizer gets no
post-processor and no special tokens, as in Megatron's BertWordPiece: the dataset adds [CLS] and [SEP].

Source: the serialisation of Hugging Face tokenizers: processors/template.rs, bert.rs, roberta.rs and sequence.rs for
the post-processor, models/bpe/model.rs for merges.txt; transformers, GPT2Tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import ConfigError, FormatError, ObjectChangedError
from binidx.json_models import JsonFile, TokenId
from binidx.storage.location import Location
from binidx.storage.open import read_document

ANY_FILE = JsonFile(object, hint="needed the file of a tokenizer")
POLICIES = ("parse", "text", "error")


@dataclass(frozen=True)
class TokenizerSpec:
    """Tokenizer, identified by the digest of its content, with the options that decide its ids. Hashable, picklable.

    Attributes:
        digest: sha256 of the content, hex.
        vocab_size: number of entries, added tokens included; decides the stored dtype, as Megatron's `vocab_size`.
        eod: id that ends a document; None if none is known.
        special_tokens: content and id of each special token but the unknown token.
        unknown: content of the unknown token. Its id also stands for unknown characters, so only the text shows
            whether the token was spelled out.
        prefix: ids that the post-processor adds before each text, also an empty one.
        suffix: ids that the post-processor adds after each text.
        specials: policy for a special token inside text. `parse`: its id, as in Megatron; `text`: the tokens of its
            characters; `error`: as `parse`, and the job refuses the text (`count_specials`).
        pattern: always empty; specs of earlier versions had one, and the digest of a recipe covers it.
        lowercase: whether text is lowercased and stripped of accents; kind wordpiece only.
        merges: URI of the merges.txt, where `uri` is a vocab.json; the content is the tokenizer.json made of both.
    """

    uri: str
    kind: str
    digest: str
    vocab_size: int
    eod: int | None = None
    special_tokens: tuple[tuple[str, int], ...] = ()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    specials: str = "parse"
    pattern: str = ""
    lowercase: bool = False
    merges: str = ""
    unknown: str = ""

    def __post_init__(self) -> None:
        if self.specials not in POLICIES:
            raise ConfigError(f"specials: unknown (found {self.specials}, need one of {', '.join(POLICIES)})")

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """Identity as a dataset's tokenizer, in indices and saved runs: the digest of its content."""
        return OrderedDict([("class", "binidx.TokenizerSpec"), ("digest", self.digest)])

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    def read_content(self, storage_options: Mapping[str, Any] | None = None) -> bytes:
        """Return the content of the tokenizer's file; with `merges` the tokenizer.json made of both files.

        Args:
            storage_options: fsspec's options of the tokenizer's store.

        Raises:
            ObjectChangedError: its digest is not the spec's.
        """
        content = fetch_content(Location(self.uri, storage_options), self.merges)
        actual = content_digest(content)
        if actual != self.digest:
            raise ObjectChangedError(
                f"{self.uri}: changed since it was described (found sha256 {actual[:12]}, need {self.digest[:12]}); "
                "restore it, or begin another job"
            )
        return content


def fetch_content(location: Location, merges: str) -> bytes:
    """Fetch the content of a tokenizer file.

    Args:
        location: location of the file; of the `vocab.json` if `merges` is given.
        merges: URI of the `merges.txt`, read with the storage options of `location`; "" if there is none.

    Returns:
        The bytes of the file; with `merges`, the bytes of a `tokenizer.json` built from both files.

    Raises:
        ObjectNotFoundError: a file is missing.
        FormatError: a file is too large for a tokenizer; or, with `merges`, one of the files has another format.
    """
    content = fetch_object(location)
    return gpt2_json(location.uri, content, fetch_object(Location(merges, location.options))) if merges else content


def fetch_object(location: Location) -> bytes:
    """Return a whole object."""
    return read_document(ANY_FILE, location)


def content_digest(content: bytes) -> str:
    """Return the sha256 that identifies a tokenizer, hex."""
    return hashlib.sha256(content).hexdigest()


@dataclass
class AddedToken:
    """Token that Hugging Face's library finds in a text before it splits the text."""

    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    id: TokenId | None = None


@dataclass
class TokenizerModel:
    """Fields of a tokenizer.json's model that binidx reads; Unigram has its vocabulary in a list."""

    vocab: dict[str, TokenId] | list[tuple[str, float]]
    type: str | None = None
    merges: list[str | tuple[str, str]] | None = None
    unk_token: str | None = None
    unk_id: TokenId | None = None
    dropout: float | None = None
    continuing_subword_prefix: str | None = None

    def __post_init__(self) -> None:
        if not self.vocab:
            raise ValueError("vocab: found no entry")
        if prefix := self.continuing_subword_prefix:
            # The library cuts these bytes off whatever they are; half a character left over ends the process.
            seconds = [pair.partition(" ")[2] if isinstance(pair, str) else pair[1] for pair in self.merges or []]
            if wrong := [second for second in seconds if not second.startswith(prefix)]:
                raise ValueError(f"merges: found {wrong[0]!r}, needs continuing_subword_prefix {prefix!r} at its start")


@dataclass
class PipelineStep:
    """Normalizer or pre-tokenizer of a tokenizer.json."""

    type: str


@dataclass
class TemplateIds:
    """Ids of a special token in the template of a post-processor."""

    ids: list[TokenId]


@dataclass
class PostProcessor:
    """Post-processor of a Hugging Face tokenizer.json; one class with the fields of all known kinds."""

    type: str
    cls: tuple[str, TokenId] | None = None
    sep: tuple[str, TokenId] | None = None
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
    """Fields of a tokenizer.json that binidx reads."""

    model: TokenizerModel
    added_tokens: list[AddedToken] | None = None
    normalizer: PipelineStep | None = None
    pre_tokenizer: PipelineStep | None = None
    post_processor: PostProcessor | None = None


TOKENIZER_FILE = JsonFile(TokenizerFile, hint="give a tokenizer.json; a vocab.json needs --merge-file", open=True)


def parse_json(uri: str, content: bytes) -> dict[str, Any]:
    """Return the JSON object of a tokenizer.json, after checking the fields that binidx reads.

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
    """Return entry -> id of a tokenizer.json, added tokens included."""
    return {**model_vocabulary(parsed), **{token["content"]: token["id"] for token in added_tokens(parsed)}}


def model_vocabulary(parsed: Mapping[str, Any]) -> dict[str, int]:
    """Return entry -> id of the model of a tokenizer.json, without added tokens."""
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


def special_tokens(parsed: Mapping[str, Any]) -> tuple[tuple[tuple[str, int], ...], str]:
    """Return (content, id) of the special tokens except the unknown token; and the unknown token's content, or "".

    The unknown token is left out because ordinary text yields it.
    """
    special = [(token["content"], token["id"]) for token in added_tokens(parsed) if token.get("special")]
    model = parsed["model"]
    unknown = [token for token in special if token[0] == model.get("unk_token") or token[1] == model.get("unk_id")]
    return tuple(token for token in special if token not in unknown), unknown[0][0] if unknown else ""


def surrounding_ids(uri: str, processor: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor adds before and after every text.

    Args:
        uri: of the tokenizer.json, for messages.
        processor: its post-processor; None if it has none.

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
        prefix, suffix = tuple[int, ...](), tuple[int, ...]()
        for inner in processor["processors"]:
            before, behind = surrounding_ids(uri, inner)
            prefix, suffix = before + prefix, suffix + behind
        return prefix, suffix
    raise ConfigError(
        f"{uri}: unknown post-processor (found {kind}, need one of ByteLevel, Template-, Bert- or RobertaProcessing)"
    )


def _template(uri: str, processor: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids before and after the text in a template such as `[BOS] $A [EOS]`."""
    before, behind, texts = list[int](), list[int](), 0
    for piece in processor["single"]:
        if "SpecialToken" in piece:
            (behind if texts else before).extend(processor["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
        else:  # a Sequence
            texts += 1
    if texts != 1:
        raise ConfigError(f"{uri}: bad template (found the text {texts} times, need it once)")
    return tuple(before), tuple(behind)


END = "<|endoftext|>"
"""GPT-2's only special token, if the vocabulary has it."""

VOCAB_FILE = JsonFile(dict[str, TokenId], hint="give a vocab.json, an object of entries and their ids")


def gpt2_json(uri: str, vocab: bytes, merges: bytes) -> bytes:
    """Return the tokenizer.json made of GPT-2's vocab.json and merges.txt.

    Args:
        uri: of the vocab.json, for messages.
        vocab, merges: contents of both files.

    Raises:
        FormatError: one of the files has another format.
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
    """Return entry -> id of a WordPiece vocab.txt; an id is a line number, from 0.

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
    """Return the tokenizer.json of a WordPiece vocab.txt.

    Args:
        uri: of the vocab.txt, for messages.
        content: an entry a line.
        lowercase: whether text is lowercased and stripped of accents.
    """
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
