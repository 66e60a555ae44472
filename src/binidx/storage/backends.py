"""Objects where they lie: `open_object` stacks the readers that a URI and the settings ask for.

    stored       LocalFile, mapped; remote: FsspecObject, few concurrent range requests
    checked      CheckedObject                         where there are checksums: `format.bin_object`
    decoded      SegmentedObject                       .bin.zst
    kept         DiskCache                             what is remote, where there is a cache_dir; index files always
                 ChunkCache                            else: small remote objects, and segments, in memory

A new backend is a class and a row in OPENERS; a codec is one in `segments.CODECS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from binidx.storage import filesystem
from binidx.storage.checked_object import CheckedObject
from binidx.storage.chunk_cache import STORE, ChunkCache, ChunkStore
from binidx.storage.disk_cache import DiskCache
from binidx.storage.fsspec_object import FsspecObject
from binidx.storage.kept import with_disk_cache
from binidx.storage.local_file import LocalFile
from binidx.storage.look_up import Found, found_of, look_up
from binidx.storage.ranges import RangeReader
from binidx.storage.segments import CODECS, TAIL_BYTES, SegmentedObject, codec_of
from binidx.storage.settings import ReadSettings

Keep = bool | Literal["disk"] | None
"""See `open_object`."""

SEGMENTS = ChunkStore(64 << 20)
"""Decoded segments of all large objects. Neighbouring samples find theirs here; shuffled ones hardly ever, and in STORE
they would push out what small objects have there: 130 samples/s of 8 segments fill its 256 MiB in 4 s."""


def open_object(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = True,
    cache: Keep = None,
    codec: str | None = None,
    found: Found | None = None,
) -> RangeReader:
    """The bytes of the object under a URI or path.

    Args:
        uri: a path, file://, or anything fsspec opens.
        storage_options: fsspec's own, for all but local files.
        mmap: map local files; else they are read through fsspec like any other store.
        cache: where what is remote is kept. By default in the cache_dir of the settings if there is one, else in a
            ChunkCache if it is small enough to stay there: the shuffled samples of a larger one do not meet a chunk
            again in time, and 64 KiB chunks moved 37 times their bytes. True: in a ChunkCache if not in a cache_dir.
            "disk": there or in the index_dir, for what is read whole. False: nowhere, for what must come from the store
            itself.
        codec: how it is stored; by default as its name tells: the plain bytes of a .bin.zst are given. "raw" gives
            those that lie there.
        found: what the store told of a remote one, so that it is not asked for again: what is read is pinned to it.

    Raises:
        ObjectNotFoundError, MissingDriverError, StorageError: each names the URI.
        FormatError: it is not stored so.
    """
    uri = os.fspath(uri)
    codec = codec or codec_of(uri)
    if found is None and codec != "raw" and filesystem.local_path(uri) is None:
        found = look_up(uri, storage_options, end_bytes=TAIL_BYTES)
    stored = open_stored(uri, storage_options=storage_options, mmap=mmap, found=found)
    return layered(stored, codec=codec, end=found.end if found else b"", cache=cache)


def open_stored(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = True,
    found: Found | None = None,
) -> RangeReader:
    """The object as it lies there, with nothing over it.

    Args:
        found: what `look_up` was told of a remote one, so that it is not asked for again.
    """
    uri = os.fspath(uri)
    path = filesystem.local_path(uri)
    if path is not None:
        return LocalFile(path) if mmap else FsspecObject(f"file://{os.path.abspath(path)}")
    if opener := OPENERS.get(filesystem.protocols(uri)[0]):
        return opener(uri, storage_options)
    reader = FsspecObject(uri, storage_options, info=found.info if found else None)
    if found and found.end:
        reader.stats.add(requests=1, bytes_moved=len(found.end))
    return reader


def layered(
    stored: RangeReader,
    *,
    sums: RangeReader | None = None,
    codec: str = "raw",
    end: bytes = b"",
    cache: Keep = None,
) -> RangeReader:
    """Checked, decoded, kept: what belongs over a stored object.

    Args:
        sums: its checksum file, if what is read is to be checked.
        end: its last bytes, if they came along when it was looked up.
    """
    reader = CODECS[codec].open(stored if sums is None else CheckedObject(stored, sums), end)
    local = filesystem.local_path(stored.uri) is not None
    if cache is not False and not local:
        settings = ReadSettings.of(getattr(stored, "storage_options", None))
        on_disk = with_disk_cache(reader, settings, whole=cache == "disk")
        if on_disk is not reader:
            return on_disk
    if not local and (cache is True or (cache is None and reader.size <= STORE.largest)):
        return ChunkCache(reader)
    if cache in (None, True) and isinstance(reader, SegmentedObject):
        # Whole segments, but no more than the store would keep: frames of other writers may have 1 GiB.
        return ChunkCache(reader, chunk_bytes=max(1, min(reader.segment_bytes, SEGMENTS.largest)), store=SEGMENTS)
    return reader


# protocol -> what opens its URIs, where FsspecObject is not good enough
OPENERS: dict[str, Callable[[str, Mapping[str, Any] | None], RangeReader]] = {}


def open_kept(
    uri: str, identity: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None = None
) -> DiskCache | None:
    """This node's copy of the object that has this identity, there or to be made; None: it keeps none."""
    found = found_of(identity)
    reader = open_object(uri, storage_options=storage_options, cache="disk", found=found) if found else None
    return reader if isinstance(reader, DiskCache) else None
