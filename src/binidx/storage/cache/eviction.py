"""How much may lie in a cache directory, and who has to leave: whole blocks, the least recently used first.

    DIR/usage     int64      bytes in all objects
                  float64    when they were counted
                  float64    when a sweep last found too much in use

Every process adds what it is about to write, under a lock on that file; counting the files anew, which a sweep does,
mends what a kill left wrong. So the bound holds over all processes without one of them looking at 10,000 files for each
chunk.

A sweep frees a sixteenth of the bound more than it must, so that the next one is some time away. What is mapped
anywhere is in use and stays. If everything is, or the disk has no room for other reasons, reads go on without being
kept, and it is tried again after ten seconds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from binidx.storage.cache.block_files import evict_block

logger = logging.getLogger(__name__)
FREE_PART = 10
"""Without a bound of its own a cache leaves this part of its file system free."""

SWEEP_PART = 16
USAGE = struct.Struct("<qdd")
COUNT_AGAIN_SECONDS = 3600.0
FULL_SECONDS = 10.0
SWEEP_WAIT_SECONDS = 5.0
"""A sweep looks at 10,000 files in 100 ms."""

COUNT_WAIT_SECONDS = 2.0
"""Changing the number takes 10 us; who was stopped in it (SIGSTOP, a frozen node) must not stop the others."""

COUNTER, SWEEPER = 0, 1
"""Bytes of `usage` that are locked: to change the number, and to sweep."""


@dataclass(frozen=True)
class BlockFile:
    """A block as the file system sees it: bytes that it takes, and when it was last used."""

    path: str
    num_bytes: int
    used_at: float


def least_recent_first(blocks: Sequence[BlockFile]) -> list[BlockFile]:
    """The order in which blocks leave."""
    return sorted(blocks, key=lambda each: (each.used_at, each.path))


def block_files(directory: str) -> list[BlockFile]:
    """All blocks of a cache directory, by one look at each: 10 us."""
    return [found for name in object_directories(directory) for found in blocks_of(name)]


def object_directories(directory: str) -> list[str]:
    """The directories of its objects."""
    with contextlib.suppress(OSError), os.scandir(os.path.join(directory, "objects")) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir())
    return []


def blocks_of(object_directory: str) -> list[BlockFile]:
    """The blocks of one object."""
    found = []
    with contextlib.suppress(OSError), os.scandir(object_directory) as entries:
        for entry in entries:
            if entry.name.endswith(".block"):
                with contextlib.suppress(OSError):
                    stat = entry.stat()
                    found.append(BlockFile(entry.path, stat.st_blocks * 512, stat.st_mtime))
    return sorted(found, key=lambda each: each.path)


class CacheQuota:
    """The bound of one cache directory, in this process.

    Args:
        directory: exists.
        limit: bytes; None: what leaves a tenth of the file system free.

    Raises:
        OSError: its `usage` can be neither opened nor made.
    """

    def __init__(self, directory: str, limit: int | None) -> None:
        self.directory, self.limit = directory, limit
        self._descriptor = os.open(os.path.join(directory, "usage"), os.O_RDWR | os.O_CREAT, 0o666)
        self._full_until = 0.0
        self.release: Callable[[], object] = lambda: None
        self.after_fork()
        _rooms.add(self)

    def after_fork(self) -> None:
        self._lock, self._sweeping = threading.Lock(), threading.Lock()

    def reserve(self, count: int) -> bool:
        """Whether so many bytes more may be written; what is least recently used makes room for them."""
        if time.monotonic() < self._full_until:
            return False
        try:
            self._add(count)
            if self.excess(count) <= 0 or (not self._is_stuck() and self.make_room(count) <= 0):
                return True
            self._add(-count)
        except OSError as error:
            logger.warning("%s: usage cannot be kept, reads go on without being cached: %s", self.directory, error)
        self.full("everything in it is in use" if self.limit is not None else "its file system is full of other things")
        return False

    def give_back(self, count: int) -> None:
        """So much of what was reserved was not written."""
        with contextlib.suppress(OSError):
            self._add(-count)

    def full(self, why: str) -> None:
        """Keep nothing for ten seconds; said once a directory and process."""
        self._full_until = time.monotonic() + FULL_SECONDS
        if self.directory not in _said:
            _said.add(self.directory)
            bound = "a tenth of the disk free" if self.limit is None else f"{self.limit} bytes"
            logger.warning("%s: %s (bound: %s); what it has not is read without being kept", self.directory, why, bound)

    def make_room(self, coming: int = 0) -> int:
        """Sweep, or wait until another process has; bytes that are too many afterwards."""
        with self._locked(SWEEPER, self._sweeping, SWEEP_WAIT_SECONDS) as ours:
            if ours and self.excess(coming) > 0 and not self._is_stuck():
                self.release()
                self._sweep(coming)
        return self.excess(coming)

    def _is_stuck(self) -> bool:
        """Whether somebody swept in the last ten seconds, and found too much in use: 64 processes need not all look."""
        return 0 <= time.time() - self._usage()[2] < FULL_SECONDS

    def _sweep(self, coming: int) -> None:
        blocks = self.recount(coming)
        needed = self.excess(coming)
        if needed > 0:
            needed += (sum(block.num_bytes for block in blocks) if self.limit is None else self.limit) // SWEEP_PART
        for block in least_recent_first(blocks):
            if needed <= 0:
                break
            if evict_block(block.path):
                needed -= block.num_bytes
                self._add(-block.num_bytes)
        if self.excess(coming) > 0:
            with self._locked(COUNTER, self._lock, COUNT_WAIT_SECONDS):
                self._write(*self._usage()[:2], time.time())

    def recount(self, coming: int = 0) -> list[BlockFile]:
        """Count what lies there, and what others should know is coming; all blocks."""
        with self._locked(COUNTER, self._lock, COUNT_WAIT_SECONDS):
            blocks = block_files(self.directory)
            self._write(sum(block.num_bytes for block in blocks) + coming, time.time())
        return blocks

    def excess(self, coming: int = 0) -> int:
        """Bytes that are too many, or, if negative, that may still come.

        Args:
            coming: bytes that were added, but do not show on the disk yet.
        """
        if self.limit is not None:
            return self.used() - self.limit
        stat = os.fstatvfs(self._descriptor)  # of a directory that is gone, too
        return (stat.f_blocks // FREE_PART - stat.f_bavail) * stat.f_frsize + coming

    def used(self) -> int:
        """Bytes in the directory, as far as is known."""
        return self._usage()[0]

    def _add(self, count: int) -> None:
        """So many bytes more; they are counted anew once an hour."""
        with self._locked(COUNTER, self._lock, COUNT_WAIT_SECONDS):
            used, counted_at, stuck_at = self._usage()
            if not 0 <= time.time() - counted_at <= COUNT_AGAIN_SECONDS or used < 0:
                used, counted_at = sum(block.num_bytes for block in block_files(self.directory)), time.time()
            self._write(max(0, used + count), counted_at, stuck_at)

    def _usage(self) -> tuple[int, float, float]:
        found = os.pread(self._descriptor, USAGE.size, 0)
        used, counted_at, stuck_at = USAGE.unpack(found) if len(found) == USAGE.size else (0, 0.0, 0.0)
        return int(used), float(counted_at), float(stuck_at)

    def _write(self, used: int, counted_at: float, stuck_at: float = 0.0) -> None:
        os.pwrite(self._descriptor, USAGE.pack(used, counted_at, stuck_at), 0)

    @contextlib.contextmanager
    def _locked(self, byte: int, threads: threading.Lock, seconds: float) -> Iterator[bool]:
        """Alone among threads and processes; after `seconds` perhaps not, and the block is told so."""
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
        while True:
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                return True
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    return True  # no locks here: the number may be off by what two processes write at once
                if time.monotonic() >= deadline:
                    return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the interpreter modules may be gone before this object.
        try:  # noqa: SIM105
            close(self._descriptor)
        except (OSError, AttributeError):
            pass


def _after_fork() -> None:
    for room in list(_rooms):
        room.after_fork()


_rooms: weakref.WeakSet[CacheQuota] = weakref.WeakSet()
_said: set[str] = set()


os.register_at_fork(after_in_child=_after_fork)
