"""The lines of a slice, out of a stream of plain bytes: whole, and only its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
