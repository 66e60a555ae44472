"""Job: all settings that decide the bytes of the result, as one value; and its parts.

Settings that do not decide them are arguments of `preprocess`: workers, the place where parts are made, overwriting.
No I/O happens here. Each part is made without knowledge of the others:

    slices of the text    |---- en.jsonl ----|---- en.jsonl ----|-- a.jsonl --|b|c|---- d.parquet ----|
    parts                 |        0         |        1         |        2        |         3         |

The name of a part is the digest of its slices and of the recipe: the same work has the same name in every run and on
every machine, and any change of the text, the tokenizer or an option gives another name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np

from binidx.errors import ConfigError, redacted
from binidx.format.document_blocks import batch_by_size
from binidx.format.idx import DType
from binidx.json_models import JsonFile
from binidx.prepare.text.batch import Filters, check_limits
from binidx.prepare.text.slices import Input, Slice, plan_slices
from binidx.storage.open import codec_named
from binidx.tokenizers.spec import TokenizerSpec

ALGORITHM = 1
"""Version of the algorithm; increased if the same job gives other bytes, so that older parts are not reused."""

ON_ERROR = ("raise", "skip", "quarantine")
EMPTY = ("zero-seq", "eod", "drop")
OPTIONS = ("source_options", "target_options")
"""Fields of a Job that are never written to a file, as they may hold secrets."""


@dataclass(frozen=True)
class Job:
    """Text to tokenize, and all options that decide the tokens. It can be pickled and converted to JSON.

    Args:
        inputs: URIs of text in a format of `read.FORMATS`, also globs and folders, in the order of the dataset.
        output: prefix of the outputs; `datasets` returns their names.
        tokenizer: from `describe_tokenizer`.
        keys: JSON keys, or Parquet columns, of the texts; each becomes a dataset.
        append_eod: whether to add the EOD to each document that has a token.
        empty: a document without tokens has no sequence (`zero-seq`, as in Megatron's preprocess_data.py), has a
            sequence of one EOD (`eod`, as in its preprocess_data_fast.py), or is dropped if it has no token in any
            key (`drop`).
        split_sentences: whether each sentence is a sequence of its own; the language is `language`.
        keep_newlines: whether sentences keep the newlines after them.
        filters: conditions on documents, by their text and their fields.
        min_tokens, max_tokens: bounds of a document's tokens in all keys together, without EOD; None: no bound.
        on_error: for a row that is not a document: `raise`; `skip`, which drops and counts it; `quarantine`, which also
            writes it to OUTPUT.quarantine.jsonl.
        id_key: field whose value is stored in the lineage.
        lineage: whether `.lineage.parquet` is written.
        codec: name of the codec of the tokens: "raw", "zstd" or a registered one.
        part_bytes: stored bytes of text in a part; None: by the size of all inputs.
        engine: name of a tokenizer engine, or `auto`. All engines give the same tokens.
        compared_share: share of the texts that are compared with the reference engine.
        format: of all inputs, a key of `read.FORMATS`; None: by the suffix of each name.
        source_options, target_options: fsspec's options of the stores of inputs and tokenizer, and of the outputs.

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
        if isinstance(self.inputs, str) or isinstance(self.keys, str):
            raise ConfigError(f"inputs, keys: found {self.inputs!r}, {self.keys!r}, need lists of texts")
        if "" in (self.output, *self.inputs):
            raise ConfigError("inputs, output: found an empty name, need paths or URIs")
        if not isinstance(self.tokenizer, TokenizerSpec):
            raise ConfigError(f"tokenizer: found {self.tokenizer!r}, needs binidx.describe_tokenizer of it")
        for name, choices in (("on_error", ON_ERROR), ("empty", EMPTY)):
            if getattr(self, name) not in choices:
                raise ConfigError(f"{name}: unknown (found {getattr(self, name)}, need one of {', '.join(choices)})")
        codec_named(self.codec)
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
        check_limits("min_tokens, max_tokens", self.min_tokens or 0, self.max_tokens)
        if not 0 <= self.compared_share <= 1:
            raise ConfigError(f"compared_share: found {self.compared_share}, need 0 to 1")
        check_eod(self.tokenizer, self.append_eod)

    @property
    def dtype(self) -> type[np.number[Any]]:
        """Dtype of stored tokens, by Megatron's rule."""
        return DType.optimal_dtype(self.tokenizer.vocab_size)

    @property
    def eod(self) -> int | None:
        """Id to add at the end of each document; None without `append_eod`."""
        return self.tokenizer.eod if self.append_eod else None

    @property
    def datasets(self) -> dict[str, str]:
        """Key -> prefix of its dataset. Source: Megatron-LM, tools/preprocess_data.py."""
        level = "sentence" if self.split_sentences else "document"
        return {key: f"{self.output}_{key}_{level}" for key in self.keys}

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values.

        Returns:
            Name of each field -> its value, without storage options and the secrets in URIs.
        """
        values = {setting.name: getattr(self, setting.name) for setting in fields(self) if setting.name not in OPTIONS}
        tokenizer = self.tokenizer.to_json()
        tokenizer |= {name: redacted(tokenizer[name]) for name in ("uri", "merges")}
        values |= {"inputs": [redacted(uri) for uri in self.inputs], "output": redacted(self.output)}
        values |= {"tokenizer": tokenizer, "filters": asdict(self.filters)}
        plain: dict[str, Any] = json.loads(json.dumps(values, default=list))
        return plain

    @property
    def recipe(self) -> dict[str, Any]:
        """Settings that, with the text, decide the bytes of a part, except `on_error`, which matters for bad rows."""
        values = self.to_json()
        tokenizer = {name: value for name, value in values["tokenizer"].items() if name not in ("uri", "merges")}
        others = ("inputs", "format", "output", "part_bytes", "engine", "compared_share", "on_error")
        recipe = {name: value for name, value in values.items() if name not in others}
        return recipe | {"tokenizer": tokenizer, "algorithm": ALGORITHM}


def check_eod(tokenizer: TokenizerSpec, append_eod: bool) -> None:
    """Raise ConfigError if an EOD is to be added and the tokenizer has none."""
    if append_eod and tokenizer.eod is None:
        special = ", ".join(text for text, _ in tokenizer.special_tokens[:6])
        raise ConfigError(
            f"{tokenizer.uri}: append_eod needs an EOD; name the token with eod (--eod)"
            + (f", such as one of its special tokens: {special}" if special else "")
        )


FEW, FEW_BYTES = 16, (4 << 20, 64 << 20)
MANY, MOST_BYTES = 512, 512 << 20
"""Number of parts, and bytes of text in one: small parts for little text, so that many cores have work; 64 MiB and
up to 512 parts for more. From there on a part has more tokens than the 5 MiB that S3 needs to copy it itself, and more
work than its ten requests cost. The largest part takes some seconds of a fast engine, and minutes of a slow one."""
MOST_SMALL = 2000
"""Parts below 4 MiB that a job may have: a part costs some 0.1 s and three files however small it is."""


@dataclass(frozen=True)
class Part:
    """Unit of work of a job, done whole or not at all; `name` is the digest of its slices and of the recipe."""

    number: int
    name: str
    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Stored bytes of the part's text."""
        return sum(piece.num_bytes for piece in self.slices)

    def __str__(self) -> str:
        first, last = self.slices[0], self.slices[-1]
        more = f" to {redacted(last.uri)}" if last.uri != first.uri else ""
        return f"part {self.number} ({redacted(first.uri)} from byte {first.stored}{more})"


def plan_parts(job: Job, inputs: Sequence[Input]) -> list[Part]:
    """Return parts of about the same size, in the order of the inputs; small neighbouring slices share one.

    A part has up to 1.5 times the planned bytes: the last slice of a file may be tiny.

    Args:
        inputs: as `find_inputs` returns them.

    Raises:
        ConfigError: `part_bytes` would cut the text into too many small parts.
    """
    total = sum(file.size for file in inputs)
    part_bytes = job.part_bytes or choose_part_bytes(total)
    if part_bytes < FEW_BYTES[0] and (count := total // part_bytes) > MOST_SMALL:
        found = f"found {part_bytes:,}, which is {count:,} parts of {total:,} bytes of text"
        raise ConfigError(f"part_bytes: {found}, need at least {total // MOST_SMALL + 1:,}; without it they are chosen")
    slices, recipe = plan_slices(inputs, part_bytes), JsonFile.digest(job.recipe)
    ends, parts = np.cumsum([0, *(piece.num_bytes for piece in slices)]), []
    for number, (first, last) in enumerate(batch_by_size(ends, part_bytes * 3 // 2)):
        identity = [{**asdict(piece), "uri": redacted(piece.uri)} for piece in slices[first:last]]
        parts.append(Part(number, JsonFile.digest([recipe, identity]), tuple(slices[first:last])))
    return parts


def choose_part_bytes(total_bytes: int) -> int:
    """Return the bytes of text for a part; `total_bytes` alone decides, so that any restart has the same parts."""
    few = min(max(total_bytes // FEW, FEW_BYTES[0]), FEW_BYTES[1])
    return min(max(total_bytes // MANY, few), MOST_BYTES)


def plan_digest(job: Job, parts: Sequence[Part]) -> str:
    """Return the digest that identifies a job: of its parts' names, and of the recipe, as there may be no part."""
    return JsonFile.digest([JsonFile.digest(job.recipe), *(part.name for part in parts)])
