"""Files of a cache directory: names, formats, locks, and the default directory of index files.

    DIR/
      usage                     bytes of all blocks, and when they were counted (`eviction`)
      filling-DIGEST            node lock of the process that fills some objects (`filling`)
      seals/                    notes on files that were checked whole (`seals`)
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
its own memory, and logs that once. So it does if the directory is full, up to `DiskCache.uncached_bytes`: more is an
error.

A cache directory that binidx makes is private (0700). What it makes in one has the permissions of the directory, so one
that others may read or write is shared with them, and they are trusted. No link in it is followed: it might lead to any
file of this user.

Blocks are mapped, and locked against eviction. A process that maps a block holds a shared flock on its file until the
mapping and the last view of it are gone, also if it is killed; an evictor needs an exclusive flock without waiting. A
mapping keeps the description of its file open, and with it the lock: one descriptor a block, and a forked child holds
the locks of its parent.

On NFS, flocks hold on all nodes (not with nolock or local_lock), on Lustre with -o flock. On file systems without
locks, blocks are mapped without one, and none can be evicted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import mmap as mapping
import os
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from binidx.errors import ConfigError, FormatError
from binidx.forks import cached_property
from binidx.json_models import Count, JsonFile, Positive
from binidx.storage.interfaces import Bytes, Range
from binidx.storage.location import Location
from binidx.storage.settings import ReadSettings
from binidx.storage.stats import DiskTimer
from binidx.storage.stores.local import raise_descriptor_limit, staging_path

FORMAT = 1
CHUNK_BYTES = 64 << 10
"""Bytes that are fetched together. A request takes one of 64 connections for 30 ms; 64 KiB take 0.7 ms more, so a first
epoch of random reads fills the cache at 137 MB/s a process, with chunks of 4 KiB at 9. A slow link needs smaller
chunks: at 25 MB/s it carries 380 chunks of 64 KiB a second, enough for 60 samples of a cold cache."""

BLOCK_BYTES = 64 << 20
"""Bytes that are evicted together: 1,600 files and maps for 100 GB, each with a table of 16 KiB."""

WRITE_BYTES = 1 << 20
"""Most bytes of one write: 5 s on a disk of 2 Mbit/s."""

ENTRY_BYTES = 16
ABSENT = bytes(ENTRY_BYTES)
PAGE = 4096


@dataclass(frozen=True)
class CachedContent:
    """Identity of one cached object, and arithmetic of its chunks and blocks.

    Equal instances mean equal bytes.

    Args:
        size: bytes of the content; plain bytes, if the object is compressed.
        identity: version of the stored object (`RangeReader.identity`).
        codec: codec of the stored object.
    """

    uri: str
    size: Count
    identity: Mapping[str, Any]
    codec: str = "raw"
    chunk_bytes: Positive = CHUNK_BYTES
    block_bytes: Positive = BLOCK_BYTES

    @cached_property
    def key(self) -> str:
        """Name of the object's directory below `objects`."""
        return hashlib.blake2b(self.text(), digest_size=16).hexdigest()

    def text(self) -> bytes:
        """Return the content of meta.json."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return META_FILE.encode(values, sort_keys=True, default=str)

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
        """Return the bytes of the checksum table, padded, before the data of a block in its file."""
        return -(-len(self.chunks_in(block)) * ENTRY_BYTES // PAGE) * PAGE

    def file_bytes(self, block: int) -> int:
        return self.table_bytes(block) + min(self.block_bytes, self.size - block * self.block_bytes)

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
    objects = os.path.dirname(directory)
    os.makedirs(os.path.dirname(objects), 0o700, exist_ok=True)
    for made in (objects, directory):
        with contextlib.suppress(FileExistsError):
            os.mkdir(made, permissions_in(os.path.dirname(made)))
        check_directory(made)
    if read_meta(directory) == content:
        return
    temporary = Path(staging_path(path))
    try:
        with open(temporary, "xb", opener=open_beside) as file:
            file.write(content.text())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def has_meta(directory: str, content: CachedContent) -> bool:
    """Return whether the directory of an object has a meta.json of the right size; parsing it takes 0.3 ms."""
    with contextlib.suppress(OSError):
        return os.stat(os.path.join(directory, "meta.json")).st_size == len(content.text())
    return False


def permissions_in(directory: str) -> int:
    """Return the permissions of new entries of a cache directory: those of the directory itself."""
    return os.stat(directory).st_mode & 0o777


def open_beside(path: str, flags: int) -> int:
    """Open a file of a cache, not through a link; a new one has the permissions of its directory.

    Args:
        flags: of `os.open`.

    Raises:
        OSError: it cannot be opened, or is a link.
    """
    mode = permissions_in(os.path.dirname(path)) & 0o666 if flags & os.O_CREAT else 0
    return os.open(path, flags | os.O_NOFOLLOW, mode)


def check_directory(path: str) -> None:
    """Check that a directory inside a cache directory can be trusted.

    Raises:
        OSError: it is no directory, or belongs to a user who may not write to the directory above it.
    """
    status, above = os.lstat(path), os.stat(os.path.dirname(path))
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "found a link or a file, needed a directory", path)
    if status.st_uid not in (os.getuid(), above.st_uid) and not above.st_mode & WRITABLE_BY_OTHERS:
        raise PermissionError(errno.EACCES, f"belongs to user {status.st_uid}", path)


def read_meta(directory: str) -> CachedContent | None:
    """Return the identity in the meta.json of a directory; None if there is no valid one."""
    try:
        with open(path := os.path.join(directory, "meta.json"), "rb", opener=open_beside) as file:
            META_FILE.check_size(os.fstat(file.fileno()).st_size, path)
            content = META_FILE.decode(file.read(), path)
    except (OSError, FormatError):
        return None
    return None if content.block_bytes % content.chunk_bytes else content


logger = logging.getLogger(__name__)
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def directory_of_index(settings: ReadSettings) -> str | None:
    """Return the directory of index files, None if there is none; raise ConfigError if it is a file."""
    if settings.index_dir and os.path.isfile(settings.index_dir):
        raise ConfigError(f"index_dir: found {settings.index_dir}, a file; needs a directory")
    return None if settings.index_dir == "" else settings.index_dir or _default_directory(os.getuid())


MEMORY, SHARED_MEMORY = "memory", "/dev/shm"
"""The `cache_dir` that stands for a directory in memory, and the file system of that directory."""


def place_of_cache(settings: ReadSettings) -> tuple[str | None, int | None]:
    """Return the directory of the disk cache, None if there is none, and the limit of its bytes.

    Raises:
        ConfigError: it is a URI or a file; or it is to be in memory, and this user can have no private directory there.
    """
    directory, limit = settings.cache_dir, settings.cache_bytes
    if directory == MEMORY:
        private = os.path.join(SHARED_MEMORY, f"binidx-{os.getuid()}")
        try:
            _create_private(private, os.getuid())
        except OSError as error:
            raise ConfigError(f"cache_dir: found 'memory', {private}: {error.strerror}; name a directory") from error
        system = os.statvfs(private)
        return os.path.join(private, "cache"), system.f_blocks * system.f_frsize // 2 if limit is None else limit
    if directory is not None and ("://" in directory or os.path.isfile(directory)):
        raise ConfigError(f"cache_dir: found {directory}, needs a directory of this machine")
    return directory, limit


def lock_path(location: Location) -> str | None:
    """Return the path of this node's lock for an object, the same for all spellings of a path; None: no lock."""
    directory, uri = directory_of_index(location.settings), location.uri
    name = xxhash.xxh3_128_hexdigest((uri if "://" in uri else os.path.abspath(uri)).encode())
    return os.path.join(directory, "turns", f"{name}.lock") if directory else None


