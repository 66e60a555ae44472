"""The engines there are, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from binidx.errors import ConfigError
from binidx.tokenize.engine import Engine, EngineRow, Reference
from binidx.tokenize.gigatoken_engine import Gigatoken
from binidx.tokenize.hf_engine import HuggingFace
from binidx.tokenize.sentencepiece_engine import SentencePiece
from binidx.tokenize.spec import TokenizerSpec, read_content
from binidx.tokenize.tiktoken_engine import Tiktoken


def refusals(spec: TokenizerSpec, content: bytes) -> dict[str, str | None]:
    """Each engine by name: why it would not do, or None where it gives the reference's ids."""
    return {name: row.refusal(spec, content) for name, row in ENGINES.items()}


def choose(spec: TokenizerSpec, name: str = "auto", *, storage_options: Mapping[str, Any] | None = None) -> Engine:
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
    return cast(Reference, choose(spec, REFERENCES[spec.kind], storage_options=storage_options))


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
