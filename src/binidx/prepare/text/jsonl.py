"""The lines of a slice, out of a stream of plain bytes: whole, and only its own.

Lines of JSON as batches of documents: parsed by msgspec, and where it refuses a line, by Python's json.

    line                                     result
    {"text": "a"}                            a document of one text; [] of none, ["a", "b"] of two, "" of an empty one
    blank: spaces, tabs, CR                  dropped, counted as "blank line"
    refused by json.loads                    Problem "malformed": a NUL or another raw control character in a string, a
                                             number of more digits than Python reads, nesting too deep
    bytes that are not UTF-8                 Problem "not utf-8", wherever in the line
    [1], "a", 7                              Problem "not an object"
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

Source: Megatron Core's tools/preprocess_data.py reads lines by json.loads; it hangs where we return a Problem.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from binidx.prepare.text.batch import Batch, Problem, Strings
from binidx.prepare.text.slices import Extent, Slice

NEWLINE = re.compile(rb"\n")


Bytes = bytes | memoryview


@dataclass(frozen=True)
class Lines:
    """Whole lines.

    Attributes:
        data: the lines with their newlines; the last of a file may have none. Holds until the next are asked for.
        place: plain byte of the file at which they begin.
        too_long: bytes of the one line that is here instead, and whose own are gone; 0: it is lines.
    """

    data: memoryview
    place: int
    too_long: int = 0


def own_bytes(pieces: Iterable[Bytes], first: int, last: int | None) -> Iterator[tuple[int, Bytes]]:
    """The bytes of the lines that are a slice's own, with the place of each piece: `slices` has the rule.

    Args:
        pieces: plain bytes from `first` on; no more of them are taken than are needed.
    """
    if last == 0:
        return
    place, begun = first, first == 0
    for data in pieces:
        start = 0
        if not begun:
            found = NEWLINE.search(data)
            if found and last is not None and place + found.start() >= last:
                return
            begun, start = found is not None, found.end() if found else len(data)
        if begun and last is not None and place + len(data) > last:
            end = NEWLINE.search(data, max(start, last - place))
            if end:
                yield place + start, data[start : end.end()]
                return
        if begun:
            yield place + start, data[start:]
        place += len(data)


def whole_lines(pieces: Iterable[tuple[int, Bytes]], batch_bytes: int, max_line_bytes: int) -> Iterator[Lines]:
    """Lines, some `batch_bytes` of them at once; memory is that, or three times the longest line.

    Args:
        pieces: bytes that follow each other, with the place of each.
        max_line_bytes: what a line and its newline may have; a longer one gives its length alone.
    """
    held = _Held(min(batch_bytes, max_line_bytes), max_line_bytes)
    for place, piece in pieces:
        if held.count == held.too_long == 0:
            held.place = place
        data = memoryview(piece)
        while data:
            data = data[held.skip(data) if held.too_long else held.take(data) :]
            yield from held.whole()
    yield from held.rest()


class _Held:
    """What was taken and not given yet."""

    def __init__(self, size: int, most: int) -> None:
        self.buffer, self.most = bytearray(size), most
        self.place, self.count = 0, 0
        self.too_long, self.ended = 0, False

    def take(self, data: memoryview) -> int:
        """How much of it there was room for."""
        taken = min(len(self.buffer) - self.count, len(data))
        self.buffer[self.count : self.count + taken] = data[:taken]
        self.count += taken
        return taken

    def skip(self, data: memoryview) -> int:
        """How much of it belongs to a line that is too long."""
        end = NEWLINE.search(data)
        self.ended = end is not None
        taken = end.end() if end else len(data)
        self.too_long += taken
        return taken

    def whole(self) -> Iterator[Lines]:
        """The lines that are held, once there is no room for more; and that which is too long, once it has ended."""
        if self.ended:
            yield Lines(memoryview(b""), self.place, self.too_long)
            self.place, self.too_long, self.ended = self.place + self.too_long, 0, False
        elif self.count == len(self.buffer):
            if end := self.buffer.rfind(b"\n") + 1:
                yield Lines(memoryview(self.buffer)[:end], self.place)
                rest = self.count - end
                self.buffer[:rest] = self.buffer[end : self.count]
                self.place, self.count = self.place + end, rest
            elif self.count < self.most:
                # Another one: whoever still has a view of this one would forbid that it grows.
                self.buffer = self.buffer + bytearray(min(self.count, self.most - self.count))
            else:
                self.too_long, self.count = self.count, 0

    def rest(self) -> Iterator[Lines]:
        """What is left at the end, which needs no newline."""
        if self.too_long:
            yield Lines(memoryview(b""), self.place, self.too_long)
        elif self.count:
            yield Lines(memoryview(self.buffer)[: self.count], self.place)


BOM = b"\xef\xbb\xbf"


BLANK = "blank line"


WHITESPACE = b" \t\r\n"


TEXTS = list[str | list[str]]


DECODER = msgspec.json.Decoder(dict[str, Any])


REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


Parsed = tuple[list[dict[str, Any]], dict[int, "NotADocument"]]


class NotADocument(Exception):
    """A line without a document: `kind` is one of KINDS, or BLANK."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class LineReader:
    """Reader of batches out of lines.

    Args:
        keys: of the texts.
        fields: further members to return.
        max_line_bytes: for the detail of a problem.
        extent: counts all lines that were read.
    """

    piece: Slice
    keys: Sequence[str]
    fields: Sequence[str]
    max_line_bytes: int
    extent: Extent = field(default_factory=Extent)

    def batches(self, chunks: Iterable[Lines]) -> Iterator[tuple[list[Batch], list[Strings]]]:
        """Yield a batch of each key and a column of each field, for each chunk of lines."""
        row = 0
        for lines in chunks:
            batches, fields = self._too_long(lines, row) if lines.too_long else self._read(lines, row)
            row += batches[0].num_rows
            yield batches, fields

    def _read(self, lines: Lines, row: int) -> tuple[list[Batch], list[Strings]]:
        starts, stops = _line_bounds(lines)
        documents, errors = self._parse(lines.data, starts, stops)
        good = np.ones(len(starts), np.bool_)
        good[list(errors)] = False
        problems = [
            self._problem(error, row + number, lines.place + start, bytes(lines.data[start:stop]))
            for number, error in errors.items()
            if error.kind != BLANK
            for start, stop in [(int(starts[number]), int(stops[number]))]
        ]
        blank = len(errors) - len(problems)
        dropped = Counter({BLANK: blank}) if blank else Counter[str]()
        rows, places = np.flatnonzero(good) + row, starts[good] + lines.place
        self.extent.add(lines.place, len(lines.data))
        batches = [
            Batch(key, *_texts([each[key] for each in documents]), rows, places, None, problems, dropped, len(starts))
            for key in self.keys
        ]
        return batches, [_strings([each.get(name) for each in documents]) for name in self.fields]

    def _parse(self, data: memoryview, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Parsed:
        """Return the objects of the lines that are documents, and the errors of the others by the line's number."""
        view = np.frombuffer(data, np.uint8)
        # decode_lines takes any white space between values. Lines that all begin with { and end with } hold one value
        # or more each, since no value has a } and a { beside each other; so it is one each if there are as many.
        if len(starts) and (view[starts] == ord("{")).all() and (view[stops - 1] == ord("}")).all():
            with suppress(KeyError, *REFUSED):
                found = DECODER.decode_lines(data[starts[0] :])
                for key in self.keys:
                    msgspec.convert([each[key] for each in found], TEXTS)
                if len(found) == len(starts):
                    return found, {}
        documents, errors = [], {}
        for number, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            try:
                documents.append(parse_line(bytes(data[start:stop]), self.keys))
            except NotADocument as error:
                errors[number] = error
        return documents, errors

    def _too_long(self, lines: Lines, row: int) -> tuple[list[Batch], list[Strings]]:
        """Return no document, and the one problem."""
        error = NotADocument("too long", f"{lines.too_long} bytes, the limit is {self.max_line_bytes}")
        batches, fields = self._read(Lines(memoryview(b""), lines.place), row)
        self.extent.add(lines.place, lines.too_long)
        problems = [self._problem(error, row, lines.place, b"")]
        return [each.with_counts(problems=problems, num_rows=1) for each in batches], fields

    def _problem(self, error: NotADocument, row: int, place: int, line: bytes) -> Problem:
        first = self.piece.first_row
        number = "" if first is None else f"line {first + row + 1}, "
        return Problem(error.kind, self.piece.uri, row, place, f"{number}byte {place}", error.detail, line)


def _line_bounds(lines: Lines) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first byte of each line and its end without the newline."""
    view = np.frombuffer(lines.data, np.uint8)
    stops = np.append(np.flatnonzero(view == ord("\n")), len(view))
    starts = np.append(0, stops[:-1] + 1)
    if lines.place == 0 and lines.data[: len(BOM)] == BOM:
        starts[0] = len(BOM)
    num_lines = len(starts) - (starts[-1] == len(view))
    return starts[:num_lines], stops[:num_lines]


def _texts(values: list[Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Return the bytes of all texts of a key, their bounds, and the first text of each document."""
    counts = [1 if isinstance(each, str) else len(each) for each in values]
    texts = [text.encode() for each in values for text in ((each,) if isinstance(each, str) else each)]
    return *_joined(texts), _bounds(counts)


def _strings(values: list[Any]) -> Strings:
    """Return a column of fields: a string as it is, any other value as JSON; a lone surrogate becomes `?`."""
    texts = [each if isinstance(each, str) else "" if each is None else json.dumps(each) for each in values]
    present = np.array([each is not None for each in values], np.bool_)
    return Strings(*_joined([each.encode(errors="replace") for each in texts]), present)


def _joined(texts: list[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    return np.frombuffer(b"".join(texts), np.uint8), _bounds(list(map(len, texts)))


def _bounds(lengths: list[int]) -> NDArray[np.int64]:
    """Return the start of each item, then the end of the last, if the items lie one after the other."""
    return np.fromiter(accumulate(lengths, initial=0), np.int64, len(lengths) + 1)


def parse_line(line: bytes, keys: Sequence[str]) -> dict[str, Any]:
    """Return the object of one line, with texts at all keys.

    Raises:
        NotADocument: there is none.
    """
    found = _object(line)
    for key in keys:
        _check_texts(found, key)
    return found


def _object(line: bytes) -> dict[str, Any]:
    if not line.strip(WHITESPACE):
        raise NotADocument(BLANK)
    with suppress(*REFUSED):
        return DECODER.decode(line)
    try:
        found = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise NotADocument("not utf-8", f"byte {line[error.start]:#04x} at {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise NotADocument("malformed", str(error)) from None
    except RecursionError:
        raise NotADocument("malformed", "nested too deep") from None
    except ValueError as error:  # int() refuses more than 4,300 digits
        raise NotADocument("malformed", str(error).partition(";")[0]) from None
    if not isinstance(found, dict):
        raise NotADocument("not an object", f"found {_kind(found)}, needed an object")
    return found


def _check_texts(found: dict[str, Any], key: str) -> None:
    if key not in found:
        raise NotADocument("missing key", f"{key!r} is not among {', '.join(map(repr, list(found)[:8])) or 'no keys'}")
    value = found[key]
    if value is None:
        raise NotADocument("null", f"{key!r} is null")
    strings = value if isinstance(value, list) else [value]
    for each in strings:
        if not isinstance(each, str):
            where = f"a list with {_kind(each)}" if isinstance(value, list) else _kind(each)
            raise NotADocument("not text", f"{key!r} is {where}, needed a string or a list of strings")
    try:
        for each in strings:
            each.encode()
    except UnicodeEncodeError as error:
        code = f"U+{ord(error.object[error.start]):04X}"
        raise NotADocument("lone surrogate", f"{key!r} has {code} at character {error.start}") from None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
