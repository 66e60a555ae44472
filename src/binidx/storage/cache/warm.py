"""Filling a disk cache before anybody waits for it: whole objects, or the ranges that a run will read.

24 threads, each with 8 MiB under way: at 25 ms to the first byte a connection is 77 % busy with parts of 8 MiB, so
they carry 1.8 GB/s where each connection has 100 MB/s. What is there already is compared and not fetched, so to go on
after a break is to begin again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.memory import chunks_of, runs_of
from binidx.storage.interfaces import Range
from binidx.storage.ranges import cut
from binidx.storage.requests.cancellation import Scope, cancellable

PART_BYTES = 8 << 20
THREADS = 24
Job = tuple[DiskCache, Sequence[Range]]
"""An object, and the bytes of it that are wanted."""


@dataclass(frozen=True)
class Warmed:
    """Bytes that were wanted, in whole chunks; those that were fetched for it; and those that found no room."""

    num_bytes: int
    fetched_bytes: int
    lacking_bytes: int


def wanted_bytes(jobs: Sequence[Job]) -> int:
    """What the wanted bytes take in the cache: whole chunks."""
    return sum(stop - start for reader, ranges in jobs for start, stop in _stretches(reader, ranges))


def warm(jobs: Sequence[Job], advance: Callable[[int], object] = lambda num_bytes: None) -> Warmed:
    """Have all wanted bytes in the cache.

    Args:
        advance: told of bytes that are there, from several threads, one at a time.

    Raises:
        StorageError: the first read that fails; the others are stopped.
    """
    before = sum(reader.stats.bytes_moved for reader, _ in jobs)
    parts = ((reader, part) for reader, ranges in jobs for part in parts_of(_stretches(reader, ranges)))
    _run(parts, advance)
    return Warmed(
        num_bytes=wanted_bytes(jobs),
        fetched_bytes=sum(reader.stats.bytes_moved for reader, _ in jobs) - before,
        lacking_bytes=sum(_lacking_bytes(reader, ranges) for reader, ranges in jobs),
    )


def parts_of(stretches: Sequence[Range]) -> Iterator[list[Range]]:
    """Lists of ranges of 8 MiB in all, or one longer by less than that."""
    part: list[Range] = []
    for each in (piece for stretch in stretches for piece in cut(stretch, PART_BYTES)):
        part.append(each)
        if sum(stop - start for start, stop in part) >= PART_BYTES:
            yield part
            part = []
    if part:
        yield part


def _run(parts: Iterator[tuple[DiskCache, list[Range]]], advance: Callable[[int], object]) -> None:
    scope, lock = Scope(), threading.Lock()

    def work() -> None:
        with cancellable(scope):
            while True:
                with lock:
                    reader, ranges = next(parts, (None, []))
                if reader is None:
                    return
                reader.read(ranges)
                with lock:
                    advance(sum(stop - start for start, stop in ranges))

    with ThreadPoolExecutor(THREADS, thread_name_prefix="binidx-warm") as pool:
        workers = [pool.submit(work) for _ in range(THREADS)]
        try:
            for worker in workers:
                worker.result()
        except BaseException:
            scope.cancel()
            raise


def _stretches(reader: DiskCache, ranges: Sequence[Range]) -> list[Range]:
    """The ranges widened to whole chunks, neighbours together."""
    layout = reader.cached.layout
    return [layout.range_of(*run) for run in runs_of(chunks_of(ranges, layout.chunk_bytes))]


def _lacking_bytes(reader: DiskCache, ranges: Sequence[Range]) -> int:
    layout = reader.cached.layout
    lacking = reader.cached.absent(chunks_of(ranges, layout.chunk_bytes))
    return sum(stop - start for start, stop in (layout.range_of(each, each + 1) for each in lacking))
