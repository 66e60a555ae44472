"""Rows of inputs as batches of documents: the last step of every format but Parquet and Arrow.

    plain bytes ── parser ──► rows: a dict of fields, or NotADocument ── RowReader ──► a Batch for each key,
                                                                                       Strings for each field

A parser of lines gives all rows of a run of lines at once; a parser of records yields a `Row` at a time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import FormatError, clipped
from binidx.prepare.text.batch import PROBLEMS_BY_KIND, Batch, Problem, Strings, cumulative_offsets, join_texts
from binidx.prepare.text.slices import ReadRequest

LINE_END = re.compile(rb"\n")
BLANK = "blank line"
BOM = b"\xef\xbb\xbf"
Pieces = Iterable[bytes | memoryview]


class TruncatedError(ValueError):
    """Error for bytes that end inside a frame."""


class ByteStream:
    """Bytes of successive pieces, taken in any amounts.

    Attributes:
        position: number of bytes taken.
    """

    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self._rest = iter(pieces), memoryview(b"")
        self.position = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        data = self.take_up_to(count)
        if len(data) < count:
            raise TruncatedError(f"{count - len(data)} bytes are missing")
        return data

    def take_line(self, most: int) -> bytes:
        """Return the bytes up to a newline, with it, or to the end; `most` bytes if the newline is not among them."""
        return self.take_up_to(most, line=True)

    def take_up_to(self, most: int, *, line: bool = False) -> bytes:
        """Return the next `most` bytes, fewer at the end; with `line` none after a newline."""
        parts, left, ended = list[memoryview](), most, False
        while left and not ended and not self.at_end():
            newline = LINE_END.search(self._rest, 0, left) if line else None
            part = self._rest[: newline.end() if newline else left]
            self._rest, left, ended = self._rest[len(part) :], left - len(part), newline is not None
            parts.append(part)
        self.position += most - left
        return b"".join(parts)

    def skip(self, most: int | None = None) -> int:
        """Take the next `most` bytes, or all, MiB by MiB, and return their number."""
        before = self.position
        while data := self.take_up_to(1 << 20 if most is None else min(1 << 20, most)):
            most = None if most is None else most - len(data)
        return self.position - before

    def at_end(self) -> bool:
        """Return whether no byte is left."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._rest = memoryview(piece)
        return False


