"""Rows that are no documents, written down: a JSON object a line.

    {"file": URI, "line": number from 1, or null, "byte": where it begins, "reason": kind, "detail": ..., "raw": ...}

`raw` is the line as text; bytes that are not UTF-8 stand in it as lone surrogates \\udc80 to \\udcff, as Python's
`surrogateescape` does: `raw.encode("utf-8", "surrogateescape")` gives the bytes back. Of a row with a special token it
is the texts, of one of parquet and of a line that is too long nothing.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from binidx.redacted import redacted
from binidx.storage.backends import open_object
from binidx.storage.publish import Writer, create_object
from binidx.storage.ranges import cut
from binidx.text.batch import Problem
from binidx.text.lines import whole_lines

BLOCK_BYTES = 1 << 20
"""Held before they are written; read at once."""


class QuarantineWriter:
    """Writes the quarantine of a part as its rows come: unseen until `publish`, and no object where there are none.

    Attributes:
        num_rows: that were written down.
    """

    def __init__(self, uri: str, options: Any) -> None:
        self._uri, self._options, self._open = uri, options, contextlib.ExitStack()
        self._out: Writer | None = None
        self._held = bytearray()
        self.num_rows = 0

    def add(self, problem: Problem, slice_number: int) -> None:
        """Write a row down."""
        self._held += format_problem(problem, slice_number)
        self.num_rows += 1
        if len(self._held) >= BLOCK_BYTES:
            self._flush()

    def publish(self) -> None:
        """Make it visible."""
        if self.num_rows:
            self._flush()
        self._open.close()

    def abandon(self) -> None:
        """Leave nothing of it; after `publish` it does nothing."""
        with contextlib.suppress(_Abandoned), self._open:
            raise _Abandoned

    def _flush(self) -> None:
        if self._out is None:
            self._out = self._open.enter_context(create_object(self._uri, self._options))
        self._out.write(bytes(self._held))
        self._held.clear()


class _Abandoned(Exception):
    """Thrown into an unfinished write so that it leaves nothing."""


def format_problem(problem: Problem, slice_number: int) -> bytes:
    """A line of a part's quarantine: its line is counted from the first of that slice."""
    told = {
        "file": redacted(problem.uri),
        "line": problem.row + 1,
        "byte": problem.byte,
        "reason": problem.kind,
        "detail": problem.detail,
        "raw": problem.line.decode("utf-8", "surrogateescape"),
        "slice": slice_number,
    }
    return json.dumps(told).encode() + b"\n"


def merge_quarantine(parts: Iterable[tuple[str, Sequence[int]]], target: str, options: Any) -> None:
    """Write the rows of all parts as one file; lines are counted in their files.

    Args:
        parts: URI of each, and the rows before the first of each of its slices.
    """
    with create_object(target, options) as out:
        for uri, bases in parts:
            for told in _lines(uri, options):
                base = bases[told.pop("slice")]
                out.write(json.dumps({**told, "line": told["line"] + base}).encode() + b"\n")


def _lines(uri: str, options: Any) -> Iterator[dict[str, Any]]:
    reader = open_object(uri, storage_options=options, cache=False)
    pieces = ((each[0], reader.read([each])[0]) for each in cut((0, reader.size), BLOCK_BYTES))
    for lines in whole_lines(pieces, BLOCK_BYTES, sys.maxsize):
        yield from map(json.loads, bytes(lines.data).splitlines())
