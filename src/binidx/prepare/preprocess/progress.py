"""Progress of a job, computed from the records of its finished parts, so that a killed worker loses no counts."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from binidx.format.sidecars.dataset_manifest import Machine
from binidx.prepare.preprocess.job_plan import Part
from binidx.prepare.preprocess.record import Record
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

RECENT_PARTS = 100
"""Number of last parts that determine the present speed: several rounds of the workers of a machine."""


def count_machines(parts: Iterable[Part], records: Mapping[str, Record]) -> dict[str, Machine]:
    """Return the counts of each machine by name; the name is "" for records of older versions."""
    sizes = part_sizes(parts)
    hosts = sorted({each.host for each in records.values()})
    return {host: _count_machine(sizes, [each for each in records.values() if each.host == host]) for host in hosts}


def part_sizes(parts: Iterable[Part]) -> dict[str, int]:
    """Return the stored bytes of each part's text, by the part's name."""
    return {part.name: part.num_bytes for part in parts}


def recent_speed(sizes: Mapping[str, int], records: Iterable[Record]) -> float | None:
    """Return the stored bytes per second of the last parts on all machines; None if it is unknown."""
    timed = sorted((each for each in records if each.ended), key=lambda each: each.ended)
    last, since = timed[-RECENT_PARTS:], timed[-RECENT_PARTS - 1].ended if len(timed) > RECENT_PARTS else 0.0
    busy = busy_seconds((max(each.ended - each.seconds, since), each.ended) for each in last)
    return sum(sizes[each.name] for each in last) / busy if busy else None


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the time that the spans cover together: the time between two runs does not count."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _count_machine(sizes: Mapping[str, int], records: Collection[Record]) -> Machine:
    timed = [each for each in records if each.ended]
    busy = busy_seconds((each.ended - each.seconds, each.ended) for each in timed)
    return Machine(
        parts=len(records),
        documents=sum(each.counts.num_documents for each in records),
        tokens=sum(each.num_tokens for each in records),
        stored_bytes=sum(sizes[each.name] for each in records),
        bytes_per_second=sum(sizes[each.name] for each in timed) / busy if busy else None,
    )


@dataclass(frozen=True)
class Progress:
    """State of a running job.

    Attributes:
        parts: parts of this run: all, or those of a shard. The other counts refer to them, but for `all_parts`.
        parts_done, parts_kept: finished parts; those of them that an earlier run had made.
        total_bytes: stored bytes of the text; `done_bytes` of finished parts, `kept_bytes` of an earlier run's.
        seconds: since this run began to make parts.
        all_parts, all_parts_done: of the whole job; a shard counts the parts of others as of its own start.
        machines: number of machines that made any of the parts.
    """

    parts: int = 0
    parts_done: int = 0
    parts_kept: int = 0
    total_bytes: int = 0
    done_bytes: int = 0
    kept_bytes: int = 0
    num_documents: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    all_parts: int = 0
    all_parts_done: int = 0
    machines: int = 0

    @property
    def bytes_per_second(self) -> float:
        """Stored bytes of text per second of this run."""
        return (self.done_bytes - self.kept_bytes) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """Time left at this speed; None if it is unknown."""
        if self.done_bytes <= self.kept_bytes:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second


class PartWatcher(ProgressWatcher, Protocol):
    """Receiver of a job's progress."""

    def show(self, progress: Progress) -> None:
        """Called at the start, and after each part."""


class SilentPartWatcher(SilentWatcher):
    """Watcher that does nothing."""

    def show(self, progress: Progress) -> None: ...


class ProgressCounter:
    """Sum of the finished parts, shown to a watcher after each part.

    Args:
        records: of the parts that were finished before.
        share: parts of this run.
    """

    def __init__(
        self, watch: PartWatcher, parts: Iterable[Part], records: Mapping[str, Record], share: Iterable[Part]
    ) -> None:
        self._watch, self._began, self._sizes = watch, time.monotonic(), part_sizes(share)
        self._hosts = {each.host for each in records.values()}
        total, num_parts = sum(self._sizes.values()), len(part_sizes(parts))
        others = sum(name not in self._sizes for name in records)
        self._now = Progress(parts=len(self._sizes), total_bytes=total, all_parts=num_parts, all_parts_done=others)
        for name, record in records.items():
            if name in self._sizes:
                self._count(record)
        now, machines = self._now, len(self._hosts - {""})
        self._now = replace(now, parts_kept=now.parts_done, kept_bytes=now.done_bytes, seconds=0.0, machines=machines)
        watch.show(self._now)

    def add(self, record: Record) -> None:
        """Count a part and show the progress."""
        self._count(record)
        self._watch.show(self._now)

    def _count(self, record: Record) -> None:
        now = self._now
        self._hosts.add(record.host)
        self._now = replace(
            now,
            parts_done=now.parts_done + 1,
            done_bytes=now.done_bytes + self._sizes[record.name],
            num_documents=now.num_documents + record.counts.num_documents,
            num_tokens=now.num_tokens + record.num_tokens,
            seconds=time.monotonic() - self._began,
            all_parts_done=now.all_parts_done + 1,
            machines=len(self._hosts - {""}),
        )
