"""Slices: inputs cut into independent pieces of work, planned from sizes and block tables alone.

    jsonl, txt   bytes      [0, 64 MiB) [64, 128 MiB) ...
    .zst of them frames     from the seek table; without one the whole file
    parquet      row groups
    all others   the whole file

A bound b that is neither 0 nor the end stands for the first line that begins after the first newline at or after byte b
(Hadoop's rule). So each line is in exactly one slice, wherever the input is cut, and no slice needs the byte before it.

An extent records which plain bytes a reader took from a slice. `check_extents` proves from the extents of all slices
that together they cover each input once:

    planned   |------- 0 -------|------- 1 -------|------- 2 -------|
    lines     aaaaaaaaaaaa bbbbbbbbbbbb ccc dddddddddddddddddddddddddd
    extents   [                         )[                          )  slice 2 took nothing: it only saw the end

Extents are counted from the bytes that the parser took, not from the plan, so a line that was read twice or not at all
shows as an overlap or a gap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from binidx.errors import FormatError, redacted
from binidx.format.document_blocks import batch_by_size
from binidx.storage.location import Location
from binidx.storage.stores.identity import check_same

CUT_ANYWHERE = ("jsonl", "txt")
"""Formats of plain lines, which can be cut at any byte; compressed by zstd, at a frame."""

LINES = tuple(name + suffix for name in CUT_ANYWHERE for suffix in ("", ".gz", ".zst"))
"""Formats of lines, compressed ones too."""

TABLES = ("parquet", "arrow")
"""Formats whose extents are counted in rows."""


@dataclass(frozen=True)
class InputBlock:
    """Smallest piece of an input that can be read on its own: a zstd frame or a Parquet row group.

    Attributes:
        stored: offset of its first byte in the object.
        stored_bytes: its length in the object.
        first: number of its first plain byte; in Parquet of its first row.
        count: number of plain bytes; in Parquet of rows.
    """

    stored: int
    stored_bytes: int
    first: int
    count: int


@dataclass(frozen=True)
class Input:
    """Object with text, as `find_inputs` returns it.

    Attributes:
        identity: size, and ETag, generation or modification time.
        blocks: blocks between which the object can be cut; empty for plain jsonl, which can be cut anywhere, and .gz,
            which cannot.
    """

    uri: str
    format: str
    identity: Mapping[str, Any]
    blocks: tuple[InputBlock, ...] = ()

    @property
    def size(self) -> int:
        """Stored bytes of the object."""
        return int(self.identity["size"])


@dataclass(frozen=True)
class Slice:
    """Piece of one input, to be read on its own. It can be pickled.

    Attributes:
        uri, format: of the input.
        identity: identity of the object at planning time; an object with another identity is not read.
        first, last: bounds in plain bytes (see the module's rule), in Parquet in row groups. `last` None: to the end.
        stored: first stored byte to read, which holds plain byte `first`.
        num_bytes: stored bytes, to measure progress and to balance parts; in Parquet of all columns.
        first_row: number of the slice's first row in the file; None if it is unknown.
    """

    uri: str
    format: str
    identity: Mapping[str, Any] = field(hash=False)
    first: int
    last: int | None
    stored: int
    num_bytes: int
    first_row: int | None

    def check_identity(self, identity: Mapping[str, Any]) -> None:
        """Raise ObjectChangedError unless this is the identity of the planned object."""
        check_same(redacted(self.uri), self.identity, identity, "it was planned", "plan it again")

    def check_unmodified(self, location: Location) -> None:
        """Raise ObjectChangedError if a local file was modified during the read; reads of others are pinned."""
        if (status := location.stat()) is not None:
            self.check_identity(file_identity(status))


def file_identity(status: os.stat_result) -> dict[str, Any]:
    """Return the identity of a local file, as its reader has it, without opening the file."""
    return {"size": status.st_size, "mtime": status.st_mtime}


def plan_slices(inputs: Sequence[Input], part_bytes: int) -> list[Slice]:
    """Return slices of about `part_bytes` stored bytes, in the order of the inputs: every row is in exactly one.

    An empty input has one slice, so that it is accounted for. A block is never cut, and a slice never spans two inputs.

    Args:
        inputs: as `find_inputs` returns them.
        part_bytes: stored bytes of a slice, at least 1.
    """
    return [piece for file in inputs for piece in _slice_input(file, part_bytes)]


def _slice_input(file: Input, part_bytes: int) -> list[Slice]:
    if file.format in CUT_ANYWHERE:
        bounds = pairwise([*range(0, file.size or 1, part_bytes), file.size])
        place = file.uri, file.format, file.identity
        return [Slice(*place, first, last, first, last - first, None if first else 0) for first, last in bounds]
    if not file.blocks:
        return [Slice(file.uri, file.format, file.identity, 0, None, 0, file.size, 0)]
    ends = np.cumsum([0, *(block.stored_bytes for block in file.blocks)])
    return [_slice_blocks(file, first, last) for first, last in batch_by_size(ends, part_bytes)]


def _slice_blocks(file: Input, first: int, last: int) -> Slice:
    begin, end = file.blocks[first], file.blocks[last - 1]
    num_bytes = sum(block.stored_bytes for block in file.blocks[first:last])
    if file.format in TABLES:
        return Slice(file.uri, file.format, file.identity, first, last, begin.stored, num_bytes, begin.first)
    stop = end.first + end.count if last < len(file.blocks) else None
    first_row = 0 if begin.first == 0 else None
    return Slice(file.uri, file.format, file.identity, begin.first, stop, begin.stored, num_bytes, first_row)


@dataclass
class Extent:
    """Part of an input that a reader took for one slice, in plain bytes of the file; in Parquet in rows.

    Attributes:
        first: byte at which the slice's first line begins; 0 if it has no line.
        count: length of all its lines, newlines included; a gap between two lines makes it too small.
        end: plain length of the file if the reader reached the end of all stored bytes, in Parquet the number of rows
            in the footer; None if the slice ended earlier.
    """

    first: int = 0
    count: int = 0
    end: int | None = None

    def add(self, first: int, count: int) -> None:
        """Add lines of `count` bytes, in Parquet `count` rows, that begin at `first`."""
        if not self.count:
            self.first = first
        self.count += count


@dataclass(frozen=True)
class ReadRequest:
    """Arguments of an input format's reader.

    Attributes:
        piece: slice to read.
        keys: JSON keys, or Parquet columns, of the texts.
        fields: further fields to return, for ids and filters.
        batch_bytes: approximate plain bytes of a batch; a longer line has a batch of its own.
        max_line_bytes: limit of a line with its newline.
        location: of the slice's object.
        extent: updated with the part of the input that was read.
    """

    piece: Slice
    keys: Sequence[str]
    fields: Sequence[str]
    batch_bytes: int
    max_line_bytes: int
    location: Location
    extent: Extent


SliceExtent = tuple[Slice, Extent]


def check_extents(extents: Iterable[SliceExtent]) -> None:
    """Check that each input was read from its beginning to its end, and no part of it twice.

    Args:
        extents: all slices of a plan in their order, each with its extent; an input may appear several times.

    Raises:
        FormatError: a gap, an overlap or a wrong end.
    """
    for slices in _group_by_input(extents):
        _check_input(slices)


def _group_by_input(extents: Iterable[SliceExtent]) -> Iterator[list[SliceExtent]]:
    """Yield the slices of each input; another input begins where the URI changes or the position does not rise."""
    group: list[SliceExtent] = []
    for piece, extent in extents:
        last = group[-1][0] if group else None
        if last is not None and (last.uri != piece.uri or (last.first, last.stored) >= (piece.first, piece.stored)):
            yield group
            group = []
        group.append((piece, extent))
    if group:
        yield group


def _check_input(slices: list[SliceExtent]) -> None:
    piece, position = slices[0][0], 0
    for _, extent in slices:
        if extent.count and extent.first != position:
            first, last = sorted((position, extent.first))
            count = "twice" if extent.first < position else "by no part"
            raise _coverage_error(piece, f"{first} to {last} were read {count}")
        position += extent.count
    ends = {extent.end for _, extent in slices if extent.end is not None}
    if piece.format in CUT_ANYWHERE:
        ends.add(int(piece.identity["size"]))
    if ends != {position}:
        end = " and ".join(map(str, sorted(ends))) or "an unknown position"
        raise _coverage_error(piece, f"0 to {position} were read, but the input ends at {end}")


def _coverage_error(piece: Slice, problem: str) -> FormatError:
    unit = "rows" if piece.format in TABLES else "plain bytes"
    return FormatError(f"{piece.uri}: {unit} {problem} (need each once); remove the parts and run again")
