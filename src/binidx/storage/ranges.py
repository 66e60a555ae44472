"""Byte ranges: few requests for many ranges, views of the ranges in the responses, and reads of many objects at once.

    ranges     [40,50) [0,10) [12,20) [44,60)         in any order; they may overlap
    coalesce   [0,20) [40,60)                         requests: sorted, disjoint
    assemble   views of 10, 10, 8 and 16 bytes        in the order of the ranges, out of the two responses

`read_many` reads ranges of many objects at the same time, so that a blend of datasets waits for one round trip:

    composite readers      are split into reads of their parts
    mapped files           are read in this thread
    remote objects         are begun in this thread, all at once, on the event loop of their driver
    all others             the first is read in this thread, the rest in READS threads
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from typing import Any, TypeVar, cast

from binidx.errors import ShortReadError
from binidx.storage.interfaces import (
    BlockReader,
    Bytes,
    CompositeReader,
    ConcurrentReader,
    LayeredReader,
    MappedReader,
    MarkedReader,
    PendingRead,
    Piece,
    Range,
    RangeReader,
    VersionMark,
)
from binidx.storage.threads import READS

Capability = TypeVar("Capability")


def check_ranges(uri: str, size: int, ranges: Sequence[Range]) -> None:
    """Raise ShortReadError for the first range that leaves [0, size).

    Args:
        uri: name of the object, for the message.
        size: bytes of the object.
        ranges: (start, stop) in bytes, half open.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop <= size:
            raise ShortReadError(f"{uri}: bytes {start}-{stop} requested, it has {size}")


def coalesce(ranges: Sequence[Range], *, max_gap: int, max_request: int) -> list[Range]:
    """Return few requests that cover the ranges.

    Ranges at most `max_gap` bytes apart share a request of up to `max_request` bytes: the bytes of the gap are cheaper
    than the latency of another request. Overlapping ranges are requested once. A longer stretch is split into requests
    of `max_request` bytes, so that one large range arrives over many connections; its last may be half as long again.

    Args:
        ranges: (start, stop) in bytes, in any order; they may be empty, equal or overlap.
        max_gap: unused bytes to fetch rather than send a second request, at least 0.
        max_request: bytes of one request, at least 1.

    Returns:
        Sorted, disjoint requests, none empty. Each byte of a range lies in exactly one of them.
    """
    stretches: list[Range] = []
    for start, stop in sorted((start, stop) for start, stop in ranges if start < stop):
        if stretches:
            first, last = stretches[-1]
            near = start <= last + max_gap and max(stop, last) - first <= max_request
            if start < last or near:
                stretches[-1] = (first, max(stop, last))
                continue
        stretches.append((start, stop))
    return [part for stretch in stretches for part in cut(stretch, max_request, max_request / 2)]


def cut(stretch: Range, size: int, least: float = 0) -> list[Range]:
    """Split a range into parts of `size` bytes, the last one shorter; one below `least` bytes is in the part before.

    With half a size, a block of 8 MiB of tokens and the rows that describe them are one request.
    """
    start, stop = stretch
    parts = [(first, min(first + size, stop)) for first in range(start, stop, size)]
    if len(parts) > 1 and parts[-1][1] - parts[-1][0] < least:
        parts[-2:] = [(parts[-2][0], stop)]
    return parts


def assemble(ranges: Sequence[Range], requests: Sequence[Range], responses: Sequence[Bytes]) -> list[memoryview]:
    """Return the bytes of each range from the responses to the requests of `coalesce`.

    A range inside one request is a view of its response; a range across several is copied once.

    Args:
        ranges: (start, stop) in bytes, in any order; they may be empty, equal or overlap.
        requests: ranges that together cover them, ascending.
        responses: the bytes of each request.

    Returns:
        One read-only view for each range, in the same order.
    """
    starts = [start for start, _ in requests]
    views = [memoryview(answer).cast("B").toreadonly() for answer in responses]
    return [_bytes_of(whole, starts, requests, views) for whole in ranges]


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


