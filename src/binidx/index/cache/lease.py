"""Lease: an object in a store that gives one of many nodes the right to build, and shows by its changes that it lives.

    {"holder": "9f3c...", "state": "building", "beat": 7, "where": "node7, process 4242", "node": "...", "error": "",
     "after": "77ab..."}

    acquire      put-if-absent: one of many succeeds. A store without conditional writes lets two succeed
    renew        rewritten every `BEAT_SECONDS` by a thread of the holder
    release      deleted; where objects cannot be deleted it expires
    failed       "failed", with the traceback: for the waiting nodes that saw it held
    unpublished  the work is done, but cannot be published: for the waiting nodes that saw it held
    take over    of the nodes that find it expired, or ended by an earlier run, one puts `{uri}-after-{holder}` and
                 rewrites the lease, if it is still the same

It only saves work: a node that cannot write it, or waited too long, works without. So two nodes must be able to do the
work at once. A waiting process polls it. `LeaseWait` decides what it does after a poll:

    poll                                                next step
    no lease                                            load, else acquire it
    the same record for two beats                       load, else as below
    failed, and seen at work before                     raise its error
    unpublished, and seen at work before                build alone
    failed or unpublished, by an earlier run            ) take over, once for each record; if it is still there after
    of an earlier holder of this process's node lock    ) `DEAD_SECONDS`, the node that was taking over has died, too:
    the same record for `DEAD_SECONDS`: it has expired  ) build alone
    any other                                           pause

No clocks are compared: a record has expired if it did not change by the clock of the waiting process, and is still the
same once that process has put its marker. So a process that was stopped, or cut off from the store, for a while takes
nothing from a living holder.

Without a lease every node would build the index and upload all of its arrays to the same names. Two nodes that shared
the cores of one machine started in 6.0 s that way and in 4.6 s with a lease, and sent 34 PUTs instead of 19 (2.5
million sequences, four epochs). On cores of their own the times would be closer, but the uploads grow with the number
of nodes, and GCS takes one write a second of an object.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import xxhash

from binidx.errors import FormatError
from binidx.json_models import JsonFile, tolerate_all

BUILDING, FAILED, UNPUBLISHED, ABSENT = "building", "failed", "unpublished", "absent"

BEAT_SECONDS = 3.0
"""Time between two renewals; GCS takes one write a second of an object."""

DEAD_SECONDS = 20.0
"""Time after which a lease that does not change expires: six renewals, as a store may stall or a machine swap."""

FIRST_PAUSE, FIRST_PAUSE_LOCAL, LONGEST_PAUSE, LONGEST_OF_MANY = 0.2, 0.01, 2.0, 30.0
"""Bounds, in seconds, of the pause between two polls of a lease, which is an eighth of the time waited: the shortest in
a store, the shortest on a local disk, the longest for each lease that this process waits for, and the longest for many.
(So a process that waits for n leases polls each n times less often.) In their first second, 1,000 nodes send a store
5,000 requests."""

NameInPath = Annotated[str, msgspec.Meta(pattern="^[^/]*$")]

NextStep = Literal["acquire", "take over", "raise", "build alone", "pause"]


@dataclass(frozen=True)
class LeaseRecord:
    """Content of a lease.

    Args:
        holder: unique name of one acquisition.
        state: BUILDING, FAILED or UNPUBLISHED. (ABSENT: there is no lease.)
        beat: number of renewals.
        where: machine and process, for people.
        node: name of the node lock that the holder has; empty: none. See `node_lock`.
        error: traceback of a failed build.
        after: holder from which the lease was taken over; empty: none.
    """

    holder: NameInPath
    state: str = BUILDING
    beat: int = 0
    where: str = ""
    node: str = ""
    error: str = ""
    after: NameInPath = ""


NO_LEASE = LeaseRecord("", ABSENT)
LEASE_FILE = JsonFile(LeaseRecord, tolerates=tolerate_all)


def parse_lease_record(data: bytes) -> LeaseRecord:
    """Return the record in the bytes of a lease.

    Damaged bytes give a record whose holder is a hash of them, so that this lease can be watched and taken over, too.
    """
    with contextlib.suppress(FormatError):
        record: LeaseRecord = LEASE_FILE.decode(data, "")
        if record.state != ABSENT:  # which no process writes
            return record
    return LeaseRecord(f"unknown-{xxhash.xxh3_64_hexdigest(data)}")


@dataclass
class LeaseWait:
    """Lease as one waiting process sees it; times are of its own clock.

    Args:
        node: name of the node lock that this process holds, whose earlier holders have ended; empty for none.
        beat_seconds, dead_seconds: as of the constants.

    Attributes:
        record: that of the last response.
        silent_seconds: time for which it has not changed.
    """

    node: str
    beat_seconds: float = BEAT_SECONDS
    dead_seconds: float = DEAD_SECONDS
    record: LeaseRecord = field(default=NO_LEASE, init=False)
    silent_seconds: float = field(default=0.0, init=False)
    _changed: float = field(default=0.0, init=False)
    _at_work: set[str] = field(default_factory=set, init=False)
    _tried: set[LeaseRecord] = field(default_factory=set, init=False)

    def polled(self, record: LeaseRecord | None, now: float) -> None:
        """Take note of the record that a poll has found; None: the store did not respond."""
        if record is not None and record != self.record:
            self.record, self._changed = record, now
        if self.record.state == BUILDING:
            self._at_work.add(self.record.holder)
        self.silent_seconds = now - self._changed

    def not_taken_over(self, now: float) -> None:
        """Take note that another process takes the lease over: its time begins."""
        self._changed = now

    @property
    def must_load(self) -> bool:
        """True if the arrays may have been published meanwhile: then load them before the next step."""
        return self.record.state == ABSENT or self.silent_seconds > 2 * self.beat_seconds

    def next_step(self) -> NextStep:
        """Return what to do after a poll, if the arrays are still missing."""
        record, is_expired = self.record, self.silent_seconds > self.dead_seconds
        if record.state == ABSENT:
            return "acquire"
        if record.state in (FAILED, UNPUBLISHED) and record.holder in self._at_work:
            return "raise" if record.state == FAILED else "build alone"
        if record in self._tried:
            return "build alone" if is_expired else "pause"
        if record.state == BUILDING and not is_expired and (record.node != self.node or not self.node):
            return "pause"
        self._tried.add(record)
        return "take over"


def poll_pause_seconds(waited_seconds: float, num_waits: int, *, remote: bool = True) -> float:
    """Return the seconds until the next poll of a lease, before jitter: an eighth of the time waited, bounded.

    Args:
        waited_seconds: time since the wait began.
        num_waits: leases for which this process waits now.
        remote: whether the lease is in a store, and not on a disk.
    """
    longest = min(LONGEST_PAUSE * max(num_waits, 1), LONGEST_OF_MANY)
    first = FIRST_PAUSE if remote else FIRST_PAUSE_LOCAL
    return min(max(waited_seconds / 8, first), longest)
