"""Lineage: the origin of each document. Row i of `PREFIX.lineage.parquet` describes document i.

    source dictionary<int32, string>   URI of the file
    row    int64                       line number in the file, blank lines counted; in parquet the row
    byte   int64                       first byte of that line in the plain text; in parquet the row in its row group
    id     string                      value of the field that the user named; null if there is none
    hash   uint64                      xxh3_64 of the document's bytes in the .bin, EOD included

Searches read only the needed row groups: for documents those that hold their rows, for a row those whose statistics
include it, and only the columns that are compared. pyarrow is imported with the first of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import BinidxError, ConfigError, FormatError, ObjectNotFoundError
from binidx.format.sidecars.dataset_manifest import LINEAGE
from binidx.storage.adapters import ReadableFile
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location, Where
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import object_exists
from binidx.storage.threads import OPENS


@functools.cache
def lineage_schema() -> Any:
    """Return the schema of a lineage file, as pyarrow has it."""
    from binidx.format.arrow import pa

    kinds = pa.dictionary(pa.int32(), pa.string()), pa.int64(), pa.int64(), pa.string(), pa.uint64()
    columns = [*zip(("source", "row", "byte", "id", "hash"), kinds, strict=True)]
    return pa.schema(columns, metadata={b"binidx": json.dumps({"lineage": 1}).encode()})


def open_lineage(reader: RangeReader, metadata: Any = None) -> Any:
    """Open a lineage file as pyarrow's ParquetFile; `read_metadata` returns metadata that does not crash pyarrow.

    Args:
        reader: reader of the file.
        metadata: pyarrow's metadata of the file, if it was read before.
    """
    from binidx.format.arrow import parquet

    return parquet.ParquetFile(
        ReadableFile(reader), metadata=metadata, read_dictionary=["source"], page_checksum_verification=True
    )


@contextlib.contextmanager
def _opened_lineage(file: Location) -> Iterator[tuple[Any, Any]]:
    """Open a lineage file as pyarrow's ParquetFile, with its schema; raise errors about its format as FormatError."""
    from binidx.format.arrow import pa
    from binidx.format.parquet_footer import read_metadata

    try:
        reader = open_object(file, cache=False)
        yield open_lineage(reader, read_metadata(reader)), lineage_schema()
    except BinidxError:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a disk that fails is no damage
        text = " ".join(str(error).split())
        raise FormatError(f"{file}: is no lineage ({text}); needed the columns source, row, byte, id, hash") from error


def read_origins(prefix: Where, documents: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return source, row, byte, id and hash of documents, by document number; empty if there is no lineage.

    Reads the footer and the row groups with these documents: about 6 MB each, for a quarter of a million rows.

    Args:
        prefix: of the dataset.
        documents: document numbers, in any order.

    Raises:
        FormatError: the lineage is not valid, or has no such row.
        MissingDriverError: there is a lineage, and pyarrow is not installed.
    """
    lineage = Location.of(prefix) + LINEAGE
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


def read_lineage(prefix: Location, count: int, documents: Range | None = None) -> Iterator[Any]:
    """Yield tables of `lineage_schema()`, of a dataset; raise FormatError unless it has a row for each document.

    Args:
        prefix: of the dataset.
        count: number of its documents.
        documents: numbers (start, stop) of the documents whose rows to yield; None: all.
    """
    from binidx.format.arrow import pa

    file, (start, stop) = prefix + LINEAGE, documents or (0, count)
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
