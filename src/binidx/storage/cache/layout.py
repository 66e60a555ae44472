"""Files of a cache directory: names, formats, and the default directory of index files.

    DIR/
      usage                     bytes of all blocks, and when they were counted (`eviction`)
      objects/KEY/              KEY: digest of URI, size, identity and the sizes below
        meta.json               the same values, for `binidx cache`
        locks                   empty; a process that fetches chunk c locks byte c of it
        00000007.block          bytes [7 B, 8 B) of the object, a sparse file:

    offset      bytes
    0           16 n            XXH3-128 of each chunk, seeded with KEY and the chunk's number; zeros: chunk is absent
    16 n        ...             zeros up to a multiple of 4096
    data        up to B         chunks of C bytes each; the last of the object is shorter

A chunk is written before its checksum, and valid only if both agree: chunks that are torn, lost, flipped or of another
object are fetched again. Table and data are one file, so both appear and disappear together.

Index files of remote stores are cached for all processes of a node in {tempdir}/binidx-{uid}, which only this user may
write to (mode 0700): its checksums do not protect against a user who can rewrite them. BINIDX_INDEX_DIR names another
directory, "off" none; a cache_dir holds index files, too. Without a usable directory each process keeps index files in
its own memory, and logs that once.
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
from pathlib import Path
from typing import Any

import xxhash

from binidx.errors import FormatError
from binidx.json_models import Count, JsonFile, Positive
from binidx.storage.interfaces import Range
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.local import staging_path

FORMAT = 1
CHUNK_BYTES = 64 << 10
"""Bytes that are fetched together. A request takes one of 64 connections for 30 ms; 64 KiB take 0.7 ms more, so a first
epoch of random reads fills the cache at 137 MB/s a process, with chunks of 4 KiB at 9. A slow link needs smaller
chunks: at 25 MB/s it carries 380 chunks of 64 KiB a second, enough for 60 samples of a cold cache."""

BLOCK_BYTES = 64 << 20
"""Bytes that are evicted together: 1,600 files and maps for 100 GB, each with a table of 16 KiB."""

ENTRY_BYTES = 16
ABSENT = bytes(ENTRY_BYTES)
PAGE = 4096


@dataclass(frozen=True)
class CachedContent:
    """Identity of the content of one directory below `objects`, and arithmetic of its chunks and blocks.

    Equal values mean equal bytes.

    Args:
        size: bytes of the content; plain bytes, if the object is compressed.
        identity: version of the stored object (`RangeReader.identity`).
        codec: of the stored object.
    """

    uri: str
    size: Count
    identity: Mapping[str, Any]
    codec: str = "raw"
    chunk_bytes: Positive = CHUNK_BYTES
    block_bytes: Positive = BLOCK_BYTES

    @cached_property
    def key(self) -> str:
        """Name of the directory."""
        return hashlib.blake2b(self.text(), digest_size=16).hexdigest()

    def text(self) -> bytes:
        """Return the content of meta.json."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps({**META_FILE.tags, **values}, sort_keys=True, default=str).encode()

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
        """Return the range of bytes of chunks [first, stop)."""
        return first * self.chunk_bytes, min(stop * self.chunk_bytes, self.size)

    def chunks_in(self, block: int) -> range:
        return range(block * self.chunks_per_block, min((block + 1) * self.chunks_per_block, self.num_chunks))

    def table_bytes(self, block: int) -> int:
        """Return the bytes before the data of a block in its file."""
        return -(-len(self.chunks_in(block)) * ENTRY_BYTES // PAGE) * PAGE

    def file_bytes(self, block: int) -> int:
        return self.table_bytes(block) + min(self.block_bytes, self.size - block * self.block_bytes)

    def place_of(self, chunk: int) -> tuple[int, int]:
        """Return the block of a chunk, and the chunk's number in that block."""
        return divmod(chunk, self.chunks_per_block)

    def entry_of(self, chunk: int, data: Any) -> bytes:
        """Return the checksum of a chunk with these bytes, as the table holds it."""
        return xxhash.xxh3_128_digest(data, seed=self._seed + chunk)

    @cached_property
    def _seed(self) -> int:
        return int(self.key[:15], 16)


META_FILE = JsonFile(CachedContent, {"format": FORMAT})


def block_path(directory: str, block: int) -> str:
    return os.path.join(directory, f"{block:08d}.block")


def write_meta(directory: str, content: CachedContent) -> None:
    """Create the directory of an object with its meta.json, unless it exists.

    Raises:
        OSError: the directory cannot be written to.
    """
    path = os.path.join(directory, "meta.json")
    try:
        os.mkdir(directory)
    except FileExistsError:
        if read_meta(directory) == content:
            return
    except FileNotFoundError:
        os.makedirs(directory, exist_ok=True)
    temporary = Path(staging_path(path))
    try:
        temporary.write_bytes(content.text())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_meta(directory: str) -> CachedContent | None:
    """Return the identity in the meta.json of a directory; None if there is no valid one."""
    try:
        with open(path := os.path.join(directory, "meta.json"), "rb") as file:
            META_FILE.check_size(os.fstat(file.fileno()).st_size, path)
            found = META_FILE.decode(file.read(), path)
    except (OSError, FormatError):
        return None
    return None if found.block_bytes % found.chunk_bytes else found


logger = logging.getLogger(__name__)
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def directory_of_index(settings: ReadSettings) -> tuple[str, int | None] | None:
    """Return the directory of index files and its limit in bytes, as `DiskCache` takes them; None if there is none."""
    if settings.index_dir == "":
        return None
    found = settings.index_dir or _default_directory(os.getuid())
    return (found, settings.index_bytes) if found else None


@functools.cache
def _default_directory(uid: int) -> str | None:
    """Create and check the default directory, once in a process; None, with a warning, if it is not private."""
    path = ""
    try:
        path = os.path.join(tempfile.gettempdir(), f"binidx-{uid}")
        problem = _create_private(path, uid)
    except OSError as error:
        problem = f"{error.strerror}"
    if problem is None:
        return path
    logger.warning(
        "%s: %s; each process keeps index files in its own memory, unless BINIDX_INDEX_DIR names a directory",
        path or "temporary directory",
        problem,
    )
    return None


def _create_private(path: str, uid: int) -> str | None:
    """Create a private directory; return why the existing one is unusable, or None."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # Not through a link, which another user may have created. In a sticky /tmp no other user can move our directory.
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return "found something else there, needed a directory"
    if found.st_uid != uid:
        return f"belongs to user {found.st_uid}, needed {uid}"
    if found.st_mode & WRITABLE_BY_OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):o}), needed 700"
    return None
