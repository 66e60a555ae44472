"""Lines of JSON as batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from binidx.text.batch import Batch, Problem, Strings
from binidx.text.json_line import BLANK, NotADocument, parse_line
from binidx.text.lines import Lines, own_bytes, whole_lines
from binidx.text.slices import Slice
from binidx.text.stored import stored_pieces

BOM = b"\xef\xbb\xbf"


def read_jsonl(
    piece: Slice,
    keys: Sequence[str],
    id_key: str | None,
    batch_bytes: int,
    max_line_bytes: int,
    options: Mapping[str, Any] | None,
) -> Iterator[tuple[Batch, ...]]:
    pieces = own_bytes(stored_pieces(piece, options), piece.first, piece.last)
    row = 0
    for lines in whole_lines(pieces, batch_bytes, max_line_bytes):
        batches = _parsed(piece, lines, row, keys, id_key, max_line_bytes)
        row += batches[0].num_rows
        yield batches


def _parsed(
    piece: Slice, lines: Lines, row: int, keys: Sequence[str], id_key: str | None, max_line_bytes: int
) -> tuple[Batch, ...]:
    fields = [] if id_key is None else [id_key]
    texts: list[list[list[bytes]]] = [[] for _ in keys]
    ids: list[bytes | None] = []
    rows, places, problems, blank, first = [], [], [], 0, row
    place = lines.place
    for line in bytes(lines.data).splitlines(keepends=False) if False else _split(lines):
        try:
            body = line.removeprefix(BOM) if place == 0 else line
            found, values = parse_line(body, keys, fields)
            for column, each in zip(texts, found, strict=True):
                column.append(each)
            ids += values
            rows.append(row)
            places.append(place)
        except NotADocument as error:
            if error.kind == BLANK:
                blank += 1
            else:
                problems.append(Problem(error.kind, piece.uri, row, place, error.detail, line))
        row += 1
        place += len(line) + 1
    if lines.too_long:
        detail = f"{lines.too_long} bytes, the limit is {max_line_bytes}"
        problems.append(Problem("too long", piece.uri, row, place, detail))
        row += 1
    size = len(lines.data) + lines.too_long
    common = {
        "rows": np.array(rows, np.int64),
        "places": np.array(places, np.int64),
        "ids": None if id_key is None else _strings(ids),
        "problems": problems,
        "dropped": {BLANK: blank} if blank else {},
        "num_rows": row - first,
        "num_bytes": size,
    }
    return tuple(_batch(key, column, common) for key, column in zip(keys, texts, strict=True))


def _split(lines: Lines) -> list[bytes]:
    found = bytes(lines.data).split(b"\n")
    return found if found[-1] else found[:-1]


def _batch(key: str, documents: Sequence[Sequence[bytes]], common: Mapping[str, Any]) -> Batch:
    texts = [text for each in documents for text in each]
    return Batch(key, *_joined(texts), _bounds(map(len, documents)), **common)


def _strings(values: Sequence[bytes | None]) -> Strings:
    return Strings(
        *_joined([each or b"" for each in values]), np.array([each is not None for each in values], np.bool_)
    )


def _joined(texts: Sequence[bytes]) -> tuple[Any, Any]:
    return np.frombuffer(b"".join(texts), np.uint8), _bounds(map(len, texts))


def _bounds(lengths: Any) -> Any:
    return np.cumsum([0, *lengths], dtype=np.int64)
