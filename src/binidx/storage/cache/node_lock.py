"""Node lock: one process of a node goes first, by a lock on a file of the node; the kernel frees it when one dies.

    open the file ─ no file, or no locks ───────────────────────────────────► first, and so is every other process
      └ locked? ─ yes ─ removed meanwhile? ─ no ── empty it ────────────────► first, until it removes the file
          │                └ yes ── open the next one
          └ no ── wait until it is free, without taking it ─────────────────► not first: the message of the first

It only saves work: where files cannot be locked every process is first. The first process may leave a message, and
removes the file when it leaves, so that only killed processes leave files, with their messages, and the next process
that locks one removes it.

`flock`, since it excludes threads of one process too, unlike the record locks of `ChunkLocks`. A forked child shares
its parent's lock, and would hold it after the parent's death: it closes its descriptors at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from binidx.storage.cache.block_files import try_lock
from binidx.storage.steps import Effect, Sleep, Steps, run
from binidx.storage.stores.local import boot_id

FIRST_PAUSE, LONGEST_PAUSE, PAUSE_SHARE = 0.005, 0.2, 32
"""Shortest and longest pause between two attempts at the lock, in seconds. A pause is a 32nd of the time waited, so
no process waits 4 % longer than needed, and an hour of waiting takes 0.1 s of a core."""

_descriptors: set[int] = set()


@dataclass(frozen=True)
class OpenLockFile(Effect["int | None"]):
    """Open a lock file, made if it is missing; return its descriptor, None if that cannot be."""

    path: str

    def perform(self) -> int | None:
        try:
            os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None
        _descriptors.add(descriptor)
        status = os.fstat(descriptor)
        # In a directory that others can write to, a link could lead to a file that this process would overwrite. A
        # holder may remove the file at any moment, which leaves no link.
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink <= 1:
            return descriptor
        CloseLockFile(descriptor).perform()
        return None


@dataclass(frozen=True)
class TryLock(Effect["bool | None"]):
    """Lock an open file without waiting; return whether it is locked, None if its file system has no locks."""

    descriptor: int
    is_shared: bool = False

    def perform(self) -> bool | None:
        return try_lock(self.descriptor, fcntl.LOCK_SH if self.is_shared else fcntl.LOCK_EX)


@dataclass(frozen=True)
class ReadMessage(Effect[bytes]):
    """Return the content of an open file."""

    descriptor: int

    def perform(self) -> bytes:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0)


@dataclass(frozen=True)
class LeaveMessage(Effect[None]):
    """Replace the content of an open file, if the disk has room. A kill may cut it."""

    descriptor: int
    data: bytes

    def perform(self) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, self.data, 0)


@dataclass(frozen=True)
class NameLockFile(Effect["str | None"]):
    """Return a name for an open file and this boot of the machine, empty without a boot ID; None if it was removed."""

    descriptor: int

    def perform(self) -> str | None:
        status = os.fstat(self.descriptor)
        if not status.st_nlink:
            return None
        return f"{boot_id().strip()}:{status.st_dev}:{status.st_ino}" if boot_id() else ""


@dataclass(frozen=True)
class CloseLockFile(Effect[None]):
    """Close an open file, unless this process is a child that was forked meanwhile, and has closed its own.

    Args:
        removed: path from which the file is removed before; None: it stays.
    """

    descriptor: int
    removed: str | None = None

    def perform(self) -> None:
        if self.descriptor in _descriptors:
            with contextlib.suppress(OSError):
                if self.removed is not None:
                    os.unlink(self.removed)
            _descriptors.discard(self.descriptor)
            os.close(self.descriptor)


@dataclass(frozen=True)
class NodeLock:
    """Result of one attempt at a node lock.

    Attributes:
        first: whether this process holds the lock until it leaves, or files cannot be locked.
        node: name of the held lock, unique among all nodes: earlier holders of a lock of this name have ended. Empty if
            there is no such name.
        message: bytes that the holder left, read when it has ended, or at once if this process does not wait; of the
            first process: those of a killed holder.
        held: descriptor and path of the file that this process holds.
    """

    first: bool
    node: str = ""
    message: bytes = b""
    held: tuple[int, str] | None = None

    def message_left(self, data: bytes) -> Steps[None]:
        """Store a message for the waiting processes, which read it when this one leaves."""
        if self.held:
            yield from LeaveMessage(self.held[0], data)

    def leave_message(self, data: bytes) -> None:
        """Carry out `message_left`."""
        run(self.message_left(data))

    def leave(self) -> Steps[None]:
        """Free the lock, if this process holds it."""
        if self.held:
            # Removed while it is locked: a process that has opened it meanwhile finds that, and makes another.
            yield from CloseLockFile(*self.held)


def enter(path: str | None, check: Callable[[], Steps[None]], *, wait: bool = True) -> Steps[NodeLock]:
    """Lock the file of this node; if another process holds it, wait until it is free, without taking it.

    Args:
        path, wait: as of `acquire_node_lock`.
        check: steps while this process waits; their exception ends the wait.
    """
    while path and (descriptor := (yield from OpenLockFile(path))) is not None:
        lock: NodeLock | None = None
        try:
            locked = yield from TryLock(descriptor)
            if locked is None:
                break
            if not locked:
                waited = 0.0
                while wait and (yield from TryLock(descriptor, is_shared=True)) is False:
                    yield from check()
                    pause = min(max(waited / PAUSE_SHARE, FIRST_PAUSE), LONGEST_PAUSE)
                    yield from Sleep(pause)
                    waited += pause
                return NodeLock(False, message=(yield from ReadMessage(descriptor)))
            if (node := (yield from NameLockFile(descriptor))) is not None:
                left = yield from ReadMessage(descriptor)
                yield from LeaveMessage(descriptor, b"")
                lock = NodeLock(True, node, left, (descriptor, path))
                return lock
        finally:
            if lock is None:
                yield from CloseLockFile(descriptor)
    return NodeLock(True)


@contextlib.contextmanager
def acquire_node_lock(
    path: str | None, check: Callable[[], object] = lambda: None, *, wait: bool = True
) -> Iterator[NodeLock]:
    """Hold the lock of this node for the block; if another process holds it, wait until it is free, without taking it.

    Args:
        path: path of the lock file, created if it is missing; None: no lock, and every process is first.
        check: called while this process waits; its exception ends the wait.
        wait: with False, do not wait.
    """

    def checked() -> Steps[None]:
        check()
        yield from ()

    lock = run(enter(path, checked, wait=wait))
    try:
        yield lock
    finally:
        run(lock.leave())


def _close_in_child() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
