"""Open an object: the stack of readers for a URI and the settings.

    stored       LocalFile, mapped; remote: RemoteObject, few concurrent range requests
    checked      CheckedObject                         if there are checksums (`format.bin_file`)
    decoded      SegmentedObject                       .bin.zst
    cached       DiskCache                             remote objects if there is a cache_dir; index files always
                 ChunkCache                            else small remote objects, and segments, in memory

A new store is a module and a row in `stores.registry`, a new codec a row in CODECS.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from binidx.errors import ConfigError
from binidx.json_models import JsonFile
from binidx.storage.cache.block_files import CHUNK_BYTES, directory_of_index
from binidx.storage.cache.disk_cache import DiskCache, UncacheableError
from binidx.storage.cache.memory import STORE, ChunkCache, ChunkStore
from binidx.storage.codecs.checksums import CheckedObject
from binidx.storage.codecs.segments import TAIL_BYTES, SegmentedObject, SegmentWriter
from binidx.storage.interfaces import Bytes, RangeReader, Writer
from binidx.storage.ranges import as_block_reader, as_mapped, cut
from binidx.storage.requests.remote_object import MAX_REQUEST, Found, RemoteObject, find_object, recorded_object
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import LocalFile
from binidx.storage.stores.registry import local_path


@dataclass(frozen=True)
class Codec:
    """Way to store the bytes of a `.bin`.

    Attributes:
        suffix: suffix of the object's name, after `.bin`.
        open: function of a reader of the stored bytes and their end (b"" if unknown); returns a reader of plain bytes.
        create: function of a Writer of stored bytes and a compression level; returns a Writer of plain bytes as a
            context manager, whose exit writes the end of the object.
    """

    suffix: str
    open: Callable[[RangeReader, Bytes], RangeReader]
    create: Callable[[Writer, int | None], AbstractContextManager[Writer]]


CODECS: dict[str, Codec] = {
    "raw": Codec("", lambda reader, end: reader, lambda writer, level: contextlib.nullcontext(writer)),
    "zstd": Codec(".zst", SegmentedObject, SegmentWriter),
}
"""Name -> codec; if objects of both are stored, the first is read."""


def codec_of(uri: str) -> str:
    """Return the codec of an object by its name: "zstd" for `.bin.zst`, else "raw", also for other names in .zst."""
    return next((name for name, codec in CODECS.items() if codec.suffix and uri.endswith(f".bin{codec.suffix}")), "raw")


Keep = bool | Literal["disk"] | None
"""Argument `cache` of `open_object`."""

SEGMENTS = ChunkStore(64 << 20)
"""Decoded segments of all large objects. Neighbouring samples hit them, shuffled ones hardly ever; in STORE they would
evict the chunks of small objects, since 130 samples/s of 8 segments fill its 256 MiB in 4 s."""


def open_object(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = True,
    cache: Keep = None,
    codec: str | None = None,
    found: Found | None = None,
) -> RangeReader:
    """Open an object for reading by ranges.

    Args:
        uri: path, file://, or any URI that fsspec opens.
        storage_options: options of fsspec for remote objects, and `ReadSettings` under the key "binidx".
        mmap: map local files; else they are read through fsspec.
        cache: of remote objects. None: on disk if there is a cache_dir, else in memory if the object is small enough
            (samples of a larger one evict each other's chunks: 64 KiB chunks moved 37 times their bytes). True: the
            same, but in memory whatever the size. "disk": on disk in cache_dir or index_dir, for objects that are read
            whole. False: none.
        codec: "raw" for the stored bytes; None: by the name, plain bytes of a `.bin.zst`.
        found: result of an earlier HEAD of a remote object, which saves another one; reads are pinned to its version.

    Returns:
        A reader, with the layers of this module's table over it.

    Raises:
        ObjectNotFoundError, MissingDriverError, StorageError: each names the URI.
        FormatError: the stored bytes contradict the codec.

    Example:
        reader = binidx.open_object("s3://bucket/en.bin")
        [view] = reader.read([(0, 4096)])

    Source: ours; fsspec's `open` for ranges.
    """
    uri = os.fspath(uri)
    codec = codec or codec_of(uri)
    if found is None and codec != "raw" and local_path(uri) is None:
        found = find_object(uri, storage_options, end_bytes=TAIL_BYTES)
    stored = open_stored(uri, storage_options=storage_options, mmap=mmap, found=found)
    return layered(stored, storage_options, codec=codec, end=found.end if found else b"", cache=cache)


def open_stored(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = True,
    found: Found | None = None,
) -> RangeReader:
    """Open the stored bytes of an object, without layers.

    Args:
        found: result of an earlier HEAD of a remote object, which saves another one.
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
    storage_options: Mapping[str, Any] | None,
    *,
    sums: RangeReader | None = None,
    codec: str = "raw",
    end: bytes = b"",
    cache: Keep = None,
) -> RangeReader:
    """Return a stored object with the layers that check, decode and cache it.

    Args:
        storage_options: those of the object.
        sums: reader of the object's checksum file; None: no checks.
        end: last bytes of the object, if they are known.
    """
    reader = CODECS[codec].open(stored if sums is None else CheckedObject(stored, sums), end)
    local = local_path(stored.uri) is not None
    if cache is not False and not local:
        on_disk = with_disk_cache(reader, ReadSettings.of(storage_options), whole=cache == "disk")
        if on_disk is not reader:
            return on_disk
    if not local and (cache is True or (cache is None and reader.size <= STORE.largest)):
        return ChunkCache(reader)
    blocks = None if codec == "raw" else as_block_reader(reader)
    if cache in (None, True) and blocks:
        # Chunks of one segment, but no larger than the store caches: frames of other writers may have 1 GiB.
        return ChunkCache(reader, chunk_bytes=max(1, min(blocks.block_bytes, SEGMENTS.largest)), store=SEGMENTS)
    return reader


