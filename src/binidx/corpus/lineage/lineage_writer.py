"""Writer of lineage files, and the lineage of parts joined to that of a dataset: `format.sidecars.lineage` reads it.

A row takes 20 to 30 bytes. A part counts rows from the start of its slices, as the rows before them are unknown;
`merge_lineage` adds their number.

NumPy arrays are converted here without pandas: pyarrow's `pa.array` imports it if it is installed, 0.3 s of CPU and
40 MB in each worker process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.format.arrow import pa, parquet
from binidx.format.bin_file import BinWriter
from binidx.format.sidecars.lineage import lineage_schema, open_lineage
from binidx.storage.adapters import WritableFile
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.threads import map_in_flight

Strings = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]
"""A nullable string column of n rows: UTF-8 bytes, offsets of shape (n + 1,), and a validity mask of shape (n,)."""

SCHEMA = lineage_schema()

GROUP_ROWS = 1 << 18
"""Rows of a row group: about 10 MB in memory, plus the ids."""


class LineageWriter:
    """Writer of one lineage file, invisible until `publish`."""

    def __init__(self, location: Location) -> None:
        self._file, self._tables, self.num_rows = BinWriter(location), list[Any](), 0
        self._writer = parquet.ParquetWriter(
            WritableFile(self._file),
            SCHEMA,
            compression="zstd",
            use_dictionary=["source"],
            # Row numbers and positions increase slowly, so that each difference takes a byte or two.
            column_encoding={"row": "DELTA_BINARY_PACKED", "byte": "DELTA_BINARY_PACKED"},
            write_page_checksum=True,
        )

    def add(
        self,
        source: str,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        ids: Strings | None,
        tokens: NDArray[Any],
        sequence_lengths: NDArray[np.int32],
        document_indices: NDArray[np.int64],
    ) -> None:
        """Append the documents of one source.

        Args:
            rows, places: the columns "row" and "byte", shape (num_documents,).
            ids: the column "id", or None for nulls.
            tokens: tokens as stored, of all documents.
            sequence_lengths: shape (num_sequences,).
            document_indices: first sequence of each document, then the end, shape (num_documents + 1,).
        """
        bounds = np.concatenate([[0], np.cumsum(sequence_lengths, dtype=np.int64)])[document_indices] * tokens.itemsize
        data = tokens.view(np.uint8).data
        digests = (xxhash.xxh3_64_intdigest(data[start:stop]) for start, stop in itertools.pairwise(bounds.tolist()))
        hashes = np.fromiter(digests, np.uint64, len(rows))
        names = None if ids is None else join_strings(*ids)
        self.write(build_lineage_table([source], np.zeros(len(rows), np.int32), rows, places, names, hashes))

    def write(self, table: Any) -> None:
        """Append an Arrow table with the schema SCHEMA."""
        self._tables.append(table)
        self.num_rows += len(table)
        if (num_held := sum(map(len, self._tables))) >= GROUP_ROWS:
            self._flush(num_held // GROUP_ROWS * GROUP_ROWS)

    def publish(self) -> None:
        """Make the file visible."""
        self._flush(sum(map(len, self._tables)))
        self._writer.close()
        self._file.publish()

    def abandon(self) -> None:
        """Remove the unpublished file; no effect after `publish`."""
        self._file.abandon()

    def _flush(self, count: int) -> None:
        """Write the first `count` rows of the held tables, as whole row groups but at the end of the file."""
        if count:
            together = pa.concat_tables(self._tables).unify_dictionaries()
            self._writer.write_table(together[:count], row_group_size=GROUP_ROWS)
            self._tables = [together[count:]]


def build_lineage_table(
    sources: Sequence[str], numbers: NDArray[np.int32], rows: Any, places: Any, ids: Any, hashes: Any
) -> Any:
    """Return an Arrow table with the schema SCHEMA.

    Args:
        numbers: for each row, the position of its source in `sources`.
        rows, places, ids, hashes: the other columns as NumPy or Arrow arrays; None for nulls.
    """
    columns = [pa.DictionaryArray.from_arrays(to_arrow(numbers, pa.int32()), to_arrow_strings(sources))]
    for kind, values in zip(SCHEMA.types[1:], (rows, places, ids, hashes), strict=True):
        column = pa.nulls(len(numbers), kind) if values is None else values
        columns.append(to_arrow(column, kind) if isinstance(column, np.ndarray) else column)
    return pa.Table.from_arrays(columns, schema=SCHEMA)


@dataclass(frozen=True)
class PartLineage:
    """Lineage file of a part.

    Attributes:
        location: of the file.
        bases: for each slice of input text, the number of rows before it in its file.
        counts: for each slice, the number of its documents.
    """

    location: Location
    bases: Sequence[int]
    counts: Sequence[int]


READ_AHEAD_ROWS, READ_AHEAD_PARTS = 1 << 17, 8
"""Most rows of a file that is read ahead, and most files read ahead at once: 5 MB each, plus the ids."""


def merge_lineage(parts: Iterable[PartLineage], target: Location) -> int:
    """Write the rows of all parts as one lineage file and return their number.

    Args:
        parts: lineage files, in the order of the documents.
        target: the file to write.

    Raises:
        FormatError: the file of a part has another number of rows than the part has documents.
    """

    def read(part: PartLineage) -> Iterable[Any]:
        rows = _numbered(part)
        return list(rows) if sum(part.counts) <= READ_AHEAD_ROWS else rows

    writer = LineageWriter(target)
    try:
        with contextlib.closing(map_in_flight(read, parts, READ_AHEAD_PARTS)) as tables:
            for table in itertools.chain.from_iterable(tables):
                writer.write(table)
        writer.publish()
    finally:
        writer.abandon()
    return writer.num_rows


def _numbered(part: PartLineage) -> Iterator[Any]:
    """Yield tables of a part's rows, with row numbers that count from the start of the input file."""
    import pyarrow.compute as compute

    first = 0
    bases = np.repeat(np.array(part.bases, np.int64), part.counts)
    opened = open_lineage(open_object(part.location, cache=False))
    for number in range(opened.num_row_groups):
        table = opened.read_row_group(number).cast(SCHEMA)
        base = bases[first : first + len(table)]
        first += len(table)
        if len(base) == len(table):
            rows = compute.add(table.column("row"), to_arrow(base, pa.int64()))
            yield table.set_column(1, SCHEMA.field("row"), rows)
    if first != len(bases):
        raise FormatError(f"{part.location}: {first} rows, needed {len(bases)}, one for each document of the part")


