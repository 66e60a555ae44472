"""What may stand beside a dataset and tells of its documents: it goes when they do, and comes along with a copy.

PREFIX.lineage.parquet   where each document came from
PREFIX.manifest.json     what the dataset was made of
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

from binidx.errors import FormatError
from binidx.json_models import JsonFile
from binidx.storage.writing.publish import read_small

LINEAGE = ".lineage.parquet"


MANIFEST = ".manifest.json"


SIDECARS = (MANIFEST, LINEAGE)


def add_counters(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in (Counter(left) + Counter(right)).items() if count}


@dataclass
class RowCounts:
    """Rows of a slice, a source or a job, and where they are now.

    Attributes:
        num_rows: read, blank lines too.
        num_documents: stored.
        num_empty: those of them whose text has no token in any key: `Job.empty` says what they are.
        dropped: reason -> rows: problems by their kind, filters, blank lines.
        text_bytes: of the texts that were tokenised, in UTF-8: also of those dropped for their tokens.
        stored_bytes: read, as they lie in the store.
    """

    num_rows: int = 0
    num_documents: int = 0
    num_empty: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0
    stored_bytes: int = 0

    def drop(self, reasons: Mapping[str, int]) -> None:
        """So many rows more, by reason."""
        self.dropped = add_counters(self.dropped, reasons)

    def __add__(self, other: RowCounts) -> RowCounts:
        numbers = {name: getattr(self, name) + getattr(other, name) for name in asdict(self) if name != "dropped"}
        return RowCounts(**numbers, dropped=add_counters(self.dropped, other.dropped))

    def check(self, subject: str) -> None:
        """FormatError unless every row is a document or was dropped for a reason."""
        told = self.num_documents + sum(self.dropped.values())
        if told != self.num_rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
            found = f"{self.num_documents} documents; dropped: {reasons}"
            raise FormatError(f"{subject}: {self.num_rows} rows read, needed {told}: {found}")


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


class ManifestTokenizer(TypedDict, total=False):
    """The fields of a tokenizer that are read again."""

    uri: str
    digest: str


class ManifestJob(TypedDict, total=False):
    """The fields of a job that are read again."""

    on_error: str
    tokenizer: ManifestTokenizer


class DatasetCounts(TypedDict):
    """What the `.idx` of a dataset must have."""

    documents: int
    sequences: int
    tokens: int


class DatasetManifest(TypedDict, total=False):
    """The fields of the file that are read again; others are for people, and tools of theirs."""

    plan: str
    job: ManifestJob
    dataset: DatasetCounts
    counts: RowCounts
    machines: dict[str, Machine]


VERSION = 1


MANIFEST_FILE = JsonFile(DatasetManifest, {"binidx_manifest": VERSION}, open=True)


def read_manifest(uri: str, options: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The manifest that stands there.

    Raises:
        FormatError: what stands there is none.
    """
    data = read_small(uri, options)
    if data is None:
        return None
    found: dict[str, Any] = MANIFEST_FILE.parse(data, uri)
    MANIFEST_FILE.convert(found, uri)
    return found
