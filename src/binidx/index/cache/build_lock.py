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

These are shells: `lease` decides what a waiting process does, and effects say how it is done: see `storage.steps`.

Price: while 1,000 nodes wait, 500 requests a second for one small object: see docs/explanation/many-nodes.md.
"""

from __future__ import annotations

import contextlib
import json
import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from binidx.errors import BinidxError, PeerError, StorageError, warn_once
from binidx.index.cache import lease as leases
from binidx.index.cache.index_files import Arrays
from binidx.index.cache.lease import LEASE_FILE, NO_LEASE, LeaseRecord, LeaseWait, parse_lease_record
from binidx.storage import effects
from binidx.storage.cache.block_files import lock_path
from binidx.storage.cache.node_lock import NodeLock, enter
from binidx.storage.effects import Steps, run, suppressed
from binidx.storage.location import Location

SLICE_SECONDS, LAST_BEAT_SECONDS = 0.1, 5.0
"""Time between two checks of a waiting process, and the longest wait of a holder for its last renewal."""

Check = Callable[[bool], None]
Checks = tuple[Check, ...]
"""Functions that are called while a process waits; an exception ends the wait. Called with False, a check is cheap and
may notice an error late; with True it is exact, as needed before work at which another process may have failed."""

Built = tuple[Arrays, bool]
"""Built arrays, and whether they are published."""


@dataclass(frozen=True)
class Lease:
    """Lease in an object. `beat_seconds` and `dead_seconds` are as of `lease`.

    None of its requests is patient: it expires sooner than an outage ends, and all nodes can do without it.
    """

    location: Location
    beat_seconds: ClassVar[float] = leases.BEAT_SECONDS
    dead_seconds: ClassVar[float] = leases.DEAD_SECONDS

    def read(self) -> Steps[LeaseRecord]:
        """Return the record, in one request; `NO_LEASE` if there is none."""
        data = yield from effects.ReadObject(self.location, patient=False)
        return NO_LEASE if data is None else parse_lease_record(data)

    def write(self, record: LeaseRecord) -> Steps[None]:
        yield from effects.WriteObject(self.location, LEASE_FILE.encode(record), patient=False)

    def remove(self) -> Steps[None]:
        """Delete the lease, of whatever holder."""
        yield from effects.DeleteObject(self.location, patient=False)

    def acquire(self, node: str = "") -> Steps[HeldLease | None]:
        """Acquire the lease; return None if another process holds it.

        Raises:
            StorageError: the store refuses to write.
        """
        record = yield from new_lease_record(node)
        return HeldLease(self, record) if (yield from self._put(record)) else None

    def take_over(self, ended: LeaseRecord, node: str = "") -> Steps[HeldLease | None]:
        """Acquire the lease of an ended holder; return None if another process takes it over.

        Args:
            ended: record of the lease, whose holder has ended.
            node: name of the node lock that this process holds; empty for none.

        Raises:
            StorageError: the store refuses to write.
        """
        record, marker = (yield from new_lease_record(node, ended.holder)), self._marker(ended.holder)
        if not (yield from marker._put(record)):
            other = yield from marker.read()
            if not node or other.node != node:
                return None
            # Killed while it took over: this process holds the node lock that the other one had.
            yield from self.remove_marker(ended)
            if not (yield from marker._put(record)):
                return None
        try:
            # It has another holder by now if a process took over before, and has removed its marker already; and
            # another beat if its holder is at work after all.
            if (yield from self.read()) not in (ended, NO_LEASE):
                return None
            yield from self.write(record)
            return HeldLease(self, record)
        finally:
            yield from self.remove_marker(ended)

    def remove_marker(self, ended: LeaseRecord) -> Steps[None]:
        """Remove the marker of a takeover from `ended`, so that others can take over if the marker's process died.

        Also that of the takeover by `ended`, which leaves it if it is killed right after it has rewritten the lease.
        """
        for holder in filter(None, (ended.after, ended.holder)):
            yield from suppressed(self._marker(holder).remove())

    def _marker(self, holder: str) -> Lease:
        return Lease(self.location + f"-after-{holder}")

    def _put(self, record: LeaseRecord) -> Steps[bool]:
        return (yield from effects.PutIfAbsent(self.location, LEASE_FILE.encode(record), patient=False))


def new_lease_record(node: str, after: str = "") -> Steps[LeaseRecord]:
    """Return the record of a new holder."""
    return LeaseRecord((yield from effects.NewName()), where=(yield from effects.ProcessName()), node=node, after=after)


@dataclass
class HeldLease:
    """Lease that this process holds until the block ends; an exception is recorded in the lease, for waiting nodes.

    Attributes:
        published: set it to False in the block if other nodes cannot use the result.
    """

    lease: Lease
    record: LeaseRecord
    published: bool = True

    def __enter__(self) -> HeldLease:
        run(self.begin())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        run(self.end(error))

    def begin(self) -> Steps[None]:
        """Begin to renew the lease."""
        self._ended = yield from effects.NewSignal()
        self._renewals = yield from effects.Start(self._renew(), "binidx-lease")

    def end(self, error: BaseException | None) -> Steps[None]:
        """Release the lease, or record an error in it."""
        yield from effects.SetSignal(self._ended)
        if not (yield from effects.WaitForTask(self._renewals, LAST_BEAT_SECONDS)):
            return  # a renewal on its way to a store that stalls could arrive after the last record: let it expire
        try:
            if isinstance(error, Exception):
                text = "".join(traceback.format_exception(error))
                yield from self.lease.write(replace(self.record, state=leases.FAILED, error=text))
            elif error is None and not self.published:
                yield from self.lease.write(replace(self.record, state=leases.UNPUBLISHED))
            else:
                yield from self.lease.remove()
        except StorageError as problem:
            expires = f"{self.lease.location}: not released, expires in {self.lease.dead_seconds:.0f} s: {problem}"
            yield from effects.Log(__name__, logging.INFO, expires)

    def _renew(self) -> Steps[None]:
        while not (yield from effects.WaitForSignal(self._ended, self.lease.beat_seconds)):
            self.record = replace(self.record, beat=self.record.beat + 1)
            try:
                yield from self.lease.write(self.record)
            except StorageError as problem:
                yield from effects.Log(__name__, logging.DEBUG, f"{self.lease.location}: not renewed: {problem}")


@dataclass(frozen=True)
class BuildLock:
    """Lock under which one of all processes builds and publishes arrays, while the others wait, then load them.

    Args:
        manifest: the file that makes the arrays valid. The lease is beside it.
        load: returns the arrays, or None if they are missing; may be called often.
        build: builds and publishes the arrays. Failing to publish them is no error.
        checks: called while this process waits; an exception ends the wait.

    Attributes:
        waits: leases for which this process waits now.
    """

    manifest: Location
    load: Callable[[], Arrays | None]
    build: Callable[[], Built]
    checks: Checks = ()
    waits: ClassVar[list[Lease]] = []

    def build_or_wait(self) -> Arrays:
        """Build the missing arrays, or wait for the process that builds them; return them.

        Raises:
            PeerError: the other process failed to build them.
        """
        return run(self.steps())

    def steps(self) -> Steps[Arrays]:
        """Do `build_or_wait`."""
        while True:
            yield from self._check()
            lock = yield from enter(lock_path(self.manifest), self._check)
            if lock.first:
                try:
                    arrays = yield from self._load_or_build_first(lock)
                finally:
                    yield from lock.leave()
                must_build = arrays is None
            else:
                message = parse_message(lock.message)
                if "failed" in message:
                    raise PeerError(message["failed"])
                must_build = "alone" in message
                arrays = None if must_build else (yield from effects.Call(self.load))
            if arrays is not None:
                return arrays
            if must_build:
                return (yield from effects.Call(self.build))[0]

    def remove_lease_of_killed_process(self) -> bool:
        """Remove the lease of a process of this node that was killed after it had published the arrays.

        Such a process leaves the file of its node lock, too, so without that file there is nothing to do.

        Returns:
            Whether there was such a lease.
        """
        if (local := self._claim.local_path) is not None and not Path(local).exists():
            return False
        path = lock_path(self.manifest)
        if path is None or not Path(path).exists():
            return False
        with contextlib.suppress(BinidxError, OSError):
            return run(self.removal(path))
        return False

    def removal(self, path: str) -> Steps[bool]:
        """Do `remove_lease_of_killed_process`, with the path of the file of the node lock."""
        lock, lease = (yield from enter(path, self._check, wait=False)), Lease(self._claim)
        try:
            record = (yield from lease.read()) if lock.node else NO_LEASE
            if not lock.node or record.node != lock.node:
                return False
            yield from lease.remove_marker(record)
            yield from lease.remove()
            return True
        finally:
            yield from lock.leave()

    @property
    def _claim(self) -> Location:
        return self.manifest + "-claim"

    def _check(self, exact: bool = False) -> Steps[None]:
        for check in self.checks:
            yield from effects.Call(check, (exact,))

    def _load_or_build_first(self, lock: NodeLock) -> Steps[Arrays | None]:
        """Return the arrays, loaded or built, as holder of the node lock; None: each process must build its own."""
        try:
            yield from self._check(exact=True)  # the holder before may have left since another rank failed
            arrays = yield from self._load_or_build_by_lease(lock)
        except Exception as error:
            # If a check raises, this is an interruption: the others of this node may be of another run.
            yield from suppressed(self._leave_failure(lock, error), Exception)
            raise
        if arrays is None:
            yield from let_others_build(lock)
        return arrays

    def _leave_failure(self, lock: NodeLock, error: Exception) -> Steps[None]:
        yield from self._check()
        text, where = str(error), f"process {(yield from effects.ProcessNumber())} of this node"
        if not isinstance(error, PeerError):
            text = describe_failure(self.manifest, where, traceback.format_exception(error))
        yield from lock.message_left(json.dumps({"failed": text}).encode())

    def _load_or_build_by_lease(self, lock: NodeLock) -> Steps[Arrays | None]:
        lease = Lease(self._claim)
        self.waits.append(lease)
        try:
            outcome = (yield from lease.acquire(lock.node)) or (yield from self._wait(lease, lock.node))
        except StorageError as error:
            directory = self.manifest.uri.rpartition("/")[0]
            problem = f"no lease on the index, so each node builds its own: {error}"
            yield from effects.Call(warn_once, (directory, problem))
            return None
        finally:
            self.waits.remove(lease)
        return (yield from self._build_with_lease(outcome, lock)) if isinstance(outcome, HeldLease) else outcome

    def _wait(self, lease: Lease, node: str) -> Steps[HeldLease | Arrays | None]:
        """Wait; return the arrays, or the acquired lease to build them with, or None to build them without a lease.

        Raises:
            PeerError: the holder failed.
            StorageError: the store refuses to write.
        """
        wait, began = LeaseWait(node, lease.beat_seconds, lease.dead_seconds), (yield from effects.Now())
        while True:
            wait.polled((yield from suppressed(lease.read())), (yield from effects.Now()))
            if wait.must_load and (arrays := (yield from effects.Call(self.load))) is not None:
                return arrays
            held, record = None, wait.record
            match wait.next_step():
                case "acquire":
                    held = yield from lease.acquire(node)
                case "take over":
                    yield from self._check(exact=True)
                    held = yield from lease.take_over(record, node)
                    wait.not_taken_over((yield from effects.Now()))
                case "raise":
                    raise PeerError(describe_failure(self.manifest, record.where, [record.error]))
                case "build alone":
                    yield from lease.remove_marker(record)
                    return None
            if held is not None:
                return held
            waited, is_remote = (yield from effects.Now()) - began, "://" in self.manifest.uri
            pause = leases.poll_pause_seconds(waited, len(self.waits), remote=is_remote)
            yield from self._sleep(pause * (yield from effects.Chance(0.75, 1.25)))

    def _sleep(self, seconds: float) -> Steps[None]:
        longest = SLICE_SECONDS if self.checks else seconds
        while seconds > 0:
            yield from self._check()
            yield from effects.Sleep(min(seconds, longest))
            seconds -= longest

    def _build_with_lease(self, held: HeldLease, lock: NodeLock) -> Steps[Arrays]:
        yield from held.begin()
        try:
            # The holder before may have published since the last load.
            arrays = yield from effects.Call(self.load)
            if arrays is None:
                arrays, held.published = yield from effects.Call(self.build)
                if not held.published:
                    yield from let_others_build(lock)
        except BaseException as error:
            yield from held.end(error)
            raise
        yield from held.end(None)
        return arrays


def parse_message(data: bytes) -> dict[str, Any]:
    """Return what the first process of a node has left; nothing if a kill has cut it."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(data or b"{}"))
    return {}


def let_others_build(lock: NodeLock) -> Steps[None]:
    """Make the waiting processes of this node build for themselves, all at the same time."""
    yield from lock.message_left(json.dumps({"alone": (yield from effects.ProcessNumber())}).encode())


def describe_failure(manifest: Location, where: str, trace: list[str]) -> str:
    return f"{manifest}: {where} was to build it, and failed:\n\n{''.join(trace).rstrip()}"
