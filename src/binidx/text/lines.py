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
    """Lines, some `batch_bytes` of them at once; memory is that, or twice the longest line."""
    buffer, held, place = bytearray(batch_bytes), 0, 0
    too_long = 0
    for at, data in pieces:
        if held == 0 and not too_long:
            place = at
        taken = 0
        while taken < len(data):
            if too_long:
                found = NEWLINE.search(data, taken)
                stop = found.end() if found else len(data)
                too_long += stop - taken
                taken = stop
                if found:
                    yield Lines(memoryview(b""), place, too_long)
                    place, too_long = place + too_long, 0
                continue
            count = min(len(buffer) - held, len(data) - taken)
            buffer[held : held + count] = data[taken : taken + count]
            held, taken = held + count, taken + count
            if held < len(buffer):
                continue
            end = buffer.rfind(b"\n") + 1
            if end:
                yield Lines(memoryview(buffer)[:end], place)
                rest = held - end
                buffer[:rest] = buffer[end:held]
                held, place = rest, place + end
            elif len(buffer) < max_line_bytes:
                # Not in place: whoever still has a view of it would forbid that.
                buffer = buffer + bytearray(min(len(buffer), max_line_bytes - len(buffer)))
            else:
                too_long, held = held, 0
    if too_long:
        yield Lines(memoryview(b""), place, too_long)
    elif held:
        yield Lines(memoryview(buffer)[:held], place)
