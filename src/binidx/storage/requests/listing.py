"""Names of objects behind a pattern, or below a folder."""

from __future__ import annotations

import glob
import os
import re

from binidx.errors import ObjectNotFoundError, StorageError
from binidx.storage.location import Location
from binidx.storage.store_protocols import SearchableStore


def list_matches(location: Location) -> list[str]:
    """Return the sorted objects of a glob, or below a folder without hidden ones, from one listing.

    Raises:
        ObjectNotFoundError: nothing matches.
        StorageError: the store cannot list.
    """
    path = location.local_path
    name, folder = path or location.uri, location.is_folder()
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
