"""All parts -> the datasets: the store moves the tokens, then the manifests appear, then the parts go.

    1  every record is there, its sums are right, and together they have read every input once, to its end
    2  of each key: the .idx of the parts is rewritten, the .bin put together by the store, published, the .idx last
    3  lineage, quarantine, manifests
    4  the parts go, job.json last

Two may do so at once, or one after another was killed: both write the same bytes, and nothing that may be the other's
is ever removed. A dataset that is found finished is left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from binidx.errors import FormatError, ObjectExistsError
from binidx.format.bin_object import beside
from binidx.format.bin_writer import delete_all
from binidx.format.convert_target import Target
from binidx.format.index_columns import IndexColumns
from binidx.prepare.finished import Finished
from binidx.prepare.merge import merge_tokens, merged_index, open_all
from binidx.prepare.preprocess.job import Job
from binidx.prepare.preprocess.manifest import manifest_of, row_bases
from binidx.prepare.preprocess.places import LINEAGE, MANIFEST, Places
from binidx.prepare.preprocess.plan import Part
from binidx.prepare.preprocess.quarantine import merge_quarantine
from binidx.prepare.preprocess.record import Record
from binidx.storage import filesystem
from binidx.storage.backends import open_object
from binidx.storage.join import IN_FLIGHT
from binidx.storage.publish import create_object, delete_object, object_exists
from binidx.storage.resumable import Watch
from binidx.text.extent import Read, check_extents
from binidx.text.listing import local_files, stored_objects

Records = Mapping[str, Record]
"""By the names of the parts."""


def finish(job: Job, parts: Sequence[Part], records: Records, *, overwrite: bool, watch: Watch) -> None:
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


def merge_key(places: Places, key: str, parts: Sequence[Part], records: Records, overwrite: bool, watch: Watch) -> None:
    """The dataset of one key."""
    job = places.job
    target = Target(job.datasets[key], job.codec, job.target_options)
    opened = open_all([places.prefix(part, key) for part in parts], job.target_options)
    with merged_index(opened, watch) as columns:
        check_counts(key, parts, records, opened)
        make_way = way_for(target, columns, overwrite)
        merge_tokens(opened, target, columns, make_way, job.target_options, watch)


def check_counts(key: str, parts: Sequence[Part], records: Records, opened: Sequence[Finished]) -> None:
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
    return lambda: delete_all([*old, *beside(target.bin_uri)], target.options)


def write_lineage(places: Places, key: str, parts: Sequence[Part], records: Records) -> None:
    """The sidecar of one dataset."""
    from binidx.prepare.preprocess.lineage import PartRows, merge_lineage

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
    if (folder := filesystem.local_path(places.folder)) is not None:
        remove_folder(Path(folder))


def remove_others(places: Places, parts: Sequence[Part]) -> None:
    """What another job left where our parts will lie."""
    ours = {name_of(uri) for uri in (places.job_uri, *itertools.chain(*map(places.objects, parts)))}
    theirs = [uri for uri in objects_in(places) if name_of(uri) not in ours]
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(lambda uri: delete_object(uri, places.job.target_options), theirs))


def objects_in(places: Places) -> list[str]:
    """All that lies in the folder of the parts, where there is one."""
    path = filesystem.local_path(places.folder)
    return stored_objects(f"{places.folder}/", places.job.target_options) if path is None else local_files(path) or []


def name_of(uri: str) -> str:
    return uri.rpartition("/")[2]


def remove_folder(folder: Path) -> None:
    """And what killed workers left in it."""
    with contextlib.suppress(OSError):
        for left in folder.glob("*.tmp"):
            left.unlink()
        folder.rmdir()
