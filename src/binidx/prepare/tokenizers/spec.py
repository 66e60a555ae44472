"""What a tokenizer is, small enough for a manifest and for every task of a job.

    kind            uri names                        its reference
    json            a tokenizer.json, or its folder  tokenizers
                    a vocab.json, with a merges.txt
    wordpiece       a vocab.txt, one entry a line    tokenizers
    tiktoken        a file of ranks                  tiktoken
    sentencepiece   a .model                         sentencepiece

The content stays where it is; `read_content` fetches it and compares its digest. Nothing is downloaded from hubs.

Special tokens inside text: an `<|endoftext|>` that a web page spells out would end its document in training.

Megatron makes the special id of it, and so do we unless told otherwise (`TokenizerSpec.specials`). Here they are
counted.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    """A tokenizer by its content, and how text meets it. Hashable, picklable, and as JSON by `to_json`.

    Attributes:
        digest: sha256 of the content, hex.
        vocab_size: entries, added tokens included: what decides the stored dtype, as Megatron's `vocab_size`.
        eod: the id that ends a document; None where none is known.
        special_tokens: content and id of each, without the one for what is unknown.
        unknown: that one's content: ids do not tell who spelled it out from who wrote what is unknown.
        prefix: ids that the post-processor puts before each text, the empty one too.
        suffix: ids that it puts behind.
        specials: what becomes of a special token inside text. `parse`: its id, as in Megatron; `text`: the tokens of
            its characters; `error`: as parse, for whoever then refuses texts that have one (`specials.find_specials`).
        pattern: regular expression that splits text; kind tiktoken only.
        lowercase: text is lowered and loses its accents first; kind wordpiece only.
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
            raise ConfigError(f"specials: found {self.specials}, needs one of {', '.join(POLICIES)}")

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What names it in index caches and saved runs, where it stands as a dataset's tokenizer: its content."""
        return OrderedDict([("class", "binidx.TokenizerSpec"), ("digest", self.digest)])

    def to_json(self) -> dict[str, Any]:
        """Values that JSON has."""
        return asdict(self)


def read_content(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """The bytes of the tokenizer's file.

    Raises:
        ObjectChangedError: they are not the ones that were described.
    """
    content = fetch_content(spec.uri, spec.merges, storage_options)
    found = content_digest(content)
    if found != spec.digest:
        raise ObjectChangedError(f"{spec.uri}: sha256 {found[:12]}, the job was planned with {spec.digest[:12]}")
    return content


def fetch_content(uri: str, merges: str, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """What a tokenizer is made of: one object, or two as one."""
    content = fetch_object(uri, storage_options)
    return gpt2_json(uri, content, fetch_object(merges, storage_options)) if merges else content


def fetch_object(uri: str, storage_options: Mapping[str, Any] | None = None) -> bytes:
    """The whole object."""
    return read_document(ANY_FILE, uri, storage_options)


def content_digest(content: bytes) -> str:
    """How manifests name a tokenizer."""
    return hashlib.sha256(content).hexdigest()


def find_specials(ids: NDArray[np.uint32], offsets: NDArray[np.int64], spec: TokenizerSpec) -> NDArray[np.int64]:
    """How many special ids stand in each text, without those that the post-processor put around it: shape (num_texts,).

    Cost: 0.07 to 0.4 ms for the ids of a megabyte of text, the more the wider special ids are apart.
    """
    counts = np.zeros(len(offsets) - 1, np.int64)
    numbers = np.array([number for _, number in spec.special_tokens], np.uint32)
    if not len(numbers):
        return counts
    lowest, span = numbers.min(), np.ptp(numbers)
    hits = np.flatnonzero(ids - lowest <= span)  # what is below wraps round
    hits = hits[np.isin(ids[hits], numbers)]
    np.add.at(counts, np.searchsorted(offsets, hits, side="right") - 1, 1)
    around = np.isin([*spec.prefix, *spec.suffix], numbers)
    return counts - np.count_nonzero(around)


def find_unknown(texts: NDArray[np.uint8], offsets: NDArray[np.int64], spec: TokenizerSpec) -> NDArray[np.int64]:
    """How often each text spells out the token for what is unknown: shape (num_texts,)."""
    counts, wanted = np.zeros(len(offsets) - 1, np.int64), spec.unknown.encode()
    data = texts.tobytes() if wanted else b""
    at = data.find(wanted) if wanted else -1
    while at >= 0:
        text = int(np.searchsorted(offsets, at, side="right")) - 1
        counts[text] += 0 <= text < len(counts) and at + len(wanted) <= offsets[text + 1]
        at = data.find(wanted, at + 1)
    return counts
