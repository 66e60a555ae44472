"""Job: all settings that decide the bytes of the result, as one value.

Settings that do not decide them are arguments of `preprocess`: workers, the place where parts are made, overwriting.
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
"""Version of the algorithm; raised if the same job gives other bytes, so that parts of the old one are not reused."""

ON_ERROR = ("raise", "skip", "quarantine")
EMPTY = ("zero-seq", "eod", "drop")
OPTIONS = ("source_options", "target_options")
"""Fields that are never written: they may hold secrets."""


@dataclass(frozen=True)
class Job:
    """Text to tokenise, and how. Pickles, and converts to JSON.

    Args:
        inputs: URIs of jsonl(.gz, .zst) and Parquet, also globs and folders, in the order of the dataset.
        output: prefix of the outputs; `datasets` returns their names.
        tokenizer: from `describe_tokenizer`.
        keys: of each JSON object, or columns; each becomes a dataset.
        append_eod: whether to add the EOD to each document that has a token.
        empty: a document without tokens has no sequence (`zero-seq`, as in Megatron's preprocess_data.py), has a
            sequence of one EOD (`eod`, as in its preprocess_data_fast.py), or is dropped if it has no token in any
            key (`drop`).
        split_sentences: whether each sentence is a sequence of its own; the language is `language`.
        keep_newlines: whether sentences keep the newlines after them.
        filters: conditions on documents, by their text and their fields.
        min_tokens, max_tokens: bounds of a document's tokens in all keys together, without EOD; None: no bound.
        on_error: for a row that is not a document: `raise`; `skip`, which drops and counts it; `quarantine`, which also
            writes it to the quarantine.
        id_key: field whose value is stored in the lineage.
        lineage: whether `.lineage.parquet` is written.
        codec: row of `segments.CODECS`: how tokens are stored.
        part_bytes: stored bytes of text in a part; None: by the size of all inputs.
        engine: name of a tokenizer engine, or `auto`. All engines give the same tokens.
        compared_share: share of the texts that are compared with the reference engine.
        format: of all inputs, a key of `read.FORMATS`; None: by the suffix of each name.
        source_options, target_options: fsspec's options of the inputs' and the outputs' stores.

    Raises:
        ConfigError: invalid or contradictory settings.

    Example:
        >>> job = Job(("s3://text/en/*.jsonl.zst",), "s3://corpus/en", tokenizer, append_eod=True)  # doctest: +SKIP

    Source: Megatron Core, tools/preprocess_data.py; parts, filters, error policies and lineage are ours.
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
        for name, choices in (("on_error", ON_ERROR), ("empty", EMPTY), ("codec", tuple(CODECS))):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: unknown (found {getattr(self, name)}, need one of {', '.join(choices)})")
        if self.empty == "eod" and not self.append_eod:
            raise ConfigError("empty: eod needs append_eod (--append-eod); give both")
        if self.id_key is not None and not self.lineage:
            raise ConfigError("id_key: ids are stored in the lineage; leave out --no-lineage, or the id_key")
        if not self.inputs or not self.keys:
            raise ConfigError("inputs, keys: found none, need at least one of each")
        if len(set(self.keys)) < len(self.keys):
            raise ConfigError(f"keys: repeated (found {', '.join(self.keys)}, need each once)")
        if self.output.endswith("/"):
            raise ConfigError(f"{self.output}: a folder; give a prefix such as {self.output}en")
        if self.part_bytes is not None and self.part_bytes < 1:
            raise ConfigError(f"part_bytes: too small (found {self.part_bytes}, need 1 or more)")
        least, most = self.min_tokens or 0, self.max_tokens
        if least < 0 or (most is not None and most < least):
            raise ConfigError(
                f"min_tokens, max_tokens: not a range (found {least}, {most}, need 0 or more, and the maximum not "
                "below the minimum)"
            )
        if not 0 <= self.compared_share <= 1:
            raise ConfigError(f"compared_share: found {self.compared_share}, need 0 to 1")
        check_eod(self.tokenizer, self.append_eod)

    @property
    def dtype(self) -> type[np.number[Any]]:
        """Dtype of stored tokens, by Megatron's rule."""
        return DType.optimal_dtype(self.tokenizer.vocab_size)

    @property
    def eod(self) -> int | None:
        """Id at the end of each document, or None."""
        return self.tokenizer.eod if self.append_eod else None

    @property
    def datasets(self) -> dict[str, str]:
        """Prefix of each key's dataset. Source: Megatron-LM, tools/preprocess_data.py."""
        level = "sentence" if self.split_sentences else "document"
        return {key: f"{self.output}_{key}_{level}" for key in self.keys}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, without storage options and the secrets in URIs."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in OPTIONS}
        tokenizer = self.tokenizer.to_json()
        tokenizer |= {name: redacted(tokenizer[name]) for name in ("uri", "merges")}
        values |= {"inputs": [redacted(each) for each in self.inputs], "output": redacted(self.output)}
        values |= {"tokenizer": tokenizer, "filters": asdict(self.filters)}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=list))
        return plain

    @property
    def recipe(self) -> dict[str, Any]:
        """Settings that, with the text, decide the bytes of a part; `on_error` decides only those with bad rows."""
        values = self.to_json()
        tokenizer = {name: value for name, value in values["tokenizer"].items() if name not in ("uri", "merges")}
        others = ("inputs", "format", "output", "part_bytes", "engine", "compared_share", "on_error")
        recipe = {name: value for name, value in values.items() if name not in others}
        return recipe | {"tokenizer": tokenizer, "algorithm": ALGORITHM}


def check_eod(tokenizer: TokenizerSpec, append_eod: bool) -> None:
    """Raise ConfigError if an EOD is to be added and the tokenizer has none."""
    if append_eod and tokenizer.eod is None:
        raise ConfigError(f"{tokenizer.uri}: append_eod needs an EOD; name the token with eod (--eod)")


def json_digest(value: Any) -> str:
    """Return 128 bits that identify a JSON value, hex."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())
