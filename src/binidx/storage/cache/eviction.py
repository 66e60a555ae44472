"""Quota of a cache directory: how many bytes its processes may write, and which blocks are evicted for them.

    record     used        bytes of all blocks, and those that processes have reserved and not written yet
               counted_at  when the blocks were counted
               failed_at   when an eviction last failed to free enough

    reserve ── paused ─────────────────────────────────────────────► none
       │ within the limit, count included ─────────────────────────► reserved
       │ an eviction of any process failed within ten seconds ─────► none, and a pause of ten seconds
       └ evict, one process at a time: count all blocks, remove ───► reserved, or none and a pause
         the least recently used ones
    write      reserved bytes become a file: they stay in `used`
    end        bytes that were not written leave `used`

Every process adds the bytes that it is about to write to the record, so the quota holds over all processes although
none of them counts 10,000 files for each chunk. A count is of the files, and of what its own process has reserved and
not written yet: it corrects the sum after a killed process. What other processes have reserved is left out; they add
what they have written when their reservation ends, as they see the time of another count in the record. So once all is
written the sum is never too small; it may be too large until the next count.

An eviction frees a sixteenth of the quota more than it must, so that evictions are rare. Blocks that any process has
mapped stay, and those that a filling of this process needs later (`fill_plan`). If all do, or the disk is full of other
files, reads go on without caching, and caching is tried again after ten seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from binidx.storage.steps import Call, Now, Steps

FREED_PART = 16


@dataclass(frozen=True)
class BlockFile:
    """File of a block: its bytes on the disk, and when it was last used."""

    path: str
    num_bytes: int
    used_at: float


@dataclass(frozen=True)
class Usage:
    """Record of a directory, which all processes share; times are of the wall clock."""

    used: int = 0
    counted_at: float = 0.0
    failed_at: float = 0.0

    def plus(self, count: int) -> Usage:
        return Usage(max(0, self.used + count), self.counted_at, self.failed_at)


@dataclass(eq=False)
class Reservation:
    """Bytes that a thread may write.

    Attributes:
        count: of them, those that no count of the blocks has seen as a file.
        left: those that it has not written yet.
        counted_at: `Usage.counted_at` of the last count that includes them; -1: none yet.
    """

    count: int
    left: int
    counted_at: float = -1.0


Change = Callable[[Usage, float], Usage]
"""Return the new record, from the old one and the time of the wall clock."""


class QuotaFiles(Protocol):
    """Files of a quota, for the threads and processes that share them: `quota_files.QuotaDirectory`, or simulated ones.

    Attributes:
        read: returns the record, and the time of the wall clock.
        disk_excess: returns the bytes that the file system lacks for the part that a cache without a limit leaves free.
        update: changes the record in one step; returns the new one, and the time.
        count: replaces the record by a function of the bytes of all blocks and the time, while no thread of this
            process writes; returns the blocks, and the new record.
        write: calls two functions for the directory of an object, to write and then to note that, while no other thread
            counts, or writes to the same object.
        begin_eviction: waits until no other thread or process evicts, then returns True; False after some seconds.
        remove: removes a block unless a process uses it; returns whether it is gone.
        release: unmaps blocks of this process.
        renew_locks: renews the locks in a forked child.
        warn: logs a problem of the directory.
    """

    def read(self) -> tuple[Usage, float]: ...
    def disk_excess(self) -> int: ...
    def update(self, change: Change) -> tuple[Usage, float]: ...
    def count(self, change: Callable[[int, float], Usage]) -> tuple[list[BlockFile], Usage]: ...
    def write(self, path: str, write: Callable[[], None], written: Callable[[], None]) -> None: ...
    def begin_eviction(self) -> bool: ...
    def end_eviction(self) -> None: ...
    def remove(self, path: str) -> bool: ...
    def release(self) -> None: ...
    def renew_locks(self) -> None: ...
    def warn(self, problem: str) -> None: ...


def evict(
    blocks: Sequence[BlockFile],
    excess: float,
    remove: Callable[[str], bool],
    is_kept: Callable[[str], bool] = lambda path: False,
) -> Steps[list[tuple[BlockFile, bool]]]:
    """Remove the least recently used blocks, `excess` bytes in all; return each with whether it was removed.

    A block in use stays, and does not count.

    Args:
        excess: bytes on the disk to remove; math.inf: all.
        remove: removes a block unless it is in use; returns whether it is gone.
        is_kept: whether a block is to stay; asked last of all, as a filling may need one that it did not before.
    """
    tried = []
    for block in sorted(blocks, key=lambda block: (block.used_at, block.path)):
        if excess <= 0:
            break
        if not is_kept(block.path):
            removed = yield Call(remove, (block.path,))
            excess -= block.num_bytes if removed else 0
            tried.append((block, removed))
    return tried


class CacheQuota:
    """Quota of one cache directory in this process.

    Args:
        files: of the directory.
        limit: bytes of all blocks; None: as many as leave a tenth of the file system free.
        pause_seconds: time without caching, and without another eviction of any process, after one that failed.
        count_again_seconds: longest age of a count of all blocks.

    Attributes:
        keepers: return whether a filling of this process needs a block later, by its path; such blocks stay.
        paused_until, pause_reason: when caching goes on, and why it was stopped last; "" if it never was.
    """

    def __init__(
        self, files: QuotaFiles, limit: int | None, pause_seconds: float = 10.0, count_again_seconds: float = 3600.0
    ) -> None:
        self.files, self.limit = files, limit
        self.pause_seconds, self.count_again_seconds = pause_seconds, count_again_seconds
        self.paused_until, self.pause_reason = 0.0, ""
        self._forget_threads()

    def after_fork(self) -> None:
        """Forget fillings and reservations: those of the parent process have no threads in the child."""
        self._forget_threads()
        self.files.renew_locks()

    def _forget_threads(self) -> None:
        self.keepers: list[Callable[[str], bool]] = []
        self.reservations: set[Reservation] = set()

    @property
    def coming(self) -> int:
        """Bytes that threads of this process have reserved and not written yet."""
        return sum([reservation.left for reservation in tuple(self.reservations)])

    def reserve(self, count: int) -> Steps[Reservation | None]:
        """Reserve bytes to be written, evicting blocks if need be; return None if there is no room.

        The caller ends the reservation, in any case.
        """
        if (yield Now()) < self.paused_until:
            return None
        reservation, has_room = Reservation(count, count), False
        try:
            has_room = yield from self._begin(reservation)
        except OSError as error:
            yield Call(self.files.warn, (f"usage unknown, reads go on without being cached: {error}",))
        finally:
            if not has_room:
                yield from self.end(reservation)
        if has_room:
            return reservation
        others = "its file system is full of other files"
        yield from self.pause(others if self.limit is None else "everything in it is in use")
        return None

    def write(self, path: str, write: Callable[[], None], count: int, reservation: Reservation | None) -> Steps[None]:
        """Write bytes of an object; reserved ones count as a file from then on, and are not coming.

        Args:
            path: of the object's directory.
            write: writes them; FileNotFoundError: nothing was written. What another failure has left is not known, so
                it counts as written until the next count.
            count: of the bytes.
            reservation: that they are a part of; None: they replace bytes that are counted already.
        """

        def written() -> None:
            if reservation is not None:
                reservation.left -= count

        try:
            yield Call(self.files.write, (path, write, written))
        except FileNotFoundError:
            raise
        except OSError:
            written()
            raise

    def end(self, reservation: Reservation) -> Steps[None]:
        """Return the bytes to the quota that were reserved and not written."""

        def change(usage: Usage, now: float) -> Usage:
            self.reservations.discard(reservation)
            is_included = usage.counted_at == reservation.counted_at
            return usage.plus(-reservation.left if is_included else reservation.count - reservation.left)

        with contextlib.suppress(OSError):
            yield from self._update(change)
        self.reservations.discard(reservation)

    def pause(self, why: str) -> Steps[None]:
        """Stop caching for ten seconds; log a warning, once for a directory in a process."""
        self.paused_until, self.pause_reason = (yield Now()) + self.pause_seconds, why
        bound = "a tenth of the disk free" if self.limit is None else f"{self.limit} bytes"
        yield Call(self.files.warn, (f"{why} (bound: {bound}); reads go on without being cached",))

    def recount(self) -> Steps[tuple[list[BlockFile], Usage]]:
        """Count the bytes of all blocks anew, store the sum plus the coming bytes, and return the blocks."""

        def change(num_bytes: int, now: float) -> Usage:
            for reservation in tuple(self.reservations):
                reservation.counted_at, reservation.count = now, reservation.left
            return Usage(num_bytes + self.coming, now)

        counted: tuple[list[BlockFile], Usage] = yield Call(self.files.count, (change,))
        return counted

    def excess(self) -> int:
        """Return the bytes above the quota, with those that are coming; negative if bytes are left."""
        return self._excess(self.files.read()[0])

    def capacity(self) -> int:
        """Return the bytes that the directory may hold, with those that it holds now."""
        usage, _ = self.files.read()
        return usage.used - self._excess(usage)

    def _excess(self, usage: Usage) -> int:
        return usage.used - self.limit if self.limit is not None else self.files.disk_excess() + self.coming

    def _begin(self, reservation: Reservation) -> Steps[bool]:
        """Add a reservation to the record; return whether it has room, by an eviction if need be."""

        def change(usage: Usage, now: float) -> Usage:
            reservation.counted_at = usage.counted_at
            self.reservations.add(reservation)
            return usage.plus(reservation.count)

        usage, now = yield from self._update(change)
        if self._excess(usage) <= 0:
            return True
        return not self._failed_lately(usage, now) and (yield from self._free_space())

    def _update(self, change: Change) -> Steps[tuple[Usage, float]]:
        """Change the record; count anew if the last count is too old."""
        usage, now = yield Call(self.files.update, (change,))
        if not 0 <= now - usage.counted_at <= self.count_again_seconds:
            _, usage = yield from self.recount()
        return usage, now

    def _failed_lately(self, usage: Usage, now: float) -> bool:
        """Return whether an eviction of any process has failed to free enough in the last ten seconds."""
        return 0 <= now - usage.failed_at < self.pause_seconds

    def _free_space(self) -> Steps[bool]:
        """Evict blocks, or wait until another process has done so; return whether what was reserved has room now.

        What others reserve meanwhile is their excess.
        """
        if not (yield Call(self.files.begin_eviction)):
            return self.excess() <= 0
        try:
            usage, now = self.files.read()
            if self._excess(usage) <= 0 or self._failed_lately(usage, now):
                return self._excess(usage) <= 0
            return (yield from self._evict())
        finally:
            yield Call(self.files.end_eviction)

    def _evict(self) -> Steps[bool]:
        yield Call(self.files.release)
        blocks, usage = yield from self.recount()
        total = sum(block.num_bytes for block in blocks) if self.limit is None else self.limit
        excess = self._excess(usage)
        goal = excess + total // FREED_PART if excess > 0 else 0
        tried = yield from evict(blocks, goal, self.files.remove, lambda path: any(keep(path) for keep in self.keepers))
        freed = sum(block.num_bytes for block, removed in tried if removed)
        is_enough = freed >= excess

        def change(latest: Usage, now: float) -> Usage:
            has_recounted = latest.counted_at != usage.counted_at  # another process, some removed blocks among them
            left = latest.plus(0 if has_recounted else -freed)
            return left if is_enough else Usage(left.used, left.counted_at, now)

        yield Call(self.files.update, (change,))
        return is_enough
