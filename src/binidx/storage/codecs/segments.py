"""zstd segments: plain bytes in frames of 64 KiB that decode alone, and a seek table.

    read        plain [70000, 70100)            plain_starts ─► segment 1
    fetch       stored [31512, 62871)           all segments of one read in one vectored read
    decode      plain [65536, 131072)           checked: lengths, and the frame's own XXH64
    return      a view of 100 bytes

    write ──► 1 MiB batches ──► threads ──► frames, in order ──► the object
                                              └─ sizes ──► table, at the end

Cost of a random sample of 4,096 neighbouring tokens: 70 us of one core, where a plain read takes 5; and 31 KiB over the
network (uint16; int32: 20 KiB instead of 16 KiB), which take 0.2 ms of 30. A read decodes no segment twice, and uses
threads from 4 segments on.

Use it to store and send less (natural text at level 3: uint16 1.4 times, int32 2.5 times). Do not use it for local
files that are read at random and fit on the disk: a mapped plain `.bin` costs 2 us a sample. Other settings measured:
256 KiB gain 4 to 9 % and cost three times the time and bytes of a sample; level 9 gains 4 to 8 % and takes four times
as long to write; a byte shuffle loses; a dictionary gains 5 % and needs a second file.

The compressed bytes depend on the plain bytes, the level and the version of libzstd only. Memory of a writer: two
batches for each thread, and 8 bytes a segment.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import xxhash
import zstandard

from binidx.errors import FormatError
from binidx.storage.codecs.seek_table import SeekTable, format_table, parse_table, tail_bytes
from binidx.storage.interfaces import Bytes, Range, RangeReader, Writer
from binidx.storage.ranges import assemble, check_ranges, cut
from binidx.storage.stats import LayerStats
from binidx.storage.threads import CPU, map_over_cores, thread_count

TAIL_BYTES = 64 << 10
"""Bytes that are read at opening, on S3 and HTTP by the request for the size. They hold the table of 8,000 segments,
half a gibibyte; 100 GB have a table of 12 MB, which needs one more read."""

# A segment takes 50 us, and handing work to a thread 20: a second thread pays from 4 segments on.
SEGMENTS_A_THREAD = 2


class SegmentedObject:
    """Reader of the plain bytes of a compressed object.

    Args:
        reader: reader of an object in zstd's seekable format; frames may be of any size, with or without checksums.
        end: last `TAIL_BYTES` of the object, or all of them, if they are known.

    Attributes:
        size: plain bytes.
        stored_bytes: compressed bytes.
        table: seek table of the segments.

    Raises:
        FormatError: the object has no valid seek table. On read: a segment is damaged, also after it was read again.

    Decoded segments are not cached: a ChunkCache with chunks of `block_bytes` over this reader does that.
    """

    codec = "zstd"

    def __init__(self, reader: RangeReader, end: Bytes = b"") -> None:
        self.reader = reader
        self.uri, self.stored_bytes, self.identity = reader.uri, reader.size, reader.identity
        self.table = read_table(reader, end)
        self.size = self.table.plain_bytes
        self.stats = LayerStats()

    @property
    def block_bytes(self) -> int:
        """Plain bytes of the largest segment."""
        return self.table.largest

    @property
    def num_blocks(self) -> int:
        return len(self.table)

    def digest(self) -> str:
        return self.table.digest()

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        segments = self.table.covering(ranges)
        self.stats.add(bytes_asked=sum(stop - start for start, stop in ranges))
        stored = self._fetch(segments)
        plain = map_over_cores(
            self._decoded, list(zip(segments, stored, strict=True)), items_per_thread=SEGMENTS_A_THREAD
        )
        damaged = [place for place, result in enumerate(plain) if isinstance(result, str)]
        # A segment that was damaged in transit is intact the second time.
        again = self._fetch([segments[place] for place in damaged])
        for place, data in zip(damaged, again, strict=True):
            plain[place] = self._decoded((segments[place], data))
            if isinstance(reason := plain[place], str):
                raise self._error(segments[place], reason)
        decoded = [result for result in plain if isinstance(result, bytes)]
        return assemble(ranges, list(map(self.table.plain, segments)), decoded)

    def _fetch(self, segments: Sequence[int]) -> list[memoryview]:
        return self.stats.read(self.reader, [self.table.stored(segment) for segment in segments])

    def _decoded(self, fetched: tuple[int, memoryview]) -> bytes | str:
        """Return the plain bytes of a segment, or a description of its damage."""
        segment, data = fetched
        start, stop = self.table.plain(segment)
        try:
            # Before that size is allocated. Some writers leave it unknown (-1).
            if (declared := zstandard.frame_content_size(data)) not in (-1, stop - start):
                return f"its header says {declared} plain bytes"
            plain = _local.decompressor.decompress(data, max_output_size=stop - start, allow_extra_data=False)
        except zstandard.ZstdError as error:
            return str(error)
        if len(plain) != stop - start:
            return f"{len(plain)} plain bytes came out"
        sums = self.table.checksums
        if sums is not None and xxhash.xxh64_intdigest(plain) & 0xFFFFFFFF != sums[segment]:
            return "its checksum in the seek table is another"
        return plain

    def _error(self, segment: int, reason: str) -> FormatError:
        (start, stop), (first, last) = self.table.plain(segment), self.table.stored(segment)
        return FormatError(
            f"{self.uri}: segment {segment} is damaged ({reason}), read twice: bytes {first}-{last} of the object, "
            f"needed plain bytes {start}-{stop}; restore the object from its source"
        )

    def __repr__(self) -> str:
        return f"SegmentedObject({self.reader!r})"


def read_table(reader: RangeReader, end: Bytes = b"") -> SeekTable:
    """Read the table at the end of an object: one read unless `end` is given, and another one if it is over 64 KiB.

    Args:
        end: the last `TAIL_BYTES` of the object, or all of it; b"": not known.

    Raises:
        FormatError: there is no table, or it is damaged.
    """
    size = reader.size
    first = max(size - TAIL_BYTES, 0)
    tail = memoryview(end) if len(end) == size - first else reader.read([(first, size)])[0]
    needed = tail_bytes(tail, size, reader.uri)
    if needed > len(tail):
        tail = memoryview(bytes(reader.read([(size - needed, first)])[0]) + tail)
    return parse_table(tail, size, reader.uri)


class _PerThread(threading.local):
    """The decompressor of a thread; a new one for each segment would cost a sixth of the segment's time."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_local = _PerThread()


