"""Which parts an object made of pieces has on S3. No I/O happens here.

    pieces     |--- a ---|b|c|------- d -------|        b and c are under 5 MiB
    parts      | copy    |upload | copy | copy |        the upload takes the first bytes of d, to reach 5 MiB

S3's limits: a part has 5 MiB to 5 GiB, only the last may be shorter; 10,000 parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from binidx.storage.ranges import RangeReader

LEAST_PART = 5 << 20
MOST_PARTS = 10_000
COPIED_PART = 128 << 20
"""What the store copies in one request where 10,000 of them suffice: seconds, well inside the time-outs of clients, and
with many in flight faster than one huge part."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Bytes [start, stop) of what `reader` reads as it is stored; or `data` itself, where there is none."""

    reader: RangeReader | None
    start: int = 0
    stop: int = 0
    data: bytes = b""

    @property
    def whole(self) -> bool:
        """Whether it is all of an object."""
        return self.reader is not None and (self.start, self.stop) == (0, self.reader.size)


@dataclass(frozen=True, eq=False)
class Copied:
    """A part that the store copies."""

    reader: RangeReader
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return (self.start, self.stop) == (0, self.reader.size)


@dataclass(frozen=True, eq=False)
class Uploaded:
    """A part that passes through this process."""

    pieces: list[Piece]


Part = Copied | Uploaded


def num_bytes(part: Piece | Part) -> int:
    """Bytes of a piece or a part."""
    if isinstance(part, Uploaded):
        return sum(map(num_bytes, part.pieces))
    return len(part.data) if isinstance(part, Piece) and part.reader is None else part.stop - part.start


def plan_parts(pieces: Sequence[Piece], *, least: int = LEAST_PART, most: int = COPIED_PART) -> list[Part]:
    """Parts that are the pieces, one after the other.

    Args:
        least: bytes of a part, but for the last; raised as far as 10,000 parts ask for it.
        most: bytes copied in one part, at least twice `least`; raised likewise.
    """
    total = sum(map(num_bytes, pieces))
    # Every part but the last has `least` bytes, so there are no more than total // least + 1.
    least = max(least, -(-total // (MOST_PARTS - 1)))
    most = max(most, 2 * least)
    parts: list[Part] = []
    small: list[Piece] = []
    for piece in pieces:
        head = min(num_bytes(piece), max(least - sum(map(num_bytes, small)), 0)) if small else 0
        taken, rest = split_piece(piece, head)
        small += [taken] if head else []
        if sum(map(num_bytes, small)) >= least:
            parts.append(Uploaded(small))
            small = []
        if rest.reader is not None and num_bytes(rest) >= least:
            parts += cut_evenly(rest, most)
        elif num_bytes(rest):
            small.append(rest)
    return [*parts, *([Uploaded(small)] if small else [])]


def split_piece(piece: Piece, head: int) -> tuple[Piece, Piece]:
    """Its first bytes, and the rest."""
    if piece.reader is None:
        return Piece(None, data=piece.data[:head]), Piece(None, data=piece.data[head:])
    middle = piece.start + head
    return Piece(piece.reader, piece.start, middle), Piece(piece.reader, middle, piece.stop)


def cut_evenly(piece: Piece, most: int) -> list[Copied]:
    """Parts of up to `most` bytes, none much smaller than the others: the last must not fall below the least."""
    assert piece.reader is not None
    size = num_bytes(piece)
    count = -(-size // most)
    bounds = [piece.start + size * number // count for number in range(count + 1)]
    return [Copied(piece.reader, first, stop) for first, stop in itertools.pairwise(bounds)]
