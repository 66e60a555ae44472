"""Build lock: at most one process builds an index; others wait, and take over if it dies.

    load ─ found ───────────────────────────────────────────────────────────────► the arrays
      └ missing ─ node lock acquired? ─ no ── wait until it is free ────────────► load
                       └ yes ─ lease acquired? ─ yes ── build, publish ─────────► the arrays
                                    └ no ── poll the lease (one request a poll):
                                              released      load
                                              failed        PeerError, with the traceback
                                              unpublished   build without a lease
                                              expired       one node takes it over, and builds

Published arrays appear whole or not at all and are the same for every builder, so two may build at once: after a lease
was lost, in a store without put-if-absent, without file locks. In a store that cannot be written to there is no lease,
and every process builds for itself.

Price: while 1,000 nodes wait, 500 requests a second for one small object: see docs/explanation/many-nodes.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass

from binidx.errors import BinidxError, PeerError, StorageError, warn_once
from binidx.index.cache.index_files import Arrays
from binidx.index.cache.lease import (
    BUILDING,
    DEAD_SECONDS,
    FAILED,
    UNPUBLISHED,
    HeldLease,
    Lease,
    LeaseRecord,
    LeaseWatcher,
)
from binidx.storage.cache.block_files import lock_path
from binidx.storage.cache.node_lock import NodeLock, acquire_node_lock
from binidx.storage.location import Location

FIRST_PAUSE, FIRST_PAUSE_LOCAL, LONGEST_PAUSE, LONGEST_OF_MANY = 0.2, 0.01, 2.0, 30.0
"""Bounds, in seconds, of the pause between two polls of a lease, which is an eighth of the time waited: the shortest in
a store, the shortest on a local disk, the longest for each lease that this process waits for, and the longest for many.
(So a process that waits for n leases polls each n times less often.) In their first second, 1,000 nodes send a store
5,000 requests."""

SLICE_SECONDS = 0.1

Check = Callable[[bool], None]
Checks = tuple[Check, ...]
"""Functions that are called while a process waits; an exception ends the wait. Called with False, a check is cheap and
may notice an error late; with True it is exact, as needed before work at which another process may have failed."""

Built = tuple[Arrays, bool]
"""Built arrays, and whether they are published."""

_leases_waited_for: list[Lease] = []


def run_checks(checks: Checks, *, exact: bool = False) -> None:
    for check in checks:
        check(exact)


def is_interrupted(checks: Checks) -> bool:
    """Return whether a check raises: then an error of this process is an interruption and no failure of its own."""
    try:
        run_checks(checks)
    except Exception:
        return True
    return False


@dataclass(frozen=True)
class BuildLock:
    """Lock under which one of all processes builds and publishes arrays, while the others wait, then load them.

    Args:
        manifest: the file that makes the arrays valid. The lease is beside it.
        load: returns the arrays, or None if they are missing; may be called often.
        build: builds and publishes the arrays. Failing to publish them is no error.
        checks: called while this process waits; an exception ends the wait.
    """

    manifest: Location
    load: Callable[[], Arrays | None]
    build: Callable[[], Built]
    checks: Checks = ()

    def build_or_wait(self) -> Arrays:
        """Build the missing arrays, or wait for the process that builds them; return them.

        Raises:
            PeerError: the other process failed to build them.
        """
        while True:
            run_checks(self.checks)
            arrays, alone = self._attempt()
            if arrays is not None:
                return arrays
            if alone:
                return self.build()[0]

    def remove_lease_of_killed_process(self) -> bool:
        """Remove the lease of a process of this node that was killed after it had published the arrays.

        Such a process leaves the file of its node lock, too, so without that file there is nothing to do.

        Returns:
            Whether there was such a lease.
        """
        if (local := self._claim.local_path) is not None and not os.path.exists(local):
            return False
        path = lock_path(self.manifest)
        if path is None or not os.path.exists(path):
            return False
        with contextlib.suppress(BinidxError, OSError), acquire_node_lock(path, wait=False) as lock:
            lease = Lease(self._claim)
            if lock.node and (record := lease.read()) is not None and record.node == lock.node:
                lease.remove_marker(record)
                lease.remove()
                return True
        return False

    @property
    def _claim(self) -> Location:
        return self.manifest + "-claim"

    def _attempt(self) -> tuple[Arrays | None, bool]:
        """Return the arrays or None, and whether this process must build them by itself; (None, False): try again."""
        with acquire_node_lock(lock_path(self.manifest), lambda: run_checks(self.checks)) as lock:
            if lock.first:
                arrays = self._load_or_build_first(lock)
                return arrays, arrays is None
        message = json.loads(lock.message or "{}")
        if "failed" in message:
            raise PeerError(message["failed"])
        return (None, True) if "alone" in message else (self.load(), False)

    def _load_or_build_first(self, lock: NodeLock) -> Arrays | None:
        """Return the arrays, loaded or built, as holder of the node lock; None: each process must build its own."""
        try:
            run_checks(self.checks, exact=True)  # the holder before may have left since another rank failed
            arrays = self._load_or_build_by_lease(lock)
        except Exception as error:
            if not is_interrupted(self.checks):  # the others of this node may be of another run
                text, where = str(error), f"process {os.getpid()} of this node"
                if not isinstance(error, PeerError):
                    text = describe_failure(self.manifest, where, traceback.format_exception(error))
                lock.leave_message(json.dumps({"failed": text}).encode())
            raise
        if arrays is None:
            let_others_build(lock)
        return arrays

    def _load_or_build_by_lease(self, lock: NodeLock) -> Arrays | None:
        lease = Lease(self._claim)
        _leases_waited_for.append(lease)
        try:
            outcome = lease.acquire(lock.node) or self._wait(lease, lock.node)
        except StorageError as error:
            directory = self.manifest.uri.rpartition("/")[0]
            warn_once(directory, f"no lease on the index, so each node builds its own: {error}")
            return None
        finally:
            _leases_waited_for.remove(lease)
        return self._build_with_lease(outcome, lock) if isinstance(outcome, HeldLease) else outcome

    def _wait(self, lease: Lease, node: str) -> HeldLease | Arrays | None:
        """Wait; return the arrays, or the acquired lease to build them with, or None to build them without a lease.

        Raises:
            PeerError: the holder failed.
            StorageError: the store refuses to write.
        """
        watcher, passed, began = LeaseWatcher(lease), set[str](), time.monotonic()
        while True:
            record = watcher.poll()
            if record is None or watcher.silent_seconds > 2 * lease.beat_seconds:
                arrays = self.load()
                if arrays is not None:
                    return arrays
            held: HeldLease | None = None
            if record is None:
                held = lease.acquire(node)
            elif record.state == FAILED and watcher.seen_at_work:
                raise PeerError(describe_failure(self.manifest, record.where, [record.error]))
            elif must_build_alone(record, watcher, passed):
                lease.remove_marker(record)
                return None
            elif record.holder not in passed and has_ended(record, watcher, node):
                passed.add(record.holder)
                run_checks(self.checks, exact=True)
                held = lease.take_over(record, node)
                watcher.restart_clock()
            if held is not None:
                return held
            waited, num_waits = time.monotonic() - began, len(_leases_waited_for)
            _sleep(poll_pause_seconds(waited, num_waits, remote="://" in self.manifest.uri), self.checks)

    def _build_with_lease(self, held: HeldLease, lock: NodeLock) -> Arrays:
        with held:
            # The holder before may have published since the last load.
            arrays = self.load()
            if arrays is None:
                arrays, held.published = self.build()
                if not held.published:
                    let_others_build(lock)
            return arrays


def has_ended(record: LeaseRecord, watcher: LeaseWatcher, node: str) -> bool:
    """Return whether the holder of a lease has ended; earlier holders of `node`, this process's node lock, have.

    Args:
        record: present record of the lease.
        watcher: its polls so far.
        node: name of the node lock that this process holds; empty for none.
    """
    return record.state != BUILDING or (node != "" and record.node == node) or watcher.silent_seconds > DEAD_SECONDS


def must_build_alone(record: LeaseRecord, watcher: LeaseWatcher, passed: Collection[str]) -> bool:
    """Return whether this process must build without a lease.

    That is so if the arrays cannot be published, or if the lease is still that of an ended holder in `passed`: the
    node that was taking it over has died, too.

    Args:
        record: present record of the lease.
        watcher: its polls so far.
        passed: holders from which this process has already tried to take over.
    """
    if record.state == UNPUBLISHED and watcher.seen_at_work:
        return True
    return record.holder in passed and watcher.silent_seconds > DEAD_SECONDS


def let_others_build(lock: NodeLock) -> None:
    """Make the waiting processes of this node build for themselves, all at the same time."""
    lock.leave_message(json.dumps({"alone": os.getpid()}).encode())


def poll_pause_seconds(waited_seconds: float, num_waits: int, *, remote: bool = True) -> float:
    """Return the seconds until the next poll of a lease: an eighth of the time waited, bounded, and varied by 25 %.

    Args:
        waited_seconds: time since the wait began.
        num_waits: leases for which this process waits now.
        remote: whether the lease is in a store, and not on a disk.
    """
    longest = min(LONGEST_PAUSE * max(num_waits, 1), LONGEST_OF_MANY)
    first = FIRST_PAUSE if remote else FIRST_PAUSE_LOCAL
    return min(max(waited_seconds / 8, first), longest) * random.uniform(0.75, 1.25)


def describe_failure(manifest: Location, where: str, trace: list[str]) -> str:
    return f"{manifest}: {where} was to build it, and failed:\n\n{''.join(trace).rstrip()}"


def _sleep(seconds: float, checks: Checks) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        run_checks(checks)
        time.sleep(min(left, SLICE_SECONDS))
