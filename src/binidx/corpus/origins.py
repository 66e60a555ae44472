"""Origins of documents: lineage rows found by document, file or id, and carried along to a new dataset.

Searches read only the needed row groups: for documents those that hold their rows, for a row those whose statistics
include it, and only the columns that are compared.

In a new dataset row i still describes document i. If only some of several sources have lineage, the documents of the
others get their prefix as `source`, their number in it as `row`, and nulls, so that each can be found. If none has any,
none is written. Rows are read and written `BATCH_ROWS` at a time. pyarrow is imported with the first of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.corpus.shuffle_buckets import Buckets, Column, keyed_row, plan_shuffle, shuffle_keys
from binidx.corpus.whole_dataset import DatasetTarget, Options, WholeDataset
from binidx.errors import BinidxError, ConfigError, FormatError, ObjectNotFoundError
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.storage.interfaces import Range
from binidx.storage.location import Location, Where
from binidx.storage.open import open_object
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.threads import OPENS
from binidx.storage.writing.copy import ProgressWatcher
from binidx.storage.writing.publish import delete_object


def read_origins(prefix: Where, documents: Sequence[int], options: Options = None) -> dict[int, dict[str, Any]]:
    """Return source, row, byte, id and hash of documents, by document number; empty if there is no lineage.

    Reads the footer and the row groups with these documents: about 6 MB each, for a quarter of a million rows.

    Args:
        prefix: of the dataset.
        documents: document numbers, in any order.
        options: fsspec options, for a prefix that is no `Location`.

    Raises:
        FormatError: the lineage is not valid, or has no such row.
        MissingDriverError: there is a lineage, and pyarrow is not installed.
    """
    lineage = Location.of(prefix, options) + LINEAGE
    if not len(documents) or not object_exists(lineage):
        return {}
    wanted = np.unique(np.array(documents, np.int64))
    with _opened_lineage(lineage) as (file, schema):
        metadata, rows = file.metadata, dict[int, dict[str, Any]]()
        if wanted[-1] >= metadata.num_rows:
            raise FormatError(f"{lineage}: {metadata.num_rows} rows, needed one for document {wanted[-1]}")
        firsts = np.cumsum([0, *(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))])
        for group in np.unique(np.searchsorted(firsts, wanted, "right") - 1).tolist():
            here = wanted[(wanted >= firsts[group]) & (wanted < firsts[group + 1])]
            table = file.read_row_group(group).take(here - firsts[group]).cast(schema)
            rows.update(zip(here.tolist(), table.to_pylist(), strict=True))
    return rows


def origin_text(origin: dict[str, Any]) -> str:
    """Return a text such as `s3://text/en.jsonl row 17, byte 2,034, id "a"` for an origin from `read_origins`."""
    byte = f", byte {origin['byte']:,}" if origin["byte"] is not None else ""
    name = f', id "{origin["id"]}"' if origin["id"] is not None else ""
    return f"{origin['source']} row {origin['row']:,}{byte}{name}"


Mask = NDArray[np.bool_]

SEARCHES = 8
"""Lineage files that are searched at the same time; each needs 6 MB, for a row group."""


def find_named(prefixes: Mapping[str, Location], name: str) -> tuple[dict[str, list[int]], list[ObjectNotFoundError]]:
    """Return the numbers of the documents that a name stands for, of each dataset that has some.

    Args:
        prefixes: the datasets by any key.
        name: FILE:ROW or id=ID.

    Returns:
        Key -> numbers, ascending; and an error for each dataset without lineage, or without ids in it.

    Raises:
        ConfigError: a name of another form.
        FormatError: a lineage is not valid.
    """
    file, _, row = name.rpartition(":")
    if not (name.startswith("id=") or (file and row.isdecimal() and len(row) < 19)):
        raise ConfigError(f"document: found {name}, needs a number, FILE:ROW or id=ID")

    def search(prefix: Location) -> list[int] | ObjectNotFoundError:
        try:
            if name.startswith("id="):
                return documents_with_id(prefix, name.removeprefix("id="))
            return documents_at(prefix, file, int(row))
        except ObjectNotFoundError as error:
            return error

    with OPENS.executor(SEARCHES) as pool:
        answers = dict(zip(prefixes, pool.map(search, prefixes.values()), strict=True))
    missing = [answer for answer in answers.values() if isinstance(answer, ObjectNotFoundError)]
    return {key: answer for key, answer in answers.items() if isinstance(answer, list) and answer}, missing


def documents_with_id(prefix: Location, wanted: str) -> list[int]:
    """Return the numbers of the documents whose id is `wanted`, ascending.

    Args:
        prefix: of the dataset.
        wanted: an id, compared as a whole.

    Raises:
        ObjectNotFoundError: the dataset has no lineage, or it has no ids.
        FormatError: the lineage is not valid.
    """
    numbers = _search(prefix, ["id"], lambda table: _equal(table["id"], wanted))
    if not numbers and not _has_ids(lineage := prefix + LINEAGE):
        problem = "has no ids, which binidx preprocess stores with --id-key"
        raise ObjectNotFoundError(f"{lineage}: {problem}; name the document by FILE:ROW")
    return numbers


def _has_ids(file: Location) -> bool:
    """Return whether a document has an id, by the statistics of the lineage; True if it has no statistics."""
    with _opened_lineage(file) as (opened, schema):
        groups = [opened.metadata.row_group(group) for group in range(opened.metadata.num_row_groups)]
        ids = [(group.column(schema.get_field_index("id")).statistics, group.num_rows) for group in groups]
        return any(not (known and known.has_null_count) or known.null_count < rows for known, rows in ids)


def documents_at(prefix: Location, file: str, row: int) -> list[int]:
    """Return the numbers of the documents made from one row of a text file, ascending.

    Args:
        file: URI of the file, or the end of that URI after a slash.

    Raises:
        ObjectNotFoundError: the dataset has no lineage.
        FormatError: the lineage is not valid.
    """

    def matches(table: Any) -> Mask:
        source = table["source"].combine_chunks()
        names = [name == file or name.endswith(f"/{file}") for name in source.dictionary.to_pylist()]
        mine: Mask = np.array([*names, False])[source.indices.fill_null(len(names)).to_numpy()]
        return mine & _equal(table["row"], row)

    return _search(prefix, ["source", "row"], matches, row)


def _search(
    prefix: Location, columns: Sequence[str], matches: Callable[[Any], Mask], row: int | None = None
) -> list[int]:
    lineage, numbers, first = prefix + LINEAGE, list[int](), 0
    if not object_exists(lineage):
        raise ObjectNotFoundError(f"{lineage}: not found; binidx preprocess writes it beside a dataset")
    with _opened_lineage(lineage) as (file, schema):
        metadata, number = file.metadata, schema.get_field_index("row")
        for group in range(metadata.num_row_groups):
            bounds = metadata.row_group(group).column(number).statistics
            if row is None or not (bounds and bounds.has_min_max) or bounds.min <= row <= bounds.max:
                numbers += (first + np.flatnonzero(matches(file.read_row_group(group, [*columns])))).tolist()
            first += metadata.row_group(group).num_rows
    return numbers


def _equal(column: Any, value: Any) -> Mask:
    import pyarrow.compute as compute

    mask: Mask = compute.equal(column, value).combine_chunks().fill_null(False).to_numpy(zero_copy_only=False)
    return mask


BATCH_ROWS = 1 << 16


def read_lineage(dataset: WholeDataset, documents: Range | None = None) -> Iterator[Any]:
    """Yield the lineage of a dataset in tables of `SCHEMA`; raise FormatError unless it has a row for each document.

    Args:
        documents: numbers (start, stop) of the documents whose rows to yield; None: all.
    """
    from binidx.format.arrow import pa

    file, count = dataset.source.prefix + LINEAGE, dataset.index.num_documents
    start, stop = documents or (0, count)
    with _opened_lineage(file) as (opened, schema):
        metadata = opened.metadata
        if metadata.num_rows != count:
            raise FormatError(f"{file}: {metadata.num_rows} rows, needed {count}, one for each document")
        sizes = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        firsts = list(itertools.accumulate(sizes, initial=0))
        groups = [group for group, first in enumerate(firsts[:-1]) if first < stop and start < firsts[group + 1]]
        first = firsts[groups[0]] if groups else 0
        for batch in opened.iter_batches(BATCH_ROWS, groups):
            yield pa.Table.from_batches([batch]).cast(schema)[max(start - first, 0) : max(stop - first, 0)]
            first += len(batch)


def _placeholders(dataset: WholeDataset) -> Iterator[Any]:
    """Yield tables for a dataset without lineage: its prefix is the source, the document number the row."""
    from binidx.format.sidecars.lineage import build_lineage_table

    for start, stop in cut((0, dataset.index.num_documents), BATCH_ROWS):
        rows = np.arange(start, stop)
        yield build_lineage_table([dataset.prefix], np.zeros(len(rows), np.int32), rows, None, None, None)


@contextlib.contextmanager
def _opened_lineage(file: Location) -> Iterator[tuple[Any, Any]]:
    """Open a lineage file as pyarrow's ParquetFile, with its schema; raise errors about its format as FormatError."""
    from binidx.format.arrow import pa
    from binidx.format.parquet_footer import read_metadata
    from binidx.format.sidecars.lineage import SCHEMA, open_lineage

    try:
        reader = open_object(file, cache=False)
        yield open_lineage(reader, read_metadata(reader)), SCHEMA
    except BinidxError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a disk that fails is no damage
        text = " ".join(str(error).split())
        raise FormatError(f"{file}: is no lineage ({text}); needed the columns source, row, byte, id, hash") from error


