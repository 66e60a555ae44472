"""Disk cache: a reader that stores the chunks it fetches in a directory.

    read       [70000, 70100) [190000, 200000)      of an object in chunks of 64 KiB
    chunks     1              2        3            1 and 2 are in the directory and agree with their checksums: views
    fetch      [196608, 262144)                     3: fetched and stored by one process of all

The directory lies on a disk of this node or on a file system of the cluster, and is shared by all processes and nodes
that can access it. `block_files` describes its files and the locks against eviction, `chunk_fetch` which process and
thread fetches a chunk, `eviction` the quota.

No cached byte is used before its checksum was compared, once for a chunk and process; of index files, which are one
block each, once for a node (`seals`). So after a kill, a loss of power,
a full disk or flipped bits, chunks are fetched again, and wrong bytes are never returned. While a directory is used,
its files must not be truncated (SIGBUS, as with every mmap); on a local file system they may be removed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from mmap import PAGESIZE
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError, redacted
from binidx.forks import cached_property
from binidx.native.arguments import AskAhead
from binidx.storage.cache.block_files import BLOCK_BYTES, CHUNK_BYTES, CachedContent
from binidx.storage.cache.cached_object import get_cached_object
from binidx.storage.cache.chunk_fetch import ChunkFetcher, FetchSizes
from binidx.storage.cache.memory import Flight, chunks_of
from binidx.storage.interfaces import Range, RangeReader, VersionedReader
from binidx.storage.ranges import as_block_reader, check_ranges, stored_reader
from binidx.storage.requests.remote_object import MAX_REQUEST
from binidx.storage.stats import LayerStats, note_seconds
from binidx.storage.steps import run
from binidx.storage.threads import READS

FETCH_SIZES = FetchSizes(at_once=32 << 20, request=MAX_REQUEST)

FILLERS = 3
"""Threads that fetch a large object: some bytes arrive while others are written and checked."""

_in_memory: list[weakref.ref[NDArray[np.uint8]]] = []
"""Whole files that this process holds in memory, as their directory has no room for them."""

MARKS = ("etag", "generation", "version", "mtime")
"""Parts of an identity, of which a cached object needs one, else a new content of the same size would go unnoticed. A
time is the weakest: it misses an object that is replaced within one tick of the store's clock by one of equal size."""


def check_content(reader: RangeReader) -> None:
    """Raise ObjectChangedError or ObjectNotFoundError if the stored object is not the opened one any more."""
    stored = stored_reader(reader)
    if isinstance(stored, VersionedReader):
        stored.check_unchanged()


class StoredChunks:
    """Object behind a disk cache, as `ChunkFetcher` reads it."""

    cpu_seconds = staticmethod(time.thread_time)

    def __init__(self, reader: RangeReader, stats: LayerStats) -> None:
        self._reader, self.add, self._read = reader, stats.add, stats.read

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        return self._read(self._reader, ranges)

    def check(self) -> None:
        check_content(self._reader)

    def wait(self, flight: Flight[int, None], seconds: float) -> Mapping[int, None]:
        return flight.wait(seconds)


