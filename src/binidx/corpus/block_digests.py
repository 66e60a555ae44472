"""Comparison of a copy with its source: with its bytes, with samples of them, or with digests of its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from binidx.errors import FormatError, StorageError
from binidx.jobs.progress import ProgressWatcher
from binidx.jobs.runner import check_stop
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.open import codec_named, stream
from binidx.storage.ranges import cut
from binidx.storage.threads import map_in_flight

Block = tuple[int, int, str, str]
"""Start and stop of a block, its digest, and its tag in an upload."""


COMPARED_BYTES = 8 << 20
"""Bytes of two objects that are compared at once."""

NUM_SAMPLES = 64
SAMPLE_BYTES = 64 << 10

MAX_IN_FLIGHT, IN_FLIGHT_BYTES = 8, 256 << 20
"""Most blocks that are read, or sent, at once, and most bytes of them."""


class CorruptCopyError(StorageError):
    """A copy differs from its source; it was removed."""


def blocks_in_flight(block_bytes: int) -> int:
    """Return how many blocks are read, or sent, at once, in bounded memory."""
    return max(2, min(MAX_IN_FLIGHT, IN_FLIGHT_BYTES // max(block_bytes, 1)))


def same_content(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Return whether two objects have the same bytes; reads both, up to the first difference.

    Args:
        watch: shows the compared bytes.
    """
    if left.size != right.size:
        return False
    watch.begin(f"compare {right.uri}", left.size, 0)
    ranges = cut((0, left.size), COMPARED_BYTES)

    def is_equal(where: Range) -> bool:  # two memoryviews would compare item by item, ten times slower
        here, there = (np.frombuffer(reader.read([where])[0], np.uint8) for reader in (left, right))
        return np.array_equal(here, there)

    with contextlib.closing(map_in_flight(is_equal, ranges, blocks_in_flight(COMPARED_BYTES))) as equals:
        for (start, stop), equal in zip(ranges, equals, strict=True):
            if not equal:
                return False
            watch.advance(stop - start)
    return True


def plan_samples(size: int) -> list[Range]:
    """Return `NUM_SAMPLES` evenly spread ranges of an object, its first and last bytes included; all of a small one."""
    if size <= NUM_SAMPLES * SAMPLE_BYTES:
        return [(0, size)]
    starts = (number * (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1) for number in range(NUM_SAMPLES))
    return [(start, start + SAMPLE_BYTES) for start in starts]


def same_samples(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Return whether two objects of one size hold the same bytes in the ranges of `plan_samples`; reads each once.

    Args:
        left, right: readers of plain bytes of the same size.
        watch: gets the number of bytes to compare.
    """
    samples = plan_samples(left.size)
    watch.begin(f"compare samples of {right.uri}", sum(stop - start for start, stop in samples), 0)
    return left.read(samples) == right.read(samples)


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


def find_difference(reader: RangeReader, blocks: Sequence[Block], advance: Callable[[int], object]) -> Range | None:
    """Return the first block whose bytes differ from its digest; None if all are equal."""

    def is_right(block: Block) -> bool:
        return has_digest(reader, "raw", (block[0], block[1]), block[2])

    with contextlib.closing(map_in_flight(is_right, blocks, blocks_in_flight(1))) as answers:
        for (start, stop, _, _), right in zip(blocks, answers, strict=True):
            if not right:
                return start, stop
            advance(stop - start)
    return None
