"""Plain bytes of inputs that are compressed by gzip or zstd, and the blocks at which a .zst can be cut.

Compressed bytes become plain pieces of bounded size:

    gzip    members one after the other, zeros after the last; isal decompresses if it is installed (extra `gzip`)
    zstd    frames one after the other, skippable ones among them; fed block by block, so that 1 KB of input never
            becomes 1 GB of output at once

An input that ends in the middle, or is followed by anything else, is a FormatError: no line is lost silently.

    frame     magic 4 │ descriptor 1 │ window 0-1 │ dictionary 0-4 │ plain bytes 0-8 │ blocks │ checksum 0 or 4
    block     3 bytes: bit 0 last, bits 1-2 kind (0 raw, 1 one byte repeated, 2 compressed), bits 3- stored bytes
    skippable magic 0x184D2A5?, u32 bytes that follow, so many bytes

Source: RFC 8878.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import zstandard

from binidx.errors import FormatError
from binidx.prepare.text.rows import ByteStream, Pieces, TruncatedError
from binidx.prepare.text.slices import InputBlock, Slice
from binidx.storage.codecs.segments import read_table
from binidx.storage.interfaces import RangeReader

try:
    from isal import isal_zlib

    GZIP_LIBRARY: Any = isal_zlib  # 0.45 of zlib's time
except ImportError:
    GZIP_LIBRARY = zlib

MAGIC, SKIPPABLE_MAGIC = 0xFD2FB528, 0x184D2A50
FIRST_HEADER_BYTES = 5
"""Bytes of a frame header that determine its length: magic and descriptor."""


def next_frame_header(stream: ByteStream) -> bytes | None:
    """Return the header of the next zstd frame, after skippable frames; None at the end of the stream.

    Raises:
        TruncatedError, ValueError: the next bytes are not a frame.
    """
    while not stream.at_end():
        magic = stream.take(4)
        number = int.from_bytes(magic, "little")
        if number == MAGIC:
            begin = magic + stream.take(FIRST_HEADER_BYTES - 4)
            return begin + stream.take(zstandard.frame_header_size(begin) - FIRST_HEADER_BYTES)
        if number & 0xFFFFFFF0 != SKIPPABLE_MAGIC:
            raise ValueError(f"found {number:#010x} at the start of a frame, need {MAGIC:#010x}")
        left = int.from_bytes(stream.take(4), "little")
        while left:
            left -= len(stream.take(min(left, PLAIN_BYTES)))
    return None


def frame_blocks(stream: ByteStream, header: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the header of each block of a frame, and the number of bytes after it, which the caller takes.

    After the header of the last block they include the frame's checksum.

    Args:
        stream: bytes after the header.
        header: of the frame, from `next_frame_header`.
    """
    checksum_bytes = 4 if zstandard.get_frame_parameters(header).has_checksum else 0
    last = False
    while not last:
        head = stream.take(3)
        bits = int.from_bytes(head, "little")
        kind, size, last = bits >> 1 & 3, bits >> 3, bool(bits & 1)
        if kind == 3 or size > zstandard.BLOCKSIZE_MAX:
            raise ValueError(f"found a block of kind {kind} and {size} bytes")
        yield head, (1 if kind == 1 else size) + last * checksum_bytes


PLAIN_BYTES = 1 << 20
FED_BYTES = 64 << 10
"""Stored bytes given to the gzip decompressor at once: at the end of each gzip member it copies the rest of them."""

GZIP_BITS = 16 + zlib.MAX_WBITS
WINDOW_BYTES = 1 << 27
"""Largest window of a zstd frame: the limit of `zstd -d` without `--long`."""


def decompress_gzip(pieces: Pieces, piece: Slice) -> Iterator[bytes]:
    """Yield the plain bytes of gzip members.

    Args:
        pieces: stored bytes from the start of the slice on.
        piece: the slice, for messages.

    Raises:
        FormatError: damaged, truncated, or followed by bytes that are not a member.
    """
    member: Any = None
    for stored in pieces:
        for start in range(0, len(stored), FED_BYTES):
            data: bytes | memoryview = memoryview(stored)[start : start + FED_BYTES]
            while data:
                if member is None:
                    if not (data := bytes(data).lstrip(b"\0")):
                        break
                    member = GZIP_LIBRARY.decompressobj(wbits=GZIP_BITS)
                try:
                    yield member.decompress(data, PLAIN_BYTES)
                except (GZIP_LIBRARY.error, zlib.error) as error:
                    problem = f"not gzip, or damaged ({error}); restore it from its source, or give its --format"
                    raise FormatError(f"{piece.uri}: {problem}") from error
                data, member = (member.unused_data, None) if member.eof else (member.unconsumed_tail, member)
    if member is not None:
        raise FormatError(f"{piece.uri}: ends in the middle of a gzip member; restore it from its source")


def decompress_zstd(pieces: Pieces, piece: Slice) -> Iterator[bytes]:
    """Yield the plain bytes of zstd frames; if the slice ends before its file, check that they have the planned sizes.

    Args:
        pieces: stored bytes from the start of the slice on.
        piece: the slice.

    Raises:
        FormatError: damaged, truncated, followed by bytes that are not a frame, or of other sizes than planned.
    """
    context = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    uri, stream, plain_bytes = piece.uri, ByteStream(pieces), 0
    sizes = None if piece.last is None else (piece.num_bytes, piece.last - piece.first)
    try:
        while (header := next_frame_header(stream)) is not None:
            frame = context.decompressobj()
            frame.decompress(header)
            for head, count in frame_blocks(stream, header):
                plain = frame.decompress(head + stream.take(count))
                if sizes is not None:
                    _check_sizes(uri, sizes, stream.position, plain_bytes, len(plain))
                    plain_bytes += len(plain)
                yield plain
    except TruncatedError as error:
        raise FormatError(f"{uri}: ends in the middle of a zstd frame; restore it from its source") from error
    except (zstandard.ZstdError, ValueError) as error:
        raise FormatError(f"{uri}: not zstd, or damaged ({error}); restore it from its source") from error


def _check_sizes(uri: str, sizes: tuple[int, int], position: int, before: int, count: int) -> None:
    """Raise FormatError if a frame contradicts the plan of its slice, so that lines would be lost or read twice.

    Args:
        sizes: planned stored and plain bytes of the slice.
        position: stored bytes read so far, with this part of the frame.
        before, count: plain bytes before this part of the frame, and in it.
    """
    stored, plain = sizes
    if before + count > plain if position <= stored else before < plain:
        size = f"more than {plain}" if position <= stored else str(before)
        raise FormatError(
            f"{uri}: {size} plain bytes in {stored} stored ones, its seek table says {plain}; compress it again"
        )


LEAST_BYTES = 1 << 20
"""Least stored bytes of a block; smaller frames are joined."""


def find_zstd_blocks(reader: RangeReader) -> tuple[InputBlock, ...]:
    """Return the blocks at which a .zst can be cut: its frames, if it has a seek table; else ()."""
    try:
        table = read_table(reader)
    except FormatError:
        return ()
    joined = list[InputBlock]()
    stored = zip(table.stored_starts.tolist(), table.stored_stops.tolist(), strict=True)
    for (start, stop), (first, last) in zip(stored, pairwise(table.plain_starts.tolist()), strict=True):
        frame = InputBlock(start, stop - start, first, last - first)
        if joined and joined[-1].stored_bytes < LEAST_BYTES:
            begin = joined.pop()
            frame = InputBlock(begin.stored, stop - begin.stored, begin.first, last - begin.first)
        joined.append(frame)
    return tuple(joined) if len(joined) > 1 else ()
