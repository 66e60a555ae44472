"""What became of a part, as a small object in the store: the proof that it is done, and the only source of all counts.

    {"binidx_part": 2, "name": ..., "engine": ..., "compared": ..., "seconds": ...,
     "host": ..., "ended": ..., "slices": [Counts, ...], "extents": [Extent, ...], "datasets": {key: Tokens},
     "quarantined": rows}

Counters that run along with the work lose what a killed worker had counted, and count twice what was done twice. A
record is there once, whole, after all that it tells of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from binidx.format.sidecars.dataset_manifest import RowCounts
from binidx.json_models import JsonFile
from binidx.prepare.text.batch import KINDS
from binidx.prepare.text.slices import Extent

VERSION = 2
SPECIAL = "special token"
"""A problem besides those that `text` has."""


def problems_of(dropped: Mapping[str, int]) -> int:
    """Of dropped rows those that are no documents."""
    return sum(count for reason, count in dropped.items() if reason in KINDS or reason == SPECIAL)


@dataclass(frozen=True)
class TokenCounts:
    """What a part has of one key.

    Attributes:
        num_tokens: with EOD.
        digest: xxh3_64 of the plain tokens as they are stored, hex.
    """

    num_sequences: int
    num_tokens: int
    digest: str


@dataclass(frozen=True)
class Record:
    """A part that is done.

    Attributes:
        engine: that tokenised it.
        compared: texts that the reference tokenised too, to the same ids.
        slices: counts of each slice, in their order.
        extents: what each of them has read of its input.
        datasets: key -> what there is of it.
        quarantined: rows written to its quarantine.
        seconds: it took, and of them of a core.
        on_error: what became of rows that are no documents.
        host: name of the machine; "" in records of before it was told.
        ended: when it was done, seconds since 1970 by the clock of that machine; 0: not told.
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

    def holds_for(self, on_error: str) -> bool:
        """Whether a job with another policy would have made the same."""
        return on_error == self.on_error or not problems_of(self.counts.dropped)

    @property
    def counts(self) -> RowCounts:
        """Of the whole part."""
        return sum(self.slices, RowCounts())

    @property
    def num_tokens(self) -> int:
        """Of all keys."""
        return sum(each.num_tokens for each in self.datasets.values())

    def to_bytes(self) -> bytes:
        return json.dumps({**RECORD_FILE.tags, **asdict(self)}).encode()

    @classmethod
    def of_bytes(cls, data: bytes, uri: str) -> Record:
        """What `to_bytes` gave.

        Raises:
            FormatError: it did not.
        """
        return RECORD_FILE.decode(data, uri)


RECORD_FILE = JsonFile(
    Record, {"binidx_part": VERSION}, hint="finish with the binidx that began, or delete it and run again"
)
