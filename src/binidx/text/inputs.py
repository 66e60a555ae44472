"""Inputs as people name them: paths, URIs, globs and directories, in a fixed order.

corpus/a.jsonl               the file
s3://corpus/en/*.jsonl.zst   what matches, sorted by name; ** goes through folders
corpus/ or s3://corpus/en/   all below whose name tells a format, sorted by name, without .hidden and _hidden ones
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.storage.backends import open_stored
from binidx.storage.filesystem import local_path
from binidx.storage.ranges import RangeReader
from binidx.storage.resumable import in_flight
from binidx.text.listing import is_pattern, local_files, stored_objects
from binidx.text.slices import FORMATS, GZIP, JSONL, PARQUET, ZSTD, Block, Input
from binidx.text.stored import file_identity
from binidx.text.zstd_inputs import zstd_blocks

ASKED_AT_ONCE = 32

SUFFIXES = {
    **{f"{lines}{packed}": kind for packed, kind in (("", JSONL), (".gz", GZIP), (".zst", ZSTD))
       for lines in (".jsonl", ".json", ".ndjson")},
    ".parquet": PARQUET,
}  # fmt: skip


def find_inputs(
    names: str | Sequence[str],
    *,
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Input]:
    """The objects behind the names, in the order of the names; those of a glob or a directory sorted.

    Args:
        format: of all of them, one of FORMATS; None: as the name of each tells.

    Raises:
        ObjectNotFoundError: a name that matches nothing.
        ConfigError: a name that tells no format.
        FormatError: a parquet file without a sound footer.
        StorageError: the store cannot be read.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format: found {format!r}, needed one of {', '.join(FORMATS)}")
    uris = [
        uri
        for name in ([names] if isinstance(names, str) else names)
        for uri in _expanded(os.fspath(name), format, storage_options)
    ]
    with closing(
        in_flight(lambda uri: _input(uri, format or format_of(uri), storage_options), uris, ASKED_AT_ONCE)
    ) as found:
        return list(found)


def format_of(uri: str) -> str:
    """The format that a name tells.

    Raises:
        ConfigError: it tells none.
    """
    if (found := _told(uri)) is None:
        raise ConfigError(
            f"{uri}: tells no format, needed a name that ends in {', '.join(SUFFIXES)}; or say the format"
        )
    return found


def _told(uri: str) -> str | None:
    name = uri.partition("?")[0] if uri.startswith(("http://", "https://")) else uri
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def _expanded(name: str, format: str | None, options: Mapping[str, Any] | None) -> list[str]:
    path = local_path(name)
    if path is not None:
        found = local_files(path)
        return [path] if found is None else _readable(path, found, format) if os.path.isdir(path) else found
    if is_pattern(name):
        return stored_objects(name, options)
    if name.endswith("/") or not _is_object(name, options):
        return _readable(name, stored_objects(name, options), format)
    return [name]


def _is_object(uri: str, options: Mapping[str, Any] | None) -> bool:
    """False where there is none: it may be a folder. Spark names folders x.parquet."""
    try:
        open_stored(uri, storage_options=options)
    except ObjectNotFoundError:
        return False
    return True


def _readable(folder: str, found: Sequence[str], format: str | None) -> list[str]:
    """Those of a folder that are inputs.

    Raises:
        ObjectNotFoundError: none of them is.
    """
    if inputs := [each for each in found if format or _told(each)]:
        return inputs
    raise ObjectNotFoundError(f"{folder}: holds {len(found)} objects, needed one that ends in {', '.join(SUFFIXES)}")


def _input(uri: str, format: str, options: Mapping[str, Any] | None) -> Input:
    path, cut = local_path(uri), BLOCKS.get(format)
    if path is not None and cut is None:
        return Input(uri, format, file_identity(_stat(path)))
    reader = open_stored(uri, storage_options=options)
    return Input(uri, format, reader.identity, cut(reader) if cut else ())  # type: ignore[attr-defined]


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        raise ObjectNotFoundError(f"{path}: no such file") from error


def _parquet_blocks(reader: RangeReader) -> tuple[Block, ...]:
    from binidx.text.parquet import parquet_blocks

    return parquet_blocks(reader)


BLOCKS: dict[str, Callable[[RangeReader], tuple[Block, ...]]] = {ZSTD: zstd_blocks, PARQUET: _parquet_blocks}
"""format -> where an object of it can be cut"""
