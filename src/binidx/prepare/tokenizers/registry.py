"""The engines there are, and the choice among them.

An engine that is compared with the reference while it works, on a sample that is always the same.

Which texts are compared is a function of their bytes, so a restart, another engine or another number of workers
compares the same ones. A job that goes on after a difference would leave a dataset nobody can trust: the first one
raises.

Cost: the reference is 50 to 100 times slower than the fastest engine, so a share of 0.01 % costs a job on it about 1 %,
and the hashes less than 0.1 ms a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, MismatchError
from binidx.prepare.tokenizers.engine import Encoded, Engine, EngineRow, Reference
from binidx.prepare.tokenizers.gigatoken_engine import Gigatoken
from binidx.prepare.tokenizers.hf_engine import HuggingFace
from binidx.prepare.tokenizers.sentencepiece_engine import SentencePiece
from binidx.prepare.tokenizers.spec import TokenizerSpec, read_content
from binidx.prepare.tokenizers.tiktoken_engine import Tiktoken


def refusals(spec: TokenizerSpec, content: bytes) -> dict[str, str | None]:
    """Each engine by name: why it would not do, or None where it gives the reference's ids."""
    return {name: row.refusal(spec, content) for name, row in ENGINES.items()}


def choose_engine(
    spec: TokenizerSpec, name: str = "auto", *, storage_options: Mapping[str, Any] | None = None
) -> Engine:
    """The engine of this name, or the fastest that is installed and exact.

    Raises:
        ConfigError: there is no such engine, or each of those asked for has a reason why not; they are in the message.
    """
    content = read_content(spec, storage_options)
    if name != "auto" and name not in ENGINES:
        raise ConfigError(f"engine: found {name}, needs auto or one of {', '.join(ENGINES)}")
    reasons = {}
    for candidate, row in ENGINES.items():
        if name in ("auto", candidate):
            reasons[candidate] = row.refusal(spec, content)
            if reasons[candidate] is None:
                return row(spec, content)
    raise ConfigError(f"{spec.uri}: " + "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items()))


def reference(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> Reference:
    """The engine whose ids are right by definition."""
    return cast(Reference, choose_engine(spec, REFERENCES[spec.kind], storage_options=storage_options))


def decoder(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> Callable[[list[int]], str]:
    """What makes text of ids, for people.

    Raises:
        ConfigError: when it is called, an id that the tokenizer does not have.
    """
    engine = reference(spec, storage_options)

    def decode(ids: list[int]) -> str:
        try:
            return engine.decode(ids)
        except (IndexError, KeyError) as error:
            raise ConfigError(
                f"{spec.uri}: ids up to {max(ids)}, it has {spec.vocab_size}; were they made by another tokenizer?"
            ) from error

    return decode


# Fastest first.
ENGINES: dict[str, EngineRow] = {row.name: row for row in (Gigatoken, Tiktoken, SentencePiece, HuggingFace)}


REFERENCES = {"json": "hf", "wordpiece": "hf", "tiktoken": "tiktoken", "sentencepiece": "sentencepiece"}


SHARE = 1e-4


FIRST, FIRST_BYTES = 1000, 512 << 10


"""Texts that the first part of a job has compared, whatever their hash, and the bytes after which no other one begins:
of the reference some tenths of a second."""


FIRST_OF_WORKER = 200


"""The same of each worker, which may have another version of a library."""


LONGEST_BYTES = 1 << 20


"""Of a text that is longer its beginning is compared: the reference takes hundreds of bytes of memory for each."""


SHOWN = 8


HASHES = 1 << 64


class Checked:
    """An engine, and the reference for some of its texts. It is an Engine.

    Args:
        share: of the texts, drawn by hash.
        first: the first texts that this object is given are compared too, while they are short: `FIRST_BYTES`.

    Attributes:
        compared: texts that were compared so far.
    """

    def __init__(self, engine: Engine, reference: Engine, *, share: float = SHARE, first: int = 0) -> None:
        self.engine, self.reference, self.name = engine, reference, engine.name
        self.share, self.first = share, first
        self.compared = self.seen = self._seen_bytes = 0

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        """As the engine does.

        Raises:
            MismatchError: the reference gives other ids for a text.
        """
        ids, bounds = self.engine.encode(texts, offsets)
        if self.engine.name == self.reference.name:
            return ids, bounds
        if len(bounds) != len(offsets):
            raise MismatchError(f"{self.name}: {len(bounds) - 1} texts came back, {len(offsets) - 1} were given")
        for text in self._sample(texts, offsets):
            content, found = texts[offsets[text] : offsets[text + 1]], ids[bounds[text] : bounds[text + 1]]
            if len(content) > LONGEST_BYTES:
                content = start_of(content, LONGEST_BYTES)
                found, _ = self.engine.encode(content, np.array([0, len(content)], np.int64))
            self._compare(text, content, found)
        self.seen += len(offsets) - 1
        self._seen_bytes += int(offsets[-1] - offsets[0])
        return ids, bounds

    def _sample(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Texts to compare, by number."""
        drawn = text_hashes(texts, offsets) < np.uint64(min(int(self.share * HASHES), HASHES - 1))
        begun = self._seen_bytes + offsets[:-1] - offsets[0] < FIRST_BYTES
        drawn[: max(0, self.first - self.seen)] |= begun[: max(0, self.first - self.seen)]
        return np.flatnonzero(drawn)

    def _compare(self, text: int, content: NDArray[np.uint8], found: NDArray[np.uint32]) -> None:
        needed, _ = self.reference.encode(content, np.array([0, len(content)], np.int64))
        self.compared += 1
        if not np.array_equal(found, needed):
            raise MismatchError(
                f"text {self.seen + text}, {len(content)} bytes, beginning {beginning(content)!r}: "
                f"{token_difference(self.name, found, self.reference.name, needed)}; "
                f"--tokenizer-engine {self.reference.name} is exact"
            )


def text_hashes(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each text's length and of 16 of its bytes, from its first on at equal distances, shape (num_texts,).

    All bytes would cost a Python call a text, which is a tenth of what the fastest engine takes.
    """
    lengths = np.diff(offsets)
    places = offsets[:-1, None] + lengths[:, None] * np.arange(16) // 16
    places[lengths == 0] = 0  # of an empty text there is no byte: that of any other, and none of it counts
    read = texts[places] if len(texts) else np.zeros((len(lengths), 16), np.uint8)
    words = np.where(lengths[:, None] > 0, read.view(np.uint64), 0).astype(np.uint64)
    return mixed(mixed(mixed(lengths.astype(np.uint64)) ^ words[:, 0]) ^ words[:, 1])


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each bit of a result depends on all bits of its value. Source: SplitMix64, Steele, Lea and Flood, 2014."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def token_difference(name: str, found: NDArray[np.uint32], other: str, needed: NDArray[np.uint32]) -> str:
    """Both lists of ids around the first place where they part."""
    shared = min(len(found), len(needed))
    unequal = np.flatnonzero(found[:shared] != needed[:shared])
    at = int(unequal[0]) if len(unequal) else shared
    window = slice(max(0, at - SHOWN), at + SHOWN)
    return (
        f"{name} has {found[window].tolist()} and {other} {needed[window].tolist()} from token {window.start}, "
        f"where {at} is the first that differs ({len(found)} and {len(needed)} tokens)"
    )


def start_of(content: NDArray[np.uint8], most: int) -> NDArray[np.uint8]:
    """Its first `most` bytes, less those of a character that does not end in them. There are more than `most`."""
    end = most
    while content[end] & 0xC0 == 0x80:
        end -= 1
    return content[:end]


def beginning(content: NDArray[np.uint8]) -> str:
    """The first characters of a text."""
    return content[:40].tobytes().decode(errors="replace")
