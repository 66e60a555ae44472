"""Objects where they lie: `open_object` stacks the readers that a URI and the settings ask for.

    stored       LocalFile, mapped; remote: FsspecObject, few concurrent range requests
    checked      CheckedObject                         where there are checksums: `format.bin_object`
    decoded      SegmentedObject                       .bin.zst
    kept         DiskCache                             what is remote, where there is a cache_dir; index files always
                 ChunkCache                            else: small remote objects, and segments, in memory

A new store is a module and a row in `stores.registry`; a codec is one in `segments.CODECS`.

Which objects are kept in a directory, and in which: all in a cache_dir; index files without one, too.

Whole objects rather than ranges of them: into memory at once, or in blocks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from binidx.errors import ConfigError
from binidx.json_models import JsonFile
from binidx.storage.cache.disk_cache import DiskCache, UncacheableError
from binidx.storage.cache.layout import CHUNK_BYTES, directory_of_index
from binidx.storage.cache.memory import STORE, ChunkCache, ChunkStore
from binidx.storage.codecs.checksums import CheckedObject
from binidx.storage.codecs.segments import CODECS, TAIL_BYTES, SegmentedObject, codec_of
from binidx.storage.interfaces import RangeReader
from binidx.storage.ranges import cut
from binidx.storage.requests.head import Found, find_object, recorded_object
from binidx.storage.requests.remote_reader import MAX_REQUEST, RemoteObject
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import LocalFile
from binidx.storage.stores.registry import local_path

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
    if found is None and codec != "raw" and local_path(uri) is None:
        found = find_object(uri, storage_options, end_bytes=TAIL_BYTES)
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
        found: what `find_object` was told of a remote one, so that it is not asked for again.
    """
    uri = os.fspath(uri)
    path = local_path(uri)
    if path is not None:
        return LocalFile(path) if mmap else RemoteObject(f"file://{os.path.abspath(path)}")
    reader = RemoteObject(uri, storage_options, info=found.info if found else None)
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
    local = local_path(stored.uri) is not None
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


def open_kept(
    uri: str, identity: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None = None
) -> DiskCache | None:
    """This node's copy of the object that has this identity, there or to be made; None: it keeps none."""
    found = recorded_object(uri, identity)
    reader = open_object(uri, storage_options=storage_options, cache="disk", found=found) if found else None
    return reader if isinstance(reader, DiskCache) else None


logger = logging.getLogger(__name__)


READ_WHOLE = (".idx", ".npy", ".bundle")


"""Arrays that are looked at for as long as a run lasts: one block each, so that they are views of one map, shared by
all processes of the node, and not copied into the memory of each."""


WHOLE_CHUNK_BYTES = 1 << 20


"""Of what is read whole: a chunk is some 20 us of Python, which 64 KiB need to come from a disk."""


def with_disk_cache(reader: RangeReader, settings: ReadSettings, *, whole: bool = False) -> RangeReader:
    """The reader, over the directory of the settings if there is one, and if its content can be told from another.

    Args:
        whole: it is read whole: an index file has a directory of its own where there is no cache_dir.
    """
    is_index = reader.uri.endswith(READ_WHOLE)
    place: tuple[str, int | None] | None = None
    if settings.cache_dir is not None:
        place = settings.cache_dir, settings.cache_bytes
    elif whole and is_index:
        place = directory_of_index(settings)
    if place is None:
        return reader
    directory, limit = place
    if "://" in directory:
        raise ConfigError(f"cache_dir: found {directory}, needs a directory of this machine")
    chunk_bytes = settings.cache_chunk_bytes or (WHOLE_CHUNK_BYTES if is_index else CHUNK_BYTES)
    one_block = max(1, -(-reader.size // chunk_bytes)) * chunk_bytes if is_index else None
    try:
        return DiskCache(reader, directory, limit, chunk_bytes=chunk_bytes, block_bytes=one_block)
    except UncacheableError as error:
        logger.info("%s", error)
        return reader


def keep_whole(reader: DiskCache, data: memoryview) -> memoryview | None:
    """Keep the whole content, which is at hand: nobody here has to fetch it.

    Returns:
        The bytes as they are kept; None where they cannot be.
    """
    cached, chunks = reader.cached, range(-(-reader.size // reader.content.chunk_bytes))
    if cached.writable and cached.lacking(chunks) and cached.room.reserve(len(data)) and not cached.keep(0, data):
        cached.room.give_back(len(data))
    return cached.views([(0, len(data))])[0][0]


ROUND_BYTES = 64 << 20


"""Read at once, over several connections: what is in memory of an object that is streamed."""


def stream(reader: RangeReader, stop: int | None = None) -> Iterator[memoryview]:
    """The bytes of an object in order, up to `stop`, in views of up to 8 MiB and rounds of 64."""
    for around in cut((0, reader.size if stop is None else stop), ROUND_BYTES):
        yield from reader.read(cut(around, MAX_REQUEST))


def read_whole(reader: RangeReader) -> memoryview:
    """All bytes of an object: a view of the map when it lies on a disk, else of one buffer filled part by part."""
    if isinstance(reader, (LocalFile, DiskCache)):
        return reader.read([(0, reader.size)])[0]
    buffer, filled = memoryview(bytearray(reader.size)), 0
    for part in stream(reader):
        buffer[filled : filled + len(part)] = part
        filled += len(part)
    return buffer.toreadonly()


def read_document(file: JsonFile[Any], uri: str, storage_options: Mapping[str, Any] | None) -> bytes:
    """Return all bytes of a file that must fit into memory, past every cache.

    Raises:
        BinidxError: the file's own error, if it is too large to be of this kind.
        ObjectNotFoundError: there is no such file.
    """
    reader = open_object(uri, storage_options=storage_options, cache=False)
    file.check_size(reader.size, uri)
    return bytes(read_whole(reader))
