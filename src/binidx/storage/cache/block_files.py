"""One block of a cached object: its file mapped, and held so that no evictor takes it.

Who maps a block holds a shared flock on it until the mapping and the last view of it are gone, kill -9 included; who
evicts one needs an exclusive flock, at once. A mapping keeps the description of the file it was made from, and that
keeps the lock: one descriptor a block, and a forked child holds what its parent held.

Files on NFS are locked over all nodes (not with nolock or local_lock), on Lustre with -o flock. Where files cannot be
locked at all blocks are mapped without, and none can be evicted.
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

from binidx.storage.cache.layout import ENTRY_BYTES, NOT_HERE, Layout
from binidx.storage.interfaces import Bytes
from binidx.storage.stores.local import keep_room, with_room

ATTEMPTS = 50
PAUSE_SECONDS = 0.002
"""An evictor holds a block for some microseconds."""

CANNOT_LOCK = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)


class MappedBlock:
    """A mapped block.

    Attributes:
        data: read-only view of its bytes of the object.
        address: where they begin in memory.
        inode: of its file.
    """

    def __init__(self, mapped: mapping.mmap, layout: Layout, number: int, inode: tuple[int, int]) -> None:
        self.number, self.inode = number, inode
        self._map, self._layout = mapped, layout
        self._offset, self._chunk_bytes = layout.table_bytes(number), layout.chunk_bytes
        self._first_chunk = layout.chunks_in(number).start
        whole = memoryview(mapped)
        self._table, self.data = whole[: self._offset], whole[self._offset :]
        self.address = int(np.frombuffer(self.data, np.uint8).ctypes.data)

    def holds(self, chunk: int) -> bool:
        """Whether there is an entry for a chunk; its bytes may still be anything."""
        return self._entry(chunk) != NOT_HERE

    def is_good(self, chunk: int) -> bool:
        """Whether the bytes of a chunk are those of the object: 6 us for 64 KiB in memory."""
        entry = self._entry(chunk)
        return entry != NOT_HERE and entry == self._layout.entry_of(chunk, self._bytes(chunk))

    def read_ahead(self, chunk: int) -> None:
        """Ask the disk for a chunk: before many are looked at, so that it works on all of them at once."""
        first = self._offset + (chunk - self._first_chunk) * self._chunk_bytes
        first -= first % mapping.PAGESIZE
        self._map.madvise(mapping.MADV_WILLNEED, first, min(self._chunk_bytes, len(self._map) - first))

    def _entry(self, chunk: int) -> bytes:
        place = (chunk - self._first_chunk) * ENTRY_BYTES
        return bytes(self._table[place : place + ENTRY_BYTES])

    def _bytes(self, chunk: int) -> memoryview:
        first = (chunk - self._first_chunk) * self._chunk_bytes
        return self.data[first : first + self._chunk_bytes]


def map_block(path: str, layout: Layout, number: int, *, create: bool = False) -> MappedBlock | None:
    """The block of a file, made if `create`; None where there is none, or none that can be mapped as it is.

    Raises:
        OSError: neither.
    """
    for _ in range(ATTEMPTS):
        try:
            descriptor = with_room(lambda: os.open(path, os.O_RDWR | os.O_CREAT if create else os.O_RDONLY, 0o666))
        except FileNotFoundError:
            if create:
                raise
            return None
        try:
            if lock_file(descriptor, fcntl.LOCK_SH) and is_same(descriptor, path):
                return _mapped(descriptor, layout, number, create)
        finally:
            os.close(descriptor)
        time.sleep(PAUSE_SECONDS)
    return None


def _mapped(descriptor: int, layout: Layout, number: int, create: bool) -> MappedBlock | None:
    needed, found = layout.file_bytes(number), os.fstat(descriptor)
    if found.st_size < needed:
        if not create:
            return None
        # Touching a hole of a mapped file on a full tmpfs kills the process: no table is a hole.
        with contextlib.suppress(AttributeError):  # macOS
            os.posix_fallocate(descriptor, 0, layout.table_bytes(number))
        # Two at once set the same length, and nobody ever makes it shorter.
        os.ftruncate(descriptor, needed)
    mapped = mapping.mmap(descriptor, needed, access=mapping.ACCESS_READ)
    # Random reads through the kernel's read-ahead fetch 125 bytes from a cold disk for each byte asked.
    mapped.madvise(mapping.MADV_RANDOM)
    keep_room(descriptor)
    return MappedBlock(mapped, layout, number, (found.st_dev, found.st_ino))


def write_chunks(path: str, layout: Layout, block: MappedBlock, first: int, data: Bytes) -> None:
    """Put neighbouring chunks from `first` on, all of this block, into its file: their bytes, then their entries.

    Raises:
        OSError: the disk is full or broken, or the file is no longer the one that was mapped; what was written of the
            chunks is without an entry, or under one that does not agree.
    """
    view, size = memoryview(data), layout.chunk_bytes
    chunks = range(first, first - (-len(view) // size))
    entries = b"".join(layout.entry_of(chunk, view[(chunk - first) * size :][:size]) for chunk in chunks)
    place = layout.place_of(first)[1]
    # Its own short-lived descriptor: closing it is what sends the bytes to the other nodes of an NFS mount.
    descriptor = with_room(lambda: os.open(path, os.O_WRONLY))
    try:
        found = os.fstat(descriptor)
        if (found.st_dev, found.st_ino) != block.inode:
            raise FileNotFoundError(errno.ENOENT, "block was replaced", path)
        _write(descriptor, view, layout.table_bytes(block.number) + place * size)
        _write(descriptor, memoryview(entries), place * ENTRY_BYTES)
    finally:
        os.close(descriptor)


def erase_entries(path: str, layout: Layout, chunks: Sequence[int]) -> None:
    """Forget chunks of one block: who has not read them yet fetches them again."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for chunk in chunks:
            _write(descriptor, memoryview(NOT_HERE), layout.place_of(chunk)[1] * ENTRY_BYTES)
    finally:
        os.close(descriptor)


def evict_block(path: str) -> bool:
    """Remove a block unless somebody has it mapped; whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not _lock(descriptor, fcntl.LOCK_EX) or not is_same(descriptor, path):
            return False
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def revalidate(path: str) -> None:
    """Let an NFS client ask its server whether the pages it has of a file are still those of the file."""
    os.close(os.open(path, os.O_RDONLY))


def lock_file(descriptor: int, how: int) -> bool:
    """flock, at once; whether nobody else has it. Where files cannot be locked nobody has it."""
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


def is_same(descriptor: int, path: str) -> bool:
    """Whether the file is still the one under the name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
