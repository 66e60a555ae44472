"""How far a job is, seen from elsewhere: by its records alone, whether it runs or has stopped. Nothing is written."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from binidx.errors import ObjectExistsError
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.machines import Machine, count_machines, pace, sizes_of
from binidx.prepare.preprocess.mark import difference, mark_of
from binidx.prepare.preprocess.places import Places
from binidx.prepare.preprocess.plan import Part, plan_parts
from binidx.prepare.preprocess.record import Record
from binidx.prepare.preprocess.run import finished, inputs_of, located, machines_of, read_records, unique
from binidx.redacted import redacted
from binidx.storage.publish import read_small


@dataclass(frozen=True)
class Status:
    """What is there.

    Attributes:
        finished: the datasets stand.
        total_bytes: stored bytes of all text; `done_bytes` of the parts that are done.
        bytes_per_second: of the last parts, all machines together.
        last_part_seconds: since the last part was done, by the clock of its machine.
        machines: name -> what it has done.
    """

    output: str
    finished: bool
    parts: int
    parts_done: int
    total_bytes: int
    done_bytes: int
    bytes_per_second: float | None
    last_part_seconds: float | None
    machines: dict[str, Machine]

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the last parts; None: nothing is known of it."""
        if self.finished or not self.bytes_per_second:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second

    def to_json(self) -> dict[str, Any]:
        """All of it as one JSON object."""
        return {**asdict(self), "seconds_left": self.seconds_left}


def status_of(job: Job) -> Status:
    """Look at a job that runs, or ran.

    Raises:
        ObjectExistsError: the parts that lie there are of another job.
    """
    job = located(job)
    parts = plan_parts(job, inputs_of(job))
    if manifests := finished(job, parts):
        return _finished(job, parts, manifests)
    _check_ours(job, parts)
    records = read_records(job, parts)
    # It may have ended in this moment: its records are gone then.
    manifests = finished(job, parts)
    return _finished(job, parts, manifests) if manifests else under_way(job, parts, records, time.time())


def under_way(job: Job, parts: Sequence[Part], records: Mapping[str, Record], now: float) -> Status:
    """Of a job that is not finished.

    Args:
        now: seconds since 1970.
    """
    sizes = sizes_of(parts)
    last = max((each.ended for each in records.values()), default=0.0)
    return Status(
        output=redacted(job.output),
        finished=False,
        parts=len(sizes),
        parts_done=len(records),
        total_bytes=sum(sizes.values()),
        done_bytes=sum(sizes[name] for name in records),
        bytes_per_second=pace(sizes, records.values()),
        last_part_seconds=max(0.0, now - last) if last else None,
        machines=count_machines(parts, records),
    )


def _finished(job: Job, parts: Sequence[Part], manifests: Mapping[str, dict[str, Any]]) -> Status:
    count, total = len(unique(parts)), sum(sizes_of(parts).values())
    return Status(redacted(job.output), True, count, count, total, total, None, None, machines_of(manifests))


def _check_ours(job: Job, parts: Sequence[Part]) -> None:
    uri, told = Places(job).job_uri, mark_of(job, parts)
    standing = read_small(uri, job.target_options)
    if standing not in (None, told):
        assert standing is not None
        raise ObjectExistsError(f"{uri}: parts of another job, {difference(standing, told)}; give its command")
