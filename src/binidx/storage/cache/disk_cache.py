"""Disk cache: a reader that stores the chunks it fetches in a directory.

    read       [70000, 70100) [190000, 200000)      of an object in chunks of 64 KiB
    chunks     1              2        3            1 and 2 are in the directory and agree with their checksums: views
    fetch      [196608, 262144)                     3: fetched and stored by one process of all

The directory lies on a disk of this node or on a file system of the cluster, and is shared by all processes and nodes
that can access it. `layout` describes its files, `block_files` the locks against eviction, `cached_object` and
`memory.SingleFlight` which process and thread fetches a chunk, `eviction` the quota.

No cached byte is used before its checksum was compared, once for a chunk and process. So after a kill, a loss of power,
a full disk or flipped bits, chunks are fetched again, and wrong bytes are never returned. While a directory is used,
its files must not be truncated (SIGBUS, as with every mmap); on a local file system they may be removed.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

from binidx.errors import ConfigError
from binidx.storage.cache.cached_object import get_cached_object
from binidx.storage.cache.layout import BLOCK_BYTES, CHUNK_BYTES, CachedContent
from binidx.storage.cache.memory import Flight, chunks_of, runs_of
from binidx.storage.interfaces import Range, RangeReader, VersionedReader
from binidx.storage.ranges import check_ranges, cut
from binidx.storage.requests.remote_reader import MAX_REQUEST
from binidx.storage.stats import LayerStats
from binidx.storage.stores.local import AskAhead
from binidx.storage.threads import READS
from binidx.storage.vectored_reads import as_block_reader, stored_reader


def check_content(reader: RangeReader) -> None:
    """Raise ObjectChangedError or ObjectNotFoundError if the stored object is not the opened one any more."""
    stored = stored_reader(reader)
    if isinstance(stored, VersionedReader):
        stored.check_unchanged()


ROUND_BYTES = 32 << 20
"""Bytes that a thread fetches at once, and holds in memory until they are written."""

FILLERS = 3
"""Threads that fetch a large object: some bytes arrive while others are written and checked."""

PATIENCE_SECONDS, LEAST_PATIENCE_SECONDS = 30.0, 0.5
"""Seconds to wait for chunks that another process fetches before reading them from the store; and how long after such
a wait has failed, until one succeeds: a stopped process holds its locks."""

FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.02
MARKS = ("etag", "generation", "version", "mtime")
"""Parts of an identity, of which a cached object needs one, else a new content of the same size would go unnoticed. A
time is the weakest: it misses an object that is replaced within one tick of the store's clock by one of equal size."""


