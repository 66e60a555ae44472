"""Files of the quota of a cache directory: the record that all processes share, its locks, and the blocks.

    DIR/usage     int64      bytes of all blocks, and reserved ones
                  float64    when the blocks were counted
                  float64    when an eviction last failed to free enough
                  locked:    byte 0 for a change of the record, byte 1 for an eviction

`eviction` decides what is written there. Record locks do not separate the threads of a process, so each byte has a lock
of threads, too. A process that is stopped while it holds a byte does not stop the others: they go on after some
seconds, and an update may be lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from binidx.errors import warn_once
from binidx.storage.cache.block_files import open_beside, remove_unlocked, try_lock
from binidx.storage.cache.eviction import BlockFile, Change, Usage

FREE_PART = 10
"""A cache without a quota leaves this fraction (1/10) of its file system free."""

USAGE = struct.Struct("<qdd")

MAX_WRITES = 16
"""Objects of a directory that a process writes at once."""

COUNTER, EVICTOR = 0, 1
"""Bytes of `usage` that are locked to update the sum, and to evict."""


def block_files(directory: str) -> list[BlockFile]:
    """Return all blocks of a cache directory; takes 10 us a block, for its stat."""
    return [block for name in object_directories(directory) for block in blocks_of(name)]


def object_directories(directory: str) -> list[str]:
    """Return the directories of the cached objects."""
    with contextlib.suppress(OSError), os.scandir(os.path.join(directory, "objects")) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    return []


def blocks_of(object_directory: str) -> list[BlockFile]:
    """Return the blocks of one cached object."""
    blocks = []
    with contextlib.suppress(OSError), os.scandir(object_directory) as entries:
        for entry in entries:
            if entry.name.endswith(".block"):
                with contextlib.suppress(OSError):
                    stat = entry.stat(follow_symlinks=False)
                    used_at = max(stat.st_atime, stat.st_mtime)
                    blocks.append(BlockFile(entry.path, stat.st_blocks * 512, used_at))
    return sorted(blocks, key=lambda block: block.path)


class QuotaDirectory:
    """Files of the quota of one cache directory in this process: see `eviction.QuotaFiles`.

    Args:
        directory: an existing directory.
        release: called before an eviction, to unmap blocks of this process.
        count_wait_seconds: longest wait for another update of the record. An update takes 10 us; a process stopped in
            it (SIGSTOP, a frozen node) must not stop the others.
        eviction_wait_seconds: longest wait for another process's eviction; one that counts 10,000 files takes 100 ms.

    Raises:
        OSError: the file `usage` can be neither opened nor created.
    """

    def __init__(
        self,
        directory: str,
        release: Callable[[], None] = lambda: None,
        *,
        count_wait_seconds: float = 2.0,
        eviction_wait_seconds: float = 5.0,
    ) -> None:
        self.directory, self.release = directory, release
        self._count_wait, self._eviction_wait = count_wait_seconds, eviction_wait_seconds
        self._descriptor = open_beside(os.path.join(directory, "usage"), os.O_RDWR | os.O_CREAT)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.renew_locks()

    def renew_locks(self) -> None:
        """Renew the locks, which a thread of the parent process may have held."""
        self._counting, self._evicting = threading.Lock(), threading.Lock()
        self._writing = [threading.Lock() for _ in range(MAX_WRITES)]

    def read(self) -> tuple[Usage, float]:
        data = os.pread(self._descriptor, USAGE.size, 0)
        return Usage(*USAGE.unpack(data)) if len(data) == USAGE.size else Usage(), time.time()

    def disk_excess(self) -> int:
        stat = os.fstatvfs(self._descriptor)  # also of a removed directory
        return (stat.f_blocks // FREE_PART - stat.f_bavail) * stat.f_frsize

    def update(self, change: Change) -> tuple[Usage, float]:
        with self._locked_record():
            before, now = self.read()
            self._write(usage := change(before, now))
        return usage, now

    def count(self, change: Callable[[int, float], Usage]) -> tuple[list[BlockFile], Usage]:
        with contextlib.ExitStack() as locks:
            # No write of this process runs meanwhile, so each byte counts once.
            for lock in self._writing:
                locks.enter_context(lock)
            locks.enter_context(self._locked_record())
            blocks = block_files(self.directory)
            usage = change(sum(block.num_bytes for block in blocks), time.time())
            self._write(usage)
        return blocks, usage

    def write(self, path: str, write: Callable[[], None], written: Callable[[], None]) -> None:
        # The kernel lets one thread at a time write to a file, and waiting ones would spin on their cores.
        with self._writing[hash(path) % MAX_WRITES]:
            write()
            written()

    def begin_eviction(self) -> bool:
        if not self._evicting.acquire(timeout=self._eviction_wait):
            return False
        is_locked = False
        try:
            is_locked = lock_byte(self._descriptor, EVICTOR, self._eviction_wait)
        finally:  # also after an interrupt
            if not is_locked:
                self.end_eviction()
        return is_locked

    def end_eviction(self) -> None:
        self._unlock(EVICTOR)
        self._evicting.release()

    def remove(self, path: str) -> bool:
        return remove_unlocked(path)

    def warn(self, problem: str) -> None:
        warn_once(self.directory, problem)

    @contextlib.contextmanager
    def _locked_record(self) -> Iterator[None]:
        """Lock the record, and go on without the lock if that takes too long."""
        is_ours = self._counting.acquire(timeout=self._count_wait)
        try:
            if is_ours:
                lock_byte(self._descriptor, COUNTER, self._count_wait)
            yield
        finally:
            if is_ours:
                self._unlock(COUNTER)
                self._counting.release()

    def _unlock(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)

    def _write(self, usage: Usage) -> None:
        os.pwrite(self._descriptor, USAGE.pack(usage.used, usage.counted_at, usage.failed_at), 0)


def lock_byte(descriptor: int, byte: int, seconds: float) -> bool:
    """Lock a byte of a file against other processes; return whether it was locked within some seconds."""
    deadline, pause = time.monotonic() + seconds, 0.0002
    # On a file system without locks concurrent updates may be lost.
    while try_lock(descriptor, fcntl.LOCK_EX, (byte, byte + 1)) is False:
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
    return True
