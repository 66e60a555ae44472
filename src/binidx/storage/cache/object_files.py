"""Files of one cached object: its blocks, its seal, and the locks of chunks that are being fetched.

A process that fetches chunk c holds a POSIX record lock on byte c of the file `locks`. Record locks work on NFS and on
every Unix, die with their process, and are not inherited by forks. They do not separate threads (`SingleFlight` does),
and closing any descriptor of a file drops all locks of the process on it, so a process has one instance for an object.
Where they do not work, several processes fetch the same chunk, and nothing else is lost.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
import weakref
from collections.abc import Callable, Sequence

from binidx.storage.cache.block_files import (
    CachedContent,
    MappedBlock,
    block_path,
    has_meta,
    map_block,
    open_beside,
    try_lock,
    write_chunks,
    write_meta,
)
from binidx.storage.cache.memory import runs_of
from binidx.storage.cache.seals import Seal, make_seal
from binidx.storage.stores.local import node_view

TICK_SECONDS = 0.05
"""Age of the last write of a block after which another write is certain to show in its mtime."""

NO_ROOM_TO_MAP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class ObjectFiles:
    """Files of one object in a cache directory.

    Attributes:
        path: directory of the object.
    """

    def __init__(self, directory: str, content: CachedContent) -> None:
        self.directory, self.content = directory, content
        self.path = os.path.join(directory, "objects", content.key)
        self._locks: int | None = None

    def exists(self) -> bool:
        """Return whether there is a meta.json of the right size."""
        return has_meta(self.path, self.content)

    def prepare_to_write(self) -> None:
        """Create the directory with its meta.json and the file of the locks, unless they exist.

        Raises:
            OSError: the directory cannot be written to.
        """
        write_meta(self.path, self.content)
        self._locks = descriptor = open_beside(os.path.join(self.path, "locks"), os.O_RDWR | os.O_CREAT)
        weakref.finalize(self, os.close, descriptor).atexit = False

    def block_path(self, number: int) -> str:
        return block_path(self.path, number)

    def map(self, number: int, *, create: bool, release: Callable[[], None]) -> MappedBlock | None:
        """Map a block; return None if there is none, or an evictor has locked it.

        Args:
            number: of the block.
            create: make a new file if there is none.
            release: called to unmap others where the process has no descriptors or no memory left.

        Raises:
            OSError: the file can be neither opened nor mapped.
        """
        path = self.block_path(number)
        try:
            block = map_block(path, self.content, number, create=create)
        except OSError as error:
            if error.errno == errno.ENOENT and create:
                write_meta(self.path, self.content)
            elif error.errno in NO_ROOM_TO_MAP:
                release()
            else:
                raise
            block = map_block(path, self.content, number, create=create)
        if block is not None:
            self.touch(number)
        return block

    def write(self, block: MappedBlock, first: int, data: memoryview) -> None:
        """Write neighbouring chunks of one block: see `block_files.write_chunks`."""
        write_chunks(self.block_path(block.number), self.content, block, first, data)

    def touch(self, number: int) -> None:
        """Mark a block as used: by its atime, as a new mtime would break its seals."""
        path = self.block_path(number)
        with contextlib.suppress(OSError):
            os.utime(path, ns=(time.time_ns(), os.stat(path).st_mtime_ns))

    def refresh(self, number: int) -> None:
        """Let an NFS client ask its server whether its pages of a block are still valid, by opening the file."""
        with contextlib.suppress(OSError):
            os.close(os.open(self.block_path(number), os.O_RDONLY | os.O_NOFOLLOW))

    def version_key(self, block: MappedBlock | None) -> str | None:
        """See `SealableReader`: that of the mapped file of an object of one block; None for other objects."""
        if self.content.num_blocks != 1 or block is None:
            return None
        with contextlib.suppress(OSError):
            path = self.block_path(0)
            status = os.stat(path)
            if (status.st_dev, status.st_ino) == block.inode and time.time() - status.st_mtime > TICK_SECONDS:
                return f"{node_view()} {path} {status.st_ino} {status.st_mtime_ns} {status.st_size}"
        return None

    def seal(self, block: MappedBlock | None) -> Seal:
        """Return the seal of an object of which all chunks agree with their checksums."""
        return make_seal(self.directory, self.version_key(block), "chunks")

    def lock_chunks(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        """Lock sorted chunks without waiting, but those that another process has locked; return the locked runs."""
        locked: list[tuple[int, int]] = []
        try:
            for run in runs_of(chunks):
                self._lock_run(run, locked)
        except BaseException:  # an interrupt: the caller has no runs to unlock
            self.unlock_chunks(runs_of(chunks))
            raise
        return locked

    def unlock_chunks(self, runs: Sequence[tuple[int, int]]) -> None:
        for first, stop in runs:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN, stop - first, first)

    @property
    def _descriptor(self) -> int:
        assert self._locks is not None, "prepare_to_write comes first"
        return self._locks

    def _lock_run(self, run: tuple[int, int], locked: list[tuple[int, int]]) -> None:
        """Lock the free chunks of a run, halving it while another process holds part; append to `locked`."""
        first, stop = run
        if try_lock(self._descriptor, fcntl.LOCK_EX, run) is not False:
            locked.append(run)
        elif (middle := (first + stop) // 2) > first:
            self._lock_run((first, middle), locked)
            self._lock_run((middle, stop), locked)
