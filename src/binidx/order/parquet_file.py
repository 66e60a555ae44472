"""Parquet of tables in which nothing is missing, and lists of numbers above all.

    PAR1 | row groups, each its columns one after the other | footer | its bytes, int32 | PAR1
    column    strings: a page of them, then one of their numbers; all else: one page
    page      header | data, see `parquet_columns`

Source: Apache Parquet, format 2.x, pages of version 1; `pyarrow.parquet` writes the same files. It asks of each element
whether it, or the list, or what is in it, may be missing, which costs 12 ns an element; here a list costs 1 ns.
"""

from __future__ import annotations

import base64
import struct as fixed
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.order.parquet_columns import Column, columns_of, page_of
from binidx.order.thrift import Value, array, binary, i32, i64, struct
from binidx.storage.publish import Writer

MAGIC = b"PAR1"
INT32, INT64, BYTE_ARRAY = 1, 2, 6
PLAIN, RLE, RLE_DICTIONARY = 0, 3, 8
REQUIRED, REPEATED = 0, 2
UTF8, LIST_OF = 0, 3
CONVERTED = {pa.uint16(): 12, pa.uint32(): 13, pa.uint64(): 14, pa.int16(): 16}
"""What a number is that is stored as an int32 or int64 and is none."""
CODECS = {None: 0, "zstd": 6, "lz4_raw": 7}
DATA_PAGE, DICTIONARY_PAGE = 0, 2
MOST_PAGE_BYTES = (1 << 31) - 1


class ParquetFile:
    """Writes tables of one schema, each as a row group.

    Args:
        out: takes the bytes.
        schema: integers, strings by number, lists of integers or of structs of integers; nothing is missing.
        metadata: of the file.
        codecs: path, joined by dots -> "zstd" or "lz4_raw"; what is not there is not compressed.
        ranged: columns of which each row group tells the least and the greatest.
    """

    def __init__(
        self,
        out: Writer,
        schema: pa.Schema,
        metadata: Mapping[str, str],
        codecs: Mapping[str, str],
        ranged: tuple[str, ...] = (),
    ) -> None:
        self.schema, self.metadata, self.codecs, self.ranged = schema, metadata, codecs, ranged
        self._out, self._position, self._num_rows, self._groups = out, 0, 0, list[Value]()
        self._write(MAGIC)

    def write_table(self, table: pa.Table) -> None:
        """One row group; none of no rows."""
        if not len(table):
            return
        first = self._position
        chunks = [self._column(column) for column in columns_of(table.cast(self.schema))]
        fields = {1: array(chunks), 2: i64(self._position - first), 3: i64(len(table))}
        self._groups.append(struct(fields))
        self._num_rows += len(table)

    def close(self) -> None:
        """The footer; the file is whole then."""
        kept = base64.b64encode(self.schema.with_metadata(dict(self.metadata)).serialize()).decode()
        pairs = {**self.metadata, "ARROW:schema": kept}
        elements = [_element("schema", children=len(self.schema)), *(each for f in self.schema for each in _schema(f))]
        leaves = sum(1 for f in self.schema for _ in _leaves(f.type))
        _, footer = struct(
            {
                1: i32(2),
                2: array(elements),
                3: i64(self._num_rows),
                4: array(self._groups),
                5: array([struct({1: binary(key), 2: binary(value)}) for key, value in pairs.items()]),
                6: binary("binidx"),
                7: array([struct({1: struct({})})] * leaves),
            }
        )
        self._write(footer + len(footer).to_bytes(4, "little") + MAGIC)

    def _column(self, column: Column) -> Value:
        """Its pages written, and what the footer says of them."""
        name = ".".join(column.path)
        first, sizes = self._position, [0, 0]
        if column.strings is not None:
            words = b"".join(fixed.pack("<i", len(word)) + word for word in map(str.encode, column.strings))
            header = {7: struct({1: i32(len(column.strings)), 2: i32(PLAIN)})}
            self._page(DICTIONARY_PAGE, header, [words], None, sizes)
        data_page = self._position
        parts, count = page_of(column)
        encoding = PLAIN if column.strings is None else RLE_DICTIONARY
        header = {5: struct({1: i32(count), 2: i32(encoding), 3: i32(RLE), 4: i32(RLE)})}
        self._page(DATA_PAGE, header, parts, self.codecs.get(name), sizes)
        kind = BYTE_ARRAY if column.strings is not None else INT64 if column.values.itemsize == 8 else INT32
        told = {
            1: i32(kind),
            2: array([i32(each) for each in sorted({PLAIN, RLE, encoding})]),
            3: array([binary(each) for each in column.path]),
            4: i32(CODECS[self.codecs.get(name)]),
            5: i64(count),
            6: i64(sizes[0]),
            7: i64(sizes[1]),
            9: i64(data_page),
            11: i64(first) if column.strings is not None else None,
            12: _statistics(column.values) if name in self.ranged else None,
        }
        return struct({2: i64(first), 3: struct(told)})

    def _page(
        self, kind: int, header: Mapping[int, Value], parts: list[Any], codec: str | None, sizes: list[int]
    ) -> None:
        """Write a page; `sizes` grows by its bytes before and after the codec."""
        views: list[Any] = [memoryview(part).cast("B") for part in parts]
        plain = sum(map(len, views))
        if plain > MOST_PAGE_BYTES:
            raise ConfigError(f"parquet: {plain} bytes of one column in a row group, it takes {MOST_PAGE_BYTES}")
        if codec is not None:
            # As bytes: a view of the buffer that it makes else has the room it took, not the bytes it filled.
            views = [pa.Codec(codec).compress(views[0] if len(views) == 1 else b"".join(views), asbytes=True)]
        stored = sum(map(len, views))
        _, head = struct({1: i32(kind), 2: i32(plain), 3: i32(stored), **header})
        for view in (head, *views):
            self._write(view)
        sizes[0] += len(head) + plain
        sizes[1] += len(head) + stored

    def _write(self, data: Any) -> None:
        self._out.write(memoryview(data))
        self._position += len(data)


def _statistics(values: NDArray[Any]) -> Value:
    return struct({3: i64(0), 5: binary(values.max().tobytes()), 6: binary(values.min().tobytes())})


def _element(
    name: str,
    kind: int | None = None,
    repetition: int | None = None,
    children: int | None = None,
    as_: int | None = None,
) -> Value:
    """A node of the schema."""
    fields = {1: kind, 3: repetition, 5: children, 6: as_}
    told = {number: None if value is None else i32(value) for number, value in fields.items()}
    return struct(dict(sorted({**told, 4: binary(name)}.items())))


def _schema(field: Any) -> Iterator[Value]:
    """The nodes of a field, each before those below it."""
    kind = field.type
    if pa.types.is_dictionary(kind):
        yield _element(field.name, BYTE_ARRAY, REQUIRED, as_=UTF8)
    elif pa.types.is_list(kind):
        yield _element(field.name, None, REQUIRED, 1, LIST_OF)
        yield _element("list", None, REPEATED, 1)
        yield from _schema(kind.value_field.with_name("element"))
    elif pa.types.is_struct(kind):
        yield _element(field.name, None, REQUIRED, kind.num_fields)
        for each in kind:
            yield from _schema(each)
    else:
        yield _element(field.name, INT64 if kind.bit_width == 64 else INT32, REQUIRED, as_=CONVERTED.get(kind))


def _leaves(kind: Any) -> Iterator[Any]:
    below = [kind.value_type] if pa.types.is_list(kind) else [f.type for f in kind] if pa.types.is_struct(kind) else []
    if not below:
        yield kind
    for each in below:
        yield from _leaves(each)
