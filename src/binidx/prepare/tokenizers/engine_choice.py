"""Table of tokenizer engines, the choice among them, and the comparison with the reference during the work.

`CheckedEngine` compares an engine with the reference on a sample of the texts. The sample is a function of the bytes of
the texts, so a restart, another engine or another number of workers compares the same ones. The first difference
raises: a job that went on would leave a dataset of unknown quality.

Cost: the reference is 50 to 100 times slower than the fastest engine, so a share of 0.01 % costs a job with it about
1 %, and the hashes less than 0.1 ms a megabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, MismatchError
from binidx.prepare.tokenizers.engine import Encoded, Engine, EngineRow, ReferenceEngine
from binidx.prepare.tokenizers.gigatoken_engine import Gigatoken
from binidx.prepare.tokenizers.hf_engine import HuggingFace
from binidx.prepare.tokenizers.sentencepiece_engine import SentencePiece
from binidx.prepare.tokenizers.spec import TokenizerSpec, read_content
from binidx.prepare.tokenizers.tiktoken_engine import Tiktoken

_ROWS: tuple[Any, ...] = (Gigatoken, Tiktoken, SentencePiece, HuggingFace)

ENGINES: dict[str, EngineRow] = {row.name: row for row in _ROWS}
"""Engines by name, the fastest first. A new engine is a module with its class and an entry here."""

REFERENCES = {kind: name for name, row in ENGINES.items() for kind in row.reference_for}


def refusals(spec: TokenizerSpec, content: bytes) -> dict[str, str | None]:
    """Return for each engine the reason why it cannot be used; None if it gives the reference's ids."""
    return {name: row.refusal(spec, content) for name, row in ENGINES.items()}


def choose_engine(
    spec: TokenizerSpec, name: str = "auto", *, storage_options: Mapping[str, Any] | None = None
) -> Engine:
    """Return the engine of this name; with `auto` the fastest that is installed and exact.

    Raises:
        ConfigError: no such engine, or none that can be used; the message has all reasons.
    """
    content = read_content(spec, storage_options)
    if name != "auto" and name not in ENGINES:
        raise ConfigError(f"engine: unknown (found {name}, need auto or one of {', '.join(ENGINES)})")
    reasons = {}
    for candidate, row in ENGINES.items():
        if name in ("auto", candidate):
            reasons[candidate] = row.refusal(spec, content)
            if reasons[candidate] is None:
                return row(spec, content)
    raise ConfigError(f"{spec.uri}: " + "; ".join(f"{engine}: {reason}" for engine, reason in reasons.items()))


