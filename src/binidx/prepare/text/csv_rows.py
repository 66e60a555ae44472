"""Rows of comma-separated values: the first names the columns, and a quoted field may hold newlines.

    text,lang             the columns
    "one, ""two""!",en    a document
    "a line               a document of two lines
    and another",en
    x,en,more             Problem "malformed": another number of fields than columns; a quote inside of a quoted field
                          that neither ends it nor is doubled; a quote that is never closed
    a byte not UTF-8      Problem "not utf-8"
    blank line            dropped, counted

A file is one slice: only a parser from its beginning knows which newlines end rows. Source: RFC 4180, as Python's csv
reads it in strict mode; CR LF or LF.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any

from binidx.prepare.text.rows import BLANK, BOM, ByteStream, NotADocument, Row, check_names
from binidx.prepare.text.slices import ReadRequest


class _TooLong(Exception):
    """A row is longer than the limit of a line."""


class _RowLines:
    """Lines of a stream as text, for a parser that may take several for a row.

    Attributes:
        data: bytes of the lines since `begin`.
        error: problem with the encoding of one of them.
    """

    def __init__(self, stream: ByteStream, most: int) -> None:
        self._stream, self._most = stream, most

    def begin(self) -> None:
        """Begin a row."""
        self.position, self.data = self._stream.position, bytearray()
        self.error: NotADocument | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._stream.take_line(self._most - len(self.data) + 1)
        if not line:
            raise StopIteration
        self.data += line
        if len(self.data) > self._most:
            while not line.endswith(b"\n") and line:
                line = self._stream.take_line(1 << 20)
            raise _TooLong
        line = line.removeprefix(BOM) if not self.position else line
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            at = len(self.data) - len(line) + error.start
            self.error = NotADocument("not utf-8", f"byte {line[error.start]:#04x} at {at} of the row")
            return line.decode(errors="replace")

    def row(self, fields: Any) -> Row:
        """Return the row of the lines since `begin`."""
        length = self._stream.position - self.position
        return Row(self.position, length, self.error or fields, bytes(self.data) if length == len(self.data) else b"")


def parse_csv(request: ReadRequest, stream: ByteStream) -> Iterator[Row]:
    """Yield the rows of a file.

    Raises:
        FormatError: a column is missing, or has a name twice.
    """
    csv.field_size_limit(max(csv.field_size_limit(), request.max_line_bytes))  # of the process; 128 KiB by default
    lines = _RowLines(stream, request.max_line_bytes)
    parser, columns = csv.reader(lines, strict=True), list[str]()
    while True:
        lines.begin()
        try:
            values = next(parser)
        except StopIteration:
            return
        except _TooLong:
            yield lines.row(NotADocument("too long", f"more than {request.max_line_bytes} bytes, the limit"))
        except csv.Error as error:
            open_quote = "unexpected end of data" in str(error)
            problem = "a quote in it is never closed" if open_quote else f"not CSV: {error}"
            yield lines.row(NotADocument("malformed", problem))
        else:
            if not columns:
                columns = values
                check_names(request.piece.uri, columns, [*request.keys, *request.fields])
                request.extent.add(lines.position, len(lines.data))
            elif not values:
                yield lines.row(NotADocument(BLANK))
            elif len(values) != len(columns):
                detail = f"{len(values)} fields, the first row has {len(columns)}"
                yield lines.row(NotADocument("malformed", detail))
            else:
                yield lines.row(dict(zip(columns, values, strict=True)))
