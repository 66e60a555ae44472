"""Progress, counts and blocks of copies, and the comparison of two objects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import numpy as np

from binidx.errors import StorageError
from binidx.storage.codecs.segments import SEGMENT_BYTES
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.ranges import cut
from binidx.storage.threads import map_in_flight
from binidx.storage.writing.multipart import MAX_PARTS

Item = TypeVar("Item")
Result = TypeVar("Result")
PART_BYTES = 8 << 20
"""Bytes of a block of a copy, which is read by one request, and is one part of an upload."""


MAX_IN_FLIGHT, IN_FLIGHT_BYTES = 8, 256 << 20
"""Most blocks that are read, or sent, at once, and most bytes of them."""

Unit = Literal["bytes", "rows", "samples", "tokens", "indices", ""]
"""Name of what is counted; "" for work of which only the time is shown."""


class ProgressWatcher(Protocol):
    """Receiver of progress and messages of long work."""

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None:
        """Begin a phase of the work, of which a restarted one has done a part before.

        Args:
            what: name of the phase.
            total, done: units of the whole phase, and of the part done before.
        """

    def advance(self, count: int) -> None:
        """Add units to those done in this phase."""

    def say(self, message: str) -> None:
        """Show a message."""


class SilentWatcher:
    """Watcher that shows nothing."""

    def begin(self, what: str, total: int, done: int, unit: Unit = "bytes") -> None: ...

    def advance(self, count: int) -> None: ...

    def say(self, message: str) -> None: ...


class CorruptCopyError(StorageError):
    """A copy differs from its source; it was removed."""


@dataclass(frozen=True)
class CopyCounts:
    """Counts of the parts that a copy made and found, and bytes of the made ones."""

    parts_sent: int = 0
    parts_kept: int = 0
    bytes_sent: int = 0


def plan_blocks(size: int, block_bytes: int = PART_BYTES) -> int:
    """Return the bytes of a block of an object: whole segments, and no more blocks than an upload has parts."""
    return -(-max(block_bytes, 1, -(-size // MAX_PARTS)) // SEGMENT_BYTES) * SEGMENT_BYTES


def map_blocks(
    function: Callable[[Item], Result], blocks: Iterable[Item], block_bytes: int
) -> Generator[Result, None, None]:
    """Do `map_in_flight` for blocks, in bounded memory.

    Args:
        block_bytes: bytes of a block.
    """
    return map_in_flight(function, blocks, max(2, min(MAX_IN_FLIGHT, IN_FLIGHT_BYTES // max(block_bytes, 1))))


def same_content(left: RangeReader, right: RangeReader, watch: ProgressWatcher) -> bool:
    """Return whether two objects have the same bytes; reads both, up to the first difference.

    Args:
        watch: shows the compared bytes.
    """
    if left.size != right.size:
        return False
    watch.begin(f"compare {right.uri}", left.size, 0)
    ranges = cut((0, left.size), PART_BYTES)

    def is_equal(where: Range) -> bool:  # two memoryviews would compare item by item, ten times slower
        here, there = (np.frombuffer(reader.read([where])[0], np.uint8) for reader in (left, right))
        return np.array_equal(here, there)

    with contextlib.closing(map_blocks(is_equal, ranges, PART_BYTES)) as equals:
        for (start, stop), equal in zip(ranges, equals, strict=True):
            if not equal:
                return False
            watch.advance(stop - start)
    return True
