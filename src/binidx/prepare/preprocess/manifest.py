"""What a dataset was made of: `PREFIX.manifest.json`, the last object of a job to appear.

{"binidx_manifest": 1, "version": ..., "plan": digest, "job": Job, "dataset": {...}, "counts": Counts,
 "sources": [{"uri": ..., "identity": ..., "counts": Counts, "covered": n}],
 "engines": {name: {"parts": n, "compared": n}}, "machines": {name: Machine}}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any, TypedDict

from binidx.json_models import JsonFile
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.machines import Machine, count_machines
from binidx.prepare.preprocess.plan import Part, plan_digest
from binidx.prepare.preprocess.record import Counts, Record
from binidx.redacted import redacted
from binidx.storage.publish import read_small

VERSION = 1


class NamedTokenizer(TypedDict, total=False):
    """The fields of a tokenizer that are read again."""

    uri: str
    digest: str


class DoneJob(TypedDict, total=False):
    """The fields of a job that are read again."""

    on_error: str
    tokenizer: NamedTokenizer


class DatasetCounts(TypedDict):
    """What the `.idx` of a dataset must have."""

    documents: int
    sequences: int
    tokens: int


class DatasetManifest(TypedDict, total=False):
    """The fields of the file that are read again; others are for people, and tools of theirs."""

    plan: str
    job: DoneJob
    dataset: DatasetCounts
    counts: Counts
    machines: dict[str, Machine]


MANIFEST_FILE = JsonFile(DatasetManifest, {"binidx_manifest": VERSION}, open=True)


@dataclass(frozen=True)
class SourceCounts:
    """What became of the rows of one input.

    Attributes:
        covered: plain bytes that were read, of parquet rows: all that it has.
    """

    uri: str
    identity: Mapping[str, Any]
    counts: Counts
    covered: int


def count_sources(parts: Sequence[Part], records: Mapping[str, Record]) -> list[SourceCounts]:
    """Of each input, in their order; one that is named twice counts twice."""
    found: dict[str, SourceCounts] = {}
    for part in parts:
        record = records[part.name]
        for piece, counts, extent in zip(part.slices, record.slices, record.extents, strict=True):
            before = found.get(piece.uri) or SourceCounts(redacted(piece.uri), piece.identity, Counts(), 0)
            together, covered = before.counts + counts, before.covered + extent.count
            found[piece.uri] = replace(before, counts=together, covered=covered)
    return list(found.values())


def count_engines(records: Mapping[str, Record]) -> dict[str, dict[str, int]]:
    """Engine -> the parts that it tokenised, and the texts that were compared with the reference and equal."""
    parts, compared = Counter[str](), Counter[str]()
    for record in records.values():
        parts[record.engine] += 1
        compared[record.engine] += record.compared
    return {name: {"parts": parts[name], "compared": compared[name]} for name in parts}


def row_bases(parts: Sequence[Part], records: Mapping[str, Record]) -> list[list[int]]:
    """Rows of its file before each slice, part by part: what nobody knew who read the slice alone."""
    bases, last, rows = list[list[int]](), "", 0
    for part in parts:
        bases.append([])
        for piece, counts in zip(part.slices, records[part.name].slices, strict=True):
            if piece.first_row is not None:
                rows = piece.first_row
            assert piece.uri == last or piece.first_row == 0, "slices of a file follow each other"
            bases[-1].append(rows)
            last, rows = piece.uri, rows + counts.num_rows
    return bases


def manifest_of(job: Job, key: str, parts: Sequence[Part], records: Mapping[str, Record]) -> dict[str, Any]:
    """The manifest of one dataset, in JSON values."""
    sources = count_sources(parts, records)
    tokens = [records[part.name].datasets[key] for part in parts]
    return {
        **MANIFEST_FILE.tags,
        "version": metadata.version("binidx"),
        "plan": plan_digest(job, parts),
        "job": job.to_json(),
        "dataset": {
            "key": key,
            "dtype": job.dtype.__name__,
            "documents": sum((each.counts for each in sources), Counts()).num_documents,
            "sequences": sum(each.num_sequences for each in tokens),
            "tokens": sum(each.num_tokens for each in tokens),
        },
        "counts": asdict(sum((each.counts for each in sources), Counts())),
        "sources": [asdict(each) for each in sources],
        "engines": count_engines(records),
        "machines": {name: asdict(each) for name, each in count_machines(parts, records).items()},
        "cpu_seconds": sum(each.cpu_seconds for each in records.values()),
    }


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
