"""The columns of a remote parquet file as a Python file that is read ahead: pyarrow asks, we fetched.

    column "text"   [block][block][block]      │ row group 1 [block]...     each column is a stream of its own
    column "id"     [block]                    │             [block]
                       ▲ read here: fetched, and those behind it asked for; those before it are let go

Memory: AHEAD_BYTES, and the blocks that are being read.

Rows of parquet as batches: only the columns that are wanted, row group by row group, in bounded memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import numpy as np

from binidx.errors import FormatError, MissingDriverError
from binidx.prepare.text.batch import Batch, Problem, Strings, only, only_strings
from binidx.prepare.text.read import Options, check_read, check_same
from binidx.prepare.text.slices import Extent, InputBlock, Slice
from binidx.storage.adapters import ReadableFile
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import open_stored
from binidx.storage.ranges import cut
from binidx.storage.stores.registry import local_path
from binidx.storage.threads import Threads

BLOCK_BYTES = 4 << 20


AHEAD_BYTES = 32 << 20


THREADS = Threads("binidx-columns", lambda: AHEAD_BYTES // BLOCK_BYTES)


class ColumnsFile(ReadableFile):
    """A reader as a file, that fetches ahead in the given streams; what lies in none of them is read as it is asked.

    Args:
        streams: of each column the ranges of bytes it will be read by, in order.
    """

    def __init__(self, reader: RangeReader, streams: Sequence[Sequence[Range]]) -> None:
        super().__init__(reader)
        self._ahead = max(1, AHEAD_BYTES // BLOCK_BYTES // max(1, len(streams)))
        self._streams = [[block for each in ranges for block in cut(each, BLOCK_BYTES)] for ranges in streams]
        places = [(block, s, b) for s, blocks in enumerate(self._streams) for b, block in enumerate(blocks)]
        self._sorted = sorted(places)
        self._starts = [block[0] for block, _, _ in self._sorted]
        self._fetched: dict[tuple[int, int], Future[memoryview]] = {}

    def read(self, count: int = -1) -> bytes:
        stop = self._reader.size if count < 0 else min(self._position + count, self._reader.size)
        parts = []
        while self._position < stop:
            parts.append(self._part(stop))
            self._position += len(parts[-1])
        return b"".join(parts)

    def _part(self, stop: int) -> memoryview:
        """Bytes from the position on, up to `stop` or the end of a block."""
        at = bisect_right(self._starts, self._position) - 1
        if at >= 0:
            (start, end), stream, number = self._sorted[at]
            if self._position < end:
                return self._block(stream, number)[self._position - start : stop - start]
        stop = min([stop, *self._starts[at + 1 : at + 2]])
        return self._reader.read([(self._position, stop)])[0]

    def _block(self, stream: int, number: int) -> memoryview:
        """The bytes of a block; those behind it are on their way after this."""
        for key in [key for key in self._fetched if key[0] == stream and key[1] < number]:
            self._fetched.pop(key).cancel()
        blocks = self._streams[stream]
        for each in range(number, min(number + self._ahead + 1, len(blocks))):
            if (stream, each) not in self._fetched:
                self._fetched[stream, each] = THREADS.submit(lambda at=blocks[each]: self._reader.read([at])[0])  # type: ignore[misc]
        return self._fetched[stream, number].result()

    def close(self) -> None:
        for each in self._fetched.values():
            each.cancel()
        self._fetched.clear()
        super().close()


try:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from binidx.prepare.text.arrow_texts import Bad, check_text, strings_of, texts_of
except ImportError as error:  # pragma: no cover - the message is the point
    raise MissingDriverError("parquet: needs pyarrow; pip install 'binidx[parquet]'") from error


PAGE_BYTES = 1 << 20


"""Read at once of a column; without it pyarrow would hold all of it in a row group."""


MOST_ROWS = 64 << 10


def parquet_blocks(reader: RangeReader) -> tuple[InputBlock, ...]:
    """Its row groups.

    Raises:
        FormatError: it is no parquet file.
    """
    groups = _opened(reader.uri, ReadableFile(reader)).metadata
    blocks, first = [], 0
    for number in range(groups.num_row_groups):
        group = groups.row_group(number)
        start = min((_range_of(column)[0] for column in _columns(group)), default=0)
        blocks.append(InputBlock(start, _stored_bytes(group), first, group.num_rows))
        first += group.num_rows
    return tuple(blocks)


def read_parquet(
    piece: Slice, keys: Sequence[str], fields: Sequence[str], batch_bytes: int, options: Options, extent: Extent
) -> Iterator[tuple[list[Batch], list[Strings]]]:
    """The batches of all keys, and the fields beside them.

    Raises:
        FormatError: it is no parquet file, or has no such columns, or they hold something else.
    """
    reader = open_stored(piece.uri, storage_options=options)
    check_same(piece, reader.identity)  # type: ignore[attr-defined]
    groups = range(piece.first, piece.last or 0)
    about = _opened(piece.uri, ReadableFile(reader)).metadata
    extent.end = about.num_rows
    with closing(_source(reader, about, groups, [*keys, *fields])) as source:
        file = _opened(piece.uri, source, about)
        _check_columns(piece.uri, file.schema_arrow, keys, fields)
        row = 0
        for number in groups:
            group = about.row_group(number)
            row_in_group = 0
            for table in _tables(piece.uri, file, number, [*keys, *fields], batch_bytes):
                batches, strings = _batches(piece, table, keys, fields, row, row_in_group)
                extent.add((piece.first_row or 0) + row, table.num_rows)
                row, row_in_group = row + table.num_rows, row_in_group + table.num_rows
                share = _share(group, row_in_group - table.num_rows, row_in_group)
                yield [each.with_counts(num_bytes=share) for each in batches], strings
    check_read(piece)


def _tables(uri: str, file: Any, group: int, columns: Sequence[str], batch_bytes: int) -> Iterator[Any]:
    about = file.metadata.row_group(group)
    wide = sum(c.total_uncompressed_size for c in _columns(about, columns))
    rows = min(max(1, batch_bytes * about.num_rows // max(1, wide)), MOST_ROWS)
    try:
        yield from file.iter_batches(batch_size=rows, row_groups=[group], columns=list(columns), use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{uri}: row group {group} is damaged ({error}); restore it from its source") from error


def _batches(
    piece: Slice, table: Any, keys: Sequence[str], fields: Sequence[str], row: int, row_in_group: int
) -> tuple[list[Batch], list[Strings]]:
    columns = [texts_of(table.column(key), key) for key in keys]
    bad: dict[int, Bad] = {}
    for column in columns:
        for each in column.bad:
            bad.setdefault(each[0], each)
    rows = np.arange(row, row + table.num_rows, dtype=np.int64)
    places = np.arange(row_in_group, row_in_group + table.num_rows, dtype=np.int64)
    problems = [
        Problem(kind, piece.uri, row + at, row_in_group + at, f"row {(piece.first_row or 0) + row + at}", detail)
        for at, kind, detail in sorted(bad.values())
    ]
    batches = [
        Batch(key, each.bytes, each.offsets, each.documents, rows, places, None, problems, Counter(), table.num_rows)
        for key, each in zip(keys, columns, strict=True)
    ]
    strings = [strings_of(table.column(name)) for name in fields]
    if not bad:
        return batches, strings
    stay = np.ones(table.num_rows, np.bool_)
    stay[list(bad)] = False
    return [only(each, stay, Counter()) for each in batches], [only_strings(each, stay) for each in strings]


def _source(reader: RangeReader, about: Any, groups: range, names: Sequence[str]) -> Any:
    """A file of pyarrow's own where it is local; else ours."""
    path = local_path(reader.uri)
    if path is not None:
        return pa.OSFile(path)
    wanted = [_columns(about.row_group(group), names) for group in groups]
    streams = [[_range_of(column) for column in columns] for columns in zip(*wanted, strict=True)]
    return ColumnsFile(reader, streams)


