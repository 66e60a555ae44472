"""Find the objects with text behind paths, URIs, globs and directories, in an order that no store decides.

corpus/a.jsonl               the file
s3://corpus/en/*.jsonl.zst   the matches, sorted by name; ** crosses folders
corpus/ or s3://corpus/en/   all objects below with the suffix of a format, sorted by name, without .hidden and _hidden
                             ones, and without the files that binidx writes beside a dataset
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from binidx.errors import ConfigError, FormatError, ObjectNotFoundError
from binidx.format.sidecars.dataset_manifest import SIDECARS
from binidx.format.virtual import PARTS
from binidx.prepare.text.read import FORMATS
from binidx.prepare.text.slices import Input, file_identity
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_stored
from binidx.storage.requests.listing import list_matches
from binidx.storage.stores.registry import split_query
from binidx.storage.threads import map_in_flight

INPUTS_IN_FLIGHT = 32
NOT_TEXT = (*SIDECARS, ".quarantine.jsonl", PARTS)
"""Suffixes of files that binidx writes, some of which end like an input format."""

BESIDE_ARROW = ("/dataset_info.json", "/state.json", "/dataset_dict.json")
"""Files that `save_to_disk` of Hugging Face datasets writes beside .arrow files."""

AMBIGUOUS = (".txt", ".txt.gz", ".txt.zst")


def find_inputs(
    names: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    exclude: Callable[[str], bool] = lambda uri: False,
    damaged_too: bool = False,
) -> list[Input]:
    """Return the objects that the names stand for, in the order of the names; those of a glob or a directory sorted.

    Args:
        names: paths, URIs, globs and directories.
        format: of all inputs, a key of FORMATS; None: by the suffix of each name.
        exclude: returns True for the URI of an object to leave out of a glob or a directory.
        damaged_too: whether to return Parquet files with a damaged footer, too; reading one yields one problem.

    Raises:
        ObjectNotFoundError: a name matches nothing.
        ConfigError: the format is unknown, a name has no known suffix, or a name is a pipe or a device.
        FormatError: the footer of a Parquet file is damaged, unless `damaged_too`.
        StorageError: the store fails.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format: unknown (found {format!r}, need one of {', '.join(FORMATS)})")
    listed = [names] if isinstance(names, str | os.PathLike) else names
    locations = [Location.of(name, storage_options) for name in listed]
    expanded = list(map_in_flight(lambda location: _expand(location, format, exclude), locations, INPUTS_IN_FLIGHT))
    return list(map_in_flight(lambda opened: _input(*opened, format, damaged_too), chain(*expanded), INPUTS_IN_FLIGHT))


def format_of(uri: str) -> str | None:
    """Return the input format of a name, by its suffix; None if the suffix is not known."""
    name, _ = split_query(uri)
    return next((format for format, row in FORMATS.items() if name.endswith(row.suffixes)), None)


def _suffixes() -> str:
    plain = [suffix for row in FORMATS.values() for suffix in row.suffixes if suffix.count(".") == 1]
    return f"{', '.join(plain)}, all but the last two also with .gz or .zst"


def _expand(
    location: Location, format: str | None, exclude: Callable[[str], bool]
) -> list[tuple[Location, RangeReader | None]]:
    """Return the objects of a name; each with the reader that was opened to test that it exists, or None."""
    name, path = location.uri, location.local_path
    if path is None and "*" not in name and not name.endswith("/"):
        try:
            return [(location, open_stored(location))]
        except ObjectNotFoundError:
            pass  # it may be a pattern with [ ] or ?, or a folder: Spark names folders x.parquet
    if path is not None and os.path.exists(path) and not os.path.isdir(path):
        return [(Location(path), None)]
    objects = [uri for uri in list_matches(location) if not exclude(uri)]
    inputs = objects
    if location.is_folder():
        left_out = (*NOT_TEXT, *BESIDE_ARROW) if any(uri.endswith(".arrow") for uri in objects) else NOT_TEXT
        inputs = [uri for uri in objects if not uri.endswith(left_out)]
        if format is None:  # a .csv beside text is mostly a table about it
            inputs = [uri for uri in inputs if (kind := format_of(uri)) and FORMATS[kind].in_folders]
    if not inputs:
        needed = f"need one that ends in {_suffixes()}; --format reads all of the folder, or name *.csv"
        raise ObjectNotFoundError(f"{name}: has no input (objects found: {len(objects)}, {needed})")
    return [(Location(uri, location.options), None) for uri in inputs]


def _input(location: Location, reader: RangeReader | None, format: str | None, damaged_too: bool) -> Input:
    uri = location.uri
    format = format or format_of(uri)
    if format is None:
        if split_query(uri)[0].endswith(AMBIGUOUS):
            kinds = "--format txt for a document a line, --format txt-file for a document a file"
            raise ConfigError(f"{uri}: a .txt can be either; give {kinds} (.gz and .zst: txt.gz, txt-file.zst, ...)")
        raise ConfigError(f"{uri}: unknown format (need a name that ends in {_suffixes()}); give the format (--format)")
    path, find_blocks = location.local_path, FORMATS[format].find_blocks
    if path is not None:
        status = _stat(path)
        if find_blocks is None:
            return Input(uri, format, file_identity(status))  # not opened: LocalFile reads up to 256 KiB at once
    reader = reader or open_stored(location)
    try:
        return Input(uri, format, reader.identity, find_blocks(reader) if find_blocks else ())
    except FormatError:
        if not damaged_too:
            raise
        return Input(uri, format, reader.identity)


def _stat(path: str) -> os.stat_result:
    try:
        status = os.stat(path)
    except OSError as error:
        raise ObjectNotFoundError(f"{path}: no such file; correct the name") from error
    if not stat.S_ISREG(status.st_mode):  # its size is 0, so all of its data would be ignored silently
        raise ConfigError(f"{path}: a pipe or a device (need a file, which several processes read in parts)")
    return status
