"""Where each document came from, beside its dataset: row i of `PREFIX.lineage.parquet` is document i.

    source dictionary<int32, string>   URI of the file
    row    int64                       number of its line there, blank ones counted; its row in parquet
    byte   int64                       where that line begins, in plain bytes; its row in the row group in parquet
    id     string                      of the field that was asked for; null where there is none
    hash   uint64                      xxh3_64 of the document's bytes in the .bin, EOD included

20 to 30 bytes a document. A part counts rows from the first of its slice, as nobody has read what lies before it; when
the parts come together, the rows before are known, and added.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError, MissingDriverError
from binidx.format.sidecars.arrow_arrays import to_arrow, to_arrow_strings, to_bitmap, to_numpy
from binidx.prepare.text.batch import Batch, Strings
from binidx.prepare.tokenizers.engine import Stored
from binidx.storage.adapters import ReadableFile, WritableFile
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_object
from binidx.storage.writing.copy import map_in_flight
from binidx.storage.writing.publish import create_object

try:
    import pyarrow as pa
    import pyarrow.parquet as parquet
except ImportError as error:  # pragma: no cover - the message is the point
    raise MissingDriverError("lineage: needs pyarrow; pip install 'binidx[parquet]', or go without it") from error


Options = Mapping[str, Any] | None


SCHEMA = pa.schema(
    [
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("row", pa.int64()),
        ("byte", pa.int64()),
        ("id", pa.string()),
        ("hash", pa.uint64()),
    ],
    metadata={b"binidx": json.dumps({"lineage": 1}).encode()},
)


GROUP_ROWS = 1 << 18


"""Rows in memory before they are written: 10 MB or so, and their ids."""


class LineageWriter:
    """Writes one sidecar, group by group; unseen until `publish`."""

    def __init__(self, uri: str, options: Options) -> None:
        self._open = contextlib.ExitStack()
        self._tables: list[Any] = []
        self.num_rows = 0
        self._writer = parquet.ParquetWriter(
            WritableFile(self._open.enter_context(create_object(uri, options))),
            SCHEMA,
            compression="zstd",
            use_dictionary=["source"],
            # Rows and places rise by little: their differences are a byte or two.
            column_encoding={"row": "DELTA_BINARY_PACKED", "byte": "DELTA_BINARY_PACKED"},
            write_page_checksum=True,
        )

    def add(self, source: str, batch: Batch, found: Stored) -> None:
        """Append the documents of a batch, as they are stored."""
        hashes = hash_document_bytes(found.tokens, token_bounds(found))
        self.write(lineage_table(source, batch.rows, batch.places, batch.ids, hashes))

    def write(self, table: Any) -> None:
        """Append rows of `SCHEMA`."""
        self._tables.append(table)
        self.num_rows += len(table)
        if sum(map(len, self._tables)) >= GROUP_ROWS:
            self._flush()

    def publish(self) -> None:
        """Make it visible."""
        self._flush()
        self._writer.close()
        self._open.close()

    def abandon(self) -> None:
        """Leave nothing of it; after `publish` it does nothing."""
        with contextlib.suppress(_Abandoned), self._open:
            raise _Abandoned

    def _flush(self) -> None:
        if self._tables:
            together = pa.concat_tables(self._tables).unify_dictionaries()
            self._writer.write_table(together, row_group_size=GROUP_ROWS)
        self._tables = []


class _Abandoned(Exception):
    """Thrown into an unfinished write so that it leaves nothing."""


def lineage_table(
    source: str, rows: NDArray[np.int64], places: NDArray[np.int64], ids: Strings | None, hashes: NDArray[np.uint64]
) -> Any:
    """Rows of one source, as a table."""
    return build_lineage_table([source], np.zeros(len(rows), np.int32), rows, places, _strings(ids, len(rows)), hashes)


def build_lineage_table(
    sources: Sequence[str], numbers: NDArray[np.int32], rows: Any, places: Any, ids: Any, hashes: Any
) -> Any:
    """Rows as a table; `numbers` say which of the sources each is of. None: nulls, and Arrow arrays are welcome."""
    given = zip(("row", "byte", "id", "hash"), (rows, places, ids, hashes), strict=True)
    columns = [
        pa.nulls(len(numbers), SCHEMA.field(name).type) if values is None else _column(values, SCHEMA.field(name).type)
        for name, values in given
    ]
    named = pa.DictionaryArray.from_arrays(to_arrow(numbers, pa.int32()), to_arrow_strings(sources))
    return pa.Table.from_arrays([named, *columns], schema=SCHEMA)


def _column(values: Any, kind: Any) -> Any:
    return to_arrow(values, kind) if isinstance(values, np.ndarray) else values


def token_bounds(found: Stored) -> NDArray[np.int64]:
    """First token of each document, then the end, shape (num_documents + 1,)."""
    ends = np.zeros(len(found.sequence_lengths) + 1, np.int64)
    np.cumsum(found.sequence_lengths, out=ends[1:])
    bounds: NDArray[np.int64] = ends[found.document_indices]
    return bounds


def hash_document_bytes(tokens: NDArray[Any], bounds: NDArray[np.int64]) -> NDArray[np.uint64]:
    """xxh3_64 of the bytes of each document, shape (num_documents,)."""
    data, places = tokens.view(np.uint8).data, (bounds * tokens.itemsize).tolist()
    hash_of = xxhash.xxh3_64_intdigest
    found = (hash_of(data[first:stop]) for first, stop in itertools.pairwise(places))
    return np.fromiter(found, np.uint64, len(places) - 1)


@dataclass(frozen=True)
class PartLineage:
    """The sidecar of a part.

    Attributes:
        bases: rows of its file before each slice.
        counts: documents of each slice.
    """

    uri: str
    bases: Sequence[int]
    counts: Sequence[int]


AHEAD_ROWS, AHEAD_PARTS = 1 << 17, 8


"""A sidecar of no more rows is read before its turn, so many at once: 5 MB each, and their ids."""


def merge_lineage(parts: Iterable[PartLineage], target: str, options: Options) -> int:
    """Write the rows of all parts as one sidecar; how many there were.

    Raises:
        FormatError: a part has another number of rows.
    """

    def read(part: PartLineage) -> Iterable[Any]:
        rows = _numbered(part, options)
        return list(rows) if sum(part.counts) <= AHEAD_ROWS else rows

    writer = LineageWriter(target, options)
    try:
        with contextlib.closing(map_in_flight(read, parts, AHEAD_PARTS)) as tables:
            for table in itertools.chain.from_iterable(tables):
                writer.write(table)
        writer.publish()
    finally:
        writer.abandon()
    return writer.num_rows


def _numbered(part: PartLineage, options: Options) -> Iterator[Any]:
    """The rows of a part, counted in their files."""
    first, uri = 0, part.uri
    bases = np.repeat(np.array(part.bases, np.int64), part.counts)
    for table in _groups(uri, options):
        base = bases[first : first + len(table)]
        first += len(table)
        if len(base) == len(table):
            rows = to_arrow(to_numpy(table.column("row")) + base, pa.int64())
            yield table.set_column(1, SCHEMA.field("row"), rows)
    if first != len(bases):
        raise FormatError(f"{uri}: {first} rows, needed {len(bases)}, one for each document of the part")


def _groups(uri: str, options: Options) -> Iterator[Any]:
    found = open_lineage(open_object(uri, storage_options=options, cache=False))
    for number in range(found.num_row_groups):
        yield found.read_row_group(number).cast(SCHEMA)


def open_lineage(reader: RangeReader) -> Any:
    """A sidecar as pyarrow's ParquetFile."""
    return parquet.ParquetFile(ReadableFile(reader), read_dictionary=["source"], page_checksum_verification=True)


def _strings(ids: Strings | None, count: int) -> Any:
    if ids is None:
        return pa.nulls(count, pa.string())
    validity = to_bitmap(ids.present)
    offsets = pa.py_buffer((ids.offsets - ids.offsets[0]).astype(np.int32).tobytes())
    data = pa.py_buffer(ids.bytes[ids.offsets[0] : ids.offsets[-1]].tobytes())
    return pa.Array.from_buffers(pa.string(), count, [validity, offsets, data])