Assign = Callable[[int, int], NDArray[np.int64]]
"""Function (first, count) -> target number of each document from `first` on, -1 for none; shape (count,)."""


class LineageTransfer:
    """Copy of the lineage of datasets to the targets that get their documents; invisible until `replace` or `publish`.

    Its truth value is False if no dataset has lineage; then none is written.

    Args:
        datasets: sources, in the order of their documents in the targets.
        limit: number of rows after which to stop; None for all.

    Attributes:
        num_rows: number of rows of all datasets, up to the limit.
    """

    def __init__(
        self, datasets: Sequence[WholeDataset], targets: Sequence[DatasetTarget], limit: int | None = None
    ) -> None:
        self._targets = targets
        present = OPENS.map(lambda dataset: dataset.source.has(LINEAGE), datasets)
        self._sources = [*zip(datasets, present, strict=True)]
        count = sum(dataset.index.num_documents for dataset in datasets)
        self.num_rows = count if limit is None else min(count, limit)
        self._writers: list[LineageWriter] = []
        if any(present):
            from binidx.format.sidecars.lineage import LineageWriter

            self._writers = [LineageWriter(target.prefix + LINEAGE) for target in targets]

    def __bool__(self) -> bool:
        return bool(self._writers)

    def tables(self) -> Iterator[Any]:
        """Yield the rows in tables of `SCHEMA`.

        Raises:
            FormatError: a file has another number of rows than its dataset has documents.
            MissingDriverError: pyarrow is not installed.
        """
        left = self.num_rows
        for dataset, present in self._sources:
            for table in (read_lineage if present else _placeholders)(dataset):
                yield table[:left]
                left -= min(left, len(table))
                if not left:
                    return

    def fill(self, watch: ProgressWatcher, tables: Iterable[Any] | None = None, assign: Assign | None = None) -> None:
        """Append rows to the files of the targets.

        Args:
            tables: tables of `SCHEMA`; by default the sources' rows, in order. Read only if a source has lineage.
            assign: target of each row; by default all rows go to the first target.
        """
        if not self._writers:
            return
        from binidx.format.arrow import pa

        watch.begin("lineage", self.num_rows, 0, "rows")
        first = 0
        for table in self.tables() if tables is None else tables:
            if assign is None:
                self._writers[0].write(table)
            else:
                targets = assign(first, len(table))
                for number, writer in enumerate(self._writers):
                    writer.write(table.filter(pa.array(targets == number)))
            first += len(table)
            watch.advance(len(table))

    def replace(self, number: int) -> None:
        """Remove the existing dataset of target `number` and its sidecars, and publish the new lineage.

        A complete dataset that this job wrote stays as it is; only its lineage is added if it is missing.
        """
        target = self._targets[number]
        if not target.is_complete:
            target.remove_existing()
            self.publish(number)
        elif self._writers and not object_exists(target.prefix + LINEAGE):
            self.publish(number)

    def publish(self, number: int) -> None:
        """Publish the new lineage of target `number`; if no source has lineage, remove the existing one."""
        if self._writers:
            self._writers[number].publish()
        else:
            delete_object(self._targets[number].prefix + LINEAGE)

    def close(self) -> None:
        """Remove the files that were not published."""
        for writer in self._writers:
            writer.abandon()


