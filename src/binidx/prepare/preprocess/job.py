"""What is to be made out of which text: everything that decides the bytes of the result, as one value.

What does not decide them is no part of it: workers, engines, which part is made where and when.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import xxhash

from binidx.errors import ConfigError, redacted
from binidx.format.idx import DType
from binidx.prepare.text.batch import Filters
from binidx.prepare.tokenizers.spec import TokenizerSpec
from binidx.storage.codecs.segments import CODECS

ALGORITHM = 1
"""Counts up when the same job gives other bytes than before: parts of the old one are then not taken for its own."""

ON_ERROR = ("raise", "skip", "quarantine")
EMPTY = ("zero-seq", "eod", "drop")
OPTIONS = ("source_options", "target_options")
"""Never written down: they may hold secrets."""


@dataclass(frozen=True)
class Job:
    """Text to be tokenised, and how. Pickles; `to_json` for the rest.

    Attributes:
        inputs: URIs of jsonl(.gz, .zst) and parquet, with globs, in the order in which they are wanted.
        output: prefix of the outputs: `dataset` says their names.
        tokenizer: see `tokenize.describe`.
        keys: of each JSON object, or columns; a dataset each.
        append_eod: after each document that has a token.
        empty: a document of no tokens is one of no sequence, as Megatron's preprocess_data.py has it; one of an EOD
            alone, as its preprocess_data_fast.py has it; or dropped, if it has none in any key.
        split_sentences: each sentence is a sequence of its own; the language is `language`.
        keep_newlines: sentences keep the newlines after them.
        filters: which documents are wanted, by their text and their fields.
        min_tokens, max_tokens: which are, by their tokens in all keys together, without EOD; None: all.
        on_error: of a row that is no document: stop, drop it and count, or do so and write it down.
        id_key: field whose value goes into the lineage.
        lineage: whether `.lineage.parquet` is written.
        codec: row of `segments.CODECS`: how tokens are stored.
        part_bytes: stored bytes of text in a part; None: by the size of all, see `plan`.
        engine: name of a tokenizer's engine, or auto. They all give the same tokens.
        compared_share: part of the texts that the reference tokenises too, to prove that.
        format: of all inputs, one of `slices.FORMATS`; None: as the name of each tells.
    """

    inputs: tuple[str, ...]
    output: str
    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    empty: str = "zero-seq"
    split_sentences: bool = False
    language: str = "english"
    keep_newlines: bool = False
    filters: Filters = field(default_factory=Filters)
    min_tokens: int | None = None
    max_tokens: int | None = None
    on_error: str = "raise"
    id_key: str | None = None
    lineage: bool = True
    codec: str = "raw"
    part_bytes: int | None = None
    engine: str = "auto"
    compared_share: float = 1e-4
    format: str | None = None
    source_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)
    target_options: Mapping[str, Any] | None = field(default=None, repr=False, hash=False)

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise ConfigError(f"on_error: found {self.on_error}, needed one of {', '.join(ON_ERROR)}")
        if self.empty not in EMPTY:
            raise ConfigError(f"empty: found {self.empty}, needed one of {', '.join(EMPTY)}")
        if self.empty == "eod" and not self.append_eod:
            raise ConfigError("empty: found eod without append_eod (--append-eod), needed both")
        if self.id_key is not None and not self.lineage:
            raise ConfigError("id_key: found it without lineage (--no-lineage), which is where ids go; needed both")
        if self.codec not in CODECS:
            raise ConfigError(f"codec: found {self.codec}, needed one of {', '.join(CODECS)}")
        if not self.inputs or not self.keys:
            raise ConfigError("inputs and keys: found none, needed at least one of each")
        if len(set(self.keys)) < len(self.keys):
            raise ConfigError(f"keys: {', '.join(self.keys)}; needed each once")
        if self.output.endswith("/"):
            raise ConfigError(f"{self.output}: a folder, needed a prefix such as {self.output}en")
        if self.part_bytes is not None and self.part_bytes < 1:
            raise ConfigError(f"part_bytes: {self.part_bytes}, needed 1 or more")
        least, most = self.min_tokens or 0, self.max_tokens
        if least < 0 or (most is not None and most < least):
            raise ConfigError(f"tokens: found {least} to {most}, needed 0 or more, and no less after it")
        if not 0 <= self.compared_share <= 1:
            raise ConfigError(f"compared_share: {self.compared_share}, needed 0 to 1")
        if self.append_eod and self.tokenizer.eod is None:
            raise ConfigError(f"{self.tokenizer.uri}: append_eod, and no EOD is known; name the token with eod (--eod)")

    @property
    def dtype(self) -> type[np.number[Any]]:
        """Of a stored token: Megatron's rule."""
        return DType.optimal_dtype(self.tokenizer.vocab_size)

    @property
    def eod(self) -> int | None:
        """What each document ends with."""
        return self.tokenizer.eod if self.append_eod else None

    @property
    def datasets(self) -> dict[str, str]:
        """key -> prefix of its dataset. Source: Megatron-LM, tools/preprocess_data.py."""
        level = "sentence" if self.split_sentences else "document"
        return {key: f"{self.output}_{key}_{level}" for key in self.keys}

    def to_json(self) -> dict[str, Any]:
        """All but the options of the stores and the secrets in URIs, in JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OPTIONS}
        filters, tokenizer = asdict(self.filters), self.tokenizer.to_json()
        tokenizer |= {name: redacted(tokenizer[name]) for name in ("uri", "merges")}
        values |= {"inputs": [redacted(each) for each in self.inputs], "output": redacted(self.output)}
        values |= {"tokenizer": tokenizer, "filters": filters}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=list))
        return plain

    @property
    def recipe(self) -> dict[str, Any]:
        """What, with its text, decides the bytes of a part: of one with rows that are no documents `on_error`, too."""
        values = self.to_json()
        tokenizer = {name: value for name, value in values["tokenizer"].items() if name not in ("uri", "merges")}
        left_out = ("inputs", "format", "output", "part_bytes", "engine", "compared_share", "on_error")
        return {name: value for name, value in values.items() if name not in left_out} | {
            "tokenizer": tokenizer,
            "algorithm": ALGORITHM,
        }


def json_digest(value: Any) -> str:
    """128 bits of a JSON value, hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
