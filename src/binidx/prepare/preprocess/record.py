"""Record of a part, a small object in the store: the proof that the part is finished, and the only source of counts.

    {"binidx_part": 2, "name": ..., "engine": ..., "compared": ..., "seconds": ...,
     "host": ..., "ended": ..., "slices": [Counts, ...], "extents": [Extent, ...], "datasets": {key: Tokens},
     "quarantined": rows}

Counters that run during the work would lose the counts of a killed worker, and count repeated work twice. A record
appears once, whole, after all objects that it describes.
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
"""Kind of problem besides those of `prepare.text`."""


def count_problems(dropped: Mapping[str, int]) -> int:
    """Return the number of dropped rows that are not documents."""
    return sum(count for reason, count in dropped.items() if reason in KINDS or reason == SPECIAL)


@dataclass(frozen=True)
class TokenCounts:
    """Counts of a part's dataset of one key.

    Attributes:
        num_tokens: EOD included.
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
        compared: texts that were compared with the reference.
        slices: counts of each slice, in their order.
        extents: part of its input that each slice has read.
        datasets: key -> counts of its dataset.
        quarantined: rows in the quarantine.
        seconds, cpu_seconds: elapsed time, and time of a core.
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
        """Return whether a job with this policy would have made the same part."""
        return on_error == self.on_error or not count_problems(self.counts.dropped)

    @property
    def counts(self) -> RowCounts:
        """Counts of the whole part."""
        return sum(self.slices, RowCounts())

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all keys."""
        return sum(each.num_tokens for each in self.datasets.values())

    def to_bytes(self) -> bytes:
        """Return the record as JSON."""
        return json.dumps({**RECORD_FILE.tags, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes, uri: str) -> Record:
        """Return the record that `to_bytes` wrote.

        Raises:
            FormatError: not such a record.
        """
        return RECORD_FILE.decode(data, uri)


RECORD_FILE = JsonFile(
    Record, {"binidx_part": VERSION}, hint="finish with the binidx that began, or delete it and run again"
)
