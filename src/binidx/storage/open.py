"""Open an object: the stack of readers for a URI and the settings.

    stored       LocalFile, mapped; remote: RemoteObject, few concurrent range requests
    checked      CheckedObject                         if there are checksums (`format.bin_file`)
    decoded      SegmentedObject                       .bin.zst
    cached       DiskCache                             remote objects if there is a cache_dir; index files always
                 ChunkCache                            else small remote objects, and segments, in memory

Codecs are forms in which tokens are stored, each under a suffix of its own:

    PREFIX.bin        "raw"     plain tokens
    PREFIX.bin.zst    "zstd"    `codecs.segments`
    PREFIX.bin.xyz    "xyz"     the codec that a program or an installed package registers for .xyz

A codec is a module with a reader and a writer, and a row of CODECS or a call of `register_codec`. Everything else asks
its `Codec`. If objects of several codecs are stored under a prefix, the first of `CODECS.known` is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from binidx.errors import ConfigError, warn_once
from binidx.json_models import JsonFile
from binidx.registries import Registry
from binidx.storage.cache.block_files import CHUNK_BYTES, directory_of_index, place_of_cache
from binidx.storage.cache.disk_cache import DiskCache, UncacheableError
from binidx.storage.cache.memory import STORE, ChunkCache, ChunkStore
from binidx.storage.codecs.checksums import CheckedObject
from binidx.storage.codecs.segments import (
    SEGMENT_BYTES,
    TAIL_BYTES,
    ZSTD_LEVELS,
    SegmentedObject,
    SegmentWriter,
    joined_table,
    stored_pieces,
)
from binidx.storage.interfaces import Bytes, MappedReader, Range, RangeReader, Writer
from binidx.storage.location import Location, Where
from binidx.storage.ranges import as_block_reader, as_capability, cut
from binidx.storage.requests.remote_object import (
    MAX_REQUEST,
    Found,
    RemoteObject,
    find_object,
    object_exists,
    recorded_object,
)
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import LocalFile, MapRefusedError


@dataclass(frozen=True)
class Joining:
    """Functions that make one stored object of several without decoding them.

    Attributes:
        pieces: function of a reader of plain bytes; returns the ranges of its stored object that hold them.
        end: function of such readers; returns the bytes that follow the pieces of all of them.
    """

    pieces: Callable[[Any], Sequence[Range]]
    end: Callable[[Sequence[Any]], bytes]


@dataclass(frozen=True)
class Codec:
    """Way to store the bytes of a `.bin`. Spawned workers unpickle it, so its functions belong to modules.

    Attributes:
        open: function of a reader of the stored bytes and their last `tail_bytes` bytes (b"" if unknown). It returns a
            reader of the plain bytes, which is a `BlockReader` and has the reader of the stored bytes as its attribute
            `reader`. (Caches and states treat one that lacks a member of `BlockReader` as a plain `.bin`.)
        create: function of a Writer of stored bytes and a compression level (None: the default). It returns a Writer
            of plain bytes as a context manager, whose exit writes the end of the object.
        levels: valid compression levels.
        tail_bytes: bytes of the end that `open` reads: on some stores they come with the request for the size.
        block_bytes: usual plain bytes of a block, for plans.
        checked_by: name, in reports, of the check of the plain bytes when they are read; None: there is none.
        joining: how objects are concatenated as they are stored; None: they are decoded and encoded again.
    """

    open: Callable[[RangeReader, Bytes], RangeReader]
    create: Callable[[Writer, int | None], AbstractContextManager[Writer]]
    levels: range = range(0)
    tail_bytes: int = 0
    block_bytes: int = 1
    checked_by: str | None = None
    joining: Joining | None = None

    def check_level(self, level: int | None) -> None:
        """Raise ConfigError if objects cannot be written with a compression level."""
        if level is not None and level not in self.levels:
            needed = f"needs {self.levels[0]} to {self.levels[-1]}" if self.levels else "this codec has none"
            raise ConfigError(f"compression_level (--compress): found {level}, {needed}")


RAW = Codec(lambda reader, end: reader, lambda writer, level: contextlib.nullcontext(writer))
ZSTD = Codec(
    SegmentedObject,
    SegmentWriter,
    ZSTD_LEVELS,
    tail_bytes=TAIL_BYTES,
    block_bytes=SEGMENT_BYTES,
    checked_by="frames",
    joining=Joining(stored_pieces, joined_table),
)

CODECS: Registry[Codec] = Registry(
    "binidx.storage.open:CODECS",
    "codec",
    "binidx.codecs",
    r"\.[a-z0-9]+",
    {"": "binidx.storage.open:RAW", ".zst": "binidx.storage.open:ZSTD"},
)
"""Suffix of the object's name, after `.bin` -> codec."""

