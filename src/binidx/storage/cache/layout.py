"""Where a cached object lies in a cache directory, and what its files hold. Pure but for meta.json.

    DIR/
      usage                     bytes in all, and when they were counted: `cache_room`
      objects/KEY/              KEY: digest of the URI, the size, the store's mark of the content, and the sizes below
        meta.json               the same in words, for `binidx cache`
        locks                   empty; byte c of it is locked by who fetches chunk c
        00000007.block          bytes [7 B, 8 B) of the object, a sparse file:

    offset      bytes
    0           16 n            of each chunk: XXH3-128 of its bytes, seeded with KEY and its number; zeros: not here
    16 n        ...             up to a multiple of 4096
    data        up to B         the chunks, of C bytes each; the last of the object is shorter

A chunk is written before its entry, and believed only when both agree: whatever was torn, lost or flipped, or belongs
to another object, is fetched again. Table and data are one file, so they come and go together.

The directory of a node through which index files of remote stores come down once, for all its processes.

    {tempdir}/binidx-{uid}      0700, ours and nobody else's: what lies there is believed by its sums alone, and sums
                                can be made to agree by whoever can write them

It is a `disk_cache`, for what is read whole and kept for as long as a run lasts: `.idx` files and arrays of indices.
BINIDX_INDEX_DIR names another one, or with "off" none; where there is a cache_dir, they go there with the rest. Where
no such directory can be had (none that is ours, a file system that is read-only or full) each process has them in its
own memory, which is said once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import xxhash

from binidx.errors import FormatError
from binidx.json_models import Count, JsonFile, Positive
from binidx.storage.interfaces import Range
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import staging_path

FORMAT = 1


CHUNK_BYTES = 64 << 10


"""What is fetched where one byte is asked. A request takes one of 64 connections for 30 ms; 64 KiB take 0.7 ms more, so
a first epoch of random reads fills the cache at 137 MB/s a process where 4 KiB would fill it at 9. A thin link wants
less: at 25 MB/s it carries 380 such chunks a second, which is 60 samples before chunks are met again."""


BLOCK_BYTES = 64 << 20


"""What is evicted: 1,600 files and maps for 100 GB; a table of 16 KiB."""


ENTRY_BYTES = 16


NOT_HERE = bytes(ENTRY_BYTES)


PAGE = 4096


@dataclass(frozen=True)
class CachedContent:
    """What one directory below `objects` holds: the same values, the same bytes.

    Args:
        size: bytes kept: plain ones, if the object is compressed.
        identity: what the store says of the object itself.
        codec: how the object is stored.
    """

    uri: str
    size: Count
    identity: Mapping[str, Any]
    codec: str = "raw"
    chunk_bytes: Positive = CHUNK_BYTES
    block_bytes: Positive = BLOCK_BYTES

    @cached_property
    def key(self) -> str:
        """Name of its directory."""
        return hashlib.blake2b(self.text(), digest_size=16).hexdigest()

    def text(self) -> bytes:
        """meta.json."""
        return json.dumps({**META_FILE.tags, **self._values()}, sort_keys=True, default=str).encode()

    def _values(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


META_FILE = JsonFile(CachedContent, {"format": FORMAT})


@dataclass(frozen=True)
class Layout:
    """Which byte lies where."""

    size: int
    chunk_bytes: int
    block_bytes: int
    seed: int

    @classmethod
    def of(cls, content: CachedContent) -> Layout:
        return cls(content.size, content.chunk_bytes, content.block_bytes, int(content.key[:15], 16))

    @cached_property
    def num_chunks(self) -> int:
        return -(-self.size // self.chunk_bytes)

    @cached_property
    def num_blocks(self) -> int:
        return -(-self.size // self.block_bytes)

    @cached_property
    def chunks_per_block(self) -> int:
        return self.block_bytes // self.chunk_bytes

    def range_of(self, first: int, stop: int) -> Range:
        """Bytes of the chunks [first, stop)."""
        return first * self.chunk_bytes, min(stop * self.chunk_bytes, self.size)

    def chunks_in(self, block: int) -> range:
        return range(block * self.chunks_per_block, min((block + 1) * self.chunks_per_block, self.num_chunks))

    def data_bytes(self, block: int) -> int:
        return min(self.block_bytes, self.size - block * self.block_bytes)

    def table_bytes(self, block: int) -> int:
        """Where the data of a block begins in its file."""
        return -(-len(self.chunks_in(block)) * ENTRY_BYTES // PAGE) * PAGE

    def file_bytes(self, block: int) -> int:
        return self.table_bytes(block) + self.data_bytes(block)

    def place_of(self, chunk: int) -> tuple[int, int]:
        """Block of a chunk, and its number there."""
        return divmod(chunk, self.chunks_per_block)

    def entry_of(self, chunk: int, data: Any) -> bytes:
        """What stands in the table for a chunk with these bytes."""
        return xxhash.xxh3_128_digest(data, seed=self.seed + chunk)


def block_path(directory: str, block: int) -> str:
    return os.path.join(directory, f"{block:08d}.block")


def write_meta(directory: str, content: CachedContent) -> None:
    """Make the directory of an object and say in it what it holds, unless that stands there.

    Raises:
        OSError: not possible here.
    """
    path = os.path.join(directory, "meta.json")
    try:
        os.mkdir(directory)
    except FileExistsError:
        if read_meta(directory) == content:
            return
    except FileNotFoundError:
        os.makedirs(directory, exist_ok=True)
    temporary = staging_path(path)
    try:
        with open(temporary, "xb") as file:
            file.write(content.text())
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def read_meta(directory: str) -> CachedContent | None:
    """What the directory says it holds; None where it does not say."""
    try:
        with open(path := os.path.join(directory, "meta.json"), "rb") as file:
            META_FILE.check_size(os.fstat(file.fileno()).st_size, path)
            found = META_FILE.decode(file.read(), path)
    except (OSError, FormatError):
        return None
    return None if found.block_bytes % found.chunk_bytes else found


logger = logging.getLogger(__name__)


OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def directory_of_index(settings: ReadSettings) -> tuple[str, int | None] | None:
    """Where index files are kept and the bytes that may lie there, as `DiskCache` takes them; None: nowhere."""
    if settings.index_dir == "":
        return None
    found = settings.index_dir or _of_this_user(os.getuid())
    return (found, settings.index_bytes) if found else None


@functools.cache
def _of_this_user(uid: int) -> str | None:
    """The default one, made and looked at once a process; None, with a line in the log, where it cannot be trusted."""
    path = ""
    try:
        path = os.path.join(tempfile.gettempdir(), f"binidx-{uid}")
        trouble = _claim(path, uid)
    except OSError as error:
        trouble = f"{error.strerror}"
    if trouble is None:
        return path
    logger.warning(
        "%s: %s; each process keeps index files in its own memory, unless BINIDX_INDEX_DIR names a directory",
        path or "temporary directory",
        trouble,
    )
    return None


def _claim(path: str, uid: int) -> str | None:
    """Make the directory; what is wrong with the one that is there, if anything."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # Not through a link, which somebody else may have put there: nobody can move what is ours in a sticky /tmp.
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return "found something else there, needed a directory"
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid}, needed {uid}"
    if found.st_mode & OTHERS_MAY_WRITE:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}), needed 700"
    return None
