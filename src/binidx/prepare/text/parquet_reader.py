"""Rows of Parquet as batches: only the needed columns, row group by row group, in bounded memory.

pyarrow reads a remote file through `ReadAheadFile`, which fetches the blocks of each column ahead of it:

    column "text"   [block][block][block]      │ row group 1 [block]...
    column "id"     [block]                    │             [block]
                       ▲ position: this block and the next ones are fetched, earlier ones are dropped

Memory: AHEAD_BYTES, and the blocks that pyarrow is decoding. Arrow's buffers become the batch's arrays without a copy;
rows that are not texts become problems.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError, StorageError, clipped
from binidx.format.arrow import pa, parquet
from binidx.format.parquet_footer import column_range, columns_of, read_row_groups
from binidx.prepare.text.batch import Batch, Problem, Strings, cumulative_offsets
from binidx.prepare.text.rows import check_names
from binidx.prepare.text.slices import InputBlock, ReadRequest
from binidx.storage.adapters import ReadableFile
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut
from binidx.storage.threads import READS

FETCH_BYTES = 4 << 20
AHEAD_BYTES = 32 << 20
PAGE_BYTES = 1 << 20
"""Bytes of a column that pyarrow reads at once; without a limit it would hold a whole column of a row group."""

MOST_ROWS_AT_ONCE = 64 << 10


class ReadAheadFile(ReadableFile):
    """File that reads ahead in given streams of byte ranges; other bytes are fetched only when they are read.

    Args:
        streams: for each column the byte ranges in which it will be read, in order.
    """

    def __init__(self, reader: RangeReader, streams: Sequence[Sequence[Range]]) -> None:
        super().__init__(reader)
        ahead = max(1, AHEAD_BYTES // FETCH_BYTES // max(1, len(streams)))
        self._fetched = [dict[Range, Future[memoryview]]() for _ in streams]
        # Start of each block -> the requests of its stream, the block and the next ones.
        self._blocks = dict[int, tuple[dict[Range, Future[memoryview]], list[Range]]]()
        for fetched, ranges in zip(self._fetched, streams, strict=True):
            blocks = [block for stretch in ranges for block in cut(stretch, FETCH_BYTES)]
            self._blocks |= {block[0]: (fetched, blocks[n : n + ahead + 1]) for n, block in enumerate(blocks)}
        self._starts = sorted(self._blocks)

    def read(self, count: int = -1) -> bytes:
        """Return the next `count` bytes; all that follow if `count` is negative."""
        stop = self._reader.size if count < 0 else min(self._position + count, self._reader.size)
        parts = []
        while self._position < stop:
            parts.append(self._next_part(stop))
            self._position += len(parts[-1])
        return b"".join(parts)

    def _next_part(self, stop: int) -> memoryview:
        """Return the bytes from the position on, up to `stop` or the end of a block."""
        at = bisect_right(self._starts, self._position)
        if at:
            fetched, blocks = self._blocks[self._starts[at - 1]]
            start, end = blocks[0]
            if self._position < end:
                for done in fetched.keys() - set(blocks):
                    fetched.pop(done).cancel()
                for block in blocks:
                    if block not in fetched:
                        fetched[block] = READS.submit(lambda block=block: self._reader.read([block])[0])  # type: ignore[misc]
                return fetched[blocks[0]].result()[self._position - start : stop - start]
        stop = min([stop, *self._starts[at : at + 1]])
        return self._reader.read([(self._position, stop)])[0]

    def close(self) -> None:
        """Cancel the requests that have not begun, and close the file."""
        for fetched in self._fetched:
            while fetched:
                fetched.popitem()[1].cancel()
        super().close()


def parquet_blocks(reader: RangeReader) -> tuple[InputBlock, ...]:
    """Return the row groups of a Parquet file.

    Raises:
        FormatError: not a Parquet file.
    """
    blocks, first = [], 0
    for start, stored_bytes, num_rows in read_row_groups(reader):
        blocks.append(InputBlock(start, stored_bytes, first, num_rows))
        first += num_rows
    return tuple(blocks)


def read_parquet(request: ReadRequest) -> Iterator[tuple[list[Batch], list[Strings]]]:
    """Yield runs of rows: a Batch for each text column (`keys`), and Strings for each further column (`fields`).

    Damaged rows, or a damaged footer in a slice without row groups, are yielded as problems.

    Raises:
        FormatError: a column is missing or repeated, a text column has another type, or the file cannot be opened.
    """
    piece, names = request.piece, [*request.keys, *request.fields]
    reader = open_stored(request.location)
    piece.check_identity(reader.identity)
    if piece.last is None:  # a file without row groups, or with a damaged footer
        request.extent.end = 0
        try:
            read_row_groups(reader)
        except FormatError as error:
            yield _damaged(request, 0, 0, 1, piece.num_bytes, str(error))
            return
    groups = range(piece.first, piece.last or 0)
    metadata = _open_parquet(piece.uri, ReadableFile(reader)).metadata
    request.extent.end = metadata.num_rows
    with closing(_open_columns(reader, metadata, groups, names)) as source:
        file = _open_parquet(piece.uri, source, metadata)
        check_columns(piece.uri, file.schema_arrow, request.keys, request.fields)
        row = 0
        for number in groups:
            group, first = metadata.row_group(number), row
            num_rows, size = group.num_rows, sum(column.total_compressed_size for column in columns_of(group))
            for table in _tables(piece.uri, file, number, names, request.batch_bytes):
                at = row - first
                count = num_rows - at if isinstance(table, Exception) else table.num_rows
                # As if all rows were equal; the shares of all rows add up to the total.
                share = size * (at + count) // num_rows - size * at // num_rows
                request.extent.add((piece.first_row or 0) + row, count)
                if isinstance(table, Exception):
                    text = " ".join(str(table).split())
                    yield _damaged(request, row, at, count, share, f"row group {number} is damaged ({text})")
                else:
                    yield make_table_batches(request, table, row, at, share)
                row += count
    piece.check_unmodified(request.location)


def _tables(uri: str, file: Any, group: int, columns: Sequence[str], batch_bytes: int) -> Iterator[Any]:
    """Yield the rows of a row group as record batches; if the rest cannot be read, the last item is the error."""
    metadata, count = file.metadata.row_group(group), 0
    plain_bytes = sum(c.total_uncompressed_size for c in columns_of(metadata, columns))
    rows = min(max(1, batch_bytes * metadata.num_rows // max(1, plain_bytes)), MOST_ROWS_AT_ONCE)
    try:
        for table in file.iter_batches(batch_size=rows, row_groups=[group], columns=list(columns), use_threads=False):
            yield table
            count += table.num_rows
    except (pa.ArrowException, OSError) as error:
        raise_unless_damage(error)
        if count >= metadata.num_rows:
            raise FormatError(f"{uri}: row group {group} is damaged ({error}); restore it from its source") from error
        yield error


def raise_unless_damage(error: Exception) -> None:
    """Raise pyarrow's error again if a store or a disk failed, which is no damage of the data."""
    if isinstance(error, StorageError) or (isinstance(error, OSError) and error.errno is not None):
        raise error


