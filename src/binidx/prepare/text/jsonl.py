r"""Lines of JSON as batches of documents: parsed by msgspec, and by Python's json if msgspec refuses a line.

    line                                     result
    {"text": "a"}                            a document of one text; [] of none, ["a", "b"] of two, "" of an empty one
    blank: spaces, tabs, CR                  dropped, counted as "blank line"
    refused by json.loads                    Problem "malformed": a NUL or another raw control character in a string, a
                                             number of more digits than Python reads, nesting too deep
    bytes that are not UTF-8                 Problem "not utf-8", wherever in the line
    [1], "a", 7                              Problem "not an object"
    {"a": {"b": "c"}}, key a.b               the document "c", unless there is a key of this very name
    no such key                              Problem "missing key"
    {"text": null}                           Problem "null"
    {"text": 7}, {"text": ["a", null]}       Problem "not text"
    {"text": "\ud800"}                       Problem "lone surrogate"; no problem in a field that is not a text
    longer than max_line_bytes               Problem "too long", without its bytes
    a key twice                              the last one counts, as in json.loads
    NaN, Infinity, in another field          as json.loads: no problem
    CR LF; no newline at the end             as without; U+2028, U+2029, U+0085 end no line
    a byte order mark                        left out at the start of the file, "malformed" anywhere else
    \u0000 in a text                         a character like any other

Source: Megatron Core's tools/preprocess_data.py parses lines with json.loads; it hangs where we return a Problem.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from binidx.prepare.text.rows import BLANK, BOM, LINE_END, NotADocument, ParsedRows, check_texts, describe_type
from binidx.prepare.text.slices import ReadRequest

Bytes = bytes | memoryview


@dataclass(frozen=True)
class Lines:
    """Run of whole lines.

    Attributes:
        data: the lines with their newlines; the last line of a file may lack its own.
        position: plain byte of the file at which the lines begin.
        too_long: length of a single line above the limit, whose bytes are left out; 0 for ordinary lines.
    """

    data: memoryview
    position: int
    too_long: int = 0


def select_lines(pieces: Iterable[Bytes], first: int, last: int | None) -> Iterator[tuple[int, Bytes]]:
    """Yield (position, bytes) for the lines that belong to a slice; the rule is in `slices`.

    Args:
        pieces: plain bytes from `first` on; no more of them are taken than necessary.
        first, last: bounds of the slice in plain bytes; None: to the end.
    """
    if last == 0:
        return
    position, begun = first, first == 0
    for data in pieces:
        start = 0
        if not begun:
            newline = LINE_END.search(data)
            if newline and last is not None and position + newline.start() >= last:
                return
            begun, start = newline is not None, newline.end() if newline else len(data)
        if begun and last is not None and position + len(data) > last:
            end = LINE_END.search(data, max(start, last - position))
            if end:
                yield position + start, data[start : end.end()]
                return
        if begun:
            yield position + start, data[start:]
        position += len(data)


def group_lines(pieces: Iterable[tuple[int, Bytes]], batch_bytes: int, max_line_bytes: int) -> Iterator[Lines]:
    """Yield runs of about `batch_bytes` of lines. Memory: two runs, or three times the longest line.

    Args:
        pieces: (position, bytes) of contiguous pieces of text.
        max_line_bytes: limit of a line with its newline; of a longer line only the length is returned.
    """
    buffer, position, too_long, limit = bytearray(), 0, 0, min(batch_bytes, max_line_bytes)
    for start, piece in pieces:
        if not buffer and not too_long:
            position = start
        data = memoryview(piece)
        while data:
            if too_long:
                end = LINE_END.search(data)
                taken = end.end() if end else len(data)
                too_long += taken
                if end:
                    yield Lines(memoryview(b""), position, too_long)
                    position, too_long = position + too_long, 0
            else:
                taken = min(limit - len(buffer), len(data))
                buffer += data[:taken]
                if len(buffer) == limit:
                    if size := buffer.rfind(b"\n") + 1:
                        yield Lines(memoryview(buffer)[:size], position)
                        buffer, position = buffer[size:], position + size
                    elif limit < max_line_bytes:
                        limit = min(2 * limit, max_line_bytes)
                    else:
                        buffer, too_long = bytearray(), limit
            data = data[taken:]
    if too_long or buffer:
        yield Lines(memoryview(buffer), position, too_long)


WHITESPACE = b" \t\r\n"
TEXT_FIELDS = list[str | list[str]]
DECODER = msgspec.json.Decoder(dict[str, Any])
REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
Parsed = tuple[list[dict[str, Any]], dict[int, NotADocument]]
ParseLines = Callable[[memoryview, NDArray[np.int64], NDArray[np.int64], ReadRequest], Parsed]


def parse_lines(lines: Lines, request: ReadRequest, parse: ParseLines) -> ParsedRows:
    """Return the rows of a run of lines.

    Args:
        parse: returns the documents of lines, and the error of each other line.
    """
    if lines.too_long:
        detail = f"{lines.too_long} bytes, the limit is {request.max_line_bytes}"
        none, errors = np.zeros(1, np.int64), {0: NotADocument("too long", detail)}
        return ParsedRows(b"", lines.position, none, none, [], errors, lines.too_long)
    starts, stops = _line_bounds(lines)
    return ParsedRows(lines.data, lines.position, starts, stops, *parse(lines.data, starts, stops, request))


def parse_json_lines(
    data: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64], request: ReadRequest
) -> Parsed:
    """Return the JSON objects of the lines that are documents, and the error of each other line by its number."""
    keys = request.keys
    dotted = [name for name in (*keys, *request.fields) if "." in name]
    view = np.frombuffer(data, np.uint8)
    # decode_lines accepts any white space between values. Lines that all begin with { and end with } hold one value
    # or more each, since no value has a } and a { beside each other; so it is one each if there are as many.
    if len(starts) and (view[starts] == ord("{")).all() and (view[stops - 1] == ord("}")).all():
        with suppress(KeyError, *REFUSED):
            rows = DECODER.decode_lines(data[starts[0] :])
            for row in rows if dotted else ():
                _add_nested(row, dotted)
            for key in keys:
                msgspec.convert([row[key] for row in rows], TEXT_FIELDS)
            if len(rows) == len(starts):
                return rows, {}
    documents, errors = [], {}
    for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        try:
            row = parse_line(bytes(data[start:stop]))
            _add_nested(row, dotted)
            for key in keys:
                check_texts(row, key)
            documents.append(row)
        except NotADocument as error:
            errors[number] = error.with_traceback(None)  # which would refer to this frame, and so to the data
    return documents, errors


def _add_nested(row: dict[str, Any], dotted: Sequence[str]) -> None:
    """Add the value of a nested object under its dotted name, unless the row has that very name."""
    for name in dotted:
        if name not in row:
            value: Any = row
            for step in name.split("."):
                value = value.get(step, row) if isinstance(value, dict) else row
            if value is not row:
                row[name] = value


def _line_bounds(lines: Lines) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the start offset of each line, and its end offset without the newline."""
    view = np.frombuffer(lines.data, np.uint8)
    stops = np.append(np.flatnonzero(view == ord("\n")), len(view))
    starts = np.append(0, stops[:-1] + 1)
    if lines.position == 0 and lines.data[: len(BOM)] == BOM:
        starts[0] = len(BOM)
    num_lines = len(starts) - (starts[-1] == len(view))
    return starts[:num_lines], stops[:num_lines]


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the JSON object of one line, without the newline.

    Raises:
        NotADocument: the line is blank or not an object.
    """
    if not line.strip(WHITESPACE):
        raise NotADocument(BLANK)
    with suppress(*REFUSED):
        return DECODER.decode(line)
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise NotADocument("not utf-8", f"byte {line[error.start]:#04x} at {error.start} of the line") from None
    except RecursionError:
        raise NotADocument("malformed", "nested too deep") from None
    except ValueError as error:  # a JSONDecodeError, or int() with more than 4,300 digits
        raise NotADocument("malformed", str(error).partition(";")[0]) from None
    if not isinstance(value, dict):
        raise NotADocument("not an object", f"found {describe_type(value)}, needed an object")
    return value
