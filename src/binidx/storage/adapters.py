"""Readers over bytes in memory and over other readers, and readers and writers as Python files.

`JoinedReader` presents parts of several objects as one object:

    parts    a [0, 100)   b [0, 40)   c [0, 60)
    joined   [0, 100)     [100, 140)  [140, 200)
    read     [90, 150)    -> a [90, 100)  b [0, 40)  c [0, 10)        all parts at the same time (`read_many`)

A range inside one part is a view of that part's result; a range across parts is a copy.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from binidx.errors import ObjectChangedError, redacted
from binidx.forks import opened_once
from binidx.storage.interfaces import Bytes, Piece, Range, RangeReader, Writer
from binidx.storage.ranges import check_ranges, read_many


class InMemory:
    """Reader of bytes in memory."""

    def __init__(self, uri: str, data: Bytes) -> None:
        self.uri, self.size, self.data = uri, len(data), data
        self.identity: Mapping[str, Any] = {}

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        view = memoryview(self.data).toreadonly()
        return [view[start:stop] for start, stop in ranges]

    def __reduce__(self) -> tuple[Any, ...]:
        return InMemory, (self.uri, bytes(self.data))

    def __repr__(self) -> str:
        return f"InMemory({redacted(self.uri)}, {self.size:,} bytes)"


class LazyReader:
    """Reader that opens its object at the first read.

    Args:
        size: expected bytes of the object; if it has another size, the first read raises ObjectChangedError.
    """

    def __init__(self, uri: str, size: int, open_reader: Callable[[], RangeReader]) -> None:
        self.uri, self.size, self._open_reader = uri, size, open_reader
        self.identity: Mapping[str, Any] = {}

    @opened_once
    def _reader(self) -> RangeReader:
        reader = self._open_reader()
        if reader.size != self.size:
            problem = f"changed while it was used (found {reader.size} bytes, had {self.size})"
            raise ObjectChangedError(f"{self.uri}: {problem}; run it again")
        return reader

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        return self._reader.read(ranges)

    def split(self, ranges: Sequence[Range]) -> tuple[list[list[Piece]], list[tuple[RangeReader, Sequence[Range]]]]:
        check_ranges(self.uri, self.size, ranges)
        return [[(0, place)] for place in range(len(ranges))], [(self._reader, ranges)]

    def component_readers(self) -> Sequence[RangeReader]:
        return ()

    def __repr__(self) -> str:
        return f"LazyReader({redacted(self.uri)}, {self.size:,} bytes)"


class JoinedReader:
    """Reader of parts of several objects, one after the other.

    Args:
        uri: name in errors.
        parts: readers of the objects.
        sizes: bytes of each part.
        identity: version of all objects together.
        starts: first byte of each part in its object; None: 0.
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

    def split(self, ranges: Sequence[Range]) -> tuple[list[list[Piece]], list[tuple[RangeReader, list[Range]]]]:
        check_ranges(self.uri, self.size, ranges)
        part_ranges: dict[int, list[Range]] = defaultdict(list)
        pieces = []
        firsts = np.searchsorted(self.stops, [start for start, _ in ranges], side="right").tolist()
        for part, (start, stop) in zip(firsts, ranges, strict=True):
            range_pieces = []
            while start < stop:
                before = int(self.stops[part]) - self.sizes[part]
                end = min(stop, before + self.sizes[part])
                if end > start:
                    range_pieces.append((part, len(part_ranges[part])))
                    shift = self.starts[part] - before
                    part_ranges[part].append((start + shift, end + shift))
                start, part = max(start, end), part + 1
            pieces.append(range_pieces)
        read_of_part = {part: read for read, part in enumerate(part_ranges)}
        numbered = [[(read_of_part[part], place) for part, place in range_pieces] for range_pieces in pieces]
        return numbered, [(self.parts[part], asked) for part, asked in part_ranges.items()]

    def component_readers(self) -> Sequence[RangeReader]:
        return self.parts

    def __reduce__(self) -> tuple[Any, ...]:
        return JoinedReader, (self.uri, self.parts, self.sizes, self.identity, self.starts)

    def __repr__(self) -> str:
        parts = "1 part" if len(self.parts) == 1 else f"{len(self.parts):,} parts"
        return f"JoinedReader({redacted(self.uri)}, {parts}, {self.size:,} bytes)"


class WritableFile(io.RawIOBase):
    """Python file over a writer, for pyarrow; closing the file does not publish the object."""

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
    """Python file over a reader of ranges, for pyarrow."""

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
        if stop <= self._position:  # at the end or beyond it, as after a seek
            return b""
        data = bytes(self._reader.read([(self._position, stop)])[0])
        self._position = stop
        return data
