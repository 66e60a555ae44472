"""Inputs as people name them: paths, URIs, globs and directories, in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from binidx.errors import ConfigError
from binidx.storage.backends import open_stored
from binidx.text.slices import FORMATS, GZIP, JSONL, PARQUET, ZSTD, Input

SUFFIXES = {
    ".jsonl": JSONL,
    ".json": JSONL,
    ".ndjson": JSONL,
    ".jsonl.gz": GZIP,
    ".json.gz": GZIP,
    ".ndjson.gz": GZIP,
    ".jsonl.zst": ZSTD,
    ".json.zst": ZSTD,
    ".ndjson.zst": ZSTD,
    ".parquet": PARQUET,
}


def find_inputs(
    names: Sequence[str], *, format: str | None = None, storage_options: Mapping[str, Any] | None = None
) -> list[Input]:
    """The objects behind the names, in their order; those of a glob or a directory sorted by name."""
    return [
        Input(uri, format or format_of(uri), open_stored(uri, storage_options=storage_options).identity)  # type: ignore[attr-defined]
        for uri in names
    ]


def format_of(uri: str) -> str:
    """The format that a name tells.

    Raises:
        ConfigError: it tells none.
    """
    name = uri.partition("?")[0] if "://" in uri else uri
    found = next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)
    if found is None:
        raise ConfigError(
            f"{uri}: a name of no known format, needed one that ends in {', '.join(SUFFIXES)}; or say format="
        )
    return found


__all__ = ["FORMATS", "find_inputs", "format_of"]
