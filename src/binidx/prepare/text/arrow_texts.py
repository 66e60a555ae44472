"""Columns of Arrow as texts: buffers and offsets are taken as they lie, and rows that are no text are named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.format.sidecars.arrow_arrays import to_numpy
from binidx.prepare.text.batch import Strings

Bad = tuple[int, str, str]


"""Row, kind of the Problem, detail."""


@dataclass(frozen=True)
class Texts:
    """As in a Batch, rows that are bad still among them."""

    bytes: NDArray[np.uint8]
    offsets: NDArray[np.int64]
    documents: NDArray[np.int64]
    bad: list[Bad]


def is_text(kind: Any) -> bool:
    """Whether a column of this type holds texts or lists of them."""
    if pa.types.is_dictionary(kind) or _is_list(kind):
        return not _is_list(kind.value_type) and is_text(kind.value_type)
    binary = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    views = (pa.types.is_string_view, pa.types.is_binary_view)
    return any(test(kind) for test in (*binary, *views, pa.types.is_fixed_size_binary, pa.types.is_null))


def check_text(uri: str, name: str, kind: Any) -> None:
    """FormatError unless it is."""
    if not is_text(kind):
        raise FormatError(f"{uri}: column {name!r} is {kind}, needed string, binary or a list of them")


def texts_of(array: Any, name: str) -> Texts:
    """A column of texts."""
    bad: list[Bad] = [(row, "null", f"{name!r} is null") for row in _rows(array.is_null())]
    if not _is_list(array.type):
        return _of_strings(array, name, bad)
    lists = array.cast(pa.large_list(array.type.value_type))
    lengths = to_numpy(pc.fill_null(pc.list_value_length(lists), 0))
    documents, values = _bounds(lengths), lists.flatten()
    owner = np.repeat(np.arange(len(array)), lengths)
    nulls = sorted({int(owner[item]) for item in _rows(values.is_null())})
    bad += [(row, "not text", f"{name!r} is a list with null, needed a string or a list of strings") for row in nulls]
    found = _of_strings(values, name, [])
    wrong = {int(owner[item]): detail for item, _, detail in reversed(found.bad)}
    bad += [(row, "not utf-8", detail) for row, detail in wrong.items()]
    return Texts(found.bytes, found.offsets, documents, bad)


def strings_of(array: Any) -> Strings:
    """A column of anything as strings: those as they are, the rest as JSON."""
    if is_text(array.type) and not _is_list(array.type):
        values = _large(array)
    elif pa.types.is_integer(array.type) or pa.types.is_boolean(array.type):
        values = array.cast(pa.large_string())
    else:
        values = pa.array(
            [None if each is None else json.dumps(each, default=str) for each in array.to_pylist()], pa.large_string()
        )
    return Strings(*_buffers(values), to_numpy(values.is_valid()))


def _of_strings(array: Any, name: str, bad: list[Bad]) -> Texts:
    values = _large(array)
    data, offsets = _buffers(values)
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        bad = bad + list(_not_utf8(data, offsets, name))
    return Texts(data, offsets, np.arange(len(array) + 1, dtype=np.int64), bad)


def _not_utf8(data: NDArray[np.uint8], offsets: NDArray[np.int64], name: str) -> Iterator[Bad]:
    for row, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        try:
            bytes(data[start:stop]).decode()
        except UnicodeDecodeError as error:
            yield row, "not utf-8", f"{name!r}: byte {data[start + error.start]:#04x} at {error.start} of the text"


def _large(array: Any) -> Any:
    """As large_string, unchecked: binary is taken for UTF-8 until it is validated."""
    if pa.types.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    if pa.types.is_null(array.type):
        return array.cast(pa.large_string())
    return array.cast(pa.large_binary()).view(pa.large_string())


def _buffers(values: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Its bytes, and where each value begins in them, from 0; a null may have some."""
    _, offsets, data = values.buffers()
    if len(values) == 0 or offsets is None:
        return np.empty(0, np.uint8), np.zeros(len(values) + 1, np.int64)
    bounds = np.frombuffer(offsets, np.int64, len(values) + 1, 8 * values.offset)
    if data is None:
        return np.empty(0, np.uint8), np.zeros(len(values) + 1, np.int64)
    return np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]], bounds - bounds[0]


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _rows(mask: Any) -> list[int]:
    found: list[int] = np.flatnonzero(to_numpy(mask)).tolist()
    return found


def _bounds(lengths: Any) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
