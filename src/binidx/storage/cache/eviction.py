"""Quota of a cache directory, and eviction of the least recently used blocks.

    DIR/usage     int64      bytes of all blocks
                  float64    when they were counted
                  float64    when an eviction last failed to free enough

Every process adds the bytes that it is about to write, under a lock on that file, so the quota holds over all processes
although none of them counts 10,000 files for each chunk. An eviction counts the files anew, and what its process has
reserved and not written yet, which corrects the sum after a killed process. No write of this process runs meanwhile, so
each byte counts once. What other processes have reserved and not written is left out until they evict.

An eviction frees a sixteenth of the quota more than it must, so that evictions are rare. Blocks that any process has
mapped stay, and those that a filling of this process needs later (`filling`). If all do, or the disk is full of other
files, reads go on without caching, and caching is tried again after ten seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from binidx.errors import warn_once
from binidx.storage.cache.block_files import open_beside, remove_unlocked, try_lock

logger = logging.getLogger(__name__)
FREE_PART = 10
"""A cache without a quota leaves this fraction (1/10) of its file system free."""

FREED_PART = 16
USAGE = struct.Struct("<qdd")
EVICTION_WAIT_SECONDS = 5.0
"""Longest wait for another process's eviction; one that counts 10,000 files takes 100 ms."""

MAX_WRITES = 16
"""Objects of a directory that a process writes at once."""

COUNTER, EVICTOR = 0, 1
"""Bytes of `usage` that are locked to update the sum, and to evict."""


@dataclass(frozen=True)
class BlockFile:
    """File of a block: its bytes on the disk, and when it was last used."""

    path: str
    num_bytes: int
    used_at: float


def evict(blocks: Sequence[BlockFile], excess: float) -> Iterator[tuple[BlockFile, bool]]:
    """Remove the least recently used blocks, `excess` bytes in all; yield each with whether it was removed.

    A block in use stays, and does not count.

    Args:
        excess: bytes on the disk to remove; math.inf: all.
    """
    for block in sorted(blocks, key=lambda block: (block.used_at, block.path)):
        if excess <= 0:
            return
        removed = remove_unlocked(block.path)
        excess -= block.num_bytes if removed else 0
        yield block, removed


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


