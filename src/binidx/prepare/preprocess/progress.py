"""What each machine did of a job, told by records: a worker that died takes nothing of it along.

How far a job is, for a person who watches it. All of it is told by records of parts that are done.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from binidx.format.sidecars.dataset_manifest import Machine
from binidx.prepare.preprocess.job_plan import Part
from binidx.prepare.preprocess.record import Record
from binidx.storage.writing.copy import ProgressWatcher, SilentWatcher

LAST = 100
"""Parts whose pace is that of now: several rounds of the workers of a machine."""


def count_machines(parts: Iterable[Part], records: Mapping[str, Record]) -> dict[str, Machine]:
    """Name -> what it has done, by name; "" for records of before they had one."""
    sizes = sizes_of(parts)
    hosts = sorted({each.host for each in records.values()})
    return {host: _machine(sizes, [each for each in records.values() if each.host == host]) for host in hosts}


def sizes_of(parts: Iterable[Part]) -> dict[str, int]:
    """Name of each part -> stored bytes of its text."""
    return {part.name: part.num_bytes for part in parts}


def pace(sizes: Mapping[str, int], records: Iterable[Record]) -> float | None:
    """Stored bytes a second of the last parts, of all machines; None: nothing is known of it."""
    timed = sorted((each for each in records if each.ended), key=lambda each: each.ended)
    last, since = timed[-LAST:], timed[-LAST - 1].ended if len(timed) > LAST else 0.0
    busy = busy_seconds((max(each.ended - each.seconds, since), each.ended) for each in last)
    return sum(sizes[each.name] for each in last) / busy if busy else None


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Of the time that any of the spans covers: nights between two runs do not count."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _machine(sizes: Mapping[str, int], records: Collection[Record]) -> Machine:
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
    """Now.

    Attributes:
        parts: that are wanted: all, or the share of a shard; the other counts are of them, but those of `all_`.
        parts_kept: that an earlier run had made, of `parts_done`.
        total_bytes: stored bytes of all text; `done_bytes` of the parts that are done, `kept_bytes` of them kept.
        seconds: since this run began to make parts.
        all_parts_done: of `all_parts`; a shard knows of the others what was done when it began.
        machines: that made any of them.
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
        return (self.done_bytes - self.kept_bytes) / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """At this pace; None: nothing is known of it yet."""
        if self.done_bytes <= self.kept_bytes:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second


class Watcher(ProgressWatcher, Protocol):
    """Who looks on."""

    def show(self, progress: Progress) -> None:
        """A part more is done, or none yet."""


class Unwatched(SilentWatcher):
    """Nobody does."""

    def show(self, progress: Progress) -> None:
        pass


class Watched:
    """Adds up what is done, and shows it.

    Args:
        records: of the parts that were done before.
        share: the parts that are wanted.
    """

    def __init__(
        self, watch: Watcher, parts: Iterable[Part], records: Mapping[str, Record], share: Iterable[Part]
    ) -> None:
        self._watch, self._began = watch, time.monotonic()
        self._sizes, self._hosts = sizes_of(share), {each.host for each in records.values()}
        kept = self._sum([record for name, record in records.items() if name in self._sizes])
        self._now = replace(
            kept,
            parts=len(self._sizes),
            parts_kept=kept.parts_done,
            total_bytes=sum(self._sizes.values()),
            kept_bytes=kept.done_bytes,
            all_parts=len(sizes_of(parts)),
            all_parts_done=len(records),
            machines=len(self._hosts - {""}),
        )
        watch.show(self._now)

    def add(self, record: Record) -> None:
        """A part more is done."""
        one, now = self._sum([record]), self._now
        self._hosts.add(record.host)
        self._now = replace(
            now,
            parts_done=now.parts_done + 1,
            done_bytes=now.done_bytes + one.done_bytes,
            num_documents=now.num_documents + one.num_documents,
            num_tokens=now.num_tokens + one.num_tokens,
            seconds=time.monotonic() - self._began,
            all_parts_done=now.all_parts_done + 1,
            machines=len(self._hosts - {""}),
        )
        self._watch.show(self._now)

    def _sum(self, records: Collection[Record]) -> Progress:
        return Progress(
            parts_done=len(records),
            done_bytes=sum(self._sizes[each.name] for each in records),
            num_documents=sum(each.counts.num_documents for each in records),
            num_tokens=sum(each.num_tokens for each in records),
        )
