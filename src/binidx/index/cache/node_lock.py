"""Which process of a node goes first: a lock on a file of the node's own, which the kernel takes from the dead.

    first     has the file to itself; what it leaves in it is for those that waited meanwhile
    the rest  wait until it let go or died, and are told what it left

Nothing but work depends on it: where files cannot be locked everybody is first. Whoever is first removes, once a
process, the locks beside his that nobody took for a day and nobody holds.

`flock`, since it tells the threads of a process apart, unlike the record locks of `chunk_locks`. A forked child shares
its parent's lock, and would keep it for a dead one: it closes its descriptors at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

FIRST_PAUSE, LONGEST_PAUSE, PAUSE_PART = 0.005, 0.2, 32


"""Between two looks at the lock. It grows with the time waited, to a 32nd of it: nobody waits 4 % longer than needed,
and in an hour each that waits takes 0.1 s of a core."""


LEFT_SECONDS, SUFFIX = 86_400.0, ".lock"


BUSY = (errno.EAGAIN, errno.EACCES)


_descriptors: set[int] = set()


@dataclass
class NodeLock:
    """One process' turn.

    Attributes:
        first: nobody of this node is at it, and nobody will be until the block ends.
        node: names the lock among those of all nodes; whoever is first under the same name now, others under it are
            dead. Empty where that cannot be known.
        left: what the first one left while we waited, if anything.
    """

    first: bool
    node: str = ""
    left: bytes = b""
    descriptor: int | None = None

    def leave(self, data: bytes) -> None:
        """For those that wait, when the block ends."""
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self.descriptor, 0)
                os.pwrite(self.descriptor, data, 0)


@contextlib.contextmanager
def acquire_node_lock(path: str | None, check: Callable[[], None] = lambda: None) -> Iterator[NodeLock]:
    """Be the first one of this node for the block, or wait until it has left.

    Args:
        path: of the lock, made if it is not there; None: there is no directory for it.
        check: called while we wait; what it raises ends that.
    """
    descriptor, locked = _tried(path)
    if path is None or descriptor is None:
        yield NodeLock(True)
        return
    try:
        if locked is False:
            yield NodeLock(False, left=_wait(descriptor, check))
        elif locked is None:
            yield NodeLock(True)
        else:
            os.utime(descriptor)
            _sweep(os.path.dirname(path), os.getpid())
            yield NodeLock(True, _node_of(descriptor), descriptor=descriptor)
    finally:
        _close(descriptor)


def _tried(path: str | None) -> tuple[int | None, bool | None]:
    """The open file, and whether we have its lock: see `_lock`."""
    while (descriptor := _opened(path)) is not None:
        locked = _lock(descriptor, fcntl.LOCK_EX)
        if not locked or os.fstat(descriptor).st_nlink:
            return descriptor, locked
        _close(descriptor)  # swept just now: the next one makes another
    return None, None


@functools.lru_cache(maxsize=64)
def _sweep(directory: str, pid: int) -> None:
    """Remove what was left long ago; once a directory and process."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        oldest = time.time() - LEFT_SECONDS
        for entry in entries:
            if entry.name.endswith(SUFFIX) and entry.stat(follow_symlinks=False).st_mtime < oldest:
                _remove(entry.path)


def _remove(path: str) -> None:
    """Unless it is held. Who waits for it has it open, and is told by that what was left."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if _lock(descriptor, fcntl.LOCK_EX):
                os.unlink(path)
        finally:
            os.close(descriptor)


def _opened(path: str | None) -> int | None:
    if path is None:
        return None
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except OSError:
        return None
    _descriptors.add(descriptor)
    if _is_ours(os.fstat(descriptor)):
        return descriptor
    _close(descriptor)
    return None


def _is_ours(found: os.stat_result) -> bool:
    """Not a link that somebody else put there, where others may write: to a file of his choice, for us to overwrite."""
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1


def _close(descriptor: int) -> None:
    # A child forked in the block has closed its own already.
    if descriptor in _descriptors:
        _descriptors.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Whether we have it now; None: files cannot be locked here."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in BUSY else None
    return True


def _wait(descriptor: int, check: Callable[[], None]) -> bytes:
    """Until nobody is first; what was left there since."""
    before, began = _content(descriptor), time.monotonic()
    while _lock(descriptor, fcntl.LOCK_SH) is False:
        check()
        time.sleep(min(max((time.monotonic() - began) / PAUSE_PART, FIRST_PAUSE), LONGEST_PAUSE))
    left = _content(descriptor)
    return left if left != before else b""


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _node_of(descriptor: int) -> str:
    """This very file, and this run of the machine. Linux says which run that is."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return ""
    found = os.fstat(descriptor)
    return f"{boot}:{found.st_dev}:{found.st_ino}"


def _close_in_child() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)
