"""Inputs cut into slices: the work of one part each, told by what lies in the store and nothing else.

    jsonl       bytes      [0, 64 MiB) [64, 128 MiB) ...
    jsonl.zst   frames     by its seek table or its frames' headers, else whole
    jsonl.gz    whole
    parquet     row groups

A bound b that is neither 0 nor the end stands for the first line that begins after the first newline at or after byte b
(Hadoop's rule): so each line is in exactly one slice, wherever they are cut, and none needs the byte before its own.

What the slices of an input have read of it: the proof that together they read it all, and nothing twice.

    planned   |------- 0 -------|------- 1 -------|------- 2 -------|
    lines     aaaaaaaaaaaa bbbbbbbbbbbb ccc dddddddddddddddddddddddddd
    extents   [                         )[                          )  and slice 2 has none: it saw where the input ends

An extent is counted from the bytes that the parser took, not from the plan: a line that two took, or none, shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from binidx.errors import FormatError

JSONL, GZIP, ZSTD, PARQUET = "jsonl", "jsonl.gz", "jsonl.zst", "parquet"


FORMATS = (JSONL, GZIP, ZSTD, PARQUET)


@dataclass(frozen=True)
class InputBlock:
    """What is read as one piece: a frame of zstd, or a row group.

    Attributes:
        stored: first byte in the object.
        stored_bytes: how many there are.
        first: its first plain byte; its first row in parquet.
        count: plain bytes, or rows.
    """

    stored: int
    stored_bytes: int
    first: int
    count: int


@dataclass(frozen=True)
class Input:
    """An object that was found: see `find_inputs`.

    Attributes:
        identity: size, and ETag, generation or time of the last change.
        blocks: where it can be cut; a plain jsonl anywhere, a .gz nowhere.
    """

    uri: str
    format: str
    identity: Mapping[str, Any]
    blocks: tuple[InputBlock, ...] = ()

    @property
    def size(self) -> int:
        return int(self.identity["size"])


@dataclass(frozen=True)
class Slice:
    """A piece of one input. Pickles; `to_json` and `from_json` for the rest.

    Attributes:
        uri, format: of the input.
        identity: of the object when it was planned: one that is another by then is not read.
        first, last: plain bytes as said above; in parquet row groups. `last` None: to the end.
        stored: first byte to be read, where plain byte `first` is: the same in plain jsonl.
        num_bytes: stored bytes, for progress and to balance parts; in parquet of all columns.
        first_row: row in the file of its first row; None where nobody has counted.
    """

    uri: str
    format: str
    identity: Mapping[str, Any] = field(hash=False)
    first: int
    last: int | None
    stored: int
    num_bytes: int
    first_row: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Slice:
        return cls(**value)


def plan_slices(inputs: Sequence[Input], part_bytes: int) -> list[Slice]:
    """Slices of about so many stored bytes each, in the order of the inputs: every row is in exactly one of them.

    An empty input has a slice, too, so that it is accounted for.

    Args:
        part_bytes: of stored bytes, at least 1; a block is never cut, and an input never shares a slice with another.
    """
    if part_bytes < 1:
        raise ValueError(f"part_bytes: {part_bytes}, needs 1 or more")
    return [piece for each in inputs for piece in _slices_of(each, part_bytes)]


def _slices_of(each: Input, part_bytes: int) -> list[Slice]:
    if each.format == JSONL:
        bounds = [*range(0, each.size or 1, part_bytes), each.size]
        return [
            Slice(each.uri, each.format, each.identity, first, last, first, last - first, None if first else 0)
            for first, last in pairwise(bounds)
        ]
    if not each.blocks:
        return [Slice(each.uri, each.format, each.identity, 0, None, 0, each.size, 0)]
    groups = _grouped(each.blocks, part_bytes)
    return [_of_blocks(each, first, last) for first, last in groups]


def _grouped(blocks: Sequence[InputBlock], part_bytes: int) -> list[tuple[int, int]]:
    """Runs of blocks, (first, last), that reach `part_bytes` where there are enough of them."""
    groups, first, held = [], 0, 0
    for number, block in enumerate(blocks):
        if held and held + block.stored_bytes > part_bytes:
            groups.append((first, number))
            first, held = number, 0
        held += block.stored_bytes
    return [*groups, (first, len(blocks))]


def _of_blocks(each: Input, first: int, last: int) -> Slice:
    begin, end = each.blocks[first], each.blocks[last - 1]
    num_bytes = sum(block.stored_bytes for block in each.blocks[first:last])
    if each.format == PARQUET:
        return Slice(each.uri, each.format, each.identity, first, last, begin.stored, num_bytes, begin.first)
    stop = end.first + end.count if last < len(each.blocks) else None
    first_row = 0 if begin.first == 0 else None
    return Slice(each.uri, each.format, each.identity, begin.first, stop, begin.stored, num_bytes, first_row)


Read = tuple[Slice, "Extent"]


@dataclass
class Extent:
    """What a slice has read, in plain bytes of its file; in parquet in rows.

    Attributes:
        first: where its first line begins; 0 if it has none.
        count: of all its lines together, newlines too; what lies between two of them is missed by it.
        end: where the file ends, if it was read to there: all that is stored was taken, and gave so many plain bytes.
            In parquet what the footer says. None: the slice ended before.
    """

    first: int = 0
    count: int = 0
    end: int | None = None

    def add(self, first: int, count: int) -> None:
        """Lines more."""
        if not self.count:
            self.first = first
        self.count += count


def check_extents(read: Iterable[Read]) -> None:
    """That each input was read from its beginning to its end, and nothing of it twice.

    Args:
        read: all slices of a plan in their order, each with its extent; an input may be there several times.

    Raises:
        FormatError: it was not.
    """
    for slices in _inputs(read):
        _check(slices)


def _inputs(read: Iterable[Read]) -> Iterator[list[Read]]:
    """Those of each input: another one begins where the name is another, or the place is none behind the last."""
    held: list[Read] = []
    for piece, extent in read:
        last = held[-1][0] if held else None
        if last is not None and (last.uri != piece.uri or (last.first, last.stored) >= (piece.first, piece.stored)):
            yield held
            held = []
        held.append((piece, extent))
    if held:
        yield held


def _check(slices: list[Read]) -> None:
    piece, at = slices[0][0], 0
    for _, extent in slices:
        if extent.count and extent.first != at:
            first, last = sorted((at, extent.first))
            raise _error(piece, f"{first} to {last} were read {'twice' if extent.first < at else 'by no part'}")
        at += extent.count
    ends = {extent.end for _, extent in slices if extent.end is not None}
    if piece.format == JSONL:
        ends.add(int(piece.identity["size"]))
    if ends != {at}:
        raise _error(piece, f"0 to {at} were read, and it ends at {' and '.join(map(str, sorted(ends))) or 'no place'}")


def _error(piece: Slice, found: str) -> FormatError:
    unit = "rows" if piece.format == PARQUET else "plain bytes"
    return FormatError(f"{piece.uri}: {unit} {found}, needed each once; remove the parts and run again")
