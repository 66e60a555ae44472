"""zstd's frames, walked without decompressing: block by block, by their headers.

    frame     magic 4 │ descriptor 1 │ window 0-1 │ dictionary 0-4 │ plain bytes 0-8 │ blocks │ checksum 0 or 4
    block     3 bytes: bit 0 last, bits 1-2 kind (0 raw, 1 one byte repeated, 2 compressed), bits 3- stored bytes
    skippable magic 0x184D2A5?, u32 bytes that follow, so many bytes

Source: RFC 8878.

Plain bytes out of gzip and zstd, in pieces of bounded size, whatever they were compressed from.

    gzip    members, one after the other; zeros after the last one; isal is used where it is installed (extra `gzip`)
    zstd    frames, one after the other, skippable ones among them; fed block by block, of 128 KiB at most

What ends in the middle, or is followed by anything else, is a FormatError: no line is lost in silence.

Where a .zst may be cut: at frames whose plain bytes are known without decompressing them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import zstandard

from binidx.errors import FormatError
from binidx.prepare.text.slices import InputBlock
from binidx.storage.codecs.segments import read_table
from binidx.storage.interfaces import RangeReader
from binidx.storage.stores.local import LocalFile

MAGIC = 0xFD2FB528


SKIPPABLE = 0x184D2A50


MOST_BLOCK_BYTES = 128 << 10


class TruncatedError(ValueError):
    """The bytes end before the frame does."""


class FrameParser:
    """The headers and blocks of the frames in a stream.

    Attributes:
        position: bytes of the stream that were taken.
        plain_bytes: of the frame whose header came last, if it says so.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces: Iterator[bytes | memoryview] = iter(pieces)
        self._data: bytes | memoryview = b""
        self._at = 0
        self._left, self._sum_bytes = False, 0
        self.position = 0
        self.plain_bytes: int | None = None

    def frame(self) -> bytes | None:
        """The header of the next frame, after those that may be skipped; None: there is none.

        Raises:
            TruncatedError, ValueError: what is there is no frame.
        """
        while magic := self._take(4, end=True):
            number = int.from_bytes(magic, "little")
            if number == MAGIC:
                return magic + self._header()
            if number & 0xFFFFFFF0 != SKIPPABLE:
                raise ValueError(f"found {number:#010x} where a frame begins, needed {MAGIC:#010x}")
            self._skip(int.from_bytes(self._take(4), "little"))
        return None

    def _header(self) -> bytes:
        descriptor = self._take(1)[0]
        single, size_code = descriptor >> 5 & 1, descriptor >> 6
        window = 1 - single
        dictionary = (0, 1, 2, 4)[descriptor & 3]
        size_bytes = (single, 2, 4, 8)[size_code]
        rest = self._take(window + dictionary + size_bytes)
        size = int.from_bytes(rest[window + dictionary :], "little") + (256 if size_bytes == 2 else 0)
        self.plain_bytes = size if size_bytes else None
        self._left, self._sum_bytes = True, 4 * (descriptor >> 2 & 1)
        return bytes([descriptor]) + rest

    def skip_blocks(self) -> None:
        """All blocks of the frame that are left."""
        while self._left:
            self._skip(self._next()[1])

    def block(self) -> bytes:
        """The next block with its header, the last one with the checksum of the frame.

        Raises:
            TruncatedError, ValueError: there is no such block.
        """
        head, count = self._next()
        return head + self._take(count)

    def _next(self) -> tuple[bytes, int]:
        """The header of a block, and the bytes that belong to it."""
        head = self._take(3)
        bits = int.from_bytes(head, "little")
        kind, size = bits >> 1 & 3, bits >> 3
        if kind == 3 or size > MOST_BLOCK_BYTES:
            raise ValueError(f"a block of kind {kind} and {size} bytes")
        self._left = not bits & 1
        return head, (1 if kind == 1 else size) + (0 if self._left else self._sum_bytes)

    def _take(self, count: int, *, end: bool = False) -> bytes:
        """So many bytes; none where the stream ends and `end` allows it."""
        parts: list[bytes] = []
        wanted = count
        while wanted:
            if self._at == len(self._data):
                piece = next(self._pieces, None)
                if piece is None:
                    if end and wanted == count:
                        return b""
                    raise TruncatedError(f"{count} bytes wanted, {count - wanted} left")
                self._data, self._at = piece, 0
                continue
            part = self._data[self._at : self._at + wanted]
            self._at += len(part)
            wanted -= len(part)
            parts.append(bytes(part))
        self.position += count
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _skip(self, count: int) -> None:
        self.position += count
        while count:
            if self._at == len(self._data):
                self._data, self._at = next(self._pieces, b""), 0
                if not self._data:
                    raise TruncatedError(f"{count} bytes more were to be skipped")
            step = min(count, len(self._data) - self._at)
            self._at, count = self._at + step, count - step


Bytes = bytes | memoryview


PLAIN_BYTES = 1 << 20


FED_BYTES = 64 << 10


"""A member's end gives back what follows it as a copy: of this, many times a MiB where members are small."""


GZIP_BITS = 16 + zlib.MAX_WBITS