class DiskCache:
    """Reader that caches the chunks of another reader in a directory.

    Args:
        reader: of one version of an object; its `identity` has one of MARKS.
        directory: created if it does not exist.
        limit: bytes of all objects in it; None: as many as leave a tenth of its file system free.
        chunk_bytes: unit of fetching, checking and storing.
        block_bytes: unit of evicting, a multiple of `chunk_bytes`.

    Raises:
        UncacheableError: the version of the object is unknown.
        ConfigError: a size is out of range.

    Views are of mapped files, and stay valid when their block is evicted. If nothing can be cached, the exact ranges
    are read instead of whole chunks. Pickles as its arguments; each process maps blocks for itself.
    """

    def __init__(
        self,
        reader: RangeReader,
        directory: str | os.PathLike[str],
        limit: int | None = None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        block_bytes: int | None = None,
    ) -> None:
        check_cacheable(reader, chunk_bytes, limit)
        self.reader, self.directory, self.limit = reader, os.path.abspath(directory), limit
        self.uri, self.size = reader.uri, reader.size
        self.identity: Mapping[str, Any] = dict(reader.identity)
        block_bytes = block_bytes or -(-BLOCK_BYTES // chunk_bytes) * chunk_bytes
        if block_bytes % chunk_bytes:
            raise ConfigError(f"{self.uri}: blocks of {block_bytes} bytes, needed a multiple of {chunk_bytes}")
        blocks = as_block_reader(reader)
        codec = blocks.codec if blocks else "raw"
        self.content = CachedContent(self.uri, self.size, self.identity, codec, chunk_bytes, block_bytes)
        self.stats = LayerStats(cache="disk")
        self._ask_ahead = AskAhead()
        self._patience = PATIENCE_SECONDS
        self.cached = get_cached_object(self.directory, self.content, limit)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        cached = self.cached
        cached.beat()
        views, lacking, count = cached.views(ranges)
        self.stats.add(bytes_asked=sum(stop - start for start, stop in ranges))
        if lacking:
            return self._read_rest(ranges, views, count)
        self.stats.add(hits=count)
        return views  # type: ignore[return-value]

    def is_complete(self) -> bool:
        return False

    def read_into(self, gather: Callable[[Any], int]) -> bool:
        self.cached.beat()
        maps, tick = self.cached.begin()
        about = maps.placed.taking(tick, ask_ahead=self._ask_ahead.wanted)
        if gather(about) < 0:
            return False
        self._ask_ahead.saw(bool(about.disk_moved))
        self.stats.add(hits=about.num_chunks, bytes_asked=about.num_bytes)
        return True

    def _read_rest(self, ranges: Sequence[Range], views: list[memoryview | None], count: int) -> list[memoryview]:
        """Return the views, with those that are None fetched."""
        lacking = [place for place, view in enumerate(views) if view is None]
        asked = [ranges[place] for place in lacking]
        chunks = self.cached.check_chunks(chunks_of(asked, self.content.chunk_bytes))
        self.stats.add(hits=max(0, count - len(chunks)), misses=len(chunks))
        unstored = self._fetch_into_cache(chunks) if chunks and self.cached.writable else {}
        found, _, _ = self.cached.views(asked)
        found = [view or self._join_unstored(each, unstored) for view, each in zip(found, asked, strict=True)]
        exact = iter(self._fetch([each for view, each in zip(found, asked, strict=True) if view is None]))
        for place, view in zip(lacking, found, strict=True):
            views[place] = next(exact) if view is None else view
        return views  # type: ignore[return-value]

    def _fetch_into_cache(self, lacking: Sequence[int]) -> dict[int, memoryview]:
        """Fetch chunks into the directory, many of them in several threads; return those that could not be written.

        Raises:
            The first error, after all threads have ended.
        """
        at_once = max(1, ROUND_BYTES // self.content.chunk_bytes)
        if len(lacking) <= at_once:
            return self._fetch_missing(lacking)
        rounds = [lacking[first : first + at_once] for first in range(0, len(lacking), at_once)]
        shares = [[chunk for each in rounds[number::FILLERS] for chunk in each] for number in range(FILLERS)]
        pending = [READS.submit(functools.partial(self._fetch_missing, share)) for share in shares if share]
        wait(pending)
        return {chunk: view for share in pending for chunk, view in share.result().items()}

    def _fetch_missing(self, lacking: Sequence[int]) -> dict[int, memoryview]:
        """Fetch chunks into the directory, each by one thread of one process; return those that could not be written.

        No thread waits while it holds a lock. A chunk whose fetcher failed or died is fetched here; none is fetched
        twice, also if it could not be written or was evicted at once.
        """
        unstored: dict[int, memoryview] = {}
        waited: set[int] = set()
        done: set[int] = set()
        at_once = max(1, ROUND_BYTES // self.content.chunk_bytes)
        place, pause, deadline = 0, FIRST_PAUSE, time.monotonic() + self._patience
        while lacking:
            with self.cached.flights.claimed(lacking[place : place + at_once]) as (ours, theirs):
                with self.cached.locks.locked(ours.keys) as held:
                    absent, damaged = self.cached.recheck(held)
                    self.stats.add(damaged=damaged)
                    if not self._fetch_chunks(absent, unstored):
                        break
                ours.land(unstored)
            place += at_once
            done |= {*held}
            if held:
                place, pause, deadline = 0, FIRST_PAUSE, time.monotonic() + self._patience
            elif place >= len(lacking):
                waited |= {*lacking}
                place, pause = 0, self._wait(theirs, unstored, pause)
            before = len(lacking)
            lacking = [
                chunk for chunk in self.cached.check_chunks(lacking) if chunk not in unstored and chunk not in done
            ]
            if len(lacking) < before:
                self._patience = PATIENCE_SECONDS
            elif time.monotonic() > deadline:
                self._patience = LEAST_PATIENCE_SECONDS
                break
        self.stats.add(waits=len(waited))
        return unstored

    def _wait(
        self, theirs: Mapping[int, Flight[int, memoryview]], unstored: dict[int, memoryview], pause: float
    ) -> float:
        """Wait for a thread of this process, or for a pause for another process; return the next pause."""
        if theirs:
            claim = next(iter(theirs.values()))
            landed = claim.wait(LONGEST_PAUSE)
            unstored |= {each: landed[each] for each in theirs if each in landed}
            return FIRST_PAUSE
        # A flight without a fetcher: waits for the pause, or until this thread's scope is cancelled.
        Flight[int, memoryview]().wait(pause)
        return min(LONGEST_PAUSE, 1.5 * pause)

    def _fetch_chunks(self, chunks: Sequence[int], unstored: dict[int, memoryview]) -> bool:
        """Fetch and write chunks; add unwritable ones to `unstored`. Return False if the quota is spent."""
        if not chunks:
            return True
        content, layout = self.content, self.cached.layout
        count = len(chunks) * content.chunk_bytes
        if not self.cached.quota.reserve(count):
            return False
        # In pieces of one request: longer ones would be put together, and so copied.
        whole = max(1, MAX_REQUEST // content.chunk_bytes)
        runs = [part for run in runs_of(chunks) for part in cut(run, whole)]
        try:
            answers = self._fetch([layout.range_of(*run) for run in runs])
            check_content(self.reader)
        except BaseException:
            self.cached.quota.release_reserved(count)
            raise
        for (first, stop), answer in zip(runs, answers, strict=True):
            if not self.cached.store(first, answer):
                self.cached.quota.release_reserved(min(count, len(answer)))
                size = content.chunk_bytes
                unstored |= {
                    each: answer[(each - first) * size : (each + 1 - first) * size] for each in range(first, stop)
                }
        return True

    def _join_unstored(self, wanted: Range, unstored: Mapping[int, memoryview]) -> memoryview | None:
        """Return a range, also from chunks that could not be written; None if a chunk of it was not fetched."""
        if not unstored:
            return None
        parts = []
        for chunk in chunks_of([wanted], self.content.chunk_bytes):
            whole = self.cached.layout.range_of(chunk, chunk + 1)
            where = max(wanted[0], whole[0]), min(wanted[1], whole[1])
            found = unstored[chunk][where[0] - whole[0] : where[1] - whole[0]] if chunk in unstored else None
            view = self.cached.views([where])[0][0] if found is None else found
            if view is None:
                return None
            parts.append(view)
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _fetch(self, requests: Sequence[Range]) -> list[memoryview]:
        if not requests:
            return []
        began = time.perf_counter()
        answers = self.reader.read(requests)
        self.stats.add(requests=len(requests), bytes_moved=sum(map(len, answers)), seconds=time.perf_counter() - began)
        return answers

    def __reduce__(self) -> tuple[Any, ...]:
        chunk_bytes, block_bytes = self.content.chunk_bytes, self.content.block_bytes
        make = functools.partial(DiskCache, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
        return make, (self.reader, self.directory, self.limit)

    def __repr__(self) -> str:
        return f"DiskCache({self.reader!r}, {self.directory!r})"


class UncacheableError(ConfigError):
    """The version of an object is unknown, so a cache could not detect that it is replaced."""


def check_cacheable(reader: RangeReader, chunk_bytes: int, limit: int | None) -> None:
    """Raise ConfigError if the reader cannot be cached with these sizes."""
    if chunk_bytes < 1:
        raise ConfigError(f"{reader.uri}: chunks of {chunk_bytes} bytes, needed 1 or more")
    if limit is not None and limit < 0:
        raise ConfigError(f"{reader.uri}: a cache of {limit} bytes, needed 0 or more")
    if not any(reader.identity.get(mark) for mark in MARKS):
        raise UncacheableError(f"{reader.uri}: not cached, the store gives neither ETag, generation nor time for it")
    if "::" in reader.uri:
        raise UncacheableError(f"{reader.uri}: not cached, a chain reads a copy of its own that may be older")
