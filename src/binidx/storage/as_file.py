"""Readers and writers of objects as Python's files, for libraries that ask for those: pyarrow above all."""

from __future__ import annotations

import io
from typing import Any

from binidx.storage.publish import Writer
from binidx.storage.ranges import RangeReader


class Sink(io.RawIOBase):
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


class Source(io.RawIOBase):
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
