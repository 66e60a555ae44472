"""Names of inputs as people write them, and the objects behind them, in an order that does not depend on the store."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from typing import Any

from binidx.errors import ObjectNotFoundError
from binidx.storage import filesystem

Options = Mapping[str, Any] | None


def is_pattern(name: str) -> bool:
    """Whether it has a wildcard. In a URL only * is one: a ? begins its query, and [ ] stand for themselves."""
    return "*" in name if filesystem.protocols(name)[:1] in (["http"], ["https"]) else glob.has_magic(name)


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
    fs, path = filesystem.open_filesystem(uri, options or {})
    with filesystem.storage_errors(uri):
        found = fs.glob(path) if is_pattern(uri) else fs.find(path)
    protocol = filesystem.protocols(uri)[0]
    uris = [each if "://" in each else f"{protocol}://{each}" for each in found]
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
