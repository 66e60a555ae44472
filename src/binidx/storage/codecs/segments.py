"""The plain bytes of a zstd-compressed object, by ranges: one frame of 64 KiB holds a segment, and decodes alone.

    asked       plain [70000, 70100)            plain_starts ─► segment 1
    read        stored [31512, 62871)           all segments of one read in one vectored read
    decoded     plain [65536, 131072)           checked: lengths, and the frame's own XXH64
    given       a view of 100 bytes

Price of a random sample of 4,096 tokens that lie together: 70 us of one core, where a plain read takes 5; and 31 KiB
over the wire (uint16; int32: 20 KiB of 16 KiB plain), which are 0.2 ms on a way of 30. A read decodes no segment twice;
from 4 segments on it decodes in threads.

When: to store and send less (natural text at level 3: uint16 1.4 times, int32 2.5 times), to copy a corpus to a node's
disk sooner over a thin link. When not: local files that are read at random and fit on the disk as they are; a plain
`.bin` there is mapped and costs 2 us a sample. The defaults, 64 KiB and level 3, are where ratio and random access
meet: 256 KiB gain 4 to 9 % and cost three times the time and bytes of a sample; level 9 gains 4 to 8 % and takes four
times as long to write, which pays for an archive; a byte shuffle loses; a dictionary gains 5 % and ties readers to a
second file.

A new codec is a class that is a RangeReader, one that writes, and a row in CODECS.

Plain bytes -> zstd frames of 64 KiB and their seek table, compressed over the cores, in a bounded memory.

    write ──► 1 MiB batches ──► threads ──► frames, in order ──► the object
                                              └─ sizes ──► table, at the end

The bytes that come out depend on those that went in and on the level (and the version of libzstd), on nothing else: not
on threads, not on how they were cut into writes. Memory: two batches for each thread, and 8 bytes a segment.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import xxhash
import zstandard

from binidx.errors import ConfigError, FormatError
from binidx.storage.codecs.seek_table import (
    MAX_SEGMENT_BYTES,
    SMALLEST,
    SeekTable,
    format_table,
    parse_table,
    tail_bytes,
)
from binidx.storage.interfaces import Bytes, Range, RangeReader, Writer
from binidx.storage.ranges import assemble, check_ranges, cut
from binidx.storage.stats import LayerStats
from binidx.storage.threads import CPU, map_over_cores, thread_count

TAIL_BYTES = 64 << 10
"""Read at opening, of S3 and HTTP in the request that finds the object. It holds the table of 8,000 segments, half a
gibibyte; 100 GB have a table of 12 MB, which is one read more."""

# Each takes 50 us, and handing work to a thread 20: a second thread pays from 4 of them on.
SEGMENTS_A_THREAD = 2


class SegmentedObject:
    """A reader of the plain bytes of what `reader` reads compressed.

    Args:
        reader: of an object in zstd's seekable format; frames may be of any size, with or without checksums.
        end: its last bytes, if they are known already: `TAIL_BYTES` of them, or all there are.

    Attributes:
        size: plain bytes.
        stored_bytes: those of the object.
        table: where its segments lie.
        codec: tells its bytes from those that lie under the same URI.

    Raises:
        FormatError: there is no sound seek table at its end. On read: a segment is damaged, also when it was read a
            second time; what is returned was always checked.

    Nothing is kept between two reads: stack a ChunkCache for that, whose chunks are `segment_bytes` long.
    """

    codec = "zstd"

    def __init__(self, reader: RangeReader, end: Bytes = b"") -> None:
        self.reader = reader
        self.uri, self.stored_bytes = reader.uri, reader.size
        self.table = read_table(reader, end)
        self.size = self.table.plain_bytes
        self.stats = LayerStats()

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.reader.identity

    @property
    def block_bytes(self) -> int:
        """Plain bytes of the largest segment."""
        return self.table.largest

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        segments = self.table.covering(ranges)
        stored = self._fetch(segments, asked=ranges)
        plain = map_over_cores(
            self._decoded, list(zip(segments, stored, strict=True)), items_per_thread=SEGMENTS_A_THREAD
        )
        damaged = [place for place, found in enumerate(plain) if isinstance(found, str)]
        # What was damaged on its way is whole the second time.
        again = self._fetch([segments[place] for place in damaged]) if damaged else []
        for place, data in zip(damaged, again, strict=True):
            plain[place] = self._decoded((segments[place], data))
        return assemble(ranges, list(map(self.table.plain, segments)), self._sound(segments, plain))

    def _fetch(self, segments: Sequence[int], asked: Sequence[Range] = ()) -> list[memoryview]:
        began = time.perf_counter()
        answers = self.reader.read([self.table.stored(each) for each in segments]) if segments else []
        self.stats.add(
            requests=len(segments),
            bytes_asked=sum(stop - start for start, stop in asked),
            bytes_moved=sum(map(len, answers)),
            seconds=time.perf_counter() - began,
        )
        return answers

    def _decoded(self, fetched: tuple[int, memoryview]) -> bytes | str:
        """The plain bytes of a segment from its stored ones, or what is wrong with it."""
        segment, data = fetched
        start, stop = self.table.plain(segment)
        try:
            # Before anything of that size is allocated. Unknown (-1) is how some writers leave it.
            if (claimed := zstandard.frame_content_size(data)) not in (-1, stop - start):
                return f"its header says {claimed} plain bytes"
            found = _decompressor().decompress(data, max_output_size=stop - start, allow_extra_data=False)
        except zstandard.ZstdError as error:
            return str(error)
        if len(found) != stop - start:
            return f"{len(found)} plain bytes came out"
        sums = self.table.checksums
        if sums is not None and xxhash.xxh64_intdigest(found) & 0xFFFFFFFF != sums[segment]:
            return "its checksum in the seek table is another"
        return found

    def _sound(self, segments: Sequence[int], plain: Sequence[bytes | str]) -> list[bytes]:
        for segment, found in zip(segments, plain, strict=True):
            if isinstance(found, str):
                raise self._error(segment, found)
        return [each for each in plain if isinstance(each, bytes)]

    def _error(self, segment: int, reason: str) -> FormatError:
        (start, stop), (first, last) = self.table.plain(segment), self.table.stored(segment)
        return FormatError(
            f"{self.uri}: segment {segment} is damaged ({reason}), read twice: bytes {first}-{last} of the object, "
            f"needed plain bytes {start}-{stop}; restore the object from its source"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stats": LayerStats()}

    def __repr__(self) -> str:
        return f"SegmentedObject({self.reader!r})"


def read_table(reader: RangeReader, end: Bytes = b"") -> SeekTable:
    """The table at the end of an object: one read unless its end is given, and one more where it is over 64 KiB.

    Raises:
        FormatError: there is none, or it is damaged.
    """
    size = reader.size
    if size < SMALLEST:
        raise FormatError(f"{reader.uri}: {size} bytes, a zstd seek table needs {SMALLEST}")
    first = max(size - TAIL_BYTES, 0)
    tail = memoryview(end) if len(end) == size - first else reader.read([(first, size)])[0]
    needed = tail_bytes(tail, size, reader.uri)
    if needed > len(tail):
        tail = memoryview(bytes(reader.read([(size - needed, first)])[0]) + tail)
    return parse_table(tail, size, reader.uri)


_local = threading.local()


def _decompressor() -> zstandard.ZstdDecompressor:
    """This thread's: it is not to be shared, and a new one for each segment would cost a sixth of its time."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _local.decompressor
    return found


