"""Table of tokenizer engines, and the choice among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from binidx.errors import ConfigError
from binidx.prepare.tokenizers.engine import Engine, HuggingFace, ReferenceEngine, SentencePiece
from binidx.prepare.tokenizers.gigatoken_engine import Gigatoken
from binidx.tokenizers.library import LibraryError, missing_package
from binidx.tokenizers.spec import TokenizerSpec

REFERENCES: dict[str, type[ReferenceEngine]] = {
    kind: row for row in (SentencePiece, HuggingFace) for kind in row.reference_for
}
"""Kind of tokenizer -> the engine that defines its ids."""

_ROWS: tuple[type[Gigatoken] | type[ReferenceEngine], ...] = (Gigatoken, *REFERENCES.values())
ENGINES = {row.name: row for row in _ROWS}
"""Engines by name, the fastest first. A new engine is a class with `refusal` and `encode`, and an entry here."""


def choose_engine(
    spec: TokenizerSpec, name: str = "auto", *, storage_options: Mapping[str, Any] | None = None
) -> Engine:
    """Return the engine of this name; with `auto` the fastest that is installed and exact.

    Args:
        spec: tokenizer to run.
        name: a key of ENGINES, or `auto`.
        storage_options: fsspec's options of the tokenizer's store.

    Raises:
        ConfigError: no such engine, or none that can be used; the message names the packages that would do, else all
            reasons.
    """
    if name not in ("auto", *ENGINES):
        raise ConfigError(f"engine: unknown (found {name}, need auto or one of {', '.join(ENGINES)})")
    content, reasons, extras = spec.read_content(storage_options), [], []
    for candidate in ENGINES if name == "auto" else [name]:
        engine = ENGINES[candidate]
        reason = engine.refusal(spec, content)
        if reason is None:
            with LibraryError.of_library(f"{spec.uri}: {candidate} does not read it"):
                return engine(spec, content)
        reasons.append(f"{candidate}: {reason}")
        if reason == missing_package(engine.package):
            extras.append(f"'binidx[{engine.package}]'")
    if extras:
        raise ConfigError(f"{spec.uri}: no engine that reads it is installed; pip install {' or '.join(extras)}")
    raise ConfigError(f"{spec.uri}: {'; '.join(reasons)}")


def reference_engine(spec: TokenizerSpec, storage_options: Mapping[str, Any] | None = None) -> ReferenceEngine:
    """Return the reference engine of a tokenizer: the one whose token ids every other engine must reproduce.

    Args:
        spec: tokenizer to run.
        storage_options: fsspec's options of the tokenizer's store.

    Raises:
        ConfigError: the package of the engine is not installed.
    """
    engine = choose_engine(spec, REFERENCES[spec.kind].name, storage_options=storage_options)
    return cast(ReferenceEngine, engine)
