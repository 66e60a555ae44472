"""Ranges of bytes: what a reader is asked for, and how many ranges become few requests and views again.

asked      [40,50) [0,10) [12,20) [44,60)         in any order, they may overlap
coalesce   [0,20) [40,60)                         requests: sorted, disjoint
assemble   views of 10, 10, 8 and 16 bytes        in the order asked, out of the two answers
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from binidx.errors import ShortReadError
from binidx.storage.interfaces import Bytes, Range

"""(start, stop) in bytes, half open."""


def check_ranges(uri: str, size: int, ranges: Sequence[Range]) -> None:
    """Every range lies in the object, or ShortReadError names the first that does not."""
    for start, stop in ranges:
        if not 0 <= start <= stop <= size:
            raise ShortReadError(f"{uri}: bytes {start}-{stop} asked, it has {size}")


def coalesce(ranges: Sequence[Range], *, max_gap: int, max_request: int) -> list[Range]:
    """Few requests that cover the ranges.

    Ranges at most `max_gap` bytes apart share a request as long as it stays within `max_request` bytes: the bytes in
    the gap are cheaper than another first-byte latency. What overlaps is asked once. A stretch longer than
    `max_request` is cut into parts of that size, so that one huge range arrives over many connections.

    Args:
        ranges: any order; empty, equal and overlapping ones are welcome.
        max_gap: bytes fetched in vain rather than a second request, at least 0.
        max_request: bytes in one request, at least 1.

    Returns:
        Sorted, disjoint, none empty. Each byte asked lies in exactly one of them.
    """
    stretches: list[Range] = []
    for start, stop in sorted(each for each in ranges if each[0] < each[1]):
        if stretches:
            first, last = stretches[-1]
            near = start <= last + max_gap and max(stop, last) - first <= max_request
            if start < last or near:
                stretches[-1] = (first, max(stop, last))
                continue
        stretches.append((start, stop))
    return [part for stretch in stretches for part in cut(stretch, max_request)]


def cut(stretch: Range, size: int) -> list[Range]:
    """Parts of `size` bytes, the last one shorter."""
    start, stop = stretch
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def assemble(ranges: Sequence[Range], requests: Sequence[Range], answers: Sequence[Bytes]) -> list[memoryview]:
    """The bytes of each range out of the answers to `coalesce`'s requests.

    A range inside one request is a view of its answer; one that spans several is joined, which copies it once.
    """
    starts = [start for start, _ in requests]
    views = [memoryview(answer).cast("B").toreadonly() for answer in answers]
    return [_bytes_of(each, starts, requests, views) for each in ranges]


def _bytes_of(
    wanted: Range, starts: Sequence[int], requests: Sequence[Range], views: Sequence[memoryview]
) -> memoryview:
    start, stop = wanted
    if start == stop:
        return memoryview(b"")
    position = bisect_right(starts, start) - 1
    first, last = requests[position]
    if stop <= last:
        return views[position][start - first : stop - first]
    joined = bytearray(stop - start)
    while start < stop:
        first, last = requests[position]
        end = min(stop, last)
        joined[start - wanted[0] : end - wanted[0]] = views[position][start - first : end - first]
        start, position = end, position + 1
    return memoryview(joined).toreadonly()
