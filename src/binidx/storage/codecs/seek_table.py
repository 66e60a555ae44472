"""Seek table at the end of a zstd-compressed object: the stored and plain bytes of its segments. No I/O.

    segment 0 │ segment 1 │ ... │ mark │ table              each a zstd frame; to a decoder, mark and table hold nothing

    from the table's start    bytes  field
    0                         4      u32 magic 0x184D2A5E: a skippable frame
    4                         4      u32 bytes that follow: 8 N + 9
    8                         8 N    of each frame: u32 stored bytes, u32 plain bytes  (12 N with checksums: a u32 more)
    8+8N                      4      u32 N, number of frames
    12+8N                     1      u8 bit 7: each entry ends in the lower half of XXH64 of its plain bytes
    13+8N                     4      u32 magic 0x8F92EAB1, the end of the object

    from the mark's start
    0                         4, 4   u32 magic 0x184D2A50, u32 bytes that follow: 24
    8                         8      `binidx` and the bytes 0, 1
    16                        8      u64 plain bytes of the object
    24                        8      u64 xxh3_64 of the table's entries before the mark's own

All little-endian. The table is zstd's seekable format; `zstd -d` restores the plain bytes, and readers of that format
seek in them. Frames of any size are read, as other programs write them. The mark is ours: every frame has its own
checksum, but a flipped bit in the table would shift all plain bytes behind it without damage to a frame.

Prohibited: entries that do not add up to the object; more than 1 GiB plain in a frame (zstd's own limit), or more than
32 KiB for each stored byte (a block of 128 KiB takes 4 bytes at least): so no table makes a reader allocate more.

Source: zstd_seekable_compression_format.md of facebook/zstd; the mark is ours.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import FormatError
from binidx.storage.interfaces import Range

FRAME_HEADER = struct.Struct("<II")
FOOTER = struct.Struct("<IBI")
MARK = struct.Struct("<II8sQQ")
SKIPPABLE, SEEKABLE, MARKS = 0x184D2A5E, 0x8F92EAB1, 0x184D2A50
TAG = b"binidx\x00\x01"
CHECKSUMS, RESERVED = 0x80, 0x7C
SMALLEST = FRAME_HEADER.size + FOOTER.size
"""Bytes of a table without frames."""

MAX_SEGMENT_BYTES = 1 << 30
MAX_EXPANSION = 1 << 15


@dataclass(frozen=True, eq=False)
class SeekTable:
    """Stored and plain bytes of the segments, without frames that hold no plain bytes (marks, notes of other programs).

    Attributes:
        stored_starts, stored_stops: byte range of each segment in the object, shape (num_segments,) int64.
        plain_starts: first plain byte of each segment, then the plain size, shape (num_segments + 1,) int64.
        checksums: lower half of XXH64 of each segment's plain bytes, shape (num_segments,) uint32; None without these.
        marked: whether the object has binidx's mark, which has a checksum of the table.
    """

    stored_starts: NDArray[np.int64]
    stored_stops: NDArray[np.int64]
    plain_starts: NDArray[np.int64]
    checksums: NDArray[np.uint32] | None
    marked: bool

    def __len__(self) -> int:
        return len(self.stored_starts)

    @property
    def plain_bytes(self) -> int:
        return int(self.plain_starts[-1])

    @property
    def largest(self) -> int:
        """Plain bytes of the largest segment; 0 without segments."""
        return int(np.diff(self.plain_starts).max(initial=0))

    def digest(self) -> str:
        """Return xxh3_64 of the sizes of all segments, stored and plain, and of their checksums, if it has them."""
        hashed = xxhash.xxh3_64((self.stored_stops - self.stored_starts).astype("<i8").tobytes())
        hashed.update(self.plain_starts.astype("<i8").tobytes())
        hashed.update(b"" if self.checksums is None else self.checksums.astype("<u4").tobytes())
        return hashed.hexdigest()

    def covering(self, ranges: Sequence[Range]) -> list[int]:
        """Return the numbers of the segments that hold plain ranges, sorted, each once."""
        asked = np.array([(start, stop) for start, stop in ranges if start < stop], np.int64).reshape(-1, 2)
        firsts = np.searchsorted(self.plain_starts, asked[:, 0], "right") - 1
        stops = np.searchsorted(self.plain_starts, asked[:, 1], "left")
        spans: Iterable[range] = map(range, firsts.tolist(), stops.tolist())
        return sorted(set(chain.from_iterable(spans)))

    def stored(self, segment: int) -> Range:
        """Return the range of a segment in the stored object."""
        return int(self.stored_starts[segment]), int(self.stored_stops[segment])

    def plain(self, segment: int) -> Range:
        """Return the range of a segment in the plain bytes."""
        return int(self.plain_starts[segment]), int(self.plain_starts[segment + 1])


def format_table(
    stored_sizes: NDArray[np.uint32], plain_sizes: NDArray[np.uint32], checksums: NDArray[np.uint32] | None = None
) -> bytes:
    """Return mark and table for segments of these sizes, shape (num_segments,) each.

    Args:
        stored_sizes, plain_sizes: bytes of each segment, shape (num_segments,) uint32.
        checksums: as in `SeekTable`.
    """
    columns = [stored_sizes, plain_sizes, *([] if checksums is None else [checksums])]
    entries = np.stack(columns, 1).astype("<u4").tobytes()
    plain_bytes = int(plain_sizes.sum(dtype=np.uint64))
    mark = MARK.pack(MARKS, MARK.size - FRAME_HEADER.size, TAG, plain_bytes, xxhash.xxh3_64_intdigest(entries))
    entries += np.array([MARK.size, 0, 0][: len(columns)], "<u4").tobytes()
    head = FRAME_HEADER.pack(SKIPPABLE, len(entries) + FOOTER.size)
    return mark + head + entries + FOOTER.pack(len(stored_sizes) + 1, CHECKSUMS * (len(columns) == 3), SEEKABLE)


def tail_bytes(end: memoryview, size: int, uri: str) -> int:
    """Return how many bytes of the end of an object `parse_table` needs.

    Args:
        end: last bytes of the object, at least `SMALLEST` or all there are.
        size: bytes of the object.

    Raises:
        FormatError: there is no table at the end, or it declares more bytes than there are.
    """
    return min(_table_bytes(end, size, uri) + MARK.size, size)


def parse_table(tail: memoryview, size: int, uri: str) -> SeekTable:
    """Return the table of an object of `size` bytes, from its last `tail_bytes` or more.

    Args:
        tail: the last bytes of the object, `tail_bytes` or more.
        size: bytes of the object.
        uri: name of the object in errors.

    Raises:
        FormatError: a rule of the format is broken; the message names it.
    """
    table_bytes = _table_bytes(tail, size, uri)
    start = len(tail) - table_bytes
    magic, length = FRAME_HEADER.unpack_from(tail, start)
    if (magic, length) != (SKIPPABLE, table_bytes - FRAME_HEADER.size):
        raise FormatError(
            f"{uri}: its seek table starts with {magic:#x} and {length}, "
            f"needed {SKIPPABLE:#x} and {table_bytes - FRAME_HEADER.size}"
        )
    count, descriptor, _ = FOOTER.unpack_from(tail, len(tail) - FOOTER.size)
    entries = tail[start + FRAME_HEADER.size : len(tail) - FOOTER.size]
    columns = np.frombuffer(entries, "<u4").reshape(count, 3 if descriptor & CHECKSUMS else 2)
    _check_entries(columns, size - table_bytes, uri)
    marked = _check_mark(tail[max(start - MARK.size, 0) : start], entries, columns, uri)
    return _table_of(columns, marked)


def _table_bytes(end: memoryview, size: int, uri: str) -> int:
    if size < SMALLEST:
        raise FormatError(f"{uri}: {size} bytes, a zstd seek table needs {SMALLEST}")
    count, descriptor, magic = FOOTER.unpack_from(end, len(end) - FOOTER.size)
    if magic != SEEKABLE:
        raise FormatError(
            f"{uri}: ends with {magic:#x}, a zstd seek table ends with {SEEKABLE:#x}; "
            f"write it with binidx convert --compress"
        )
    if descriptor & RESERVED:
        raise FormatError(f"{uri}: seek table of kind {descriptor:#x}, needed 0 or {CHECKSUMS:#x}")
    table_bytes = SMALLEST + int(count) * (12 if descriptor & CHECKSUMS else 8)
    if table_bytes > size:
        raise FormatError(f"{uri}: {size} bytes, its seek table of {count} frames needs {table_bytes}")
    return table_bytes


def _check_entries(columns: NDArray[np.uint32], num_bytes: int, uri: str) -> None:
    stored, plain = columns[:, 0].astype(np.int64), columns[:, 1].astype(np.int64)
    # Below 2^64 whatever the entries say: at most 2^32 of them, each below 2^32.
    total = int(stored.sum(dtype=np.uint64))
    if total != num_bytes:
        raise FormatError(f"{uri}: its seek table is for {total} bytes before it, there are {num_bytes}")
    wrong = (plain > MAX_SEGMENT_BYTES) | (plain > stored * MAX_EXPANSION)
    if wrong.any():
        frame = int(wrong.argmax())
        raise FormatError(
            f"{uri}: frame {frame} of {stored[frame]} bytes is to hold {plain[frame]}, "
            f"needed at most {min(MAX_SEGMENT_BYTES, int(stored[frame]) * MAX_EXPANSION)}"
        )


def _check_mark(before: memoryview, entries: memoryview, columns: NDArray[np.uint32], uri: str) -> bool:
    """Return whether binidx's mark precedes the table; check the entries against its checksum."""
    if len(before) < MARK.size or not len(columns) or tuple(columns[-1, :2]) != (MARK.size, 0):
        return False
    magic, length, tag, plain_bytes, digest = MARK.unpack(before)
    if (magic, length, tag) != (MARKS, MARK.size - FRAME_HEADER.size, TAG):
        return False
    before_mark = entries[: len(entries) * (len(columns) - 1) // len(columns)]
    found = int(columns[:, 1].sum(dtype=np.uint64)), xxhash.xxh3_64_intdigest(before_mark)
    if found != (plain_bytes, digest):
        raise FormatError(
            f"{uri}: its seek table is damaged: {found[0]} plain bytes and digest {found[1]:016x}, "
            f"needed {plain_bytes} and {digest:016x}"
        )
    return True


def _table_of(columns: NDArray[np.uint32], marked: bool) -> SeekTable:
    stops = np.cumsum(columns[:, 0], dtype=np.int64)
    full = columns[:, 1] > 0
    plain = np.cumsum(columns[full, 1], dtype=np.int64)
    return SeekTable(
        (stops - columns[:, 0])[full],
        stops[full],
        np.concatenate([np.zeros(1, np.int64), plain]),
        columns[full, 2].copy() if columns.shape[1] == 3 else None,
        marked,
    )
