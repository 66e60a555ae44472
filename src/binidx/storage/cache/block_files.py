"""Block files of the disk cache: mapped, and locked against eviction.

A process that maps a block holds a shared flock on its file until the mapping and the last view of it are gone, also if
it is killed; an evictor needs an exclusive flock without waiting. A mapping keeps the description of its file open, and
with it the lock: one descriptor a block, and a forked child holds the locks of its parent.

On NFS, flocks hold on all nodes (not with nolock or local_lock), on Lustre with -o flock. On file systems without
locks, blocks are mapped without one, and none can be evicted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap as mapping
import os
import time
from collections.abc import Sequence

import numpy as np

from binidx.storage.cache.layout import ABSENT, ENTRY_BYTES, CachedContent
from binidx.storage.interfaces import Bytes
from binidx.storage.stores.local import raise_descriptor_limit

ATTEMPTS = 50
PAUSE_SECONDS = 0.002
"""An evictor locks a block for some microseconds."""

CANNOT_LOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class MappedBlock:
    """Mapped block of an object.

    Attributes:
        number: of the block.
        data: read-only view of its bytes of the object.
        address: of its first byte in memory.
        inode: device and inode of its file.
    """

    def __init__(self, mapped: mapping.mmap, content: CachedContent, number: int, inode: tuple[int, int]) -> None:
        self.number, self.inode = number, inode
        self._map, self._content = mapped, content
        self._offset, self._chunk_bytes = content.table_bytes(number), content.chunk_bytes
        self._first_chunk = content.chunks_in(number).start
        whole = memoryview(mapped)
        self._table, self.data = whole[: self._offset], whole[self._offset :]
        self.address = int(np.frombuffer(self.data, np.uint8).ctypes.data)

    def holds(self, chunk: int) -> bool:
        """Return whether the table has a checksum of a chunk; the chunk itself is not checked."""
        return self._entry(chunk) != ABSENT

    def is_good(self, chunk: int) -> bool:
        """Return whether a chunk agrees with its checksum: 6 us for 64 KiB in memory."""
        entry = self._entry(chunk)
        return entry != ABSENT and entry == self._content.entry_of(chunk, self._bytes(chunk))

    def read_ahead(self, chunk: int) -> None:
        """Let the disk read a chunk: called for all chunks before the first is checked, it reads them at once."""
        first = self._offset + (chunk - self._first_chunk) * self._chunk_bytes
        first -= first % mapping.PAGESIZE
        self._map.madvise(mapping.MADV_WILLNEED, first, min(self._chunk_bytes, len(self._map) - first))

    def _entry(self, chunk: int) -> bytes:
        place = (chunk - self._first_chunk) * ENTRY_BYTES
        return bytes(self._table[place : place + ENTRY_BYTES])

    def _bytes(self, chunk: int) -> memoryview:
        first = (chunk - self._first_chunk) * self._chunk_bytes
        return self.data[first : first + self._chunk_bytes]


def map_block(path: str, content: CachedContent, number: int, *, create: bool = False) -> MappedBlock | None:
    """Map a block, with `create` from a new file if there is none.

    Returns:
        The block; None if there is no file, or an evictor holds it.

    Raises:
        OSError: the file can be neither opened nor mapped.
    """
    raise_descriptor_limit()
    for _ in range(ATTEMPTS):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666)
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            if _lock_if_possible(descriptor, fcntl.LOCK_SH) and _is_same(descriptor, path):
                return _mapped(descriptor, content, number, create)
        finally:
            os.close(descriptor)
        time.sleep(PAUSE_SECONDS)
    return None


def _mapped(descriptor: int, content: CachedContent, number: int, create: bool) -> MappedBlock | None:
    needed, found = content.file_bytes(number), os.fstat(descriptor)
    if found.st_size < needed:
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
    return MappedBlock(mapped, content, number, (found.st_dev, found.st_ino))


def write_chunks(path: str, content: CachedContent, block: MappedBlock, first: int, data: Bytes) -> None:
    """Write neighbouring chunks of one block into its file: their bytes, then their checksums.

    Raises:
        OSError: the disk is full or broken, or the file was replaced; chunks that were written by then have no
        checksum,
            or a wrong one.
    """
    view, size = memoryview(data), content.chunk_bytes
    chunks = range(first, first - (-len(view) // size))
    entries = b"".join(content.entry_of(chunk, view[(chunk - first) * size :][:size]) for chunk in chunks)
    place = content.place_of(first)[1]
    # Its own short-lived descriptor: closing it is what sends the bytes to the other nodes of an NFS mount.
    descriptor = os.open(path, os.O_WRONLY)
    try:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != block.inode:
            raise FileNotFoundError(errno.ENOENT, "block was replaced", path)
        _write(descriptor, view, content.table_bytes(block.number) + place * size)
        _write(descriptor, memoryview(entries), place * ENTRY_BYTES)
    finally:
        os.close(descriptor)


def erase_entries(path: str, content: CachedContent, chunks: Sequence[int]) -> None:
    """Erase the checksums of chunks of one block, so that the next reader fetches the chunks again."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for chunk in chunks:
            _write(descriptor, memoryview(ABSENT), content.place_of(chunk)[1] * ENTRY_BYTES)
    finally:
        os.close(descriptor)


def evict_block(path: str) -> bool:
    """Remove a block unless some process has it mapped; return whether it is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not _lock(descriptor, fcntl.LOCK_EX) or not _is_same(descriptor, path):
            return False
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _lock_if_possible(descriptor: int, how: int) -> bool:
    """Lock a file without waiting; return whether it is locked. File systems without locks count as locked."""
    try:
        return _lock(descriptor, how)
    except OSError as error:
        if error.errno in CANNOT_LOCK:
            return True
        raise


def _lock(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(descriptor: int, path: str) -> bool:
    """Return whether an open file is still the one under its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
