"""Plain bytes -> zstd frames of 64 KiB and their seek table, compressed over the cores, in a bounded memory.

    write ──► 1 MiB batches ──► threads ──► frames, in order ──► the object
                                              └─ sizes ──► table, at the end

The bytes that come out depend on those that went in and on the level (and the version of libzstd), on nothing else: not
on threads, not on how they were cut into writes. Memory: two batches for each thread, and 8 bytes a segment.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from types import TracebackType

import numpy as np
import zstandard

from binidx.errors import ConfigError
from binidx.storage.cores import submit, thread_count
from binidx.storage.publish import Writer
from binidx.storage.ranges import Bytes, cut
from binidx.storage.seek_table import MAX_SEGMENT_BYTES, format_table

SEGMENT_BYTES = 64 << 10
DEFAULT_LEVEL = 3
"""340 MB/s a core; 9 is four times slower and 4 to 8 % smaller."""

BATCH_BYTES = 1 << 20


class SegmentWriter:
    """A Writer that compresses into another one; `finish`, or the end of its block, writes the seek table.

    Args:
        writer: where the compressed bytes go.
        level: 1 to 22, zstd's.
        segment_bytes: plain bytes of a segment; the last one may be shorter.

    Raises:
        ConfigError: no such level or size.
    """

    def __init__(
        self, writer: Writer, level: int | None = None, *, segment_bytes: int = SEGMENT_BYTES, threads: int = 0
    ) -> None:
        self.level = check_level(DEFAULT_LEVEL if level is None else level)
        if not 1 <= segment_bytes <= MAX_SEGMENT_BYTES:
            raise ConfigError(f"segments of {segment_bytes} bytes, needed 1 to {MAX_SEGMENT_BYTES}")
        self.segment_bytes = segment_bytes
        self._writer = writer
        self._threads = threads or thread_count()
        self._batch_bytes = segment_bytes * max(BATCH_BYTES // segment_bytes, 1)
        self._rest = bytearray()
        self._pending: deque[tuple[int, Future[list[bytes]]]] = deque()
        self._stored_sizes, self._plain_bytes = bytearray(), 0

    def write(self, data: Bytes, /) -> int:
        view = memoryview(data).cast("B")
        for start, stop in cut((0, len(view)), self._batch_bytes):
            self._rest += view[start:stop]
            while len(self._rest) >= self._batch_bytes:
                self._begin(bytes(self._rest[: self._batch_bytes]))
                del self._rest[: self._batch_bytes]
        return len(view)

    def finish(self) -> None:
        """What is left, and the table."""
        # Mostly all there is: not worth a thread.
        last = compress_batch(bytes(self._rest), self.segment_bytes, self.level)
        while self._pending:
            self._write_first()
        self._write_frames(len(self._rest), last)
        self._rest = bytearray()
        stored = np.frombuffer(self._stored_sizes, "<u4")
        plain = np.full(len(stored), self.segment_bytes, np.uint32)
        if len(plain):
            plain[-1] = self._plain_bytes - self.segment_bytes * (len(plain) - 1)
        self._writer.write(format_table(stored, plain))

    def _begin(self, batch: bytes) -> None:
        while len(self._pending) >= 2 * self._threads:
            self._write_first()
        work = lambda: compress_batch(batch, self.segment_bytes, self.level)  # noqa: E731
        self._pending.append((len(batch), submit(work)))

    def _write_first(self) -> None:
        num_bytes, frames = self._pending.popleft()
        self._write_frames(num_bytes, frames.result())

    def _write_frames(self, num_bytes: int, frames: list[bytes]) -> None:
        self._writer.write(b"".join(frames))
        self._stored_sizes += np.array(list(map(len, frames)), "<u4").tobytes()
        self._plain_bytes += num_bytes

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        # Else not waited for: in a forked child nobody is at work on them.
        self._pending.clear()


def compress_batch(batch: bytes, segment_bytes: int, level: int) -> list[bytes]:
    """A frame for each segment, with its plain size and XXH64 in it."""
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=True)
    view = memoryview(batch)
    return [compressor.compress(view[start:stop]) for start, stop in cut((0, len(view)), segment_bytes)]


def check_level(level: int) -> int:
    """The level, or ConfigError."""
    if not 1 <= level <= zstandard.MAX_COMPRESSION_LEVEL:
        raise ConfigError(f"compression level {level}, needed 1 to {zstandard.MAX_COMPRESSION_LEVEL}")
    return level
