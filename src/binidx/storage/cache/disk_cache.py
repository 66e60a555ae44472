"""Is what was fetched of the content that was opened? Asked before it is kept, of stores that cannot be told which one.

s3, gs             each response tells its ETag or generation: `response_check`
http(s)            the same, with a strong ETag
files, memory      looked at after each read
the rest           looked at here, once for a fetch: one request more for a batch, and never new bytes under old names

The cluster-local copy: a RangeReader over a RangeReader that keeps what it read in a directory.

    asked      [70000, 70100) [190000, 200000)      of an object in chunks of 64 KiB
    chunks     1              2        3            1 and 2 lie in the directory and agree with their sums: views
    read       [196608, 262144)                     3: one process of all fetches it and writes it down

The directory may lie on a disk of this node or on a file system of the cluster; all processes and nodes that see it
share it. `cache_layout` has the format, `cache_block` who may evict, `chunk_locks` and `single_flight` who fetches,
`cache_room` the bound. Nothing read from there is believed before its sum was compared, once for a chunk and process,
so kill -9, loss of power, a full disk and flipped bits cost a second request, never a wrong byte. Not to be done to a
directory in use: cutting its files short (SIGBUS, as with every mmap); removing them is fine on a local file system.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from binidx.errors import ConfigError
from binidx.native.pieces import Pieces, placed_pieces
from binidx.storage.cache.cached_object import cached_object
from binidx.storage.cache.layout import BLOCK_BYTES, CHUNK_BYTES, CachedContent
from binidx.storage.cache.memory import Flight, chunks_of, runs_of
from binidx.storage.interfaces import Range, RangeReader
from binidx.storage.ranges import check_ranges, cut
from binidx.storage.requests.remote_reader import MAX_REQUEST, RemoteObject
from binidx.storage.stats import CacheStats
from binidx.storage.stores.local import AskAhead
from binidx.storage.threads import Threads


def check_content(reader: RangeReader) -> None:
    """What lies at the bottom of a stack of readers still is what was opened.

    Raises:
        ObjectChangedError, ObjectNotFoundError: it is not.
    """
    stored: Any = reader
    while hasattr(stored, "reader"):
        stored = stored.reader
    if isinstance(stored, RemoteObject) and not stored.is_pinned:
        stored.check_unchanged()


ROUND_BYTES = 32 << 20


"""Fetched at once by a thread, and in memory until it is written."""


FILLERS = 3


"""Threads that bring a large object: one's bytes come while another's are written and compared."""


PATIENCE_SECONDS, LEAST_PATIENCE_SECONDS = 30.0, 0.5


"""So long another process may take to fetch chunks before what is asked is read here, too; and, after that happened,
until it is seen to go on: it may be stopped, and hold its locks for ever."""


FIRST_PAUSE, LONGEST_PAUSE = 0.001, 0.02


MARKS = ("etag", "generation", "version", "mtime")


"""Without one of these nobody could tell a new content from an old one of the same size. A time is the weakest: who
replaces an object within one tick of its store's clock, by one of equal size, is not seen."""