def _damaged(
    request: ReadRequest, row: int, row_in_group: int, count: int, num_bytes: int, detail: str
) -> tuple[list[Batch], list[Strings]]:
    """Return batches without documents for `count` rows that cannot be read: one problem, the others dropped."""
    piece, empty = request.piece, Strings(np.empty(0, np.uint8), np.zeros(1, np.int64), np.empty(0, np.bool_))
    where = f"row {(piece.first_row or 0) + row}"
    problem = Problem("damaged", piece.uri, row, row_in_group, where, f"{detail}; {count} rows are lost")
    dropped, none = Counter({"damaged": count - 1}), np.empty(0, np.int64)
    batches = [
        Batch(key, empty.bytes, empty.offsets, empty.offsets, none, none, None, [problem], dropped, count, num_bytes)
        for key in request.keys
    ]
    return batches, [empty for _ in request.fields]


def make_table_batches(
    request: ReadRequest, table: Any, row: int, row_in_group: int, num_bytes: int
) -> tuple[list[Batch], list[Strings]]:
    """Return the batches of a run of rows.

    Args:
        table: record batch with the needed columns.
        row, row_in_group: number of its first row in the slice, and in its row group.
        num_bytes: stored bytes of the rows.
    """
    piece, columns, bad = request.piece, [], dict[int, BadRow]()
    for key in request.keys:
        data, offsets, documents, bad_rows = _read_texts(_column(table, key), key)
        columns.append((data, offsets, documents))
        for bad_row in bad_rows:
            bad.setdefault(bad_row[0], bad_row)
    rows = np.arange(row, row + table.num_rows, dtype=np.int64)
    positions, good = rows - row + row_in_group, np.ones(table.num_rows, np.bool_)
    good[list(bad)] = False
    problems = [
        Problem(kind, piece.uri, row + at, row_in_group + at, f"row {(piece.first_row or 0) + row + at}", detail)
        for at, kind, detail in sorted(bad.values())
    ]
    batches = [
        Batch(key, *arrays, rows, positions, None, problems, Counter(), table.num_rows, num_bytes)
        for key, arrays in zip(request.keys, columns, strict=True)
    ]
    strings = [_read_strings(_column(table, name)) for name in request.fields]
    return [batch.select(good) for batch in batches], [column.select(good) for column in strings]