def _opened(uri: str, source: Any, metadata: Any = None) -> Any:
    """As a parquet file, whose footer need not be read again if it is known."""
    try:
        return parquet.ParquetFile(
            source, metadata=metadata, buffer_size=PAGE_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except pa.ArrowException as error:
        raise FormatError(f"{uri}: no parquet file, or damaged ({error})") from error


def _columns(group: Any, names: Sequence[str] | None = None) -> list[Any]:
    """The stored columns of these names, or all: of a list the one of its items."""
    found = [group.column(c) for c in range(group.num_columns)]
    return [each for each in found if names is None or any(_is_of(each.path_in_schema, name) for name in names)]


def _is_of(path: str, name: str) -> bool:
    """Whether a stored column is that of a name, which may have dots, or of the items in its lists."""
    return path == name or path.startswith(f"{name}.")


def _stored_bytes(group: Any) -> int:
    return sum(column.total_compressed_size for column in _columns(group))


def _share(group: Any, first: int, last: int) -> int:
    """Of its stored bytes those of some rows, as if all were alike; those of all rows add up to all."""
    size = _stored_bytes(group)
    return int(size * last // group.num_rows - size * first // group.num_rows)


def _range_of(column: Any) -> tuple[int, int]:
    first = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    return first, first + column.total_compressed_size


def _check_columns(uri: str, schema: Any, keys: Sequence[str], fields: Sequence[str]) -> None:
    for name in [*keys, *fields]:
        if name not in schema.names:
            raise FormatError(f"{uri}: no column {name!r}, it has {', '.join(map(repr, schema.names))}")
        if schema.names.count(name) > 1:
            raise FormatError(f"{uri}: {schema.names.count(name)} columns {name!r}, needed one")
    for key in keys:
        check_text(uri, key, schema.field(key).type)
