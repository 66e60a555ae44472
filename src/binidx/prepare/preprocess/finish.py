"""What a dataset was made of: `PREFIX.manifest.json`, the last object of a job to appear.

{"binidx_manifest": 1, "version": ..., "plan": digest, "job": Job, "dataset": {...}, "counts": Counts,
 "sources": [{"uri": ..., "identity": ..., "counts": Counts, "covered": n}],
 "engines": {name: {"parts": n, "compared": n}}, "machines": {name: Machine}}

All parts -> the datasets: the store moves the tokens, then the manifests appear, then the parts go.

    1  every record is there, its sums are right, and together they have read every input once, to its end
    2  of each key: the .idx of the parts is rewritten, the .bin put together by the store, published, the .idx last
    3  lineage, quarantine, manifests
    4  the parts go, job.json last

Two may do so at once, or one after another was killed: both write the same bytes, and nothing that may be the other's
is ever removed. A dataset that is found finished is left alone.

Whose parts lie there: job.json, the first object of a job and the last to go.

nothing there                        ours from now on
ours                                 go on
another's, and no part beside it     ours from now on: a call that failed before it made any, of a wrong key say
another's, and parts                 an error that says in what the two differ; `overwrite` drops them
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from binidx.corpus.convert_journal import Target
from binidx.corpus.merge import merge_tokens, merged_index, open_all
from binidx.corpus.whole_dataset import WholeDataset
from binidx.errors import FormatError, ObjectExistsError, redacted
from binidx.format.bin_file import delete_all, related_objects
from binidx.format.index_writer import IndexColumns
from binidx.format.sidecars.dataset_manifest import LINEAGE, MANIFEST, MANIFEST_FILE, RowCounts
from binidx.json_models import JsonFile
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.job_plan import Part, Places, plan_digest
from binidx.prepare.preprocess.part_writer import merge_quarantine
from binidx.prepare.preprocess.progress import count_machines
from binidx.prepare.preprocess.record import Record
from binidx.prepare.text.inputs import local_files, stored_objects
from binidx.prepare.text.slices import Read, check_extents
from binidx.storage.open import open_object
from binidx.storage.stores.registry import local_path
from binidx.storage.writing.concatenate import IN_FLIGHT
from binidx.storage.writing.copy import ProgressWatcher
from binidx.storage.writing.publish import create_object, delete_object, object_exists, put_if_absent, read_small


@dataclass(frozen=True)
class SourceCounts:
    """What became of the rows of one input.

    Attributes:
        covered: plain bytes that were read, of parquet rows: all that it has.
    """

    uri: str
    identity: Mapping[str, Any]
    counts: RowCounts
    covered: int


def count_sources(parts: Sequence[Part], records: Mapping[str, Record]) -> list[SourceCounts]:
    """Of each input, in their order; one that is named twice counts twice."""
    found: dict[str, SourceCounts] = {}
    for part in parts:
        record = records[part.name]
        for piece, counts, extent in zip(part.slices, record.slices, record.extents, strict=True):
            before = found.get(piece.uri) or SourceCounts(redacted(piece.uri), piece.identity, RowCounts(), 0)
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
            "documents": sum((each.counts for each in sources), RowCounts()).num_documents,
            "sequences": sum(each.num_sequences for each in tokens),
            "tokens": sum(each.num_tokens for each in tokens),
        },
        "counts": asdict(sum((each.counts for each in sources), RowCounts())),
        "sources": [asdict(each) for each in sources],
        "engines": count_engines(records),
        "machines": {name: asdict(each) for name, each in count_machines(parts, records).items()},
        "cpu_seconds": sum(each.cpu_seconds for each in records.values()),
    }


Records = Mapping[str, Record]


"""By the names of the parts."""


def finish(job: Job, parts: Sequence[Part], records: Records, *, overwrite: bool, watch: ProgressWatcher) -> None:
    """Make the datasets of all parts, and remove the parts.

    Raises:
        FormatError: the counts do not add up, or a part is not what its record says.
        ObjectExistsError: another dataset stands there, and nobody said `overwrite`.
    """
    places = Places(job)
    for part in parts:
        records[part.name].counts.check(str(part))
    check_extents(extents_of(parts, records))
    for key in job.keys:
        merge_key(places, key, parts, records, overwrite, watch)
        if job.lineage:
            write_lineage(places, key, parts, records)
    write_quarantine(places, parts, records)
    for key, prefix in job.datasets.items():
        with create_object(prefix + MANIFEST, job.target_options) as out:
            out.write(json.dumps(manifest_of(job, key, parts, records), indent=1).encode())
    remove_parts(places, parts)


def extents_of(parts: Sequence[Part], records: Records) -> Iterator[Read]:
    """Each slice with what was read for it, in the order of the inputs."""
    for part in parts:
        yield from zip(part.slices, records[part.name].extents, strict=True)


def merge_key(
    places: Places, key: str, parts: Sequence[Part], records: Records, overwrite: bool, watch: ProgressWatcher
) -> None:
    """The dataset of one key."""
    job = places.job
    target = Target(job.datasets[key], job.codec, job.target_options)
    opened = open_all([places.prefix(part, key) for part in parts], job.target_options)
    with merged_index(opened, watch) as columns:
        check_part_counts(key, parts, records, opened)
        make_way = way_for(target, columns, overwrite)
        merge_tokens(opened, target, columns, make_way, job.target_options, watch)


def check_part_counts(key: str, parts: Sequence[Part], records: Records, opened: Sequence[WholeDataset]) -> None:
    """FormatError unless each part has the documents and tokens that its record tells of."""
    for part, each in zip(parts, opened, strict=True):
        record = records[part.name]
        told = record.counts.num_documents, record.datasets[key].num_sequences, record.datasets[key].num_tokens
        found = each.index.num_documents, each.index.num_sequences, each.index.num_tokens
        if found != told:
            raise FormatError(
                f"{each.prefix}: {found} documents, sequences and tokens, its record says {told}; "
                "delete the record and run again"
            )


def same_bytes(target: Target, columns: IndexColumns) -> bool:
    """Whether the `.idx` that stands there is what these columns give."""
    reader, start = open_object(target.idx_uri, storage_options=target.options, cache=False), 0
    for block in columns.format():
        stop = start + len(block)
        if stop > reader.size or bytes(reader.read([(start, stop)])[0]) != block:
            return False
        start = stop
    return start == reader.size


def way_for(target: Target, columns: IndexColumns, overwrite: bool) -> Callable[[], object]:
    """What is to go right before the new dataset appears.

    Raises:
        ObjectExistsError: another one stands there. Not so the one that we make: somebody was killed after he had
            published it, or publishes it now, and may find it replaced by its like but never removed.
    """
    old = [target.idx_uri, target.prefix + MANIFEST, target.prefix + LINEAGE] if overwrite else []
    if not overwrite and object_exists(target.idx_uri, target.options) and not same_bytes(target, columns):
        raise ObjectExistsError(f"{target.prefix}: holds another dataset, needed a free name; --overwrite replaces it")
    return lambda: delete_all([*old, *related_objects(target.bin_uri)], target.options)


def write_lineage(places: Places, key: str, parts: Sequence[Part], records: Records) -> None:
    """The sidecar of one dataset."""
    from binidx.format.sidecars.lineage import PartRows, merge_lineage

    rows = (
        PartRows(places.prefix(part, key) + LINEAGE, bases, [each.num_documents for each in records[part.name].slices])
        for part, bases in zip(parts, row_bases(parts, records), strict=True)
    )
    merge_lineage(rows, places.job.datasets[key] + LINEAGE, places.job.target_options)


def write_quarantine(places: Places, parts: Sequence[Part], records: Records) -> None:
    """Rows that were no documents, of all parts; no file where there are none."""
    bases = zip(parts, row_bases(parts, records), strict=True)
    told = [(places.part_quarantine_uri(part), rows) for part, rows in bases if records[part.name].quarantined]
    if told:
        merge_quarantine(told, places.quarantine_uri, places.job.target_options)
    else:  # one of an older job may stand there
        delete_object(places.quarantine_uri, places.job.target_options)


def remove_parts(places: Places, parts: Sequence[Part]) -> None:
    """All that the parts left, records first; job.json last, so that who is killed here comes back."""
    uris = set(itertools.chain.from_iterable(places.objects(part) for part in parts))
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(lambda uri: delete_object(uri, places.job.target_options), sorted(uris)))
    delete_object(places.job_uri, places.job.target_options)
    if (folder := local_path(places.folder)) is not None:
        remove_folder(Path(folder))


def remove_others(places: Places, parts: Sequence[Part]) -> None:
    """What another job left where our parts will lie."""
    ours = {name_of(uri) for uri in (places.job_uri, *itertools.chain(*map(places.objects, parts)))}
    theirs = [uri for uri in objects_in(places) if name_of(uri) not in ours]
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(lambda uri: delete_object(uri, places.job.target_options), theirs))


def objects_in(places: Places) -> list[str]:
    """All that lies in the folder of the parts, where there is one."""
    path = local_path(places.folder)
    return stored_objects(f"{places.folder}/", places.job.target_options) if path is None else local_files(path) or []


def name_of(uri: str) -> str:
    return uri.rpartition("/")[2]


def remove_folder(folder: Path) -> None:
    """And what killed workers left in it."""
    with contextlib.suppress(OSError):
        for left in folder.glob("*.tmp"):
            left.unlink()
        folder.rmdir()


@dataclass(frozen=True)
class JobMark:
    """The fields of the file besides its version."""

    plan: str
    inputs: list[str]
    recipe: dict[str, Any]


MARK_FILE = JsonFile(JobMark, {"binidx_job": 1}, open=True)


def take_place(job: Job, parts: Sequence[Part], overwrite: bool) -> bool:
    """Say whose parts are about to lie there; whether there may be some already.

    Raises:
        ObjectExistsError: a dataset stands there, or parts of another job do.
    """
    places, told = Places(job), mark_of(job, parts)
    standing = read_small(places.job_uri, job.target_options)
    if standing == told:
        return True
    if not overwrite:
        if standing is not None and any(name_of(uri) != name_of(places.job_uri) for uri in objects_in(places)):
            differs = job_difference(standing, told)
            raise ObjectExistsError(f"{places.job_uri}: parts of another job, {differs}; --overwrite drops them")
        for prefix in job.datasets.values():
            Target(prefix, job.codec, job.target_options).check_free(None, ours=False)
        if standing is None and not put_if_absent(places.job_uri, told, job.target_options):
            raise ObjectExistsError(f"{places.job_uri}: another job began here in this moment; run it again")
    if overwrite or standing is not None:
        with create_object(places.job_uri, job.target_options) as out:
            out.write(told)
    if overwrite and standing is not None:
        remove_others(places, parts)
    return overwrite


def mark_of(job: Job, parts: Sequence[Part]) -> bytes:
    """What identifies a job, and says for people what it is."""
    mark = JobMark(plan_digest(job, parts), job.to_json()["inputs"], job.recipe)
    return json.dumps({**MARK_FILE.tags, **asdict(mark)}).encode()


def job_difference(standing: bytes, ours: bytes) -> str:
    """In what two jobs differ, in words."""
    try:
        theirs, mine = MARK_FILE.decode(standing, ""), MARK_FILE.decode(ours, "")
    except FormatError as error:
        return f"of a form that is not known ({error})"
    if names := list(_unequal(theirs.recipe, mine.recipe)):
        return f"which differs in {', '.join(names)}"
    if theirs.inputs != mine.inputs:
        return f"of other inputs: {', '.join(theirs.inputs[:3])}{', ...' if len(theirs.inputs) > 3 else ''}"
    return "of inputs that changed since, or of another --part-bytes or --format"


def _unequal(theirs: Mapping[str, Any], ours: Mapping[str, Any], of: str = "") -> Iterator[str]:
    """Names whose values differ: `append_eod`, `tokenizer eod`."""
    for name, value in ours.items():
        other = theirs.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from _unequal(other, value, f"{name} ")
        elif value != other:
            yield of + name