Reads = Sequence[tuple[RangeReader, Sequence[Range]]]


def read_many(reads: Reads) -> list[list[memoryview]]:
    """Return the results of each reader's `read` for its ranges, in the order of the reads.

    Raises:
        The error of the first read that fails, after all reads have ended; at once, if a range leaves its object.
    """
    if any(as_composite(reader) for reader, _ in reads):
        return _read_composites(reads)
    with ExitStack() as begun:
        pending: dict[int, PendingRead] = {}
        blocking = []
        for number, (reader, ranges) in enumerate(reads):
            mapped = as_capability(reader, MappedReader)
            if not ranges or (mapped and mapped.is_complete()):
                continue
            concurrent = as_capability(reader, ConcurrentReader)
            read = concurrent.begin(ranges) if concurrent else None
            if read is None:
                blocking.append(number)
            else:
                pending[number] = begun.enter_context(read)
        for number in blocking[1:]:
            future = READS.submit(functools.partial(reads[number][0].read, reads[number][1]))
            pending[number] = PendingRead(future, future.result)
        try:
            here = {number: read[0].read(read[1]) for number, read in enumerate(reads) if number not in pending}
        finally:
            wait([read.outcome for read in pending.values()])
        return [pending[number].result() if number in pending else here[number] for number in range(len(reads))]


def _read_composites(reads: Reads) -> list[list[memoryview]]:
    """Do `read_many` for composite readers: split them, read all parts at the same time, and join the results."""
    splits = [composite.split(ranges) if (composite := as_composite(reader)) else None for reader, ranges in reads]
    below = [split[1] if split else [read] for split, read in zip(splits, reads, strict=True)]
    in_order = iter(read_many([read for part_reads in below for read in part_reads]))
    results = [[next(in_order) for _ in part_reads] for part_reads in below]
    return [_join(split[0], views) if split else views[0] for split, views in zip(splits, results, strict=True)]


def _join(pieces: Sequence[Sequence[Piece]], results: Sequence[list[memoryview]]) -> list[memoryview]:
    """Return for each range the view of its only piece, or a copy of all its pieces."""
    views = [[results[read][place] for read, place in range_pieces] for range_pieces in pieces]
    return [parts[0] if len(parts) == 1 else memoryview(b"".join(parts)) for parts in views]


_provided: dict[tuple[type, Any], bool] = {}


def provides(reader: object, capability: Any) -> bool:
    """Return whether the class of a reader or store has a capability, cached: `isinstance` takes 5 to 100 us.

    Args:
        capability: a Protocol.
    """
    key = type(reader), capability
    if key not in _provided:
        _provided[key] = isinstance(reader, capability)
    return _provided[key]


def as_capability(reader: RangeReader, capability: type[Capability]) -> Capability | None:
    """Return the reader if its class has a capability, else None.

    Args:
        reader: any reader.
        capability: a Protocol of `interfaces`.
    """
    return cast(Capability, reader) if provides(reader, capability) else None


as_block_reader = functools.partial(as_capability, capability=BlockReader)
"""Query of `BlockReader`, which tests of codecs elsewhere call, too."""

as_composite = functools.partial(as_capability, capability=CompositeReader)
"""Query of `CompositeReader`."""


def stored_reader(reader: RangeReader) -> RangeReader:
    """Return the lowest reader of a stack.

    Args:
        reader: a reader, perhaps with layers.

    Returns:
        The one that sends requests to the store.
    """
    while provides(reader, LayeredReader):
        reader = cast("LayeredReader", reader).reader
    return reader


def version_marks(*readers: RangeReader) -> dict[str, VersionMark]:
    """Return the marks of the objects that are read through readers.

    Args:
        readers: readers of one object each, perhaps with layers.

    Returns:
        By URI, in the order of the readers; nothing for objects without a mark.
    """
    stored = [(reader.uri, stored_reader(reader)) for reader in readers]
    marks = [(uri, cast("MarkedReader", below).mark) for uri, below in stored if provides(below, MarkedReader)]
    return {uri: mark for uri, mark in marks if mark is not None}
