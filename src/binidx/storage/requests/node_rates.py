"""Request rates that the processes of a node share: a small file in memory that only this user can open.

    /dev/shm/binidx-UID/request-rates-v4-HOST   SLOTS records: key of the partition, fields of `RequestRate`

A change locks the file, for some 10 us; the kernel unlocks it when a process dies. A record of an earlier boot, one
without a change for `FORGET_SECONDS`, or one with a value that no rate has, is a new rate. Without the file, or if its
lock is not free for `STUCK_SECONDS` (its holder was stopped), each process has its own rates.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import mmap
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TypeVar

from binidx.errors import redacted
from binidx.storage.requests.request_rate import RequestRate
from binidx.storage.stats import add_usage

Result = TypeVar("Result")

SLOTS, WAYS = 256, 8
"""Records of the file, and the ones among which a partition has its own; a new one replaces the oldest of these."""

FORGET_SECONDS = 600.0
STUCK_SECONDS = 2.0
LAYOUT = 4
"""Version of RECORD, and of the meaning of its fields: part of the file's name, as releases that run side by side on a
node would misread the records of one another. The name of version 1 had none."""

RECORD = struct.Struct(f"=16s{len(fields(RequestRate))}d")

THROTTLED_SECONDS = 1.0
"""Time for which a process counts as throttled after a request of it had to wait."""

logger = logging.getLogger(__name__)


def is_throttled() -> bool:
    """Return whether requests of this process wait for a rate, or did a moment ago."""
    return time.monotonic() < _throttled_until.get(os.getpid(), 0.0)


_throttled_until: dict[int, float] = {}
"""Process -> until when it counts as throttled, by `time.monotonic`."""


class NodeRates:
    """Rates by partition. Only one thread may use it.

    Args:
        path: file of the rates; None: they are of this process only.
    """

    def __init__(self, path: str | None) -> None:
        self._own: dict[bytes, RequestRate] = {}
        self._file: _RatesFile | None = None
        self._stuck_since: float | None = None
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                self._file = _RatesFile(path)

    @property
    def is_shared(self) -> bool:
        """True if other processes of the node may use the same rates."""
        return self._file is not None

    def change(
        self, partition: str, new: Callable[[], RequestRate], change: Callable[[RequestRate, float, float], Result]
    ) -> Result | None:
        """Return `change(rate, now, wall time)`, which changes a rate; None if another process is changing one.

        Args:
            partition: name of the partition.
            new: returns the rate of a partition without one.
        """
        key = _key(partition)
        if self._file is None:
            now = time.monotonic()
            rate = self._own.setdefault(key, _begun(new(), now))
            return change(rate, now, time.time())
        if not self._file.try_lock():
            self._stuck_since = self._stuck_since or time.monotonic()
            if time.monotonic() > self._stuck_since + STUCK_SECONDS:
                self.close()
            return None
        self._stuck_since = None
        try:
            now = time.monotonic()
            slot, stored = self._file.find(key, now)
            rate = stored or _begun(new(), now)
            result = change(rate, now, time.time())
            self._file.store(slot, key, rate)
            return result
        finally:
            self._file.unlock()

    def note_waiting(self, now: float, seconds: float, rate: RequestRate) -> None:
        """Count seconds in which requests of this process waited for a rate."""
        _throttled_until[os.getpid()] = now + THROTTLED_SECONDS
        add_usage(
            {
                "throttled_seconds": seconds,
                "throttled_allowed": rate.limit * seconds,
                "throttled_served": rate.goodput * seconds,
                "throttled_alone": 0.0 if self.is_shared else seconds,
            }
        )

    def log_throttling(self, partition: str, waited_seconds: float, rate: RequestRate) -> None:
        """Log that a store throttles this process."""
        sharing = "the processes of this node send" if self.is_shared else "this process alone sends"
        logger.warning(
            "%s: throttled for %.1f of the last 10 s: serves %.0f requests/s, refuses %.1f %%; %s %.0f/s at most, "
            "and reads ahead no further. Fewer requests: BINIDX_CACHE_DIR, a baked run; the limit of a store: "
            "binidx plan --tokens-per-second",
            *(redacted(partition), waited_seconds, rate.goodput, 100 * rate.refused_share, sharing, rate.limit),
        )

    def forget(self) -> None:
        """Remove all rates, those of other processes, too."""
        self._own.clear()
        if self._file is not None:
            self._file.map[:] = bytes(len(self._file.map))

    def close(self) -> None:
        """Go on with rates of this process only."""
        if self._file is not None:
            self._file.close()
        self._file = None


class _RatesFile:
    """The mapped file, in a directory of this user; both are made if they are missing.

    Raises:
        OSError: they belong to another user, who could change them, or are no file and directory.
    """

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path), 0o700)
        _check_private(os.lstat(os.path.dirname(path)), stat.S_ISDIR)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _check_private(os.fstat(self._descriptor), stat.S_ISREG)
            os.ftruncate(self._descriptor, SLOTS * RECORD.size)
            self.map = mmap.mmap(self._descriptor, SLOTS * RECORD.size)
        except BaseException:
            os.close(self._descriptor)
            raise

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def find(self, key: bytes, now: float) -> tuple[int, RequestRate | None]:
        """Return the slot of a partition, and its rate if there is a valid one."""
        first = int.from_bytes(key[:2], "little")
        ages: dict[int, float] = {}
        for slot in ((first + way) % SLOTS for way in range(WAYS)):
            stored, *values = RECORD.unpack_from(self.map, slot * RECORD.size)
            rate = RequestRate(*values)
            age = now - rate.updated
            ages[slot] = age if -1 <= age < FORGET_SECONDS and rate.is_possible() else FORGET_SECONDS
            if stored == key and ages[slot] < FORGET_SECONDS:
                return slot, rate
        return max(ages, key=ages.__getitem__), None

    def store(self, slot: int, key: bytes, rate: RequestRate) -> None:
        RECORD.pack_into(self.map, slot * RECORD.size, key, *vars(rate).values())

    def close(self) -> None:
        self.map.close()
        os.close(self._descriptor)


def _begun(rate: RequestRate, now: float) -> RequestRate:
    rate.updated = now
    return rate


def node_rates() -> NodeRates:
    """Return the rates of this process, which it shares with others of its node if it can."""
    return _node_rates(os.getpid())


@functools.cache
def _node_rates(pid: int) -> NodeRates:
    rates = NodeRates(default_path())
    os.register_at_fork(after_in_child=rates.close)  # a child would hold a lock of its dead parent
    return rates


def default_path() -> str | None:
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(directory, f"binidx-{os.getuid()}", f"request-rates-v{LAYOUT}-{os.uname().nodename}")


def _check_private(status: os.stat_result, is_right_type: Callable[[int], bool]) -> None:
    if not is_right_type(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError("not private to this user")


@functools.lru_cache(4096)
def _key(partition: str) -> bytes:
    return hashlib.blake2b(partition.encode(errors="surrogatepass"), digest_size=16).digest()