@dataclass(frozen=True)
class Codec:
    """How the bytes of a `.bin` may be stored.

    Attributes:
        suffix: of the object, after `.bin`.
        open: a reader of the plain bytes, over one of the stored ones; and the end of these, if it is known.
        create: a Writer of plain bytes, over one of stored ones, and a level; whole at the end of its block.
    """

    suffix: str
    open: Callable[[RangeReader, Bytes], RangeReader]
    create: Callable[[Writer, int | None], AbstractContextManager[Writer]]


def codec_of(uri: str) -> str:
    """The codec of an object, by its name: `.bin.zst` is compressed; whatever else ends in .zst is as it is."""
    return next((name for name, codec in CODECS.items() if codec.suffix and uri.endswith(f".bin{codec.suffix}")), "raw")


SEGMENT_BYTES = 64 << 10


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
        self._pending.append((len(batch), CPU.submit(work)))

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


CODECS: dict[str, Codec] = {
    "raw": Codec("", lambda reader, end: reader, lambda writer, level: contextlib.nullcontext(writer)),
    "zstd": Codec(".zst", SegmentedObject, SegmentWriter),
}
"""name -> codec, the one first that is read where both lie there"""

DEFAULT_LEVEL = 3
"""340 MB/s a core; 9 is four times slower and 4 to 8 % smaller."""

BATCH_BYTES = 1 << 20


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