def _open_columns(reader: RangeReader, metadata: Any, groups: range, names: Sequence[str]) -> Any:
    """Return a file for pyarrow: its own if the object is local, else one that reads the columns ahead."""
    path = Location(reader.uri).local_path
    if path is not None:
        return pa.OSFile(path)
    columns = [columns_of(metadata.row_group(group), names) for group in groups]
    return ReadAheadFile(reader, [[column_range(column) for column in same] for same in zip(*columns, strict=True)])


def _open_parquet(uri: str, source: Any, metadata: Any = None) -> Any:
    """Return pyarrow's ParquetFile; known metadata saves reading the footer."""
    try:
        return parquet.ParquetFile(
            source, metadata=metadata, buffer_size=PAGE_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except pa.ArrowException as error:
        raise FormatError(f"{uri}: not a Parquet file, or damaged ({error}); restore it from its source") from error


def check_columns(uri: str, schema: Any, keys: Sequence[str], fields: Sequence[str]) -> None:
    """Raise FormatError unless each column is there once, and those of `keys` have texts.

    `content.text` is the field `text` of a column `content` of structs, unless a column has this very name.
    """
    for name in [*keys, *fields]:
        kind = _type_of(schema, name)
        if kind is None:
            check_names(uri, schema.names, [name])
        elif name in keys and not _is_text(kind):
            raise FormatError(
                f"{uri}: column {name!r} is {clipped(str(kind), 200)} (need string, binary or a list of them)"
                + _nested_hint(kind, name)
            )


def _type_of(schema: Any, name: str) -> Any:
    """Return the type of a column, or of a field of its structs; None if it is missing, or there more than once."""
    if (count := schema.names.count(name)) == 1:
        return schema.field(name).type
    top, *steps = name.split(".")
    if count or not steps or schema.names.count(top) != 1:
        return None
    kind = schema.field(top).type
    for step in steps:
        if not pa.types.is_struct(kind) or (at := kind.get_field_index(step)) < 0:
            return None
        kind = kind.field(at).type
    return kind


def _nested_hint(kind: Any, name: str) -> str:
    fields = [kind.field(number) for number in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    return "".join(f"; --json-keys {name}.{field.name} reads a field of it" for field in fields[:1])


def _column(table: Any, name: str) -> Any:
    """Return a column, or a field of its structs, which is null where a struct around it is."""
    if name in table.schema.names:
        return table.column(name)
    import pyarrow.compute as pc

    top, *steps = name.split(".")
    return pc.struct_field(table.column(top), steps)


BadRow = tuple[int, str, str]
"""Number of the row, kind of its Problem, detail."""


def _is_text(kind: Any) -> bool:
    """Return whether a column of this type holds texts or lists of texts."""
    if pa.types.is_dictionary(kind) or _is_list(kind):
        return not _is_list(kind.value_type) and _is_text(kind.value_type)
    binary = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    views = (pa.types.is_string_view, pa.types.is_binary_view)
    return any(test(kind) for test in (*binary, *views, pa.types.is_fixed_size_binary, pa.types.is_null))


def _read_texts(array: Any, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64], list[BadRow]]:
    """Return `texts`, `offsets`, `documents` of a Batch that still has the bad rows; and the bad rows."""
    bad: list[BadRow] = [(row, "null", f"{name!r} is null") for row in _true_rows(array.is_null())]
    lengths, values = np.ones(len(array), np.int64), array
    if _is_list(array.type):
        import pyarrow.compute as pc

        lists = array.cast(pa.large_list(array.type.value_type))
        lengths, values = to_numpy(pc.fill_null(pc.list_value_length(lists), 0)), lists.flatten()
    rows = np.repeat(np.arange(len(array)), lengths)
    if values is not array:
        nulls = sorted({int(rows[item]) for item in _true_rows(values.is_null())})
        bad += [
            (row, "not text", f"{name!r} is a list with null, needed a string or a list of strings") for row in nulls
        ]
    data, offsets, invalid = _decode_strings(values, name)
    first_invalid = {int(rows[item]): detail for item, detail in reversed(invalid)}
    bad += [(row, "not utf-8", detail) for row, detail in first_invalid.items()]
    return data, offsets, cumulative_offsets(lengths), bad


def _read_strings(array: Any) -> Strings:
    """Return a column of any type as strings: strings as they are, other values as JSON."""
    if _is_text(array.type) and not _is_list(array.type):
        values = _as_large_string(array)
    elif pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        values = array.cast(pa.large_string())
    else:
        texts = [None if value is None else json.dumps(value, default=str) for value in array.to_pylist()]
        values = pa.array(texts, pa.large_string())
    return Strings(*_buffers(values), to_numpy(values.is_valid()))


def _decode_strings(array: Any, name: str) -> tuple[NDArray[np.uint8], NDArray[np.int64], list[tuple[int, str]]]:
    """Return the bytes and offsets of the values, and (number, problem) of each value that is not UTF-8."""
    values, bad = _as_large_string(array), list[tuple[int, str]]()
    data, offsets = _buffers(values)
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        for item, (start, stop) in enumerate(pairwise(offsets.tolist())):
            try:
                bytes(data[start:stop]).decode()
            except UnicodeDecodeError as error:
                bad.append((item, f"{name!r}: byte {data[start + error.start]:#04x} at {error.start} of the text"))
    return data, offsets, bad


def _as_large_string(array: Any) -> Any:
    """Return the column as large_string; binary values are not validated."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    return array.cast(pa.large_binary()).view(pa.large_string())


def _buffers(values: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of a column, and the start of each value in them, then the end; a null value may have bytes."""
    _, offsets, data = values.buffers()
    if len(values) == 0 or offsets is None or data is None:
        return np.empty(0, np.uint8), np.zeros(len(values) + 1, np.int64)
    bounds = np.frombuffer(offsets, np.int64, len(values) + 1, 8 * values.offset)
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0]


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _true_rows(mask: Any) -> list[int]:
    rows: list[int] = np.flatnonzero(to_numpy(mask)).tolist()
    return rows


def to_numpy(array: Any) -> NDArray[Any]:
    """Copy an Arrow array of numbers or booleans, none of them null; pyarrow's method would import pandas."""
    kind, data, stop = array.type.to_pandas_dtype(), array.buffers()[1], array.offset + len(array)
    if not len(array):
        return np.empty(0, kind)
    if kind is np.bool_:
        data = np.unpackbits(np.frombuffer(data, np.uint8), count=stop, bitorder="little").view(np.bool_)
    return np.array(np.frombuffer(data, kind, stop)[array.offset :])