class DiskCache:
    """Reader that caches the chunks of another reader in a directory.

    Args:
        reader: reader of one version of an object; its `identity` has one of MARKS.
        directory: cache directory, created if it does not exist.
        limit: bytes of all objects in the directory; None: as many as leave a tenth of its file system free.
        chunk_bytes: unit of fetching, checking and storing.
        block_bytes: unit of evicting, a multiple of `chunk_bytes`.
        fill: `ReadSettings.cache_fill`, for loaders.

    Attributes:
        wait_seconds, least_wait_seconds: time to wait for chunks that another process fetches, before reading them from
            the store; the second one holds after a wait that failed, until one succeeds. A stopped process holds its
            locks.
        uncached_bytes: bytes of whole files that a process holds in its own memory where the directory has no room for
            them: enough for small indices on a full disk. 8 ranks that each held an index of 81 GB would need 650 GB.

    Raises:
        UncacheableError: the version of the object is unknown.

    Views are of mapped files, and stay valid when their block is evicted. If nothing can be cached, the exact ranges
    are read instead of whole chunks. Pickles as its arguments; each process maps blocks for itself.
    """

    wait_seconds, least_wait_seconds = 30.0, 0.5
    uncached_bytes = 256 << 20

    def __init__(
        self,
        reader: RangeReader,
        directory: str | os.PathLike[str],
        limit: int | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        block_bytes: int | None = None,
        fill: str = "never",
    ) -> None:
        if not any(map(reader.identity.get, MARKS)):
            raise UncacheableError(
                f"{reader.uri}: not cached, the store gives neither ETag, generation nor time for it"
            )
        self.reader, self.directory, self.limit, self.fill = reader, os.path.abspath(directory), limit, fill
        self.uri, self.size = reader.uri, reader.size
        self.identity: Mapping[str, Any] = dict(reader.identity)
        block_bytes = block_bytes or -(-BLOCK_BYTES // chunk_bytes) * chunk_bytes
        blocks = as_block_reader(reader)
        codec = blocks.codec if blocks else "raw"
        # meta.json has no signature, and a URL that is signed anew finds its blocks.
        self.content = CachedContent(redacted(self.uri), self.size, self.identity, codec, chunk_bytes, block_bytes)
        self.stats = LayerStats(cache="disk")
        self._ask_ahead = AskAhead()
        self.cached = get_cached_object(self.directory, self.content, limit)

    @cached_property
    def _fetcher(self) -> ChunkFetcher:
        """Fetches what is missing: made at the first miss, so that a start with a full cache needs none."""
        waits = self.wait_seconds, self.least_wait_seconds
        return ChunkFetcher(self.cached, StoredChunks(self.reader, self.stats), FETCH_SIZES, waits)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        cached = self.cached
        cached.unmap_idle()
        views, missing, count = cached.views(ranges)
        self.stats.add(bytes_asked=sum([stop - start for start, stop in ranges]))
        if missing:
            return self._read_rest(ranges, views, count)
        self.stats.add(hits=count)
        return views  # type: ignore[return-value]

    def is_complete(self) -> bool:
        return False

    def version_key(self) -> str | None:
        return self.cached.version_key()

    def read_into(self, gather: Callable[[Any], int]) -> bool:
        self.cached.unmap_idle()
        maps, tick = self.cached.begin()
        about = maps.placed.taking(tick, ask_ahead=self._ask_ahead.wanted)
        began = time.perf_counter()
        if (requests := gather(about)) < 0:
            return False
        self._ask_ahead.saw(bool(about.disk_moved))
        if about.disk_moved:
            note_seconds("cache_read", time.perf_counter() - began, about.num_bytes + requests * PAGESIZE)
        self.stats.add(hits=about.num_chunks, bytes_asked=about.num_bytes)
        return True

    def _read_rest(self, ranges: Sequence[Range], views: list[memoryview | None], count: int) -> list[memoryview]:
        """Return `views` with the ranges whose view is None read; `count` is the number of chunks of all ranges."""
        missing = [place for place, view in enumerate(views) if view is None]
        asked = [ranges[place] for place in missing]
        chunks = self.cached.check_chunks(chunks_of(asked, self.content.chunk_bytes))
        self.stats.add(hits=max(0, count - len(chunks)), misses=len(chunks))
        filling = self.cached.filling
        if chunks and self.cached.writable:
            self.fill_chunks(run(filling.chunks_to_await(self.content, chunks)) if filling else chunks)
        cached, _, _ = self.cached.views(asked)
        uncached = [where for view, where in zip(cached, asked, strict=True) if view is None]
        num_bytes = sum([stop - start for start, stop in uncached])
        with filling.measuring_ranges(num_bytes) if filling and uncached else contextlib.nullcontext():
            exact = iter(self._read_uncached(uncached) if uncached else ())
        for place, view in zip(missing, cached, strict=True):
            views[place] = next(exact) if view is None else view
        return views  # type: ignore[return-value]

    def _read_uncached(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return bytes that are not in the cache.

        Raises:
            ConfigError: they are a whole file for which the directory has no room, and there is too much such memory.
        """
        is_whole = [*ranges] == [(0, self.size)] and self.content.num_blocks == 1
        is_paused = self.cached.writable and time.monotonic() < self.cached.quota.paused_until
        if not is_whole or (self.cached.writable and not is_paused):
            return self.stats.read(self.reader, ranges)
        _in_memory[:] = [reference for reference in _in_memory if reference() is not None]
        held = sum(array.nbytes for reference in _in_memory if (array := reference()) is not None)
        if held + self.size > self.uncached_bytes:
            room = "it cannot be written to"
            if self.cached.writable:
                free = max(0, -self.cached.quota.excess())
                room = f"{self.cached.quota.pause_reason}; found room for {free:,} bytes"
            raise ConfigError(
                f"{self.uri}: no room in {self.directory} ({room}, need {self.size:,} bytes; {held:,} "
                "of other files are in memory already); make room, raise BINIDX_INDEX_BYTES if it is set, or name a "
                "larger directory of the node in BINIDX_INDEX_DIR (BINIDX_CACHE_DIR, if that is set). "
                "BINIDX_INDEX_DIR=off, without BINIDX_CACHE_DIR, holds a copy in the memory of each process"
            )
        array = np.frombuffer(self.stats.read(self.reader, ranges)[0], np.uint8)
        _in_memory.append(weakref.ref(array))
        return [array.data]

    def fill_chunks(self, missing: Sequence[int]) -> None:
        """Fetch sorted absent chunks into the directory as far as there is room, many of them in several threads.

        Raises:
            The first error, after all threads have ended.
        """
        at_once = self._fetcher.at_once
        if len(missing) <= at_once:
            run(self._fetcher.fetch(missing))
        else:
            rounds = [missing[first : first + at_once] for first in range(0, len(missing), at_once)]
            shares = [[chunk for chunks in rounds[number::FILLERS] for chunk in chunks] for number in range(FILLERS)]
            READS.map(lambda chunks: run(self._fetcher.fetch(chunks)), filter(None, shares))

    def put(self, data: memoryview) -> memoryview | None:
        """Store all bytes of the object, if there is room; return the cached ones, None if there was none."""
        if self.cached.writable and self.cached.check_chunks(range(self.content.num_chunks)):
            run(self.cached.store_whole(data))
        return self.cached.views([(0, len(data))])[0][0]

    def replace(self, data: memoryview) -> None:
        """Write all bytes of the object over a damaged copy."""
        if self.cached.writable:
            run(self.cached.store(0, data))

    def __reduce__(self) -> tuple[Any, ...]:
        chunk_bytes, block_bytes = self.content.chunk_bytes, self.content.block_bytes
        make = functools.partial(DiskCache, chunk_bytes=chunk_bytes, block_bytes=block_bytes, fill=self.fill)
        return make, (self.reader, self.directory, self.limit)

    def __repr__(self) -> str:
        return f"DiskCache({self.reader!r}, {self.directory})"


class UncacheableError(ConfigError):
    """The version of an object is unknown, so a cache could not detect that it is replaced."""
