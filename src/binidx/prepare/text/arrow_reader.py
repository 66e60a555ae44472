"""Rows of Arrow files as batches: streams, as `save_to_disk` of Hugging Face datasets writes them, and files (Feather).

    schema │ record batch │ record batch │ ... │ end      one slice; only the needed columns become arrays

A stream whose end is missing is an error: pyarrow would take a file that was cut between two record batches for whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from binidx.errors import FormatError
from binidx.format.arrow import pa
from binidx.prepare.text.batch import Batch, Strings
from binidx.prepare.text.parquet_reader import (
    MOST_ROWS_AT_ONCE,
    ReadAheadFile,
    check_columns,
    make_table_batches,
    raise_unless_damage,
)
from binidx.prepare.text.slices import ReadRequest
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_stored

FILE_MAGIC, STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


def read_arrow_rows(request: ReadRequest) -> Iterator[tuple[list[Batch], list[Strings]]]:
    """Yield runs of rows: a Batch for each text column (`keys`), and Strings for each further column (`fields`).

    Raises:
        FormatError: a column is missing or repeated, a text column has another type, or the file is damaged.
    """
    piece, row, done = request.piece, 0, 0
    reader = open_stored(request.location)
    piece.check_identity(reader.identity)
    path = Location(reader.uri).local_path
    with pa.OSFile(path) if path else ReadAheadFile(reader, [[(0, reader.size)]]) as source:
        for table in _record_batches(reader, source, request):
            step = max(1, min(MOST_ROWS_AT_ONCE, request.batch_bytes * table.num_rows // max(1, table.nbytes)))
            for start in range(0, table.num_rows, step):
                part = table.slice(start, step)
                request.extent.add(row, part.num_rows)
                before, done = done, min(source.tell(), piece.num_bytes)
                yield make_table_batches(request, part, row, row, done - before)
                row += part.num_rows
    request.extent.end = row
    piece.check_unmodified(request.location)


def _record_batches(reader: RangeReader, source: Any, request: ReadRequest) -> Iterator[Any]:
    uri, number = request.piece.uri, 0
    start, end = (
        bytes(piece) for piece in reader.read([(0, min(6, reader.size)), (max(0, reader.size - 8), reader.size)])
    )
    is_file = start == FILE_MAGIC
    if not (end.endswith(FILE_MAGIC) if is_file else end == STREAM_END):
        raise FormatError(
            f"{uri}: not an Arrow file, or truncated (found {end!r} at its end); restore it from its source"
        )
    try:
        schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(source).schema
        check_columns(uri, schema, request.keys, request.fields)
        source.seek(0)
        needed = {name if name in schema.names else name.partition(".")[0] for name in (*request.keys, *request.fields)}
        options = pa.ipc.IpcReadOptions(included_fields=[schema.names.index(name) for name in sorted(needed)])
        if is_file:
            opened = pa.ipc.open_file(source, options=options)
            tables = map(opened.get_batch, range(opened.num_record_batches))
        else:
            tables = iter(pa.ipc.open_stream(source, options=options))
        for table in tables:
            table.validate()
            yield table
            number += 1
    except (pa.ArrowException, OSError) as error:
        raise_unless_damage(error)
        raise FormatError(f"{uri}: record batch {number} is damaged ({error}); restore it from its source") from error
