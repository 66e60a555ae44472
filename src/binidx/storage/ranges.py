"""Byte ranges: few requests for many ranges, and views of the ranges in the responses. Pure functions.

ranges     [40,50) [0,10) [12,20) [44,60)         in any order; they may overlap
coalesce   [0,20) [40,60)                         requests: sorted, disjoint
assemble   views of 10, 10, 8 and 16 bytes        in the order of the ranges, out of the two responses
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from binidx.errors import ShortReadError
from binidx.storage.interfaces import Bytes, Range


def check_ranges(uri: str, size: int, ranges: Sequence[Range]) -> None:
    """Raise ShortReadError for the first range that leaves [0, size)."""
    for start, stop in ranges:
        if not 0 <= start <= stop <= size:
            raise ShortReadError(f"{uri}: bytes {start}-{stop} requested, it has {size}")


def coalesce(ranges: Sequence[Range], *, max_gap: int, max_request: int) -> list[Range]:
    """Return few requests that cover the ranges.

    Ranges at most `max_gap` bytes apart share a request of up to `max_request` bytes: the bytes of the gap are cheaper
    than the latency of another request. Overlapping ranges are requested once. A longer stretch is split into requests
    of `max_request` bytes, so that one large range arrives over many connections.

    Args:
        ranges: (start, stop) in bytes, in any order; they may be empty, equal or overlap.
        max_gap: unused bytes to fetch rather than send a second request, at least 0.
        max_request: bytes of one request, at least 1.

    Returns:
        Sorted, disjoint requests, none empty. Each byte of a range lies in exactly one of them.
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
    """Split a range into parts of `size` bytes, the last one shorter."""
    start, stop = stretch
    return [(first, min(first + size, stop)) for first in range(start, stop, size)]


def assemble(ranges: Sequence[Range], requests: Sequence[Range], responses: Sequence[Bytes]) -> list[memoryview]:
    """Return the bytes of each range from the responses to the requests of `coalesce`.

    A range inside one request is a view of its response; a range across several is copied once.
    """
    starts = [start for start, _ in requests]
    views = [memoryview(answer).cast("B").toreadonly() for answer in responses]
    return [_bytes_of(each, starts, requests, views) for each in ranges]


def _bytes_of(
    whole: Range, starts: Sequence[int], requests: Sequence[Range], views: Sequence[memoryview]
) -> memoryview:
    start, stop = whole
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
        joined[start - whole[0] : end - whole[0]] = views[position][start - first : end - first]
        start, position = end, position + 1
    return memoryview(joined).toreadonly()
