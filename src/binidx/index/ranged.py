"""The arrays of an index, left where they lie: opened by a manifest that they can be proven to belong to.

Nobody can compare the checksum of an array without reading all of it. What proves the rest:

    remote    the manifest names the object that took the array's bytes (its ETag): each request says If-Match
    local     array and manifest are the same before and after, and no array changed after its manifest was written

Where neither holds (a cache that was copied, a store that tells nothing of what it took) there is no such way.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from binidx.errors import FormatError
from binidx.format.ranged import RangedArray, beneath_copy, open_in_ranges
from binidx.index.files import MANIFEST, IndexFiles
from binidx.index.manifest import ALGORITHM, Manifest, StoredArray, differences
from binidx.index.npy import parse_header
from binidx.storage import filesystem
from binidx.storage.look_up import Found, found_of
from binidx.storage.vectored import read_many

HEADER_BYTES = 128
"""Of a `.npy`: what numpy.save takes for up to three dimensions."""


def open_manifest(files: IndexFiles, names: Sequence[str]) -> tuple[Manifest, dict[str, RangedArray]] | None:
    """A manifest and its arrays, unread; None: there is none, or nothing proves that they are its own.

    Raises:
        FormatError: the manifest is not as it was written, or an array is not what it says.
        ObjectChangedError: an array is not the object that it names.
        StorageError: the store refuses.
    """
    local = filesystem.local_path(files.directory) is not None
    before = _marks(files, names) if local else None
    manifest = files.read_manifest()
    if manifest is None:
        return None
    arrays = {}
    for name in names:
        found = found_of(manifest.arrays[name].identity)
        if found is None and not local:
            return None
        arrays[name] = _array(files, name, manifest.arrays[name], found)
    if local and not (before == _marks(files, names) and _is_last(before)):
        return None
    _check_headers(arrays)
    return manifest, arrays


def fits(manifest: Manifest, fingerprint: Mapping[str, Any]) -> bool:
    """Whether its arrays depend on these options."""
    return not differences(manifest.fingerprint, {"algorithm": ALGORITHM, **fingerprint})


def _array(files: IndexFiles, name: str, stored: StoredArray, found: Found | None) -> RangedArray:
    uri, dtype = files.array_uri(name), np.dtype(stored.dtype)
    reader = open_in_ranges(uri, files.storage_options, found=found)
    if reader.size != stored.bytes:
        raise FormatError(f"{uri}: {reader.size} bytes, needed {stored.bytes}")
    return RangedArray(reader, stored.bytes - prod(stored.shape) * dtype.itemsize, dtype, stored.shape)


def _check_headers(arrays: Mapping[str, RangedArray]) -> None:
    """One round trip, that of the pins: whoever is not the object that was named says so now."""
    readers = [beneath_copy(each.reader) for each in arrays.values()]
    headers = read_many([(each, [(0, min(HEADER_BYTES, each.size))]) for each in readers])
    for (name, array), [header] in zip(arrays.items(), headers, strict=True):
        found = parse_header(header)
        if found != (array.dtype, array.shape, array.offset):
            raise FormatError(f"{array.reader.uri}: {name} is {found}, needed {array.dtype, array.shape, array.offset}")


def _marks(files: IndexFiles, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Inode, size, and when it or its name was last written, of the manifest and each array; empty: one is missing."""
    uris = [files.uri(MANIFEST), *map(files.array_uri, names)]
    try:
        found = [os.stat(str(filesystem.local_path(uri))) for uri in uris]
    except OSError:
        return []
    return [(each.st_ino, each.st_size, each.st_ctime_ns) for each in found]


def _is_last(marks: Sequence[tuple[int, int, int]]) -> bool:
    return bool(marks) and all(each[2] < marks[0][2] for each in marks[1:])
