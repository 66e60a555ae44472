"""The columns of a remote parquet file as a Python file that is read ahead: pyarrow asks, we fetched.

    column "text"   [block][block][block]      │ row group 1 [block]...     each column is a stream of its own
    column "id"     [block]                    │             [block]
                       ▲ read here: fetched, and those behind it asked for; those before it are let go

Memory: AHEAD_BYTES, and the blocks that are being read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future

from binidx.storage.as_file import Source
from binidx.storage.ranges import Range, RangeReader, cut
from binidx.storage.threads import Threads

BLOCK_BYTES = 4 << 20
AHEAD_BYTES = 32 << 20
THREADS = Threads("binidx-columns", lambda: AHEAD_BYTES // BLOCK_BYTES)


class ColumnsFile(Source):
    """A reader as a file, that fetches ahead in the given streams; what lies in none of them is read as it is asked.

    Args:
        streams: of each column the ranges of bytes it will be read by, in order.
    """

    def __init__(self, reader: RangeReader, streams: Sequence[Sequence[Range]]) -> None:
        super().__init__(reader)
        self._ahead = max(1, AHEAD_BYTES // BLOCK_BYTES // max(1, len(streams)))
        self._streams = [[block for each in ranges for block in cut(each, BLOCK_BYTES)] for ranges in streams]
        places = [(block, s, b) for s, blocks in enumerate(self._streams) for b, block in enumerate(blocks)]
        self._sorted = sorted(places)
        self._starts = [block[0] for block, _, _ in self._sorted]
        self._fetched: dict[tuple[int, int], Future[memoryview]] = {}

    def read(self, count: int = -1) -> bytes:
        stop = self._reader.size if count < 0 else min(self._position + count, self._reader.size)
        parts = []
        while self._position < stop:
            parts.append(self._part(stop))
            self._position += len(parts[-1])
        return b"".join(parts)

    def _part(self, stop: int) -> memoryview:
        """Bytes from the position on, up to `stop` or the end of a block."""
        at = bisect_right(self._starts, self._position) - 1
        if at >= 0:
            (start, end), stream, number = self._sorted[at]
            if self._position < end:
                return self._block(stream, number)[self._position - start : stop - start]
        stop = min([stop, *self._starts[at + 1 : at + 2]])
        return self._reader.read([(self._position, stop)])[0]

    def _block(self, stream: int, number: int) -> memoryview:
        """The bytes of a block; those behind it are on their way after this."""
        for key in [key for key in self._fetched if key[0] == stream and key[1] < number]:
            self._fetched.pop(key).cancel()
        blocks = self._streams[stream]
        for each in range(number, min(number + self._ahead + 1, len(blocks))):
            if (stream, each) not in self._fetched:
                self._fetched[stream, each] = THREADS.submit(lambda at=blocks[each]: self._reader.read([at])[0])  # type: ignore[misc]
        return self._fetched[stream, number].result()

    def close(self) -> None:
        for each in self._fetched.values():
            each.cancel()
        self._fetched.clear()
        super().close()