SEGMENT_BYTES = 64 << 10


class SegmentWriter:
    """Writer that compresses into another writer; `finish`, or the end of a `with` block, writes the seek table.

    Args:
        writer: writer of the compressed bytes.
        level: compression level of zstd, 1 to 22.
        segment_bytes: plain bytes of a segment; the last one may be shorter.
    """

    def __init__(
        self, writer: Writer, level: int | None = None, *, segment_bytes: int = SEGMENT_BYTES, threads: int = 0
    ) -> None:
        self.level = DEFAULT_LEVEL if level is None else level
        self.segment_bytes = segment_bytes
        self._writer = writer
        self._threads = threads or thread_count()
        self._batch_bytes = segment_bytes * max(BATCH_BYTES // segment_bytes, 1)
        self._rest = bytearray()
        self._pending: deque[tuple[int, Future[list[bytes]]]] = deque()
        self._stored_sizes, self._plain_bytes = bytearray(), 0

    def write(self, data: Bytes, /) -> int:
        view = memoryview(data).cast("B")
        while view:
            missing = self._batch_bytes - len(self._rest)
            self._rest += view[:missing]
            view = view[missing:]
            if len(self._rest) == self._batch_bytes:
                self._begin(self._rest)
                self._rest = bytearray()
        return memoryview(data).nbytes

    def finish(self) -> None:
        """Write the last segments and the table."""
        # Often the only batch: not worth a thread.
        last = compress_batch(self._rest, self.segment_bytes, self.level)
        while self._pending:
            self._write_first()
        self._write_frames(len(self._rest), last)
        self._rest = bytearray()
        stored = np.frombuffer(self._stored_sizes, "<u4")
        plain = np.full(len(stored), self.segment_bytes, np.uint32)
        if len(plain):
            plain[-1] = self._plain_bytes - self.segment_bytes * (len(plain) - 1)
        self._writer.write(format_table(stored, plain))

    def _begin(self, batch: Bytes) -> None:
        while len(self._pending) >= 2 * self._threads:
            self._write_first()
        work = functools.partial(compress_batch, batch, self.segment_bytes, self.level)
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        # An error does not wait for pending batches: after a fork their threads do not exist.
        self._pending.clear()


DEFAULT_LEVEL = 3
"""340 MB/s a core; 9 is four times slower and 4 to 8 % smaller."""

ZSTD_LEVELS = range(1, zstandard.MAX_COMPRESSION_LEVEL + 1)
BATCH_BYTES = 1 << 20


def compress_batch(batch: Bytes, segment_bytes: int, level: int) -> list[bytes]:
    """Return a frame for each segment, with its plain size and XXH64.

    Args:
        batch: plain bytes of the segments.
        segment_bytes: plain bytes of each but the last.
        level: compression level of zstd.
    """
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=True)
    view = memoryview(batch)
    return [compressor.compress(view[start:stop]) for start, stop in cut((0, len(view)), segment_bytes)]


def stored_pieces(reader: SegmentedObject) -> list[Range]:
    """Return the ranges of the frames that hold plain bytes; frames that follow each other are one range."""
    starts, stops = reader.table.stored_starts, reader.table.stored_stops
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    firsts, lasts = np.append(starts[:1], starts[breaks + 1]), np.append(stops[breaks], stops[-1:])
    return [*zip(firsts.tolist(), lasts.tolist(), strict=True)]


def joined_table(readers: Sequence[SegmentedObject]) -> bytes:
    """Return the seek table over the frames of all objects in turn; with checksums if all tables have them."""
    tables = [reader.table for reader in readers]
    stored = np.concatenate([table.stored_stops - table.stored_starts for table in tables])
    plain = np.concatenate([np.diff(table.plain_starts) for table in tables])
    sums = [table.checksums for table in tables if table.checksums is not None]
    checksums = np.concatenate(sums) if len(sums) == len(tables) else None
    return format_table(stored.astype(np.uint32), plain.astype(np.uint32), checksums)