class CacheQuota:
    """Quota of one cache directory in this process.

    Args:
        directory: an existing directory.
        limit: bytes of all blocks; None: as many as leave a tenth of the file system free.

    Attributes:
        release: called before an eviction, to unmap blocks of this process.
        keepers: return whether a filling of this process needs a block later, by its path; such blocks stay.
        pause_reason: why caching was stopped last; "" if it never was.
        pause_seconds: time without caching, and without another eviction of any process, after one that failed.
        count_again_seconds: longest age of a count of all blocks.
        count_wait_seconds: longest wait for another update of the sum. An update takes 10 us; a process stopped in it
            (SIGSTOP, a frozen node) must not stop the others.

    Raises:
        OSError: the file `usage` can be neither opened nor created.
    """

    pause_seconds, count_again_seconds, count_wait_seconds = 10.0, 3600.0, 2.0

    def __init__(self, directory: str, limit: int | None) -> None:
        self.directory, self.limit = directory, limit
        self._descriptor = open_beside(os.path.join(directory, "usage"), os.O_RDWR | os.O_CREAT)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self._paused_until, self.pause_reason = 0.0, ""
        self.release: Callable[[], object] = lambda: None
        self.after_fork()

    def after_fork(self) -> None:
        """Renew the locks, which a thread of the parent process may have held; its fillings have none in this one."""
        self.keepers: list[Callable[[str], bool]] = []
        self._lock, self._evicting = threading.Lock(), threading.Lock()
        self._writing = [threading.Lock() for _ in range(MAX_WRITES)]
        self._coming = 0  # bytes that threads of this process have reserved and not written yet

    @contextlib.contextmanager
    def reserved(self, count: int) -> Iterator[Reservation | None]:
        """Reserve bytes to be written in the block, evicting the least recently used blocks if need be.

        Bytes that are not written then are returned to the quota.

        Yields:
            The reservation; None if there is no room.
        """
        reservation = Reservation(count) if self._reserve(count) else None
        try:
            yield reservation
        finally:
            self._give_back(reservation.left if reservation else 0)

    @contextlib.contextmanager
    def writing(self, path: str, count: int, reservation: Reservation | None) -> Iterator[None]:
        """Write bytes in the block; if that succeeds, reserved ones count as a file from then on, and are not coming.

        Writes exclude counts of the directory, and those of one object each other: the kernel lets one thread at a time
        write to a file, and waiting ones would spin on their cores.

        Args:
            path: of the object's directory.
            count: of the bytes.
            reservation: that they are a part of; None: they replace bytes that are counted already.
        """
        with self._writing[hash(path) % MAX_WRITES]:
            yield
            if reservation is not None:
                reservation.left -= count
                with self._lock:
                    self._coming -= count

    def _reserve(self, count: int) -> bool:
        if self.is_paused:
            return False
        try:
            self._add(count, count)
            if self.excess() <= 0 or (not self._failed_lately() and self.free_space()):
                return True
        except OSError as error:
            logger.warning("%s: usage unknown, reads go on without being cached: %s", self.directory, error)
        self._give_back(count)
        self.pause("everything in it is in use" if self.limit is not None else "its file system is full of other files")
        return False

    def _give_back(self, count: int) -> None:
        with contextlib.suppress(OSError):
            self._add(-count, -count)

    def pause(self, why: str) -> None:
        """Stop caching for ten seconds; log a warning, once for a directory in a process."""
        self._paused_until, self.pause_reason = time.monotonic() + self.pause_seconds, why
        bound = "a tenth of the disk free" if self.limit is None else f"{self.limit} bytes"
        warn_once(self.directory, f"{why} (bound: {bound}); reads go on without being cached")

    @property
    def is_paused(self) -> bool:
        """True while nothing is cached, after a failure."""
        return time.monotonic() < self._paused_until

    def free_space(self) -> bool:
        """Evict blocks, or wait until another process has done so; return whether what was reserved has room now.

        What others reserve meanwhile is their excess.
        """
        with self._locked(EVICTOR, self._evicting, EVICTION_WAIT_SECONDS) as ours:
            if ours and self.excess() > 0 and not self._failed_lately():
                self.release()
                blocks = self.recount()
                total = sum(block.num_bytes for block in blocks) if self.limit is None else self.limit
                excess, freed = self.excess(), 0
                unneeded = [block for block in blocks if not any(needs(block.path) for needs in self.keepers)]
                for block, removed in evict(unneeded, excess + total // FREED_PART if excess > 0 else 0):
                    if removed:
                        self._add(-block.num_bytes)
                        freed += block.num_bytes
                if freed < excess:
                    with self._locked(COUNTER, self._lock, self.count_wait_seconds):
                        self._write(*self._usage()[:2], time.time())
                return freed >= excess
        return self.excess() <= 0

    def _failed_lately(self) -> bool:
        """Return whether an eviction of any process has failed to free enough in the last ten seconds."""
        return 0 <= time.time() - self._usage()[2] < self.pause_seconds

    def recount(self) -> list[BlockFile]:
        """Count the bytes of all blocks anew, store the sum plus the coming bytes, and return the blocks."""
        with contextlib.ExitStack() as writes:
            for lock in self._writing:
                writes.enter_context(lock)
            writes.enter_context(self._locked(COUNTER, self._lock, self.count_wait_seconds))
            blocks = block_files(self.directory)
            self._write(sum(block.num_bytes for block in blocks) + self._coming, time.time())
        return blocks

    def excess(self) -> int:
        """Return the bytes above the quota, with those that are coming; negative if bytes are left."""
        if self.limit is not None:
            return self.used() - self.limit
        stat = os.fstatvfs(self._descriptor)  # also of a removed directory
        return (stat.f_blocks // FREE_PART - stat.f_bavail) * stat.f_frsize + self._coming

    def capacity(self) -> int:
        """Return the bytes that the directory may hold, with those that it holds now."""
        return self.used() - self.excess()

    def used(self) -> int:
        """Return the counted bytes of the directory."""
        return self._usage()[0]

    def _add(self, count: int, coming: int = 0) -> None:
        """Add bytes to the sum, which is counted anew once an hour, and to those that are coming."""
        with self._locked(COUNTER, self._lock, self.count_wait_seconds):
            self._coming += coming  # first, whatever fails
            used, counted_at, failed_at = self._usage()
            self._write(max(0, used + count), counted_at, failed_at)
        if not 0 <= time.time() - counted_at <= self.count_again_seconds or used < 0:
            self.recount()

    def _usage(self) -> tuple[int, float, float]:
        data = os.pread(self._descriptor, USAGE.size, 0)
        return USAGE.unpack(data) if len(data) == USAGE.size else (0, 0.0, 0.0)

    def _write(self, used: int, counted_at: float, failed_at: float = 0.0) -> None:
        os.pwrite(self._descriptor, USAGE.pack(used, counted_at, failed_at), 0)

    @contextlib.contextmanager
    def _locked(self, byte: int, threads: threading.Lock, seconds: float) -> Iterator[bool]:
        """Lock a byte of `usage` against threads and processes; yield whether it was locked within `seconds`."""
        ours = threads.acquire(timeout=seconds)
        try:
            yield ours and self._lock_byte(byte, seconds)
        finally:
            if ours:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, byte)
                threads.release()

    def _lock_byte(self, byte: int, seconds: float) -> bool:
        deadline, pause = time.monotonic() + seconds, 0.0002
        # On a file system without locks concurrent updates may be lost.
        while try_lock(self._descriptor, fcntl.LOCK_EX, (byte, byte + 1)) is False:
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return True


@dataclass
class Reservation:
    """Bytes that a thread may write.

    Attributes:
        left: those that it has not written yet.
    """

    left: int
