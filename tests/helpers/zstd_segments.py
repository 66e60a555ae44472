"""What the tests of zstd segments share: compressed bytes, ours and other people's."""

from __future__ import annotations

import io
import struct

import xxhash
import zstandard

from binidx.storage.codecs.segments import SegmentWriter


def compressed(data: bytes, segment_bytes: int = 1000, level: int | None = None) -> bytes:
    """What our writer makes of `data`, in small segments."""
    out = io.BytesIO()
    with SegmentWriter(out, level, segment_bytes=segment_bytes) as writer:
        writer.write(data)
    return out.getvalue()


def foreign(pieces: list[bytes], *, sizes: bool = False, frame_sums: bool = False, sums: bool = False) -> bytes:
    """What another writer of the seekable format may make of them: frames of any size, empty ones, one left blank.

    Args:
        sizes: whether frames tell their plain size; pyzstd's do not.
        frame_sums: whether they carry a checksum.
        sums: whether the table does.
    """
    compressor = zstandard.ZstdCompressor(write_content_size=sizes, write_checksum=frame_sums)
    body, entries = b"", b""
    for piece in pieces:
        frame = one_frame(compressor, piece) if piece else skippable(b"a note")
        body += frame
        entries += struct.pack("<II", len(frame), len(piece))
        entries += struct.pack("<I", xxhash.xxh64_intdigest(piece) & 0xFFFFFFFF) if sums else b""
    footer = struct.pack("<IBI", len(pieces), 0x80 if sums else 0, 0x8F92EAB1)
    return body + struct.pack("<II", 0x184D2A5E, len(entries) + 9) + entries + footer


def one_frame(compressor: zstandard.ZstdCompressor, piece: bytes) -> bytes:
    stream = compressor.compressobj()
    return stream.compress(piece) + stream.flush()


def skippable(note: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A53, len(note)) + note
