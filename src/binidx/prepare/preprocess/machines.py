"""What each machine did of a job, told by records: a worker that died takes nothing of it along."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from binidx.prepare.preprocess.plan import Part
from binidx.prepare.preprocess.record import Record

LAST = 100
"""Parts whose pace is that of now: several rounds of the workers of a machine."""


@dataclass(frozen=True)
class Machine:
    """What one has done.

    Attributes:
        tokens: of all keys.
        stored_bytes: of text, as it lies in the store.
        bytes_per_second: of all its workers together, while any was at work; None: its records do not tell.
    """

    parts: int
    documents: int
    tokens: int
    stored_bytes: int
    bytes_per_second: float | None


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