def to_arrow(values: NDArray[Any], kind: Any) -> Any:
    """Convert numbers to an Arrow array of the type `kind`, without a copy if the type is the same.

    Args:
        values: numbers, shape (n,).
        kind: Arrow type of the result.

    Raises:
        TypeError: `kind` does not hold all values of the array's type.
    """
    values = np.ascontiguousarray(values.astype(kind.to_pandas_dtype(), casting="safe", copy=False))
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def to_bitmap(values: NDArray[np.bool_]) -> Any:
    """Convert booleans to an Arrow buffer, such as the validity bitmap of an array."""
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def to_arrow_strings(values: Sequence[str]) -> Any:
    """Convert a few strings to an Arrow array."""
    encoded = [text.encode() for text in values]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
    return join_strings(np.frombuffer(b"".join(encoded), np.uint8), ends, np.ones(len(encoded), bool))


def join_strings(data: NDArray[np.uint8], offsets: NDArray[np.int64], present: NDArray[np.bool_]) -> Any:
    """Return the strings of a column, see `Strings`, as an Arrow array."""
    ends = pa.py_buffer((offsets - offsets[0]).astype(np.int32).tobytes())
    text = pa.py_buffer(data[offsets[0] : offsets[-1]].tobytes())
    return pa.Array.from_buffers(pa.string(), len(present), [to_bitmap(present), ends, text])
