"""Thrift's compact protocol, as far as Parquet's headers need it: values as (type, bytes), structs of them.

    struct    a byte for each field, (number - the one before) << 4 | type, and its bytes; 0 ends it
    integer   zigzag (0 -1 1 -2 .. as 0 1 2 3 ..), seven bits a byte, the last with its highest bit off
    bytes     their count, seven bits a byte; then they
    list      count << 4 | type, from 15 on 0xf0 | type and the count; then they

Source: Apache Thrift, thrift-compact-protocol.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
Value = tuple[int, bytes]


def varint(number: int) -> bytes:
    """A number of 0 or more, seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def i32(number: int) -> Value:
    return I32, varint(number << 1 if number >= 0 else -number * 2 - 1)


def i64(number: int) -> Value:
    return I64, i32(number)[1]


def binary(data: bytes | str) -> Value:
    data = data.encode() if isinstance(data, str) else data
    return BINARY, varint(len(data)) + data


def array(items: Sequence[Value]) -> Value:
    """A list of one type; an empty one is of structs."""
    kind, count = items[0][0] if items else STRUCT, len(items)
    head = bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + varint(count)
    return LIST, head + b"".join(data for _, data in items)


def struct(fields: Mapping[int, Value | None]) -> Value:
    """Fields by number, rising by at most 15; None is not there."""
    out, before = [], 0
    for number, value in fields.items():
        if value is not None:
            out += [bytes([(number - before) << 4 | value[0]]), value[1]]
            before = number
    return STRUCT, b"".join(out) + b"\0"
