"""Where a .zst may be cut: at frames whose plain bytes are known without decompressing them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from binidx.errors import FormatError
from binidx.storage.local_file import LocalFile
from binidx.storage.ranges import RangeReader
from binidx.storage.segments import read_table
from binidx.text.slices import Block
from binidx.text.zstd_frames import Blocks

LEAST_BYTES = 1 << 20
"""Stored bytes of a block, where there is more than that: frames of 64 KiB are joined."""


def zstd_blocks(reader: RangeReader) -> tuple[Block, ...]:
    """By its seek table; else, of a local file, by the headers of its frames. None: it is one piece.

    A remote file without a table is one piece: its frames would be found by reading all of it.
    """
    frames = _by_table(reader)
    if frames is None and isinstance(reader, LocalFile):
        frames = _by_headers(reader)
    joined = tuple(_joined(frames or []))
    return joined if len(joined) > 1 else ()


def _by_table(reader: RangeReader) -> list[Block] | None:
    try:
        table = read_table(reader)
    except FormatError:
        return None
    stored, stops, plain = table.stored_starts.tolist(), table.stored_stops.tolist(), table.plain_starts.tolist()
    return [Block(stored[i], stops[i] - stored[i], plain[i], plain[i + 1] - plain[i]) for i in range(len(stored))]


def _by_headers(reader: RangeReader) -> list[Block] | None:
    """None where one of them does not say its size, or is damaged: whoever reads it will say so."""
    blocks, found, plain = Blocks(reader.read([(0, reader.size)])), [], 0
    try:
        before = 0
        while blocks.frame() is not None:
            if blocks.plain_bytes is None:
                return None
            blocks.skip_blocks()
            found.append(Block(before, blocks.position - before, plain, blocks.plain_bytes))
            plain, before = plain + blocks.plain_bytes, blocks.position
    except ValueError:
        return None
    return found


def _joined(frames: Iterable[Block]) -> Iterator[Block]:
    """Neighbours as one, until they are `LEAST_BYTES`."""
    held: Block | None = None
    for each in frames:
        if held is not None and held.stored_bytes >= LEAST_BYTES:
            yield held
            held = None
        if held is None:
            held = each
        else:
            stop = each.stored + each.stored_bytes
            held = Block(held.stored, stop - held.stored, held.first, held.count + each.count)
    if held is not None:
        yield held