LINEAGE_ROW_BYTES = 64
"""Assumed bytes of a row with its id. A bucket with much longer ids stays on the scratch disk, and its ids are read one
by one."""

ROW = np.dtype([("source", "<i4"), ("row", "<i8"), ("byte", "<i8"), ("hash", "<u8"), ("present", "?", 3)])
"""Record of a row without its id: the number of its source, and whether byte, id and hash are present."""


def shuffle_lineage(
    tables: Iterable[Any], num_rows: int, seed: int, memory_bytes: int, scratch: str | None
) -> Iterator[Any]:
    """Yield the rows of lineage tables, one a document, in the order in which `shuffle_datasets` puts the documents.

    Args:
        tables: tables of `SCHEMA`.
        num_rows: number of rows of all tables.
        seed: seed of that shuffle.
        memory_bytes, scratch: as in `shuffle_datasets`.
    """
    from binidx.format.arrow import pa
    from binidx.format.sidecars.lineage import build_lineage_table, join_strings

    sources: dict[str, int] = {}
    plan, first = plan_shuffle(memory_bytes, num_rows * LINEAGE_ROW_BYTES, num_rows, 2), 0
    with contextlib.closing(Buckets(plan, keyed_row(2), scratch)) as buckets:
        for table in tables:
            buckets.add(shuffle_keys(seed, first, len(table)), _row_columns(table, sources))
            first += len(table)
        for lengths, (records, ids) in buckets.sorted():
            rows = np.frombuffer(b"".join(map(bytes, records)), ROW)
            text, ends = np.frombuffer(b"".join(map(bytes, ids)), np.uint8), np.append(0, np.cumsum(lengths[:, 1]))
            has_byte, has_id, has_hash = rows["present"].T
            byte, hashes = pa.array(rows["byte"], mask=~has_byte), pa.array(rows["hash"], mask=~has_hash)
            names = join_strings(text, ends, has_id)
            yield build_lineage_table([*sources], rows["source"], rows["row"], byte, names, hashes)


def _row_columns(table: Any, sources: dict[str, int]) -> list[Column]:
    """Return the rows of a table as a column of `ROW` records and one of ids; new source names go into `sources`."""
    table = table.unify_dictionaries()
    named, ids = table.column("source").combine_chunks(), table.column("id").fill_null("").combine_chunks()
    numbers = [sources.setdefault(name, len(sources)) for name in named.dictionary.to_pylist()]
    rows = np.zeros(len(table), ROW)
    rows["source"] = np.array(numbers, np.int32)[named.indices.to_numpy()]
    rows["present"] = np.column_stack([table.column(name).is_valid().to_numpy() for name in ("byte", "id", "hash")])
    for name in ("row", "byte", "hash"):
        rows[name] = table.column(name).fill_null(0).to_numpy()
    _, offsets, text = ids.buffers()
    bounds = np.frombuffer(offsets, np.int32, len(ids) + 1, ids.offset * 4).astype(np.int64)
    records = rows.view(np.uint8), np.arange(len(rows) + 1) * ROW.itemsize
    return [records, (np.frombuffer(text or b"", np.uint8), bounds)]