class DiskCache:
    """A reader whose chunks are kept in a directory. Same bytes as the reader below.

    Args:
        reader: of one content: its `identity` has a mark of it. Its own `read` coalesces and runs requests at once.
        directory: made if it is not there.
        limit: bytes that may lie in it, of all objects; None: what leaves a tenth of its file system free.
        chunk_bytes: unit of fetching, checking and keeping.
        block_bytes: unit of evicting, a multiple of it.

    Raises:
        ConfigError: the reader has no mark of its content, or sizes that make no sense.

    Views are of the mapped files, and stay valid when their block is evicted. Where nothing can be kept, the ranges
    asked are read, and not whole chunks. Pickles as its arguments; another process, forked or not, maps for itself.
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
        self.identity: Mapping[str, Any] = dict(content_identity(reader))
        block_bytes = block_bytes or -(-BLOCK_BYTES // chunk_bytes) * chunk_bytes
        if block_bytes % chunk_bytes:
            raise ConfigError(f"{self.uri}: blocks of {block_bytes} bytes, needed a multiple of {chunk_bytes}")
        codec = getattr(reader, "codec", "raw")
        self.content = CachedContent(self.uri, self.size, self.identity, codec, chunk_bytes, block_bytes)
        self.stats = CacheStats(cache="disk")
        self._ask_ahead = AskAhead()
        self._patience = PATIENCE_SECONDS
        self.cached = cached_object(self.directory, self.content, limit)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        cached = self.cached
        cached.beat()
        views, lacking, count = cached.views(ranges)
        self.stats.add(bytes_asked=sum(stop - start for start, stop in ranges))
        if lacking:
            return self._read_rest(ranges, views, count)
        self.stats.count_chunks(hits=count)
        return views  # type: ignore[return-value]

    def read_into(self, gather: Callable[[Any], int]) -> bool:
        """`read` without views: `gather` takes what it wants of the whole content, and says in how many ranges.

        Args:
            gather: called once with what `PlacedBlocks.taking` gives.

        Returns:
            False: nothing was taken, since not all of it is here, or was compared.
        """
        self.cached.beat()
        maps, tick = self.cached.begin()
        about = maps.placed.taking(tick, ask_ahead=self._ask_ahead.wanted)
        if gather(about) < 0:
            return False
        self._ask_ahead.saw(bool(about.disk_moved))
        self.stats.count_chunks(hits=about.num_chunks)
        self.stats.add(bytes_asked=about.num_bytes)
        return True

    def pieces(self, ranges: NDArray[np.int64]) -> Pieces | None:
        """The ranges, shape (n, 2), as pieces of memory: `read` for C, without a view for each.

        None where they have to be read: something is not here or was not compared yet, or crosses a block.
        """
        self.cached.beat()
        found = self.cached.addresses(ranges)
        if found is None:
            return None
        maps, places, count = found
        pieces, num_bytes = placed_pieces(maps, places)
        self.stats.count_chunks(hits=count)
        self.stats.add(bytes_asked=num_bytes)
        return pieces

    def _read_rest(self, ranges: Sequence[Range], views: list[memoryview | None], count: int) -> list[memoryview]:
        """With what `views` lacks."""
        lacking = [place for place, view in enumerate(views) if view is None]
        asked = [ranges[place] for place in lacking]
        chunks = self.cached.lacking(chunks_of(asked, self.content.chunk_bytes))
        self.stats.count_chunks(hits=max(0, count - len(chunks)), misses=len(chunks))
        loose = self._bring(chunks) if chunks and self.cached.writable else {}
        found, _, _ = self.cached.views(asked)
        found = [view or self._from_loose(each, loose) for view, each in zip(found, asked, strict=True)]
        exact = iter(self._fetch([each for view, each in zip(found, asked, strict=True) if view is None]))
        for place, view in zip(lacking, found, strict=True):
            views[place] = next(exact) if view is None else view
        return views  # type: ignore[return-value]

    def _bring(self, lacking: Sequence[int]) -> dict[int, memoryview]:
        """Get chunks into the directory; those that could not be written. Of many, some come while others are written.

        Raises:
            The first error, after all have ended.
        """
        at_once = max(1, ROUND_BYTES // self.content.chunk_bytes)
        if len(lacking) <= at_once:
            return self._bring_in_turn(lacking)
        rounds = [lacking[first : first + at_once] for first in range(0, len(lacking), at_once)]
        shares = [[chunk for each in rounds[number::FILLERS] for chunk in each] for number in range(FILLERS)]
        pending = [_submit(functools.partial(self._bring_in_turn, share)) for share in shares if share]
        wait(pending)
        return {chunk: view for share in pending for chunk, view in share.result().items()}

    def _bring_in_turn(self, lacking: Sequence[int]) -> dict[int, memoryview]:
        """Get chunks into the directory, each fetched by one thread of one process; those that could not be written.

        Nobody waits while he holds a lock. A chunk whose fetcher failed or died is fetched here, and none twice: where
        there is no room, or what came is evicted before it is read, it stays away.
        """
        loose: dict[int, memoryview] = {}
        waited: set[int] = set()
        done: set[int] = set()
        at_once = max(1, ROUND_BYTES // self.content.chunk_bytes)
        place, pause, deadline = 0, FIRST_PAUSE, time.monotonic() + self._patience
        while lacking:
            with self.cached.flights.claimed(lacking[place : place + at_once]) as (ours, theirs):
                with self.cached.locks.held(ours.keys) as held:
                    absent, damaged = self.cached.lacking_afresh(held)
                    self.stats.count_chunks(damaged=damaged)
                    if not self._fetch_chunks(absent, loose):
                        break
                ours.land(loose)
            place += at_once
            done |= {*held}
            if held:
                place, pause, deadline = 0, FIRST_PAUSE, time.monotonic() + self._patience
            elif place >= len(lacking):
                waited |= {*lacking}
                place, pause = 0, self._wait(theirs, loose, pause)
            before = len(lacking)
            lacking = [chunk for chunk in self.cached.lacking(lacking) if chunk not in loose and chunk not in done]
            if len(lacking) < before:
                self._patience = PATIENCE_SECONDS
            elif time.monotonic() > deadline:
                self._patience = LEAST_PATIENCE_SECONDS
                break
        self.stats.count_chunks(waits=len(waited))
        return loose

    def _wait(self, theirs: Mapping[int, Flight[int, memoryview]], loose: dict[int, memoryview], pause: float) -> float:
        """For a thread of this process, or a moment for another process; the next pause."""
        if theirs:
            claim = next(iter(theirs.values()))
            landed = claim.wait(LONGEST_PAUSE)
            loose |= {each: landed[each] for each in theirs if each in landed}
            return FIRST_PAUSE
        # A claim that nobody lands: for a moment, or until this thread's scope is cancelled.
        Flight[int, memoryview]().wait(pause)
        return min(LONGEST_PAUSE, 1.5 * pause)

    def _fetch_chunks(self, chunks: Sequence[int], loose: dict[int, memoryview]) -> bool:
        """Fetch, write, and put what could not be written into `loose`. False: nothing more may be written."""
        if not chunks:
            return True
        content, layout = self.content, self.cached.layout
        count = len(chunks) * content.chunk_bytes
        if not self.cached.room.reserve(count):
            return False
        # In pieces of one request: longer ones would be put together, and so copied.
        whole = max(1, MAX_REQUEST // content.chunk_bytes)
        runs = [part for run in runs_of(chunks) for part in cut(run, whole)]
        try:
            answers = self._fetch([layout.range_of(*run) for run in runs])
            check_content(self.reader)
        except BaseException:
            self.cached.room.give_back(count)
            raise
        for (first, stop), answer in zip(runs, answers, strict=True):
            if not self.cached.keep(first, answer):
                self.cached.room.give_back(min(count, len(answer)))
                size = content.chunk_bytes
                loose |= {
                    each: answer[(each - first) * size : (each + 1 - first) * size] for each in range(first, stop)
                }
        return True

    def _from_loose(self, wanted: Range, loose: Mapping[int, memoryview]) -> memoryview | None:
        """A range of which chunks could not be written; None where one was not even fetched."""
        if not loose:
            return None
        parts = []
        for chunk in chunks_of([wanted], self.content.chunk_bytes):
            whole = self.cached.layout.range_of(chunk, chunk + 1)
            where = max(wanted[0], whole[0]), min(wanted[1], whole[1])
            found = loose[chunk][where[0] - whole[0] : where[1] - whole[0]] if chunk in loose else None
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
    """Nobody could tell a new content of this object from its old one."""


def content_identity(reader: RangeReader) -> Mapping[str, Any]:
    """What identified the content when it was opened; nothing where the reader does not know."""
    found: Mapping[str, Any] = getattr(reader, "identity", {})
    return found


def check_cacheable(reader: RangeReader, chunk_bytes: int, limit: int | None) -> None:
    """ConfigError unless a cache can be made of this."""
    if chunk_bytes < 1:
        raise ConfigError(f"{reader.uri}: chunks of {chunk_bytes} bytes, needed 1 or more")
    if limit is not None and limit < 0:
        raise ConfigError(f"{reader.uri}: a cache of {limit} bytes, needed 0 or more")
    if not any(content_identity(reader).get(mark) for mark in MARKS):
        raise UncacheableError(f"{reader.uri}: not cached, the store gives neither ETag, generation nor time for it")
    if "::" in reader.uri:
        raise UncacheableError(f"{reader.uri}: not cached, a chain reads a copy of its own that may be older")


_submit = Threads("binidx-fill", lambda: 2 * FILLERS).submit
