"""What the slices of an input have read of it: the proof that together they read it all, and nothing twice.

    planned   |------- 0 -------|------- 1 -------|------- 2 -------|
    lines     aaaaaaaaaaaa bbbbbbbbbbbb ccc dddddddddddddddddddddddddd
    extents   [                         )[                          )  and slice 2 has none: it saw where the input ends

An extent is counted from the bytes that the parser took, not from the plan: a line that two took, or none, shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from binidx.errors import FormatError
from binidx.text.slices import JSONL, PARQUET, Slice

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
