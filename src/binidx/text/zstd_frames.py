"""zstd's frames, walked without decompressing: block by block, by their headers.

    frame     magic 4 │ descriptor 1 │ window 0-1 │ dictionary 0-4 │ plain bytes 0-8 │ blocks │ checksum 0 or 4
    block     3 bytes: bit 0 last, bits 1-2 kind (0 raw, 1 one byte repeated, 2 compressed), bits 3- stored bytes
    skippable magic 0x184D2A5?, u32 bytes that follow, so many bytes

Source: RFC 8878.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAGIC = 0xFD2FB528
SKIPPABLE = 0x184D2A50
MOST_BLOCK_BYTES = 128 << 10


class TruncatedError(ValueError):
    """The bytes end before the frame does."""


class Blocks:
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
