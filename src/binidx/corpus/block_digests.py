"""Digests of the blocks of an object: what a copy recorded of each, and which of them an object has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import xxhash

from binidx.errors import FormatError
from binidx.jobs.runner import check_stop
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import codec_named, stream
from binidx.storage.writing.copy import map_blocks

Advance = Callable[[int], object]
Block = tuple[int, int, str, str]
"""Start and stop of a block, its digest, and its tag in an upload."""


def has_digest(stored: RangeReader, codec: str, where: Range, digest: str) -> bool:
    """Return whether a range of the plain bytes of an object has a digest, xxh3_128."""
    found = xxhash.xxh3_128()
    try:
        reader = codec_named(codec).open(stored, b"")
        for view in stream(reader, min(where[1], reader.size), start=where[0]):
            check_stop()
            found.update(view)
    except FormatError:
        return False
    return found.hexdigest() == digest


def find_difference(reader: RangeReader, blocks: Sequence[Block], advance: Advance) -> Range | None:
    """Return the first block whose bytes differ from its digest; None if all are equal."""

    def is_right(block: Block) -> bool:
        return has_digest(reader, "raw", (block[0], block[1]), block[2])

    with contextlib.closing(map_blocks(is_right, blocks, 1)) as answers:
        for (start, stop, _, _), right in zip(blocks, answers, strict=True):
            if not right:
                return start, stop
            advance(stop - start)
    return None
