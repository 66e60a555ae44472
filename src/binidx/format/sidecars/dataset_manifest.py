"""Manifest of a dataset: the job that wrote it and the number of its documents, sequences and tokens.

PREFIX.manifest.json     the manifest
PREFIX.lineage.parquet   the origin of each document: `lineage`

Both are sidecars: replacing the dataset removes them, copying it copies them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NotRequired, TypedDict

from binidx.errors import FormatError
from binidx.json_models import JsonFile
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small

LINEAGE = ".lineage.parquet"
"""Suffix of the file with the origin of each document."""
MANIFEST = ".manifest.json"
"""Suffix of the file with the counts of a dataset and the job that made it."""
SIDECARS = (MANIFEST, LINEAGE)
"""Suffixes of the files beside a pair; who replaces the pair removes them."""


@dataclass
class RowCounts:
    """Counts of the rows of a slice, a source or a job.

    Attributes:
        num_rows: rows read, blank lines included.
        num_documents: rows stored as documents.
        num_empty: stored documents without a token in any key; `Job.empty` decides how they are stored.
        dropped: dropped rows by reason: the kind of a problem, a filter, "blank line".
        text_bytes: UTF-8 bytes of all tokenized texts, those dropped for their tokens included.
        stored_bytes: bytes read from the store, before decompression.
    """

    num_rows: int = 0
    num_documents: int = 0
    num_empty: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    text_bytes: int = 0
    stored_bytes: int = 0

    def drop(self, reasons: Mapping[str, int]) -> None:
        """Count dropped rows, by reason."""
        self.dropped = dict(Counter(self.dropped) + Counter(reasons))

    def __add__(self, other: RowCounts) -> RowCounts:
        numbers = {name: getattr(self, name) + getattr(other, name) for name in asdict(self) if name != "dropped"}
        return RowCounts(**numbers, dropped=dict(Counter(self.dropped) + Counter(other.dropped)))

    def check(self, subject: str) -> None:
        """Raise FormatError unless every row is a document or was dropped for a reason."""
        needed = self.num_documents + sum(self.dropped.values())
        if needed != self.num_rows:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self.dropped.items()) or "none"
            found = f"{self.num_documents} documents; dropped: {reasons}"
            raise FormatError(f"{subject}: {self.num_rows} rows read, needed {needed}: {found}")


@dataclass(frozen=True)
class Machine:
    """Work of one machine in a preprocessing job.

    Attributes:
        tokens: tokens of all keys.
        stored_bytes: bytes of text read from the store, before decompression.
        bytes_per_second: rate of all its workers together while at least one worked; None if not recorded.
    """

    parts: int
    documents: int
    tokens: int
    stored_bytes: int
    bytes_per_second: float | None


class ManifestTokenizer(TypedDict, total=False):
    """Fields of a manifest's tokenizer that binidx reads."""

    uri: str
    digest: str
    eod: int | None


class ManifestJob(TypedDict, total=False):
    """Fields of a manifest's job that binidx reads."""

    on_error: str
    tokenizer: ManifestTokenizer


class DatasetCounts(TypedDict):
    """Counts that the `.idx` must have."""

    documents: int
    sequences: int
    tokens: int
    dtype: NotRequired[str]


class DatasetManifest(TypedDict, total=False):
    """Fields of a manifest that binidx reads; the other fields are for people and other tools."""

    plan: str
    job: ManifestJob
    dataset: DatasetCounts
    counts: RowCounts
    machines: dict[str, Machine]


MANIFEST_FILE = JsonFile(DatasetManifest, {"binidx_manifest": 1}, open=True)


def read_manifest(location: Location) -> dict[str, Any] | None:
    """Read the manifest at `prefix + MANIFEST`; None if there is none.

    Raises:
        FormatError: the object is not a manifest.
    """
    data = read_small(location)
    if data is None:
        return None
    manifest: dict[str, Any] = MANIFEST_FILE.parse(data, location.uri)
    MANIFEST_FILE.convert(manifest, location.uri)
    return manifest


def check_counts(prefix: str, manifest: Mapping[str, Any], index: DatasetCounts) -> None:
    """Compare the counts and the dtype in a manifest with those of the `.idx`.

    Args:
        prefix: URI of the dataset.
        manifest: contents of its manifest.
        index: counts and dtype of its `.idx`.

    Raises:
        FormatError: they differ, or the manifest has no counts.
    """
    uri = prefix + MANIFEST
    if "dataset" not in manifest:
        raise FormatError(f"{uri}: $.dataset: missing, needed the counts that binidx preprocess writes")
    recorded = {"dtype": index["dtype"], **manifest["dataset"]}
    for name, found in index.items():
        if recorded[name] != found:
            problem = f"{recorded[name]} {name}, {prefix}.idx has {found}"
            raise FormatError(f"{uri}: {problem}; one of the two belongs to another dataset")
