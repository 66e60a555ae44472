"""Plain bytes out of gzip and zstd, in pieces of bounded size, whatever they were compressed from.

    gzip    members, one after the other; zeros after the last one; isal is used where it is installed (extra `gzip`)
    zstd    frames, one after the other, skippable ones among them; fed block by block, of 128 KiB at most

What ends in the middle, or is followed by anything else, is a FormatError: no line is lost in silence.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import zstandard

from binidx.errors import FormatError
from binidx.text.zstd_frames import Blocks, TruncatedError

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
    blocks, plain_bytes = Blocks(pieces), 0
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