SUFFIX_OF_NAME = {"raw": "", "zstd": ".zst"}
"""Names of codecs that are not their suffixes without the dot."""


def register_codec(suffix: str, codec: Codec) -> None:
    """Register a codec for this process, and for the worker processes that it starts.

    A package that is installed registers its codec by an entry point instead: `.xyz = "package.module:CODEC"` in the
    group `binidx.codecs`.

    Args:
        suffix: suffix of objects after `.bin`, such as ".xyz"; without its dot it is the name of the codec.
        codec: the functions that read and write such objects.

    Raises:
        ConfigError: the suffix is built in, or stands for another codec.

    Example:
        binidx.register_codec(".xyz", Codec(XyzReader, XyzWriter))

    Source: ours; the registry of codecs of zarr-python.
    """
    CODECS.register(suffix, codec)


def codec_named(name: str) -> Codec:
    """Return a codec by its name: "raw", "zstd", or another suffix without its dot.

    Raises:
        ConfigError: there is no codec of this name.
    """
    try:
        return CODECS[suffix_of(name)]
    except KeyError:
        names = ", ".join(map(_name_of, CODECS.names()))
        raise ConfigError(
            f"codec: unknown (found {name}, need one of {names}); install the package that has it"
        ) from None


def suffix_of(name: str) -> str:
    """Return the suffix that objects of a codec have after `.bin`."""
    return SUFFIX_OF_NAME.get(name, f".{name}")


def codec_of(uri: str, end: str = ".bin") -> str:
    """Return the name of an object's codec by the suffix after `end`: "zstd" for `en.bin.zst`; "raw" for other names.

    Args:
        end: end of the name of a plain object; "" for any.
    """
    plain, dot, suffix = uri.rpartition(".")
    suffix = dot + suffix
    is_codec = plain.endswith(end) and (suffix in CODECS.known or suffix in CODECS.names())
    return _name_of(suffix) if is_codec else "raw"


def _name_of(suffix: str) -> str:
    return next((name for name, known in SUFFIX_OF_NAME.items() if known == suffix), suffix[1:])


Keep = bool | Literal["disk"] | None
"""Argument `cache` of `open_object`."""

SEGMENTS = ChunkStore(64 << 20)
"""Decoded segments of all large objects. Neighbouring samples hit them, shuffled ones hardly ever; in STORE they would
evict the chunks of small objects, since 130 samples/s of 8 segments fill its 256 MiB in 4 s."""


