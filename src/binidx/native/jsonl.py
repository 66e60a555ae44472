"""Texts and fields of lines of JSON: `native/jsonl.c`.

reader = JsonLines(data, [b"text"], [b"id"])
while (line := reader.next_odd()) is not None:      # all plain ones before it are in
    reader.add(...)  or  reader.skip()
reader.texts(0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx._native import ffi, lib
from binidx.native.arguments import items

MOST_KEYS = 64


class _Column:
    """What one key has in all documents: see `binidx_json_key`."""

    def __init__(self, struct: Any, name: bytes, size: int, most_documents: int, *, field: bool) -> None:
        self.struct = struct
        self.name = ffi.from_buffer("uint8_t[]", name)
        # As long as the data: what is never written to costs no memory.
        self.bytes = np.empty(size, np.uint8)
        self.bounds = np.empty(size // 2 + 2, np.int64)
        self.documents = None if field else np.empty(most_documents + 1, np.int64)
        self.present = np.empty(most_documents, np.uint8) if field else None
        self.bounds[0] = 0
        struct.name, struct.name_bytes = self.name, len(name)
        if self.documents is not None:
            self.documents[0] = 0
            struct.documents = items(self.documents, np.int64, write=True)
        if self.present is not None:
            struct.present = items(self.present, np.uint8, write=True)
        self._point()

    def _point(self) -> None:
        self._view = self.bytes.data
        self.struct.bytes = items(self.bytes, np.uint8, write=True)
        self.struct.bounds = items(self.bounds, np.int64, write=True)
        self.struct.most_bytes, self.struct.most_texts = len(self.bytes), len(self.bounds) - 1

    def add(self, texts: Sequence[bytes]) -> None:
        struct, data = self.struct, b"".join(texts)
        stop, number = struct.num_bytes + len(data), struct.num_texts
        # A field may be longer as we write it than it was; C hands back every line that it has no room for.
        if stop > len(self.bytes) or number + len(texts) >= len(self.bounds):
            # Twice as much, so that a line costs its own bytes, not those of all before it.
            self.bytes = _longer(self.bytes, 2 * stop)
            self.bounds = _longer(self.bounds, 2 * (number + len(texts) + 1))
            self._point()
        self._view[struct.num_bytes : stop] = data
        for each in texts:
            struct.num_bytes += len(each)
            number += 1
            self.bounds[number] = struct.num_bytes
        struct.num_texts = number

    def result(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        return self.bytes[: self.struct.num_bytes], self.bounds[: self.struct.num_texts + 1].copy()


def _longer(array: NDArray[Any], least: int) -> NDArray[Any]:
    longer = np.empty(max(least, len(array)), array.dtype)
    longer[: len(array)] = array
    return longer


class JsonLines:
    """The documents of some lines; plain ones are read by C, the others by whoever calls.

    Args:
        data: whole lines, each with its newline but perhaps the last; unchanged as long as this is used.
        keys: UTF-8 names of texts.
        fields: of other members; none that is among the keys. All together at most MOST_KEYS.
        start: byte of `data` at which its first line begins.
    """

    def __init__(self, data: memoryview, keys: Sequence[bytes], fields: Sequence[bytes] = (), start: int = 0) -> None:
        names = [*keys, *fields]
        if len(set(names)) < len(names) or not 0 < len(names) <= MOST_KEYS:
            raise ValueError(f"keys: {names}, needs 1 to {MOST_KEYS}, none twice")
        if not 0 <= start <= len(data):
            raise ValueError(f"start: {start}, needs one within {len(data)} bytes")
        # {"key":""} and a newline is the shortest document.
        most = len(data) // (2 + sum(len(key) + 5 for key in keys)) + 1
        self._data = data
        self._source = ffi.from_buffer("uint8_t[]", data)
        self._structs = ffi.new("binidx_json_key[]", len(names))
        self._columns = [
            _Column(self._structs[k], name, len(data), most, field=k >= len(keys)) for k, name in enumerate(names)
        ]
        self._num_texts = len(keys)
        self._rows, self._places = np.empty(most, np.int64), np.empty(most, np.int64)
        self._state = ffi.new(
            "binidx_jsonl *",
            {
                "data": self._source,
                "size": len(data),
                "keys": self._structs,
                "num_keys": len(names),
                "rows": items(self._rows, np.int64, write=True),
                "places": items(self._places, np.int64, write=True),
                "most_documents": most,
                "position": start,
            },
        )

    def next_odd(self) -> bytes | None:
        """The next line that C does not read, without its newline; None: all are read."""
        if lib.binidx_read_jsonl(self._state) >= 0:
            return None
        return bytes(self._data[self._state.position : self._state.stop])

    @property
    def place(self) -> int:
        """First byte of that line."""
        return int(self._state.position)

    @property
    def row(self) -> int:
        """Lines before it."""
        return int(self._state.row)

    def skip(self) -> None:
        """It is no document."""
        self._state.row += 1
        self._state.position = min(self._state.stop + 1, self._state.size)

    def add(self, texts: Sequence[Sequence[bytes]], fields: Sequence[bytes | None]) -> None:
        """It is a document with these texts of each key, and these fields."""
        state, number = self._state, self._state.num_documents
        for column, each in zip(self._columns, texts, strict=False):
            column.add(each)
            column.documents[number + 1] = column.struct.num_texts  # type: ignore[index]
        for column, value in zip(self._columns[self._num_texts :], fields, strict=True):
            column.add([value or b""])
            column.present[number] = value is not None  # type: ignore[index]
        self._rows[number], self._places[number] = state.row, state.position
        state.num_documents += 1
        self.skip()

    @property
    def rows(self) -> NDArray[np.int64]:
        """The line of each document."""
        return self._rows[: self._state.num_documents].copy()

    @property
    def places(self) -> NDArray[np.int64]:
        """Its first byte in the data."""
        return self._places[: self._state.num_documents].copy()

    def texts(self, key: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Bytes of all texts of a key, where each begins, and the first of each document."""
        column = self._columns[key]
        return *column.result(), column.documents[: self._state.num_documents + 1].copy()  # type: ignore[index]

    def field(self, number: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.bool_]]:
        """Bytes of all values of a field, where each begins, and which of them are there."""
        column = self._columns[self._num_texts + number]
        return *column.result(), column.present[: self._state.num_documents].astype(np.bool_)  # type: ignore[index]
