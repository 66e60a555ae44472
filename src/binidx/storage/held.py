"""Bytes that are gathered before they are sent: in chunks of one size, so that what grows is never moved."""

from __future__ import annotations

from binidx.storage.ranges import Bytes

CHUNK_BYTES = 256 << 10
"""What a connection is given at once. One buffer that grows leaves holes of all sizes: 30 MB behind one of 8 MiB."""


class Held:
    """Grows at its end. Memory: its bytes, and a chunk."""

    def __init__(self) -> None:
        self._chunks: list[bytearray] = []
        self.size = 0

    def write(self, data: Bytes) -> int:
        view = memoryview(data).cast("B")
        count = len(view)
        while view:
            place = self.size % CHUNK_BYTES
            if place == 0:
                self._chunks.append(bytearray(CHUNK_BYTES))
            taken = min(CHUNK_BYTES - place, len(view))
            self._chunks[-1][place : place + taken] = view[:taken]
            self.size, view = self.size + taken, view[taken:]
        return count

    @property
    def pieces(self) -> list[memoryview]:
        """All of it, chunk by chunk."""
        ends = [min(CHUNK_BYTES, self.size - number * CHUNK_BYTES) for number in range(len(self._chunks))]
        return [memoryview(chunk)[:end] for chunk, end in zip(self._chunks, ends, strict=True)]


def cut_views(data: Bytes) -> list[memoryview]:
    """The same of bytes that lie together."""
    view = memoryview(data).cast("B")
    return [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
