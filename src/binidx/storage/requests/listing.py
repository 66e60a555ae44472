"""Names of objects behind a pattern, or below a folder."""

from __future__ import annotations

import glob
import os
import re

from binidx.errors import ObjectNotFoundError, StorageError
from binidx.storage.location import Location
from binidx.storage.store_protocols import SearchableStore
from binidx.storage.stores.registry import is_url


def is_folder(location: Location) -> bool:
    """Return whether a name that is not an object is a folder, not a pattern."""
    if (path := location.local_path) is not None:
        return os.path.isdir(path)
    return not ("*" in location.uri if is_url(location.uri) else glob.has_magic(location.uri))  # a ? begins a query


def list_matches(location: Location) -> list[str]:
    """Return the sorted objects of a glob, or below a folder without hidden ones, from one listing.

    Raises:
        ObjectNotFoundError: nothing matches.
        StorageError: the store cannot list.
    """
    path = location.local_path
    name, folder = path or location.uri, is_folder(location)
    if path is None:
        store = location.store
        if not isinstance(store, SearchableStore):
            raise StorageError(f"{name}: this store cannot list objects (need their names); name each object")
        objects = [uri for uri in store.find(name, pattern=not folder) if not uri.endswith("/")]
    elif folder:
        objects = [os.path.join(below, file) for below, _, files in os.walk(path) for file in files]
    else:
        objects = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
    if folder:  # without _SUCCESS, _temporary/
        objects = [uri for uri in objects if not re.search(r"(^|/)[._]", uri[len(name) :])]
    if not objects:
        problem = "a folder without files to read" if folder else "no such file"
        if path is None or glob.has_magic(name):
            problem = "matches no object"
        raise ObjectNotFoundError(f"{name}: {problem}; correct the name")
    return sorted(objects)
