"""The bytes of many objects, one after the other, as those of one.

parts    a [0, 100)   b [0, 40)   c [0, 60)         of each the bytes that count, which may begin and end within it
joined   [0, 100)     [100, 140)  [140, 200)
asked    [90, 150)    ─► a [90, 100)  b [0, 40)  c [0, 10)        all parts at the same time: `vectored.read_many`

A range within a part is a view of what that gave; one across parts is copied together.

Readers and writers of objects as Python's files, for libraries that ask for those: pyarrow above all.
"""

from __future__ import annotations

import functools
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from binidx.errors import ObjectChangedError
from binidx.storage.interfaces import Bytes, Range, RangeReader, Writer
from binidx.storage.ranges import check_ranges
from binidx.storage.vectored_reads import read_many


class InMemory:
    """Bytes in memory as an object."""

    def __init__(self, uri: str, data: Bytes) -> None:
        self.uri, self.size, self.data = uri, len(data), data

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        view = memoryview(self.data)
        return [view[start:stop] for start, stop in ranges]

    def __reduce__(self) -> tuple[Any, ...]:
        return InMemory, (self.uri, bytes(self.data))


class Late:
    """An object that is opened when the first of it is read.

    Args:
        size: bytes that it has; ObjectChangedError if it turns out to have others.
    """

    def __init__(self, uri: str, size: int, open_it: Callable[[], RangeReader]) -> None:
        self.uri, self.size, self._open_it = uri, size, open_it

    @functools.cached_property
    def _reader(self) -> RangeReader:
        found = self._open_it()
        if found.size != self.size:
            raise ObjectChangedError(f"{self.uri}: {found.size} bytes, had {self.size} before; run it again")
        return found

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        return self._reader.read(ranges)

    def split(
        self, ranges: Sequence[Range]
    ) -> tuple[list[list[tuple[int, int]]], list[tuple[RangeReader, Sequence[Range]]]]:
        """As of a `Joined`: all of it of the one object."""
        check_ranges(self.uri, self.size, ranges)
        return [[(0, place)] for place in range(len(ranges))], [(self._reader, ranges)]


class Joined:
    """A reader of `sizes[i]` bytes of each of the `parts`, in their order.

    Args:
        uri: what errors call it.
        identity: what identifies the content of all of them.
        starts: where in each part its bytes begin; None: at 0.
    """

    def __init__(
        self,
        uri: str,
        parts: Sequence[RangeReader],
        sizes: Sequence[int],
        identity: Mapping[str, Any] | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        self.uri, self.parts, self.sizes = uri, tuple(parts), tuple(sizes)
        self.starts = (0,) * len(self.parts) if starts is None else tuple(starts)
        self.identity = dict(identity or {})
        self.stops = np.cumsum(self.sizes, dtype=np.int64)
        self.size = sum(self.sizes)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        return read_many([(self, ranges)])[0]

    def split(
        self, ranges: Sequence[Range]
    ) -> tuple[list[list[tuple[int, int]]], list[tuple[RangeReader, list[Range]]]]:
        """What to read of which part; and for each range its pieces, as (request, place in it).

        Raises:
            ShortReadError: a range outside.
        """
        check_ranges(self.uri, self.size, ranges)
        wanted: dict[int, list[Range]] = defaultdict(list)
        pieces = []
        firsts = np.searchsorted(self.stops, [start for start, _ in ranges], side="right").tolist()
        for part, (start, stop) in zip(firsts, ranges, strict=True):
            mine = []
            while start < stop:
                before = int(self.stops[part]) - self.sizes[part]
                end = min(stop, before + self.sizes[part])
                if end > start:
                    mine.append((part, len(wanted[part])))
                    shift = self.starts[part] - before
                    wanted[part].append((start + shift, end + shift))
                start, part = max(start, end), part + 1
            pieces.append(mine)
        number = {part: place for place, part in enumerate(wanted)}
        numbered = [[(number[part], place) for part, place in mine] for mine in pieces]
        return numbered, [(self.parts[part], found) for part, found in wanted.items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return Joined, (self.uri, self.parts, self.sizes, self.identity, self.starts)

    def __repr__(self) -> str:
        return f"Joined({self.uri!r}, {len(self.parts)} parts)"


class WritableFile(io.RawIOBase):
    """A writer as a file; closing it is the business of who opened the object."""

    def __init__(self, out: Writer) -> None:
        self._out, self._position = out, 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._out.write(memoryview(data).cast("B"))
        self._position += len(data)
        return len(data)

    def tell(self) -> int:
        return self._position


class ReadableFile(io.RawIOBase):
    """A reader of ranges as a file."""

    def __init__(self, reader: RangeReader) -> None:
        self._reader, self._position = reader, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._reader.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, count: int = -1) -> bytes:
        stop = self._reader.size if count < 0 else min(self._position + count, self._reader.size)
        data = bytes(self._reader.read([(self._position, stop)])[0])
        self._position = stop
        return data
