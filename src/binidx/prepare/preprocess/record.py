"""Record of a part, a small object in the store: the proof that the part is finished, and the only source of counts.

    {"binidx_part": 2, "name": ..., "engine": ..., "compared": ..., "seconds": ...,
     "host": ..., "ended": ..., "slices": [Counts, ...], "extents": [Extent, ...], "datasets": {key: Tokens},
     "quarantined": rows}

A record appears once, whole, after all objects that it describes. The progress of a job is computed from records, too:
counters that run during the work would lose the counts of a killed worker, and count repeated work twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from binidx.format.sidecars.dataset_manifest import Machine, RowCounts
from binidx.json_models import JsonFile
from binidx.prepare.preprocess.job import Part
from binidx.prepare.text.batch import PROBLEMS_BY_KIND
from binidx.prepare.text.slices import Extent

VERSION = 2
SPECIAL, UNENCODED = "special token", "not tokenized"
"""Kinds of problems besides those of `prepare.text`."""


def count_problems(dropped: Mapping[str, int]) -> int:
    """Return the number of dropped rows that are not documents, from reason -> number of dropped rows."""
    return sum(count for reason, count in dropped.items() if reason in (*PROBLEMS_BY_KIND, SPECIAL, UNENCODED))


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a part's dataset of one key.

    Attributes:
        num_tokens: number of tokens, EODs included.
        digest: xxh3_64 of the tokens before compression, hex.
    """

    num_sequences: int
    num_tokens: int
    digest: str


@dataclass(frozen=True)
class Record:
    """Record of a finished part.

    Attributes:
        engine: name of the tokenizer's engine.
        compared: number of texts that were compared with the reference.
        slices: counts of each slice, in their order.
        extents: for each slice the part of its input that was read.
        datasets: key -> counts of its dataset.
        quarantined: number of rows in the quarantine file.
        seconds, cpu_seconds: elapsed time, and CPU time.
        on_error: policy for rows that are not documents.
        host: name of the machine; "" in records of older versions.
        ended: end time, seconds since 1970 by the machine's clock; 0 in records of older versions.
    """

    name: str
    engine: str
    compared: int
    slices: list[RowCounts]
    extents: list[Extent]
    datasets: dict[str, TokenCounts]
    quarantined: int
    seconds: float
    cpu_seconds: float
    on_error: str = "raise"
    host: str = ""
    ended: float = 0.0

    def valid_for(self, on_error: str) -> bool:
        """Return whether a job with this policy for bad rows would have made the same part."""
        return on_error == self.on_error or not count_problems(self.counts.dropped)

    @property
    def counts(self) -> RowCounts:
        """Counts of the rows of the whole part."""
        return sum(self.slices, RowCounts())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the part, summed over the datasets of all JSON keys."""
        return sum(dataset.num_tokens for dataset in self.datasets.values())


HINT = "finish with the binidx that began, or delete it and give the same command again"
RECORD_FILE = JsonFile(Record, {"binidx_part": VERSION}, hint=HINT)


RECENT_PARTS = 100
"""Number of last parts that determine the present speed: several for each worker of a machine."""


def part_sizes(parts: Iterable[Part]) -> dict[str, int]:
    """Return the stored bytes of each part's text, by the part's name."""
    return {part.name: part.size for part in parts}


def count_machines(parts: Iterable[Part], records: Mapping[str, Record]) -> dict[str, Machine]:
    """Return the work of each machine of a job: finished parts, documents, tokens, stored bytes of text, and speed.

    Args:
        parts: all parts of the job, finished or not; they give the stored bytes.
        records: part name -> record, for each finished part.

    Returns:
        Machine name -> its work, sorted by name. A record of an older version has no machine name; its work is under
        "". `bytes_per_second` is None if no record of the machine has an end time.
    """
    sizes, machines = part_sizes(parts), dict[str, Machine]()
    for host in sorted({record.host for record in records.values()}):
        own = [record for record in records.values() if record.host == host]
        machines[host] = Machine(
            parts=len(own),
            documents=sum(record.counts.num_documents for record in own),
            tokens=sum(record.num_tokens for record in own),
            stored_bytes=sum(sizes[record.name] for record in own),
            bytes_per_second=_speed(sizes, own),
        )
    return machines


def recent_speed(sizes: Mapping[str, int], records: Iterable[Record]) -> float | None:
    """Return the stored bytes per second of the last parts on all machines; None if it is unknown.

    Args:
        sizes: name of each part -> stored bytes of its text.
        records: records of finished parts, in any order.
    """
    timed = sorted(records, key=lambda record: record.ended)
    since = timed[-RECENT_PARTS - 1].ended if len(timed) > RECENT_PARTS else 0.0
    return _speed(sizes, timed[-RECENT_PARTS:], since)


def _speed(sizes: Mapping[str, int], records: Collection[Record], since: float = 0.0) -> float | None:
    """Return the stored bytes of parts per second in which at least one of them was made; None if it is unknown."""
    timed = [record for record in records if record.ended]
    busy = busy_seconds((max(record.ended - record.seconds, since), record.ended) for record in timed)
    return sum(sizes[record.name] for record in timed) / busy if busy else None


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time covered by the spans (begin, end); overlaps count once, gaps between runs do not count."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