class NotADocument(Exception):
    """Reason why a row is not a document.

    Attributes:
        kind: a key of PROBLEMS_BY_KIND; any other is the reason under which the row is dropped without a problem.
        detail: description of the found value.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class ParsedRows:
    """Adjacent rows of an input.

    Attributes:
        data: plain bytes of the rows; of a row that is too long they may be left out.
        position: plain byte of the file at which the rows begin.
        starts, stops: bounds of each row's content in `data`, shape (n,).
        documents: fields of the rows that are documents, in order.
        errors: number of each other row -> its error.
        length: plain bytes of the rows; None: all of `data`.
    """

    data: bytes | memoryview
    position: int
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    documents: list[dict[str, Any]]
    errors: dict[int, NotADocument]
    length: int | None = None


class RowReader:
    """Counter of the rows of a slice, in their order, that makes batches of them.

    Args:
        unit: name and number of the first row of a file, for messages; rows that are not lines are counted from 0, as
            those of Parquet.
    """

    def __init__(self, request: ReadRequest, unit: tuple[str, int] = ("row", 0)) -> None:
        self._request, self._row, self._unit = request, 0, unit

    def make_batches(self, rows: ParsedRows, num_bytes: int) -> tuple[list[Batch], list[Strings]]:
        """Return a batch for each key and a column for each field; `num_bytes` are the stored bytes of the rows."""
        starts, documents = rows.starts, rows.documents
        good = np.ones(len(starts), np.bool_)
        good[list(rows.errors)] = False
        problems, dropped = list[Problem](), Counter[str]()
        for number, error in rows.errors.items():
            if error.kind in PROBLEMS_BY_KIND:
                problems.append(self._problem(error, number, rows))
            else:
                dropped[error.kind] += 1
        numbers, positions = np.flatnonzero(good) + self._row, starts[good] + rows.position
        self._request.extent.add(rows.position, len(rows.data) if rows.length is None else rows.length)
        self._row += len(starts)
        batches = []
        for key in self._request.keys:
            texts = _join_documents([document[key] for document in documents])
            batches.append(Batch(key, *texts, numbers, positions, None, problems, dropped, len(starts), num_bytes))
        return batches, [_strings([document.get(name) for document in documents]) for name in self._request.fields]

    def _problem(self, error: NotADocument, number: int, rows: ParsedRows) -> Problem:
        piece, row, start = self._request.piece, self._row + number, int(rows.starts[number])
        position, line = rows.position + start, bytes(rows.data[start : int(rows.stops[number])])
        name, first = self._unit
        known = "" if piece.first_row is None else f"{name} {piece.first_row + row + first}, "
        return Problem(error.kind, piece.uri, row, position, f"{known}byte {position}", error.detail, line)


@dataclass(frozen=True)
class Row:
    """Record of an input.

    Attributes:
        position: plain byte of the file at which it begins.
        length: number of its plain bytes.
        fields: names and values, or the reason why it is not a document.
        data: its plain bytes; empty if it is too long.
    """

    position: int
    length: int
    fields: dict[str, Any] | NotADocument
    data: bytes = b""


def batch_records(
    request: ReadRequest, records: Iterable[Row], progress: Callable[[], int]
) -> Iterator[tuple[list[Batch], list[Strings]]]:
    """Yield batches of records, each of about `batch_bytes`.

    Args:
        records: adjacent rows.
        progress: returns the stored bytes read since its last call.
    """
    reader, group, size = RowReader(request), list[Row](), 0
    for row in records:
        if group and (size + row.length > request.batch_bytes or not row.data):
            yield reader.make_batches(_parse_group(group, request.keys), progress())
            group, size = [], 0
        group.append(row)
        size += row.length if row.data else request.batch_bytes  # one without data is alone, so that positions add up
    if group:
        yield reader.make_batches(_parse_group(group, request.keys), progress())


def _parse_group(group: Sequence[Row], keys: Sequence[str]) -> ParsedRows:
    starts = cumulative_offsets([len(row.data) for row in group])
    documents, errors = list[dict[str, Any]](), dict[int, NotADocument]()
    for number, row in enumerate(group):
        try:
            if isinstance(row.fields, NotADocument):
                raise row.fields
            for key in keys:
                check_texts(row.fields, key)
            documents.append(row.fields)
        except NotADocument as error:
            errors[number] = error.with_traceback(None)
    data, length = b"".join(row.data for row in group), sum(row.length for row in group)
    return ParsedRows(data, group[0].position, starts[:-1], starts[1:], documents, errors, length)


def check_names(uri: str, names: Sequence[str], needed: Iterable[str]) -> None:
    """Raise FormatError unless each needed column is there once."""
    for name in needed:
        if (count := names.count(name)) != 1:
            listed = clipped(", ".join(clipped(repr(each), 80) for each in names), 600)
            problem = f"{count} columns {name!r} (need one)" if count else f"no column {name!r} (found {listed})"
            merged = len(names) == 1 and re.search(r"[;\t|]", names[0])
            way = "a .csv has commas between its fields" if merged else "--json-keys names the text"
            raise FormatError(f"{uri}: {problem}; {way}")


def _join_documents(values: list[Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes of all texts of a key, their offsets, and the first text of each document."""
    lists = [(value,) if isinstance(value, str) else value for value in values]
    return *join_texts([text.encode() for texts in lists for text in texts]), cumulative_offsets(list(map(len, lists)))


def _strings(values: list[Any]) -> Strings:
    """Return the values of a field as a column: a string as it is, others as JSON; a lone surrogate becomes `?`."""
    texts = [value if isinstance(value, str) else "" if value is None else json.dumps(value) for value in values]
    present = np.array([value is not None for value in values], np.bool_)
    return Strings(*join_texts([text.encode(errors="replace") for text in texts]), present)


def check_texts(row: dict[str, Any], key: str) -> None:
    """Raise NotADocument unless the value at a key is a text or a list of texts."""
    if key not in row:
        found = ", ".join(map(repr, list(row)[:8])) or "no keys"
        nested = [f"{name}.{key}" for name, value in row.items() if isinstance(value, dict) and key in value]
        nested += [
            f"{name}.{own}" for name, value in row.items() if key.startswith(f"{name}.") and isinstance(value, dict)
            for own in value
        ]  # fmt: skip
        hint = "".join(f"; --json-keys {name} reads the nested one" for name in nested[:1])
        raise NotADocument("missing key", f"{key!r} is not among {found}{hint}")
    value = row[key]
    if value is None:
        raise NotADocument("null", f"{key!r} is null")
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            kind = f"a list with {describe_type(text)}" if isinstance(value, list) else describe_type(text)
            inner = [name for name, each in text.items() if isinstance(each, str)] if isinstance(text, dict) else []
            hint = "".join(f"; --json-keys {key}.{name} reads one in it" for name in inner[:1])
            raise NotADocument("not text", f"{key!r} is {kind}, needed a string or a list of strings{hint}")
    try:
        for text in texts:
            text.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise NotADocument("lone surrogate", f"{key!r} has {code} at character {error.start}") from None


def describe_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