def reference_engine(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> ReferenceEngine:
    """Return the engine whose ids are right by definition."""
    return cast(ReferenceEngine, choose_engine(spec, REFERENCES[spec.kind], storage_options=storage_options))


def open_decoder(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> Callable[[list[int]], str]:
    """Return a function that decodes ids to readable text.

    The function raises ConfigError for an id outside the vocabulary.
    """
    engine = reference_engine(spec, storage_options)

    def decode(ids: list[int]) -> str:
        try:
            return engine.decode(ids)
        except (IndexError, KeyError) as error:
            raise ConfigError(
                f"{spec.uri}: id outside the vocabulary (found {max(ids)}, need less than {spec.vocab_size}); "
                "give the tokenizer that made the ids"
            ) from error

    return decode


SHARE = 1e-4
FIRST, FIRST_BYTES = 1000, 512 << 10
"""The first part of a job compares so many texts whatever their hash, up to so many bytes: some tenths of a second."""

FIRST_OF_WORKER = 200
"""The same for each worker, which may have another version of a library."""

LONGEST_BYTES = 1 << 20
"""Of a longer text only the beginning is compared: the reference takes hundreds of bytes of memory for each byte."""

DIFFERENCE_TOKENS = 8
HASHES = 1 << 64


class CheckedEngine:
    """Engine that compares a sample of its texts with the reference.

    Args:
        share: of the texts, drawn by hash.
        first: number of texts at the start that are compared whatever their hash, up to `FIRST_BYTES`.

    Attributes:
        compared: number of compared texts.
        seen: number of encoded texts.
    """

    def __init__(self, engine: Engine, reference: Engine, *, share: float = SHARE, first: int = 0) -> None:
        self.engine, self.reference, self.name = engine, reference, engine.name
        self.share, self.first = share, first
        self.compared = self.seen = self._seen_bytes = 0

    def encode(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> Encoded:
        """Return the engine's ids.

        Raises:
            MismatchError: the reference gives other ids for a text.
        """
        ids, bounds = self.engine.encode(texts, offsets)
        if self.engine.name == self.reference.name:
            return ids, bounds
        if len(bounds) != len(offsets):
            raise MismatchError(f"{self.name}: {len(bounds) - 1} texts returned (need {len(offsets) - 1})")
        for text in self._sample(texts, offsets):
            content, found = texts[offsets[text] : offsets[text + 1]], ids[bounds[text] : bounds[text + 1]]
            if len(content) > LONGEST_BYTES:
                content = truncate_text(content, LONGEST_BYTES)
                found, _ = self.engine.encode(content, np.array([0, len(content)], np.int64))
            self._compare(text, content, found)
        self.seen += len(offsets) - 1
        self._seen_bytes += int(offsets[-1] - offsets[0])
        return ids, bounds

    def _sample(self, texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of the texts to compare."""
        drawn = hash_texts(texts, offsets) < np.uint64(min(int(self.share * HASHES), HASHES - 1))
        first = slice(max(0, self.first - self.seen))
        drawn[first] |= (self._seen_bytes + offsets[:-1] - offsets[0] < FIRST_BYTES)[first]
        return np.flatnonzero(drawn)

    def _compare(self, text: int, content: NDArray[np.uint8], found: NDArray[np.uint32]) -> None:
        needed, _ = self.reference.encode(content, np.array([0, len(content)], np.int64))
        self.compared += 1
        if not np.array_equal(found, needed):
            beginning = content[:40].tobytes().decode(errors="replace")
            raise MismatchError(
                f"text {self.seen + text}, {len(content)} bytes, beginning {beginning!r}: "
                f"{describe_token_difference(self.name, found, self.reference.name, needed)}; "
                f"--tokenizer-engine {self.reference.name} is exact"
            )


def hash_texts(texts: NDArray[np.uint8], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a hash of each text's length and of 16 of its bytes at equal distances, shape (num_texts,).

    Hashing all bytes would cost a Python call a text, a tenth of the fastest engine's time.
    """
    lengths = np.diff(offsets)
    positions = offsets[:-1, None] + lengths[:, None] * np.arange(16) // 16
    positions[lengths == 0] = 0  # any byte, which is then ignored: an empty text has none
    read = texts[positions] if len(texts) else np.zeros((len(lengths), 16), np.uint8)
    words = np.where(lengths[:, None] > 0, read.view(np.uint64), 0).astype(np.uint64)
    return mix_bits(mix_bits(mix_bits(lengths.astype(np.uint64)) ^ words[:, 0]) ^ words[:, 1])


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each value so that every bit depends on all bits. Source: SplitMix64, Steele, Lea and Flood, 2014."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def describe_token_difference(name: str, found: NDArray[np.uint32], other: str, needed: NDArray[np.uint32]) -> str:
    """Return both lists of ids around the first difference."""
    shared = min(len(found), len(needed))
    unequal = np.flatnonzero(found[:shared] != needed[:shared])
    at = int(unequal[0]) if len(unequal) else shared
    window = slice(max(0, at - DIFFERENCE_TOKENS), at + DIFFERENCE_TOKENS)
    return (
        f"{name} has {found[window].tolist()} and {other} {needed[window].tolist()} from token {window.start}, "
        f"where {at} is the first that differs ({len(found)} and {len(needed)} tokens)"
    )


def truncate_text(content: NDArray[np.uint8], limit: int) -> NDArray[np.uint8]:
    """Return the first `limit` bytes of a longer text, without a character that is cut at the end."""
    end = limit
    while content[end] & 0xC0 == 0x80:
        end -= 1
    return content[:end]
