"""Columns of an Arrow table as Parquet stores them, and the data of their pages.

    strings   their numbers: bits each, one byte | a run of them
    lists     levels | values
    levels    bytes, int32 | of each element 0 where a row begins, else 1, a bit each
              bytes, int32 | of each element 1, or 0 for an empty list
    run       count << 1, the value | eighths of the count << 1 | 1, the values in 1, 8 or 16 bits

Source: Apache Parquet, encodings PLAIN and RLE / bit-packing hybrid.
"""

from __future__ import annotations

import struct as fixed
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from binidx.order.thrift import varint


@dataclass(frozen=True)
class Column:
    """One column as it is stored: numbers, or numbers of strings.

    Attributes:
        path: its name, below a list with those between.
        values: integers, shape (n,).
        bounds: row i has values[bounds[i]:bounds[i + 1]]; None: each row has one.
        strings: that the values are numbers of.
    """

    path: tuple[str, ...]
    values: NDArray[Any]
    bounds: NDArray[Any] | None = None
    strings: tuple[str, ...] | None = None


def columns_of(table: pa.Table) -> Iterator[Column]:
    """The columns of a table as they are stored, those of structs each by itself."""
    for field, column in zip(table.schema, table.columns, strict=True):
        whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        if pa.types.is_dictionary(field.type):
            yield Column((field.name,), _numbers(whole.indices), strings=tuple(whole.dictionary.to_pylist()))
        elif pa.types.is_list(field.type):
            bounds, inside = whole.offsets.to_numpy(), whole.flatten()
            for path, leaf in _inside(inside):
                yield Column((field.name, "list", "element", *path), _numbers(leaf), bounds)
        else:
            yield Column((field.name,), _numbers(whole))


def _inside(elements: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not pa.types.is_struct(elements.type):
        yield (), elements
        return
    for field, leaf in zip(elements.type, elements.flatten(), strict=True):
        yield (field.name,), leaf


def _numbers(values: Any) -> NDArray[Any]:
    """As they are stored: four bytes each, or eight."""
    found: NDArray[Any] = values.to_numpy()
    return found if found.itemsize >= 4 else found.astype(np.int32)


def page_of(column: Column) -> tuple[list[Any], int]:
    """The parts of its data page, and how many elements it has; an empty list is one."""
    if column.strings is not None:
        return [_by_number(column.values)], len(column.values)
    if column.bounds is None:
        return [column.values], len(column.values)
    levels, count = _levels(column.bounds)
    return [levels, column.values], count


def _levels(bounds: NDArray[Any]) -> tuple[bytes, int]:
    """Repetition and definition of each element."""
    empty = bounds[1:] == bounds[:-1]
    starts, count = bounds[:-1] - bounds[0], int(bounds[-1] - bounds[0])
    defined = varint(count << 1) + b"\1"
    if num_empty := int(empty.sum()):
        starts, count = starts + np.cumsum(empty) - empty, count + num_empty
        defined = _bits_but(starts[empty], count)
    parts = (_bits_but(starts, count), defined)
    return b"".join(part for each in parts for part in (fixed.pack("<i", len(each)), each)), count


def _bits_but(places: NDArray[Any], count: int) -> bytes:
    """A run of so many bits, 1 but at these places."""
    bits = np.ones(count, np.uint8)
    bits[places] = 0
    packed = np.packbits(bits, bitorder="little")
    return varint(len(packed) << 1 | 1) + packed.tobytes()


def _by_number(values: NDArray[Any]) -> bytes:
    """Numbers of strings: a width in bits, and one run of them."""
    width = 1 if not len(values) or int(values.max()) < 256 else 2
    if (values == values[:1]).all():
        return bytes([8 * width]) + varint(len(values) << 1) + int(values[0]).to_bytes(width, "little")
    groups = -(-len(values) // 8)
    padded = np.zeros(8 * groups, f"<u{width}")
    padded[: len(values)] = values
    return bytes([8 * width]) + varint(groups << 1 | 1) + padded.tobytes()
