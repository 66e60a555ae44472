"""Objects where they lie: `open_object` stacks the readers that a URI and the settings ask for.

    local        LocalFile, mapped
    remote       FsspecObject                          few concurrent range requests
                 ChunkCache(FsspecObject)              small objects, in memory

A new backend is a class and a row in OPENERS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from binidx.storage import filesystem
from binidx.storage.chunk_cache import STORE, ChunkCache
from binidx.storage.fsspec_object import FsspecObject
from binidx.storage.local_file import LocalFile
from binidx.storage.ranges import RangeReader


def open_object(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = True,
    cache: bool | None = None,
) -> RangeReader:
    """The bytes of the object under a URI or path.

    Args:
        uri: a path, file://, or anything fsspec opens.
        storage_options: fsspec's own, for all but local files.
        mmap: map local files; else they are read through fsspec like any other store.
        cache: put a ChunkCache over what is remote; by default over objects small enough to stay in it. The shuffled
            samples of a larger one do not meet a chunk again in time, and 64 KiB chunks moved 37 times their bytes.

    Raises:
        ObjectNotFoundError, MissingDriverError, StorageError: each names the URI.
    """
    uri = os.fspath(uri)
    path = filesystem.local_path(uri)
    if path is not None:
        return LocalFile(path) if mmap else FsspecObject(f"file://{os.path.abspath(path)}")
    opener = OPENERS.get(filesystem.protocols(uri)[0], FsspecObject)
    reader = opener(uri, storage_options)
    return ChunkCache(reader) if cache or (cache is None and reader.size <= STORE.largest) else reader


# protocol -> what opens its URIs, where FsspecObject is not good enough
OPENERS: dict[str, Callable[[str, Mapping[str, Any] | None], RangeReader]] = {}
