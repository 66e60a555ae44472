"""Rows that are no documents, written down: a JSON object a line.

    {"file": URI, "line": number from 1, or null, "byte": where it begins, "reason": kind, "detail": ..., "raw": ...}

`raw` is the line as text; bytes that are not UTF-8 stand in it as lone surrogates \\udc80 to \\udcff, as Python's
`surrogateescape` does: `raw.encode("utf-8", "surrogateescape")` gives the bytes back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from binidx.storage.backends import open_object
from binidx.storage.publish import create_object
from binidx.storage.transfer import read_whole
from binidx.text.batch import Problem


def format_problem(problem: Problem, slice_number: int) -> bytes:
    """A line of a part's quarantine: its line is counted from the first of that slice."""
    told = {
        "file": problem.uri,
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
    data = bytes(read_whole(open_object(uri, storage_options=options, cache=False)))
    yield from map(json.loads, data.splitlines())