logger = logging.getLogger(__name__)
READ_WHOLE = (".idx", ".npy", ".bundle")
"""Suffixes of index files. Each is one block of a disk cache, so that its arrays are views of one map that all
processes of the node share."""

WHOLE_CHUNK_BYTES = 1 << 20
"""Chunk of objects that are read whole: a chunk costs 20 us of Python, as much as reading 64 KiB from a disk."""


def with_disk_cache(reader: RangeReader, settings: ReadSettings, *, whole: bool = False) -> RangeReader:
    """Return a disk cache over a reader; the reader itself if no cache directory is set or its version is unknown.

    Args:
        whole: the object is read whole, so an index file may also be cached in index_dir.
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


def cache_whole(
    uri: str, data: memoryview, identity: Mapping[str, Any] | None, storage_options: Mapping[str, Any] | None = None
) -> memoryview | None:
    """Put the whole content of a stored object into the disk cache of this node.

    Args:
        identity: version of the object in its store, if it is known.

    Returns:
        The cached bytes; None if there is no identity, or no cache, or no space.
    """
    found = recorded_object(uri, identity)
    reader = open_object(uri, storage_options=storage_options, cache="disk", found=found) if found else None
    if not isinstance(reader, DiskCache):
        return None
    cached, chunks = reader.cached, range(-(-reader.size // reader.content.chunk_bytes))
    if (
        cached.writable
        and cached.check_chunks(chunks)
        and cached.quota.reserve(len(data))
        and not cached.store(0, data)
    ):
        cached.quota.release_reserved(len(data))
    return cached.views([(0, len(data))])[0][0]


def replace_cached(reader: RangeReader, data: Bytes) -> None:
    """Write the content of an object over its damaged copy in the reader's disk cache, if the reader has one."""
    if isinstance(reader, DiskCache) and reader.cached.writable:
        reader.cached.store(0, memoryview(data))


ROUND_BYTES = 64 << 20
"""Bytes of a streamed object that are read at once, over several connections, and held in memory."""


def stream(reader: RangeReader, stop: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of an object in order, up to `stop`, in views of up to 8 MiB; 64 MiB are read at once."""
    for around in cut((0, reader.size if stop is None else stop), ROUND_BYTES):
        yield from reader.read(cut(around, MAX_REQUEST))


def read_whole(reader: RangeReader) -> memoryview:
    """Return all bytes of an object: a view of the map if it is mapped, else of one buffer, filled part by part."""
    if as_mapped(reader):
        return reader.read([(0, reader.size)])[0]
    buffer, filled = memoryview(bytearray(reader.size)), 0
    for part in stream(reader):
        buffer[filled : filled + len(part)] = part
        filled += len(part)
    return buffer.toreadonly()


def read_object(uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bytes:
    """Return all bytes of an object, read from its store past every cache."""
    return bytes(read_whole(open_object(uri, storage_options=storage_options, cache=False)))


def read_document(file: JsonFile[Any], uri: str, storage_options: Mapping[str, Any] | None) -> bytes:
    """Return all bytes of a small file, without any cache.

    Raises:
        BinidxError: `file.error`, if the file is larger than MAX_BYTES.
        ObjectNotFoundError: there is no such file.
    """
    reader = open_object(uri, storage_options=storage_options, cache=False)
    file.check_size(reader.size, uri)
    return bytes(read_whole(reader))
