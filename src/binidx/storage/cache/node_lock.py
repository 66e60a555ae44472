"""Node lock: one process of a node goes first, by a lock on a file of the node; the kernel frees it when one dies.

    the first    holds the lock; it may leave a message for the processes that wait meanwhile
    the others   wait until the lock is free, and read the message

It only saves work: where files cannot be locked every process is first. The first process removes the file when it
leaves, so that only killed processes leave files, with their messages, and the next process that locks one removes it.

`flock`, since it excludes threads of one process too, unlike the record locks of `ChunkLocks`. A forked child shares
its parent's lock, and would hold it after the parent's death: it closes its descriptors at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from binidx.storage.cache.block_files import try_lock
from binidx.storage.stores.local import boot_id

FIRST_PAUSE, LONGEST_PAUSE, PAUSE_SHARE = 0.005, 0.2, 32
"""Shortest and longest pause between two attempts at the lock, in seconds. A pause is a 32nd of the time waited, so
no process waits 4 % longer than needed, and an hour of waiting takes 0.1 s of a core."""

_descriptors: set[int] = set()


@dataclass
class NodeLock:
    """Result of one attempt at a node lock.

    Attributes:
        first: whether this process holds the lock until the block ends, or files cannot be locked.
        node: name of the held lock, unique among all nodes: earlier holders of a lock of this name have ended. Empty if
            there is no such name.
        message: bytes that the holder left, read when it has ended, or at once if this process does not wait; of the
            first process: those of a killed holder.
    """

    first: bool
    node: str = ""
    message: bytes = b""
    descriptor: int | None = None

    def leave_message(self, data: bytes) -> None:
        """Store a message for the waiting processes, which read it when the block ends."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
                os.pwrite(self.descriptor, data, 0)


@contextlib.contextmanager
def acquire_node_lock(
    path: str | None, check: Callable[[], None] = lambda: None, *, wait: bool = True
) -> Iterator[NodeLock]:
    """Hold the lock of this node for the block; if another process holds it, wait until it is free, without taking it.

    Args:
        path: path of the lock file, created if it is missing; None: no lock, and every process is first.
        check: called while this process waits; its exception ends the wait.
        wait: with False, do not wait.
    """
    descriptor, locked = _try_path(path) if path else (None, None)
    try:
        if descriptor is None or locked is None:
            yield NodeLock(True)
        elif not locked:
            if wait:
                _wait(descriptor, check)
            yield NodeLock(False, message=_read(descriptor))
        else:
            left = _read(descriptor)
            os.ftruncate(descriptor, 0)
            yield NodeLock(True, _node_name(descriptor), left, descriptor)
    finally:
        if path and locked and descriptor in _descriptors:
            # While it is locked: a process that has opened it meanwhile finds it removed, and makes another.
            with contextlib.suppress(OSError):
                os.unlink(path)
        _close(descriptor)


def _try_path(path: str) -> tuple[int | None, bool | None]:
    """Open and lock a file; return its descriptor and what `try_lock` returned; (None, None) if it cannot be opened."""
    while (descriptor := _open(path)) is not None:
        locked = try_lock(descriptor, fcntl.LOCK_EX)
        if not locked or os.fstat(descriptor).st_nlink:
            return descriptor, locked
        _close(descriptor)  # its holder has just removed it
    return None, None


def _open(path: str) -> int | None:
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    _descriptors.add(descriptor)
    status = os.fstat(descriptor)
    # In a directory that others can write to, a link could lead to a file that this process would overwrite. A holder
    # may remove the file at any moment, which leaves no link.
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink <= 1:
        return descriptor
    _close(descriptor)
    return None


def _close(descriptor: int | None) -> None:
    # A child forked in the block has closed its own already.
    if descriptor is not None and descriptor in _descriptors:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _wait(descriptor: int, check: Callable[[], None]) -> None:
    """Wait until the holder has left."""
    began = time.monotonic()
    while try_lock(descriptor, fcntl.LOCK_SH) is False:
        check()
        time.sleep(min(max((time.monotonic() - began) / PAUSE_SHARE, FIRST_PAUSE), LONGEST_PAUSE))


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _node_name(descriptor: int) -> str:
    """Return a name for this file and this boot of the machine; empty if there is no boot ID."""
    status = os.fstat(descriptor)
    return f"{boot_id().strip()}:{status.st_dev}:{status.st_ino}" if boot_id() else ""


def _close_in_child() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
