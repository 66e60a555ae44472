"""Descriptions of tokenizers, small enough for a manifest and for every task of a job.

    kind            uri names                        its reference engine
    json            a tokenizer.json, or its folder  tokenizers
                    a vocab.json, with a merges.txt
    wordpiece       a vocab.txt, one entry a line    tokenizers
    tiktoken        a file of ranks                  tiktoken
    sentencepiece   a .model                         sentencepiece

The content stays in its store; `read_content` fetches it and compares its digest. Nothing is downloaded from hubs.

Special tokens inside text: an `<|endoftext|>` on a web page becomes the special id, as in Megatron, and ends the
document in training. `TokenizerSpec.specials` chooses another policy; `count_specials` finds such texts.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, ObjectChangedError
from binidx.json_models import JsonFile
from binidx.prepare.tokenizers.tokenizer_json import gpt2_json
from binidx.storage.open import read_document

ANY_FILE = JsonFile(object, hint="needed the file of a tokenizer")
POLICIES = ("parse", "text", "error")


@dataclass(frozen=True)
class TokenizerSpec:
    """Tokenizer by the digest of its content, with the options that decide its ids. Hashable, picklable.

    Attributes:
        digest: sha256 of the content, hex.
        vocab_size: number of entries, added tokens included; decides the stored dtype, as Megatron's `vocab_size`.
        eod: id that ends a document; None if none is known.
        special_tokens: content and id of each special token but the unknown token.
        unknown: content of the unknown token. Its id also stands for unknown characters, so only the text shows
            whether the token was spelled out.
        prefix: ids that the post-processor adds before each text, also an empty one.
        suffix: ids that it adds behind each text.
        specials: policy for a special token inside text. `parse`: its id, as in Megatron; `text`: the tokens of its
            characters; `error`: as `parse`, and the job refuses the text (`count_specials`).
        pattern: regular expression that splits text; kind tiktoken only.
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
        """Identity as a dataset's tokenizer, in index caches and saved runs: the digest of its content."""
        return OrderedDict([("class", "binidx.TokenizerSpec"), ("digest", self.digest)])

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)


def read_content(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """Return the content of the tokenizer's file.

    Raises:
        ObjectChangedError: its digest is not the spec's.
    """
    content = fetch_content(spec.uri, spec.merges, storage_options)
    found = content_digest(content)
    if found != spec.digest:
        raise ObjectChangedError(
            f"{spec.uri}: changed since it was described (found sha256 {found[:12]}, need {spec.digest[:12]}); restore "
            "it, or begin another job"
        )
    return content


def fetch_content(uri: str, merges: str, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """Return the content of a tokenizer's object; with `merges`, the tokenizer.json made of both objects."""
    content = fetch_object(uri, storage_options)
    return gpt2_json(uri, content, fetch_object(merges, storage_options)) if merges else content


def fetch_object(uri: str, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """Return a whole object."""
    return read_document(ANY_FILE, uri, storage_options)


def content_digest(content: bytes) -> str:
    """Return the sha256 that identifies a tokenizer, hex."""
    return hashlib.sha256(content).hexdigest()


def count_specials(ids: NDArray[np.uint32], offsets: NDArray[np.int64], spec: TokenizerSpec) -> NDArray[np.int64]:
    """Return the number of special ids in each text, without those of the post-processor, shape (num_texts,).

    Cost: 0.07 to 0.4 ms for the ids of a megabyte of text; more the wider apart the special ids are.
    """
    counts = np.zeros(len(offsets) - 1, np.int64)
    numbers = np.array([number for _, number in spec.special_tokens], np.uint32)
    if not len(numbers):
        return counts
    lowest, span = numbers.min(), np.ptp(numbers)
    hits = np.flatnonzero(ids - lowest <= span)  # smaller ids wrap round
    hits = hits[np.isin(ids[hits], numbers)]
    np.add.at(counts, np.searchsorted(offsets, hits, side="right") - 1, 1)
    return counts - np.count_nonzero(np.isin([*spec.prefix, *spec.suffix], numbers))


def count_unknown(texts: NDArray[np.uint8], offsets: NDArray[np.int64], spec: TokenizerSpec) -> NDArray[np.int64]:
    """Return how often each text spells out the unknown token, shape (num_texts,)."""
    token = spec.unknown.encode()
    if not token:
        return np.zeros(len(offsets) - 1, np.int64)
    data = texts.tobytes()
    return np.array([data.count(token, first, stop) for first, stop in pairwise(offsets.tolist())], np.int64)
