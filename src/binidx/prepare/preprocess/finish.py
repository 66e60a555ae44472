"""Last stage of a job: put the parts together, write the manifests.

    1  check that every record exists, that its sums are right, and that the parts have read each input once, to its end
    2  for each key: rewrite the .idx of the parts, let the store concatenate the .bin, publish it, then the .idx
    3  write lineage, quarantine and manifests

Two processes may finish at once, or one after the other was killed: both write the same bytes, and neither removes an
object that the other may have published.

`PREFIX.manifest.json` is the last object of a job to appear:

{"binidx_manifest": 1, "version": ..., "plan": digest, "job": Job, "dataset": {...}, "counts": Counts,
 "sources": [{"uri": ..., "identity": ..., "counts": Counts, "covered": n}],
 "engines": {name: {"parts": n, "compared": n}}, "machines": {name: Machine}}
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import binidx
from binidx.corpus.merge import merge_tokens, merged_index
from binidx.corpus.whole_dataset import DatasetTarget, SourceDatasets, WholeDataset
from binidx.errors import FormatError, redacted
from binidx.format.bin_file import BinWriter
from binidx.format.sidecars.dataset_manifest import LINEAGE, MANIFEST, MANIFEST_FILE, RowCounts
from binidx.jobs.progress import ProgressWatcher
from binidx.prepare.preprocess.job import Job, Part, plan_digest
from binidx.prepare.preprocess.job_files import JobFiles, Record, count_machines
from binidx.prepare.preprocess.part_writer import merge_quarantine
from binidx.prepare.text.slices import check_extents
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.writing.publish import delete_object, write_object


def count_sources(parts: Sequence[Part], records: Mapping[str, Record]) -> list[dict[str, Any]]:
    """Return a JSON object with the counts of each input, in their order; an input that is named twice counts twice.

    `covered` is the number of plain bytes, in Parquet of rows, that were read: all of the input.

    Args:
        parts: parts of the job, in their order.
        records: name of each part -> its record.
    """
    sources: dict[str, dict[str, Any]] = {}
    for part in parts:
        record = records[part.name]
        for piece, counts, extent in zip(part.slices, record.slices, record.extents, strict=True):
            empty = {"uri": redacted(piece.uri), "identity": piece.identity, "counts": RowCounts(), "covered": 0}
            source = sources.setdefault(piece.uri, empty)
            source["counts"] += counts
            source["covered"] += extent.count
    return list(sources.values())


def count_engines(records: Mapping[str, Record]) -> Mapping[str, Mapping[str, int]]:
    """Return for each tokenizer engine the number of its parts, and of its texts compared with the reference."""
    engines = defaultdict[str, Counter[str]](Counter)
    for record in records.values():
        engines[record.engine].update(parts=1, compared=record.compared)
    return engines


def rows_before_slices(parts: Sequence[Part], records: Mapping[str, Record]) -> list[list[int]]:
    """Return for each slice of each part the number of rows before it in its file.

    Args:
        parts: parts of the job, in their order.
        records: name of each part -> its record.
    """
    before, last, rows = list[list[int]](), "", 0
    for part in parts:
        before.append([])
        for piece, counts in zip(part.slices, records[part.name].slices, strict=True):
            if piece.first_row is not None:
                rows = piece.first_row
            assert piece.uri == last or piece.first_row == 0, "slices of a file follow each other"
            before[-1].append(rows)
            last, rows = piece.uri, rows + counts.num_rows
    return before


def build_manifest(job: Job, key: str, parts: Sequence[Part], records: Mapping[str, Record]) -> dict[str, Any]:
    """Return the manifest of one dataset, in JSON values.

    Args:
        key: JSON key of the dataset.
        parts, records: parts of the job in their order, and the record of each by its name.
    """
    sources = count_sources(parts, records)
    counts = sum((source["counts"] for source in sources), RowCounts())
    tokens = [records[part.name].datasets[key] for part in parts]
    return {
        "version": binidx.__version__,
        "plan": plan_digest(job, parts),
        "job": job.to_json(),
        "dataset": {
            "key": key,
            "dtype": job.dtype.__name__,
            "documents": counts.num_documents,
            "sequences": sum(part.num_sequences for part in tokens),
            "tokens": sum(part.num_tokens for part in tokens),
        },
        "counts": asdict(counts),
        "sources": [source | {"counts": asdict(source["counts"])} for source in sources],
        "engines": count_engines(records),
        "machines": {name: asdict(machine) for name, machine in count_machines(parts, records).items()},
        "cpu_seconds": sum(record.cpu_seconds for record in records.values()),
    }


Records = Mapping[str, Record]
"""Name of a part -> its record."""


def finish(job: Job, parts: Sequence[Part], records: Records, *, overwrite: bool, watch: ProgressWatcher) -> None:
    """Merge the parts into the datasets; write lineage, quarantine and, last, the manifests.

    Args:
        parts, records: parts of the job in their order, and the record of each by its name.
        overwrite: whether to replace another dataset.
        watch: receiver of the progress.

    Raises:
        FormatError: the counts do not add up, or a part contradicts its record.
        ObjectExistsError: another dataset exists, without `overwrite`.
    """
    files = JobFiles(job)
    for part in parts:
        records[part.name].counts.check(str(part))
    check_extents(pair for part in parts for pair in zip(part.slices, records[part.name].extents, strict=True))
    for key in job.keys:
        merge_key(files, key, parts, records, overwrite, watch)
        if job.lineage:
            write_lineage(files, key, parts, records)
    write_quarantine(files, parts, records)
    for key, prefix in files.datasets.items():
        write_object(prefix + MANIFEST, [MANIFEST_FILE.encode(build_manifest(job, key, parts, records), indent=1)])


def merge_key(
    files: JobFiles, key: str, parts: Sequence[Part], records: Records, overwrite: bool, watch: ProgressWatcher
) -> None:
    """Merge the parts of one key into its dataset.

    Args:
        files: locations of the job's objects.
        key: JSON key of the dataset.
        parts, records, overwrite, watch: as in `finish`.

    Raises:
        ObjectExistsError: another dataset exists. The same dataset may exist if another process publishes it now, or
            was killed after that; it may be replaced by the same bytes, but is never removed.
    """
    target = DatasetTarget(files.datasets[key], files.job.codec)
    opened = SourceDatasets([files.prefix(part, key) for part in parts])
    with merged_index(opened, watch) as columns:
        check_part_counts(key, parts, records, opened.datasets)
        if not overwrite and object_exists(target.idx):
            target.compare_index(columns)
        # Without `overwrite` an existing .idx has been compared, and stays.
        remove = target.remove_existing if overwrite else partial(BinWriter.remove_superseded, target.bin)
        merge_tokens(opened, target, columns, remove, watch)


def check_part_counts(key: str, parts: Sequence[Part], records: Records, opened: Sequence[WholeDataset]) -> None:
    """Raise FormatError unless each part has the numbers of documents, sequences and tokens in its record.

    Args:
        key: JSON key of the dataset.
        parts, records: as in `finish`.
        opened: datasets of the parts, in the same order.
    """
    for part, dataset in zip(parts, opened, strict=True):
        counts = records[part.name].datasets[key]
        expected = records[part.name].counts.num_documents, counts.num_sequences, counts.num_tokens
        stored = dataset.index.num_documents, dataset.index.num_sequences, dataset.index.num_tokens
        if stored != expected:
            raise FormatError(
                f"{dataset.prefix}: contradicts its record (found {stored} documents, sequences and tokens, need "
                f"{expected}); delete the record and give the same command again"
            )


def write_lineage(files: JobFiles, key: str, parts: Sequence[Part], records: Records) -> None:
    """Merge the parts' lineage files (the origin of each document) into the lineage file of one dataset."""
    from binidx.corpus.lineage.lineage_writer import PartLineage, merge_lineage

    lineages = []
    for part, before in zip(parts, rows_before_slices(parts, records), strict=True):
        num_documents = [counts.num_documents for counts in records[part.name].slices]
        lineages.append(PartLineage(files.prefix(part, key) + LINEAGE, before, num_documents))
    merge_lineage(lineages, files.datasets[key] + LINEAGE)


def write_quarantine(files: JobFiles, parts: Sequence[Part], records: Records) -> None:
    """Write the quarantine file, of rows that are not documents; if there are none, remove an older file."""
    rows = zip(parts, rows_before_slices(parts, records), strict=True)
    quarantined = [(files.part_quarantine(part), before) for part, before in rows if records[part.name].quarantined]
    if quarantined:
        merge_quarantine(quarantined, files.quarantine)
    else:  # remove that of an older job
        delete_object(files.quarantine)
