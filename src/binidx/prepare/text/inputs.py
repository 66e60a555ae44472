"""Names of inputs as people write them, and the objects behind them, in an order that does not depend on the store.

Inputs as people name them: paths, URIs, globs and directories, in a fixed order.

corpus/a.jsonl               the file
s3://corpus/en/*.jsonl.zst   what matches, sorted by name; ** goes through folders
corpus/ or s3://corpus/en/   all below whose name tells a format, sorted by name, without .hidden and _hidden ones,
                             and without what stands beside a dataset
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeVar

from binidx.errors import ConfigError, ObjectNotFoundError, StorageError
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.format.virtual import SUFFIX as PARTS
from binidx.prepare.text.decompress import zstd_blocks
from binidx.prepare.text.read import file_identity
from binidx.prepare.text.slices import FORMATS, GZIP, JSONL, PARQUET, ZSTD, Input, InputBlock
from binidx.storage.interfaces import RangeReader, SearchableStore
from binidx.storage.open import open_stored
from binidx.storage.stores.registry import is_url, local_path, open_store, split_query
from binidx.storage.writing.copy import map_in_flight

Options = Mapping[str, Any] | None


def is_pattern(name: str) -> bool:
    """Whether it has a wildcard. In a URL only * is one: a ? begins its query, and [ ] stand for themselves."""
    return "*" in name if is_url(name) else glob.has_magic(name)


def local_files(path: str) -> list[str] | None:
    """The files of a glob or a directory, sorted; None: it is one file.

    Raises:
        ObjectNotFoundError: nothing matches.
    """
    if os.path.isdir(path):
        found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        return some(path, [each for each in found if not hidden(path, each)])
    if os.path.exists(path):
        return None
    return some(path, [each for each in glob.glob(path, recursive=True) if os.path.isfile(each)])


def stored_objects(uri: str, options: Options) -> list[str]:
    """The objects of a glob, or below a folder, sorted: one listing.

    Raises:
        ObjectNotFoundError: nothing matches.
        StorageError: the store does not list.
    """
    store = open_store(uri, options)
    if not isinstance(store, SearchableStore):
        raise StorageError(f"{uri}: this store has no listing; needed the names of objects")
    uris = store.find(uri, pattern=is_pattern(uri))
    if not is_pattern(uri):
        uris = [each for each in uris if not hidden(uri, each)]
    return some(uri, [each for each in uris if not each.endswith("/")])


def hidden(folder: str, name: str) -> bool:
    """Whether a part of the name below the folder begins with a dot or an underscore: _SUCCESS, .crc, _temporary/."""
    return any(part[:1] in (".", "_") for part in name[len(folder) :].split("/"))


def some(name: str, found: Sequence[str]) -> list[str]:
    """Sorted.

    Raises:
        ObjectNotFoundError: there is none.
    """
    if not found:
        raise ObjectNotFoundError(f"{name}: matches nothing, needed one object at least")
    return sorted(found)


ASKED_AT_ONCE = 32


Item = TypeVar("Item")


Result = TypeVar("Result")


Named = tuple[str, RangeReader | None]


"""A URI, and its reader where it was opened to see whether it is there."""


SUFFIXES = {
    **{f"{lines}{packed}": kind for packed, kind in (("", JSONL), (".gz", GZIP), (".zst", ZSTD))
       for lines in (".jsonl", ".json", ".ndjson")},
    ".parquet": PARQUET,
}  # fmt: skip


NO_TEXT = (*SIDECARS, ".quarantine.jsonl", PARTS)


"""Ends of names that tell a format, and are what these tools have written there."""


def find_inputs(
    names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    leave_out: Callable[[str], bool] = lambda uri: False,
) -> list[Input]:
    """The objects behind the names, in the order of the names; those of a glob or a directory sorted.

    Args:
        format: of all of them, one of FORMATS; None: as the name of each tells.
        leave_out: of what globs and folders hold.

    Raises:
        ObjectNotFoundError: a name that matches nothing.
        ConfigError: a name that tells no format; a pipe.
        FormatError: a parquet file without a sound footer.
        StorageError: the store cannot be read.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format: found {format!r}, needed one of {', '.join(FORMATS)}")
    every = [os.fspath(each) for each in ([names] if isinstance(names, str | os.PathLike) else names)]
    found = _at_once(lambda name: _expanded(name, format, storage_options, leave_out), every)
    return _at_once(lambda each: _input(*each, format, storage_options), [each for some in found for each in some])


def _at_once(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Each costs a round trip: many of them together."""
    with closing(map_in_flight(function, items, ASKED_AT_ONCE)) as results:
        return list(results)


def format_of(uri: str) -> str:
    """The format that a name tells.

    Raises:
        ConfigError: it tells none.
    """
    if (found := _told(uri)) is None:
        raise ConfigError(
            f"{uri}: tells no format, needed a name that ends in {', '.join(SUFFIXES)}; or say the format (--format)"
        )
    return found


def _told(uri: str) -> str | None:
    name, _ = split_query(uri)
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def _expanded(
    name: str, format: str | None, options: Mapping[str, Any] | None, leave_out: Callable[[str], bool]
) -> list[Named]:
    path = local_path(name)
    if path is None and "*" not in name and not name.endswith("/"):
        try:
            return [(name, open_stored(name, storage_options=options))]
        except ObjectNotFoundError:
            pass  # it may be a pattern of [ ] or ?, or a folder: Spark names them x.parquet
    listed = stored_objects(name, options) if path is None else local_files(path)
    if listed is None:
        return [(name if path is None else path, None)]
    found = [each for each in listed if not leave_out(each)]
    folder = os.path.isdir(path) if path is not None else not is_pattern(name)
    return [(uri, None) for uri in (_readable(name, found, format) if folder else some(name, found))]


def _readable(folder: str, found: Sequence[str], format: str | None) -> list[str]:
    """Those of a folder that are inputs.

    Raises:
        ObjectNotFoundError: none of them is.
    """
    if inputs := [each for each in found if (format or _told(each)) and not each.endswith(NO_TEXT)]:
        return inputs
    raise ObjectNotFoundError(f"{folder}: holds {len(found)} objects, needed one that ends in {', '.join(SUFFIXES)}")


def _input(uri: str, opened: RangeReader | None, format: str | None, options: Mapping[str, Any] | None) -> Input:
    format = format or format_of(uri)
    path, cut = local_path(uri), BLOCKS.get(format)
    if path is not None:
        about = _stat(path)
        if cut is None:
            return Input(uri, format, file_identity(about))
    reader = opened or open_stored(uri, storage_options=options)
    return Input(uri, format, reader.identity, cut(reader) if cut else ())  # type: ignore[attr-defined]


def _stat(path: str) -> os.stat_result:
    try:
        about = os.stat(path)
    except OSError as error:
        raise ObjectNotFoundError(f"{path}: no such file") from error
    if not stat.S_ISREG(about.st_mode):  # its size is 0: nothing of it would be read, without a word
        raise ConfigError(f"{path}: is a pipe or a device, needed a file: it is read in parts, by several processes")
    return about


def _parquet_blocks(reader: RangeReader) -> tuple[InputBlock, ...]:
    from binidx.prepare.text.parquet_reader import parquet_blocks

    return parquet_blocks(reader)


BLOCKS: dict[str, Callable[[RangeReader], tuple[InputBlock, ...]]] = {ZSTD: zstd_blocks, PARQUET: _parquet_blocks}


"""format -> where an object of it can be cut"""