WINDOW_BYTES = 1 << 27


"""What `zstd -d` allows: more needs --long=31, which nobody ought to write for others."""


def gunzipped(pieces: Iterable[Bytes], uri: str) -> Iterator[bytes]:
    """The plain bytes of gzip's members.

    Raises:
        FormatError: damaged, cut off, or followed by something that is no member.
    """
    make, errors = _inflate()
    member: Any = None
    for piece in _small(pieces):
        data: Bytes = piece
        while data:
            if member is None:
                if not (data := bytes(data).lstrip(b"\0")):
                    break
                member = make(wbits=GZIP_BITS)
            try:
                yield member.decompress(data, PLAIN_BYTES)
            except errors as error:
                raise FormatError(f"{uri}: not gzip, or damaged ({error}); restore it from its source") from error
            data, member = (member.unused_data, None) if member.eof else (member.unconsumed_tail, member)
    if member is not None:
        raise FormatError(f"{uri}: ends in the middle of a gzip member; restore it from its source")


def _small(pieces: Iterable[Bytes]) -> Iterator[memoryview]:
    for piece in pieces:
        view = memoryview(piece)
        yield from (view[start : start + FED_BYTES] for start in range(0, len(view), FED_BYTES))


@functools.cache
def _inflate() -> Any:
    """isal's where it is installed: 0.45 of zlib's time."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.decompressobj, (zlib.error,)
    return isal_zlib.decompressobj, (isal_zlib.error, zlib.error)


def unzstd(pieces: Iterable[Bytes], uri: str, told: tuple[int, int] | None = None) -> Iterator[bytes]:
    """The plain bytes of zstd's frames.

    Args:
        told: stored and plain bytes of the first frames together, where a table or their headers say so.

    Raises:
        FormatError: damaged, cut off, or followed by something that is no frame; or not as large as it was told.
    """
    context = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    blocks, plain_bytes = FrameParser(pieces), 0
    try:
        while (header := blocks.frame()) is not None:
            frame = context.decompressobj()
            frame.decompress(header)
            while not frame.eof:
                plain = frame.decompress(blocks.block())
                if told:
                    _check_told(uri, told, blocks.position, plain_bytes, len(plain))
                    plain_bytes += len(plain)
                yield plain
    except TruncatedError as error:
        raise FormatError(f"{uri}: ends in the middle of a zstd frame; restore it from its source") from error
    except FormatError:
        raise
    except (zstandard.ZstdError, ValueError) as error:
        raise FormatError(f"{uri}: not zstd, or damaged ({error}); restore it from its source") from error


def _check_told(uri: str, told: tuple[int, int], position: int, before: int, count: int) -> None:
    """FormatError if `count` bytes after `before` belie it: cut at such a place, lines would be lost or there twice."""
    stored, plain = told
    if before + count > plain if position <= stored else before < plain:
        found = f"more than {plain}" if position <= stored else str(before)
        raise FormatError(
            f"{uri}: {found} plain bytes in {stored} stored ones, its seek table says {plain}; compress it again"
        )


LEAST_BYTES = 1 << 20


"""Stored bytes of a block, where there is more than that: frames of 64 KiB are joined."""


def zstd_blocks(reader: RangeReader) -> tuple[InputBlock, ...]:
    """By its seek table; else, of a local file, by the headers of its frames. None: it is one piece.

    A remote file without a table is one piece: its frames would be found by reading all of it.
    """
    frames = _by_table(reader)
    if frames is None and isinstance(reader, LocalFile):
        frames = _by_headers(reader)
    joined = tuple(_joined(frames or []))
    return joined if len(joined) > 1 else ()


def _by_table(reader: RangeReader) -> list[InputBlock] | None:
    try:
        table = read_table(reader)
    except FormatError:
        return None
    stored, stops, plain = table.stored_starts.tolist(), table.stored_stops.tolist(), table.plain_starts.tolist()
    return [InputBlock(stored[i], stops[i] - stored[i], plain[i], plain[i + 1] - plain[i]) for i in range(len(stored))]


def _by_headers(reader: RangeReader) -> list[InputBlock] | None:
    """None where one of them does not say its size, or is damaged: whoever reads it will say so."""
    blocks, found, plain = FrameParser(reader.read([(0, reader.size)])), [], 0
    try:
        before = 0
        while blocks.frame() is not None:
            if blocks.plain_bytes is None:
                return None
            blocks.skip_blocks()
            found.append(InputBlock(before, blocks.position - before, plain, blocks.plain_bytes))
            plain, before = plain + blocks.plain_bytes, blocks.position
    except ValueError:
        return None
    return found


def _joined(frames: Iterable[InputBlock]) -> Iterator[InputBlock]:
    """Neighbours as one, until they are `LEAST_BYTES`."""
    held: InputBlock | None = None
    for each in frames:
        if held is not None and held.stored_bytes >= LEAST_BYTES:
            yield held
            held = None
        if held is None:
            held = each
        else:
            stop = each.stored + each.stored_bytes
            held = InputBlock(held.stored, stop - held.stored, held.first, held.count + each.count)
    if held is not None:
        yield held
