"""Decompression of gzip and zstd into pieces of bounded size, and the points at which a .zst can be cut.

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
from collections.abc import Iterable, Iterator
from typing import Any

import zstandard

from binidx.errors import FormatError
from binidx.prepare.text.slices import InputBlock
from binidx.storage.codecs.segments import read_table
from binidx.storage.interfaces import RangeReader
from binidx.storage.stores.registry import local_path

try:
    from isal import isal_zlib

    GZIP_LIBRARY: Any = isal_zlib  # 0.45 of zlib's time
except ImportError:
    GZIP_LIBRARY = zlib

MAGIC, SKIPPABLE_MAGIC = 0xFD2FB528, 0x184D2A50
FIRST_HEADER_BYTES = 5
"""Bytes of a frame header that determine its length: magic and descriptor."""

Bytes = bytes | memoryview


class TruncatedError(ValueError):
    """The bytes end inside a frame."""


class ByteStream:
    """Bytes of successive pieces, taken in any amounts.

    Attributes:
        position: number of bytes taken.
    """

    def __init__(self, pieces: Iterable[Bytes]) -> None:
        self._pieces, self._rest = iter(pieces), memoryview(b"")
        self.position = 0

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        return b"".join(self._views(count))

    def skip(self, count: int) -> None:
        """Pass over the next `count` bytes without copying them."""
        for _ in self._views(count):
            pass

    def at_end(self) -> bool:
        """Return whether no byte is left."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._rest = memoryview(piece)
        return False

    def _views(self, count: int) -> Iterator[memoryview]:
        while count:
            if self.at_end():
                raise TruncatedError(f"{count} bytes are missing")
            part, self._rest = self._rest[:count], self._rest[count:]
            count -= len(part)
            self.position += len(part)
            yield part


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
        stream.skip(int.from_bytes(stream.take(4), "little"))
    return None


def frame_blocks(stream: ByteStream, header: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the header of each block of a frame, and the number of bytes behind it, which the caller takes or skips.

    The last block has the frame's checksum behind it.
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
"""The end of a gzip member returns the bytes behind it as a copy: with small members, many times per MiB."""

GZIP_BITS = 16 + zlib.MAX_WBITS
WINDOW_BYTES = 1 << 27
"""The limit of `zstd -d`; a larger window needs --long=31."""


def decompress_gzip(pieces: Iterable[Bytes], uri: str) -> Iterator[bytes]:
    """Yield the plain bytes of gzip members.

    Raises:
        FormatError: damaged, truncated, or followed by bytes that are not a member.
    """
    member: Any = None
    for piece in pieces:
        for start in range(0, len(piece), FED_BYTES):
            data: Bytes = memoryview(piece)[start : start + FED_BYTES]
            while data:
                if member is None:
                    if not (data := bytes(data).lstrip(b"\0")):
                        break
                    member = GZIP_LIBRARY.decompressobj(wbits=GZIP_BITS)
                try:
                    yield member.decompress(data, PLAIN_BYTES)
                except (GZIP_LIBRARY.error, zlib.error) as error:
                    raise FormatError(f"{uri}: not gzip, or damaged ({error}); restore it from its source") from error
                data, member = (member.unused_data, None) if member.eof else (member.unconsumed_tail, member)
    if member is not None:
        raise FormatError(f"{uri}: ends in the middle of a gzip member; restore it from its source")


def decompress_zstd(pieces: Iterable[Bytes], uri: str, sizes: tuple[int, int] | None = None) -> Iterator[bytes]:
    """Yield the plain bytes of zstd frames.

    Args:
        sizes: stored and plain bytes of the leading frames together, from a seek table or the frame headers.

    Raises:
        FormatError: damaged, truncated, followed by bytes that are not a frame, or of other sizes.
    """
    context = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    stream, plain_bytes = ByteStream(pieces), 0
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
    """Raise FormatError if `count` bytes after `before` contradict the sizes: lines would be lost or read twice."""
    stored, plain = sizes
    if before + count > plain if position <= stored else before < plain:
        found = f"more than {plain}" if position <= stored else str(before)
        raise FormatError(
            f"{uri}: {found} plain bytes in {stored} stored ones, its seek table says {plain}; compress it again"
        )


LEAST_BYTES = 1 << 20
"""Least stored bytes of a block; smaller frames are joined."""


def find_zstd_blocks(reader: RangeReader) -> tuple[InputBlock, ...]:
    """Return the blocks of a .zst, from its seek table or, for a local file, from its frame headers; else none.

    The frame headers of a remote file are not used: finding them would mean to read all of it.
    """
    frames = _read_seek_table(reader)
    if frames is None and local_path(reader.uri) is not None:
        frames = _walk_frames(reader)
    joined: list[InputBlock] = []
    for each in frames or []:
        if joined and joined[-1].stored_bytes < LEAST_BYTES:
            last = joined.pop()
            stop = each.stored + each.stored_bytes
            each = InputBlock(last.stored, stop - last.stored, last.first, last.count + each.count)
        joined.append(each)
    return tuple(joined) if len(joined) > 1 else ()


def _read_seek_table(reader: RangeReader) -> list[InputBlock] | None:
    try:
        table = read_table(reader)
    except FormatError:
        return None
    stored, stops, plain = table.stored_starts.tolist(), table.stored_stops.tolist(), table.plain_starts.tolist()
    return [InputBlock(stored[i], stops[i] - stored[i], plain[i], plain[i + 1] - plain[i]) for i in range(len(stored))]


def _walk_frames(reader: RangeReader) -> list[InputBlock] | None:
    """Return None if a frame lacks its plain size or is damaged; reading the file reports the damage."""
    stream, frames, plain, start = ByteStream(reader.read([(0, reader.size)])), list[InputBlock](), 0, 0
    try:
        while (header := next_frame_header(stream)) is not None:
            count = zstandard.get_frame_parameters(header).content_size
            if count == zstandard.CONTENTSIZE_UNKNOWN:
                return None
            for _, behind in frame_blocks(stream, header):
                stream.skip(behind)
            frames.append(InputBlock(start, stream.position - start, plain, count))
            plain, start = plain + count, stream.position
    except (zstandard.ZstdError, ValueError):
        return None
    return frames
