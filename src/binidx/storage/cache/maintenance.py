"""Fill, list and prune a cache directory, also while runs use it.

DIR/objects/KEY/meta.json             without it the blocks beside it are unusable, and are pruned
                00000007.block        stays while any process has it mapped
                *.tmp                 staging file; removed after an hour, when its process must be dead

A cache is filled with whole objects or with the ranges that a run will read. 24 threads fetch parts of 8 MiB: at 25 ms
to the first byte a connection is then 77 % busy, so they move 1.8 GB/s where one connection has 100 MB/s. Cached chunks
are checked and not fetched, so an interrupted fill resumes when it is run again.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from binidx.errors import ObjectNotFoundError, redacted
from binidx.storage.cache.block_files import ENTRY_BYTES, CachedContent, read_meta, remove_unlocked
from binidx.storage.cache.cached_object import recount
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.eviction import BlockFile, evict
from binidx.storage.cache.memory import chunks_of, runs_of
from binidx.storage.cache.quota_files import block_files, blocks_of, object_directories
from binidx.storage.interfaces import Range
from binidx.storage.requests.cancellation import cancellable
from binidx.storage.steps import run
from binidx.storage.threads import map_in_flight

STALE_SECONDS = 3600.0
Advance = Callable[[int], object]
"""Called with the number of bytes that were processed."""


@dataclass(frozen=True)
class CachedObjectInfo:
    """Cached part of one object.

    Args:
        path: path of its directory.
        content: identity of the object; None without a valid meta.json.
        blocks: files of its blocks.
        num_bytes: cached bytes of the object.
        used_at: last use in seconds since 1970; a run updates it once a minute.
    """

    path: str
    content: CachedContent | None
    blocks: list[BlockFile]
    num_bytes: int
    used_at: float

    @property
    def disk_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)


def check_cache(directory: str) -> None:
    """Raise ObjectNotFoundError if the directory is no cache."""
    if not os.path.isfile(os.path.join(directory, "usage")):
        raise ObjectNotFoundError(f"{directory}: no disk cache of binidx, needed that of a run or of binidx cache warm")


def cached_contents(directory: str) -> list[CachedObjectInfo]:
    """Return all cached objects, the last used first.

    Raises:
        ObjectNotFoundError: the directory is no cache.
    """
    check_cache(directory)
    return sorted(
        map(inspect_cached_object, object_directories(directory)), key=lambda cached: (-cached.used_at, cached.path)
    )


def inspect_cached_object(path: str) -> CachedObjectInfo:
    """Return the cached part of one object, from the checksum tables of its blocks: 16 KiB are read for 64 MiB."""
    content, blocks = read_meta(path), blocks_of(path)
    used_at = max((block.used_at for block in blocks), default=0.0)
    return CachedObjectInfo(path, content, blocks, _bytes_here(content, blocks) if content else 0, used_at)


def _bytes_here(content: CachedContent, blocks: Sequence[BlockFile]) -> int:
    count = 0
    for block in blocks:
        name = os.path.basename(block.path).removesuffix(".block")
        if not name.isdigit() or int(name) >= content.num_blocks:
            continue
        with contextlib.suppress(OSError):
            chunks = content.chunks_in(int(name))
            entries = np.fromfile(block.path, np.uint8, count=ENTRY_BYTES * len(chunks))
            here = np.flatnonzero(entries[: len(entries) // ENTRY_BYTES * ENTRY_BYTES].reshape(-1, ENTRY_BYTES).any(1))
            count += _bytes_of(content, [chunks[place] for place in here.tolist()])
    return count


def _bytes_of(content: CachedContent, chunks: Sequence[int]) -> int:
    """Return the bytes of sorted chunks, of which only the last one of the object is shorter."""
    return sum(stop - start for start, stop in (content.range_of(*run) for run in runs_of(chunks)))


@dataclass
class CachePruning:
    """Bytes removed from the disk; bytes that stay as a process uses them; number of removed leftover files."""

    num_bytes: int = 0
    in_use_bytes: int = 0
    num_litter: int = 0

    def count(self, blocks: Iterable[tuple[BlockFile, bool]]) -> None:
        """Add blocks, each with whether it was removed."""
        for block, removed in blocks:
            self.num_bytes += block.num_bytes if removed else 0
            self.in_use_bytes += 0 if removed else block.num_bytes


def prune(
    directory: str,
    *,
    limit: int | None = None,
    older_than: float | None = None,
    chosen: Callable[[str], bool] | None = None,
) -> CachePruning:
    """Remove leftovers of killed processes, and blocks that meet any of the conditions, but none in use.

    Args:
        limit: remove the least recently used blocks until at most so many bytes are left.
        older_than: remove blocks that were not used for so many seconds.
        chosen: remove all blocks of the URIs for which it returns true.

    Raises:
        ObjectNotFoundError: the directory is no cache.
    """
    done, now = CachePruning(), time.time()
    for cached in cached_contents(directory):
        uri = cached.content.uri if cached.content else None
        # Earlier versions named objects by signed URLs, which are never found again.
        unwanted = uri is None or redacted(uri) != uri or (chosen is not None and chosen(uri))
        old = [block for block in cached.blocks if older_than is not None and now - block.used_at > older_than]
        done.count(run(evict(cached.blocks if unwanted else old, math.inf, remove_unlocked)))
        done.num_litter += _remove_leftovers(cached.path, now)
    if limit is not None:
        left = block_files(directory)
        excess = sum(block.num_bytes for block in left) - limit
        done.count(run(evict(left, excess, remove_unlocked)))
    with contextlib.suppress(OSError):
        recount(directory)
    return done


def _remove_leftovers(path: str, now: float) -> int:
    """Remove staging files of killed processes, and the directory if it has no blocks; return how many were removed."""
    removed = 0
    for file in Path(path).iterdir():
        with contextlib.suppress(OSError):
            if file.suffix == ".tmp" and now - file.stat().st_mtime > STALE_SECONDS:
                file.unlink()
                removed += 1
    empty = {file.name for file in Path(path).iterdir()} <= {"meta.json", "locks"}
    with contextlib.suppress(OSError):
        # A process that has opened it but not read yet creates it again.
        if empty and now - os.stat(path).st_mtime > STALE_SECONDS:
            for name in ("meta.json", "locks"):
                Path(path, name).unlink(missing_ok=True)
            os.rmdir(path)
            removed += 1
    return removed


PART_BYTES = 8 << 20
THREADS = 24


@dataclass(frozen=True)
class Warmed:
    """Bytes of the requested chunks; bytes that were fetched; and bytes that are missing, since the cache is full."""

    num_bytes: int
    fetched_bytes: int
    lacking_bytes: int


@dataclass(frozen=True)
class Warming:
    """Objects to cache.

    Args:
        jobs: objects, and the ranges of each to cache.
    """

    jobs: Sequence[tuple[DiskCache, Sequence[Range]]]

    @property
    def wanted_bytes(self) -> int:
        """Return the bytes of all chunks that hold the ranges."""
        return sum(_bytes_of(reader.content, _chunks(reader, ranges)) for reader, ranges in self.jobs)

    def run(self, advance: Advance = lambda num_bytes: None) -> Warmed:
        """Fetch all ranges into their caches.

        Args:
            advance: called with the bytes of each part when it is cached, by one thread at a time.

        Raises:
            StorageError: the first failed read; the others are cancelled.
        """
        before = sum(reader.stats.bytes_moved for reader, _ in self.jobs)

        def read(part: tuple[DiskCache, list[int]]) -> int:
            reader, chunks = part
            reader.read([reader.content.range_of(*run) for run in runs_of(chunks)])
            return _bytes_of(reader.content, chunks)

        parts = ((reader, part) for reader, ranges in self.jobs for part in _parts(reader, ranges))
        with cancellable() as scope, contextlib.closing(map_in_flight(read, parts, THREADS, scope.cancel)) as counts:
            for num_bytes in counts:
                advance(num_bytes)
        return Warmed(
            num_bytes=self.wanted_bytes,
            fetched_bytes=sum(reader.stats.bytes_moved for reader, _ in self.jobs) - before,
            lacking_bytes=sum(
                _bytes_of(reader.content, reader.cached.absent(_chunks(reader, ranges))) for reader, ranges in self.jobs
            ),
        )


def _chunks(reader: DiskCache, ranges: Sequence[Range]) -> list[int]:
    return chunks_of(ranges, reader.content.chunk_bytes)


def _parts(reader: DiskCache, ranges: Sequence[Range]) -> Iterator[list[int]]:
    """Yield the chunks of ranges, about 8 MiB of them at a time."""
    chunks, at_once = _chunks(reader, ranges), max(1, PART_BYTES // reader.content.chunk_bytes)
    for first in range(0, len(chunks), at_once):
        yield chunks[first : first + at_once]