def open_object(
    uri: Where,
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = True,
    cache: Keep = None,
    codec: str | None = None,
    found: Found | None = None,
) -> RangeReader:
    """Open an object for reading by ranges.

    Args:
        uri: path, file://, or a URI of a store, or of any driver of fsspec; or a `Location` with options of its own.
        storage_options: options of fsspec for remote objects, and `ReadSettings` under the key "binidx".
        mmap: map local files, where that is not refused; else they are read through fsspec.
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
    location = Location.of(uri, storage_options)
    codec = codec or codec_of(location.uri)
    if found is None and codec != "raw" and location.local_path is None:
        found = find_object(location, end_bytes=codec_named(codec).tail_bytes)
    stored = open_stored(location, mmap=mmap, found=found)
    return layered(stored, location, codec=codec, end=found.end if found else b"", cache=cache)


def open_if_exists(location: Location, *, cache: Keep = None) -> RangeReader | None:
    """Open an object as `open_object`; return None if there is none. No folder of its name is looked for."""
    if location.local_path is not None:
        return open_object(location, cache=cache) if object_exists(location) else None
    found = find_object(location)
    return None if found is None else open_object(location, cache=cache, found=found)


def open_stored(
    location: Location, *, mmap: bool = True, found: Found | None = None, identity: Mapping[str, Any] | None = None
) -> RangeReader:
    """Open the stored bytes of an object, without layers; read a file by ranges if it cannot be mapped.

    Args:
        found: result of an earlier HEAD of a remote object, which saves another one.
        identity: recorded version of the object, which saves one, too, if it proves the content.
    """
    found = found or recorded_object(location.uri, identity)
    if (path := location.local_path) is not None:
        try:
            if mmap:
                return LocalFile(path)
        except MapRefusedError as error:
            warn_once("mmap", f"{error}; such files are read by ranges, as by mmap=False, which costs CPU")
        return RemoteObject(location.beside(f"file://{os.path.abspath(path)}"))
    reader = RemoteObject(location, info=found.info if found else None)
    if found and found.end:
        reader.stats.add(requests=1, bytes_moved=len(found.end))
    return reader


def layered(
    stored: RangeReader,
    location: Location,
    *,
    sums: RangeReader | None = None,
    codec: str = "raw",
    end: bytes = b"",
    cache: Keep = None,
) -> RangeReader:
    """Return a stored object with the layers that check, decode and cache it.

    Args:
        location: of the object.
        sums: reader of the object's checksum file; None: no checks.
        end: last bytes of the object, if they are known.
    """
    reader = codec_named(codec).open(stored if sums is None else CheckedObject(stored, sums), end)
    blocks = None if codec == "raw" else as_block_reader(reader)
    if codec != "raw" and blocks is None:
        raise ConfigError(
            f"codec {codec}: its {type(reader).__name__} is no BlockReader (needs block_bytes, num_blocks, "
            "stored_bytes, codec and digest)"
        )
    if cache is not False and location.local_path is None:
        on_disk = add_disk_cache(reader, location.settings, whole=cache == "disk")
        if on_disk is not reader:
            return on_disk
        if cache is True or (cache is None and reader.size <= STORE.largest):
            return ChunkCache(reader)
    if cache in (None, True) and blocks:
        # Chunks of one segment, but no larger than the store caches: frames of other writers may have 1 GiB.
        return ChunkCache(reader, chunk_bytes=max(1, min(blocks.block_bytes, SEGMENTS.largest)), store=SEGMENTS)
    return reader


logger = logging.getLogger(__name__)
READ_WHOLE = (".idx", ".npy", ".bundle", "-binidx-pinned.json")
"""Suffixes of index files. Each is one block of a disk cache, so that its arrays are views of one map that all
processes of the node share."""

WHOLE_CHUNK_BYTES = 1 << 20
"""Chunk of objects that are read whole: a chunk costs 20 us of Python, as much as reading 64 KiB from a disk."""


def add_disk_cache(reader: RangeReader, settings: ReadSettings, *, whole: bool = False) -> RangeReader:
    """Return a disk cache over a reader; the reader itself if no cache directory is set or its version is unknown.

    Args:
        whole: the object is read whole, so an index file may also be cached in index_dir.
    """
    is_index = reader.uri.endswith(READ_WHOLE)
    directory, limit = place_of_cache(settings)
    if directory is None and whole and is_index:
        directory, limit = directory_of_index(settings), settings.index_bytes
    if directory is None:
        return reader
    chunk_bytes = settings.cache_chunk_bytes or (WHOLE_CHUNK_BYTES if is_index else CHUNK_BYTES)
    one_block = max(1, -(-reader.size // chunk_bytes)) * chunk_bytes if is_index else None
    try:
        fill = "never" if is_index else settings.cache_fill
        return DiskCache(reader, directory, limit, chunk_bytes=chunk_bytes, block_bytes=one_block, fill=fill)
    except UncacheableError as error:
        logger.info("%s", error)
        return reader


def cache_whole(location: Location, data: memoryview, identity: Mapping[str, Any] | None) -> memoryview | None:
    """Put the whole content of a stored object into the disk cache of this node.

    Args:
        identity: version of the object in its store, if it is known.

    Returns:
        The cached bytes; None if there is no identity, or no cache, or no space.
    """
    found = recorded_object(location.uri, identity)
    reader = open_object(location, cache="disk", found=found) if found else None
    if not isinstance(reader, DiskCache):
        return None
    return reader.put(data)


def replace_cached(reader: RangeReader, data: Bytes) -> None:
    """Write the content of an object over its damaged copy in the reader's disk cache, if the reader has one.

    Args:
        reader: as `open_object` returned it.
        data: all bytes of the object.
    """
    if isinstance(reader, DiskCache):
        reader.replace(memoryview(data))


ROUND_BYTES = 64 << 20
"""Bytes of a streamed object that are read at once, over several connections, and held in memory."""


def stream(reader: RangeReader, stop: int | None = None, *, start: int = 0) -> Iterator[memoryview]:
    """Yield the bytes [start, stop) of an object in order, in views of up to 8 MiB; 64 MiB are read at once.

    Args:
        stop: None: the end of the object.
    """
    for around in cut((start, reader.size if stop is None else stop), ROUND_BYTES):
        yield from reader.read(cut(around, MAX_REQUEST))


def read_whole(reader: RangeReader) -> memoryview:
    """Return all bytes of an object: a view of the map if it is mapped, else of one buffer, filled part by part."""
    if as_capability(reader, MappedReader):
        return reader.read([(0, reader.size)])[0]
    buffer, filled = memoryview(bytearray(reader.size)), 0
    for part in stream(reader):
        buffer[filled : filled + len(part)] = part
        filled += len(part)
    return buffer.toreadonly()


def read_document(file: JsonFile[Any], location: Location) -> bytes:
    """Return all bytes of a small file, without any cache.

    Raises:
        BinidxError: `file.error`, if the file is larger than MAX_BYTES.
        ObjectNotFoundError: there is no such file.
    """
    reader = open_object(location, cache=False)
    file.check_size(reader.size, location.uri)
    return bytes(read_whole(reader))