@functools.cache
def _default_directory(uid: int) -> str | None:
    """Create and check the default directory, once in a process; None, with a warning, if it is not private."""
    path = ""
    try:
        path = os.path.join(tempfile.gettempdir(), f"binidx-{uid}")
        _create_private(path, uid)
    except OSError as error:
        logger.warning(
            "%s: %s; each process keeps index files in its own memory, unless BINIDX_INDEX_DIR names a directory",
            path or "temporary directory",
            error.strerror,
        )
        return None
    return path


def _create_private(path: str, uid: int) -> None:
    """Create a private directory; raise OSError if an existing one is none."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    # Not through a link, which another user may have created. In a sticky /tmp no other user can move our directory.
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "found something else there, needed a directory")
    if status.st_uid != uid:
        raise PermissionError(errno.EACCES, f"belongs to user {status.st_uid}, needed {uid}")
    if status.st_mode & WRITABLE_BY_OTHERS:
        problem = f"others may write to it (mode {stat.S_IMODE(status.st_mode):o}), needed 700"
        raise PermissionError(errno.EACCES, problem)


OPEN_ATTEMPTS = 50
RETRY_PAUSE_SECONDS = 0.002
"""Seconds between attempts to map a block that an evictor has locked, which takes some microseconds."""


class MappedBlock:
    """Mapped block of an object.

    Attributes:
        number: number of the block in the object.
        data: read-only view of the block's bytes.
        address: address of their first byte in memory.
        inode: device and inode of the block's file.
    """

    def __init__(self, mapped: mapping.mmap, content: CachedContent, number: int, inode: tuple[int, int]) -> None:
        self.number, self.inode = number, inode
        self._map, self._content = mapped, content
        self._offset, self._chunk_bytes = content.table_bytes(number), content.chunk_bytes
        self._first_chunk = number * content.chunks_per_block
        whole = memoryview(mapped)
        self._table, self.data = whole[: self._offset], whole[self._offset :]
        self.address = int(np.frombuffer(self.data, np.uint8).ctypes.data)

    def absent(self, chunks: Sequence[int]) -> list[int]:
        """Return the chunks of which the table has no checksum; the others are not checked."""
        entries = np.frombuffer(self._table, np.int64).reshape(-1, 2)
        has_entry = entries[np.array(chunks) - self._first_chunk].any(axis=1)
        return [chunk for chunk, has in zip(chunks, has_entry.tolist(), strict=True) if not has]

    def is_good(self, chunk: int) -> bool:
        """Return whether a chunk agrees with its checksum: 6 us for 64 KiB in memory."""
        place = chunk - self._first_chunk
        entry = bytes(self._table[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])
        data = self.data[place * self._chunk_bytes : (place + 1) * self._chunk_bytes]
        return entry != ABSENT and entry == self._content.entry_of(chunk, data)

    def read_ahead(self, chunk: int) -> None:
        """Ask the kernel to read a chunk from the disk; call it for all chunks before the first of them is checked."""
        first = self._offset + (chunk - self._first_chunk) * self._chunk_bytes
        first -= first % mapping.PAGESIZE
        self._map.madvise(mapping.MADV_WILLNEED, first, min(self._chunk_bytes, len(self._map) - first))


def map_block(path: str, content: CachedContent, number: int, *, create: bool = False) -> MappedBlock | None:
    """Map a block, with `create` from a new file if there is none.

    Args:
        path: of its file.
        number: of the block in the object.
        create: make a new file if there is none.

    Returns:
        The block; None if there is no file, or it is too short (both without `create`), or an evictor has locked it.

    Raises:
        OSError: the file can be neither opened nor mapped.
    """
    raise_descriptor_limit()
    for _ in range(OPEN_ATTEMPTS):
        try:
            check_directory(os.path.dirname(path))
            descriptor = open_beside(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY)
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            if try_lock(descriptor, fcntl.LOCK_SH) is not False and is_same_file(descriptor, path):
                return _mapped(descriptor, content, number, create)
        finally:
            os.close(descriptor)
        time.sleep(RETRY_PAUSE_SECONDS)
    return None


def _mapped(descriptor: int, content: CachedContent, number: int, create: bool) -> MappedBlock | None:
    needed, status = content.file_bytes(number), os.fstat(descriptor)
    if status.st_size < needed:
        if not create:
            return None
        # Touching a hole of a mapped file on a full tmpfs kills the process: no table is a hole.
        with contextlib.suppress(AttributeError):  # macOS
            os.posix_fallocate(descriptor, 0, content.table_bytes(number))
        # Two processes set the same length, and none ever makes it shorter.
        os.ftruncate(descriptor, needed)
    mapped = mapping.mmap(descriptor, needed, access=mapping.ACCESS_READ)
    # Random reads through the kernel's read-ahead fetch 125 bytes from a cold disk for each byte that is read.
    mapped.madvise(mapping.MADV_RANDOM)
    return MappedBlock(mapped, content, number, (status.st_dev, status.st_ino))


def write_chunks(path: str, content: CachedContent, block: MappedBlock, first: int, data: Bytes) -> None:
    """Write neighbouring chunks of one block into its file: their bytes, then their checksums.

    Args:
        block: the mapped block of all these chunks.
        first: number of the first chunk in the object.
        data: bytes of the chunks, each of `content.chunk_bytes` but the last of the object.

    Raises:
        OSError: the disk is full or broken, or the file was replaced; chunks that were written by then have no
            checksum, or a wrong one.
    """
    view, size = memoryview(data), content.chunk_bytes
    chunks = range(first, first - (-len(view) // size))
    entries = b"".join(content.entry_of(chunk, view[(chunk - first) * size :][:size]) for chunk in chunks)
    place = first % content.chunks_per_block
    # Its own short-lived descriptor: closing it is what sends the bytes to the other nodes of an NFS mount.
    timer, descriptor = DiskTimer("cache_write"), os.open(path, os.O_WRONLY | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != block.inode:
            raise FileNotFoundError(errno.ENOENT, "block was replaced", path)
        _write(descriptor, view, content.table_bytes(block.number) + place * size, timer)
        _write(descriptor, memoryview(entries), place * ENTRY_BYTES, timer)
    finally:
        os.close(descriptor)
        timer.end()


def remove_unlocked(path: str) -> bool:
    """Remove a block or staging file unless a process holds a lock on it; return whether the file is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not try_lock(descriptor, fcntl.LOCK_EX) or not is_same_file(descriptor, path):
            return False
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


BUSY = (errno.EAGAIN, errno.EACCES)


def try_lock(descriptor: int, kind: int, where: Range | None = None) -> bool | None:
    """Lock a file without waiting.

    Args:
        kind: `fcntl.LOCK_SH` or `fcntl.LOCK_EX`.
        where: lock these bytes only, by a record lock, which does not separate the threads of a process; None: the
            whole file, by a flock.

    Returns:
        Whether it is locked now; None if its file system has no locks.
    """
    try:
        if where is None:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        else:
            fcntl.lockf(descriptor, kind | fcntl.LOCK_NB, where[1] - where[0], where[0])
    except OSError as error:
        return False if error.errno in BUSY else None
    return True


def is_same_file(descriptor: int, path: str) -> bool:
    """Return whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write(descriptor: int, data: memoryview, offset: int, timer: DiskTimer) -> None:
    while data:
        written = os.pwrite(descriptor, data[:WRITE_BYTES], offset)
        timer.add(written)
        data, offset = data[written:], offset + written
