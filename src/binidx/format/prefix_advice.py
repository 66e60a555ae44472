"""Advice for a prefix without a dataset: several prefixes in one text, or names that are like it."""

from __future__ import annotations

import difflib
import glob
import os
import re

from binidx.errors import ObjectNotFoundError, StorageError
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import list_page


def did_you_mean(prefix: Location) -> str:
    """Return advice for a prefix without an `.idx`: datasets of its folder with a name that begins with it or is like
    it; else nothing.

    Raises:
        ObjectNotFoundError: its bucket does not exist.
    """
    path = prefix.local_path
    if path and os.path.exists(f"{path}.idx"):
        return ""
    if hint := _hint_at_spelling(prefix.uri):
        return hint
    near = _list_datasets(prefix) or _list_datasets(Location(f"{prefix}/", prefix.options))
    if prefix.uri in near:  # its writer was replacing it
        return ""
    if path and not near and os.path.isfile(path):
        return f"; {prefix} is a file, and no dataset; binidx preprocess makes one of text"
    near = near or _list_similar(prefix)
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def _hint_at_spelling(typed: str) -> str:
    """Return advice for several prefixes in one text, or for a bucket alone; else nothing."""
    if re.fullmatch("(s3|gs|az|oss)://[^/]+", typed):
        return f"; {typed} is a bucket, needs a prefix in it such as {typed}/en"
    parts = [part for part in re.split(r"[,;\s]+", typed) if part != typed]
    if typed.count("://") > 1 or any(os.path.exists(f"{part}.idx") for part in parts):
        return "; if these are several datasets, give each as a text of its own: {'a': 0.7, 'b': 0.3}, or ['a', 'b']"
    return ""


def _list_similar(prefix: Location) -> list[str]:
    """Return the prefixes of the same folder whose names are like this one."""
    folder = prefix.uri[: len(prefix.uri) - len(prefix.name)]
    names = _list_datasets(Location(folder, prefix.options)) if folder else []
    near = difflib.get_close_matches(prefix.name, [uri.removeprefix(folder) for uri in names])
    return [folder + name for name in near]


def _list_datasets(start: Location) -> list[str]:
    """Return the prefixes of `.idx` files whose names begin so, in order; of a store those of one page of its list."""
    try:
        pattern = None if start.local_path is None else f"{glob.escape(start.local_path)}*.idx"
        files = glob.iglob(pattern) if pattern else list_page(start)
        return sorted(file.removesuffix(".idx") for file in files if file.endswith(".idx"))
    except ObjectNotFoundError:  # no such bucket
        raise
    except StorageError:  # the store cannot be listed, or refuses it
        return []
