"""Which process fetches a chunk: a lock on one byte of a file for each, which dies with its process.

POSIX record locks: they work on NFS and on every Unix, and a forked child has none of its parent's. What belongs to a
process does not tell its threads apart, so threads agree first (`single_flight`); and closing any descriptor of the
file drops the process' locks on it, so there is one ChunkLocks for a file in a process.

Nothing depends on these locks but that a chunk is fetched once: where they do not work everybody fetches.

The blocks of an object that a process has mapped, and what it found good in them.

Only ever added to, so that threads may read it without a lock: a chunk that is marked good in one `Maps` is good in the
block that the same one has mapped. Letting blocks go makes another `Maps`; who still uses the old one keeps its blocks.

One object of a cache directory in this process: which blocks are mapped, which chunks were found good, and views.

range ─► chunk is good? ─► block's data[first:stop]          0.5 us, no system call, no lock
          else ─► map the block, compare chunk and entry      once for a chunk and process
                   else ─► it is lacking
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from binidx.native.pieces import PlacedBlocks
from binidx.storage.cache.block_files import MappedBlock, map_block, revalidate, write_chunks
from binidx.storage.cache.eviction import CacheQuota
from binidx.storage.cache.layout import CachedContent, Layout, block_path, write_meta
from binidx.storage.cache.memory import SingleFlight, runs_of
from binidx.storage.interfaces import Range


class ChunkLocks:
    """The locks of one object.

    Raises:
        OSError: the file can be neither opened nor made.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)

    @contextlib.contextmanager
    def held(self, chunks: Sequence[int]) -> Iterator[list[int]]:
        """Those of the sorted chunks that no other process holds, held for the block; nobody is waited for."""
        held: list[tuple[int, int]] = []
        try:
            for run in runs_of(chunks):
                self._take(run, held)
            yield [chunk for run in held for chunk in range(*run)]
        finally:
            for first, stop in held:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN, stop - first, first)

    def _take(self, run: tuple[int, int], held: list[tuple[int, int]]) -> None:
        """Lock a run, or what can be had of it: by halves."""
        first, stop = run
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, stop - first, first)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                middle = (first + stop) // 2
                for half in ((first, middle), (middle, stop)) if middle > first else ():
                    self._take(half, held)
                return
        held.append(run)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        # At the end of the interpreter modules may be gone before this object.
        try:  # noqa: SIM105
            close(self._descriptor)
        except (OSError, AttributeError):
            pass


class Maps:
    """Blocks by number, and per chunk whether it was compared; `used` has the number of the last read of each.

    Args:
        layout: of the object.
        like: has what this is to have, but for the blocks `without`.
    """

    def __init__(self, layout: Layout, like: Maps | None = None, without: Sequence[int] = ()) -> None:
        self._layout = layout
        if like is None:
            self.blocks: list[MappedBlock | None] = [None] * layout.num_blocks
            self.data: list[memoryview | None] = [None] * layout.num_blocks
            self.addresses: NDArray[np.int64] = np.zeros(layout.num_blocks, np.int64)
            self.used: NDArray[np.int64] = np.zeros(layout.num_blocks, np.int64)
            self.good: NDArray[np.uint8] = np.zeros(layout.num_chunks, np.uint8)
        else:
            self.blocks, self.data = list(like.blocks), list(like.data)
            self.addresses, self.used, self.good = like.addresses.copy(), like.used.copy(), like.good.copy()
        for number in without:
            self.blocks[number] = self.data[number] = None
            self.addresses[number] = 0
            chunks = layout.chunks_in(number)
            self.good[chunks.start : chunks.stop] = 0
        # Python takes one element of a memoryview in half the time that NumPy needs.
        self.good_at, self.used_at = self.good.data, self.used.data
        sizes = layout.size, layout.chunk_bytes, layout.block_bytes
        self.placed = PlacedBlocks(self.good, self.addresses, self.used, *sizes)

    def add(self, block: MappedBlock) -> None:
        """Last in `blocks`: who finds it there marks chunks, and who finds chunks marked looks at the others."""
        self.addresses[block.number] = block.address
        self.data[block.number] = block.data
        self.blocks[block.number] = block

    def without(self, numbers: Sequence[int]) -> Maps:
        """The same, but for these blocks."""
        return Maps(self._layout, self, numbers)

    def mapped(self) -> list[int]:
        """Numbers of the blocks that are mapped, least recently used first."""
        return sorted(np.flatnonzero(self.addresses).tolist(), key=self.used.__getitem__)


logger = logging.getLogger(__name__)
IDLE_SECONDS = 60.0
"""A block that was not read for so long is no longer mapped; one that was is marked as used for all processes."""

RELEASED_PART = 4
NO_ROOM_TO_MAP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class CachedObject:
    """Get it from `cached_object`: there is one for a directory and content in a process.

    Where the directory cannot be written to, `writable` is false, and what lies there is read.
    """

    def __init__(self, directory: str, content: CachedContent, limit: int | None) -> None:
        self.uri, self.layout = content.uri, Layout.of(content)
        self.path = os.path.join(directory, "objects", content.key)
        self._content = content
        self.maps = Maps(self.layout)
        self._tick, self._beat_at, self._seen_tick = 0, time.monotonic() + IDLE_SECONDS, 0
        self.after_fork()
        self.writable = True
        try:
            write_meta(self.path, content)
            self.room = room_of(directory, limit)
            self.locks = ChunkLocks(os.path.join(self.path, "locks"))
        except OSError as error:
            self.writable = False
            _warn_once(directory, f"cache cannot be written to, what it has not is read without being kept: {error}")

    def after_fork(self) -> None:
        self._lock, self._writing = threading.RLock(), threading.Lock()
        self.flights: SingleFlight[int, memoryview] = SingleFlight()

    # Reading

    def begin(self) -> tuple[Maps, int]:
        """What one read looks at, and its number."""
        self._tick = tick = self._tick + 1
        return self.maps, tick

    def views(self, ranges: Sequence[Range]) -> tuple[list[memoryview | None], int, int]:
        """The bytes of each range, None where a chunk lacks or was not compared yet; how many are None; and of how many
        chunks they all are.

        Ranges lie in the object. Those that cross blocks are copied together.
        """
        maps, tick = self.begin()
        chunk_bytes, block_bytes = self.layout.chunk_bytes, self.layout.block_bytes
        good, data, used = maps.good_at, maps.data, maps.used_at
        found: list[memoryview | None] = []
        count, lacking = len(ranges), 0
        for start, stop in ranges:
            chunk, first = start // chunk_bytes, start % block_bytes
            if start < stop <= (chunk + 1) * chunk_bytes:
                number = start // block_bytes
                view = data[number] if good[chunk] else None
                used[number] = tick
                lacking += view is None
                found.append(view and view[first : first + stop - start])
            elif start == stop:
                count -= 1
                found.append(memoryview(b""))
            else:
                last = -(-stop // chunk_bytes)
                count += last - chunk - 1
                view = self._across(maps, start, stop) if 0 not in good[chunk:last] else None
                lacking += view is None
                found.append(view)
        return found, lacking, count

    def _across(self, maps: Maps, start: int, stop: int) -> memoryview:
        """Bytes of several chunks, all of them good."""
        size, parts = self.layout.block_bytes, []
        for number in range(start // size, -(-stop // size)):
            view, first = maps.data[number], number * size
            maps.used_at[number] = self._tick
            assert view is not None
            parts.append(view[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def lacking(self, chunks: Sequence[int]) -> list[int]:
        """Those of the sorted chunks that are not here, or not as they should be."""
        maps = self.maps
        for number in {self.layout.place_of(chunk)[0] for chunk in chunks}:
            maps.used_at[number] = self._tick
        unsure = [chunk for chunk in chunks if not maps.good_at[chunk]]
        held = [(chunk, block) for chunk in unsure if (block := self._block(maps, chunk)) and block.holds(chunk)]
        for chunk, block in held:
            block.read_ahead(chunk)
        for chunk, block in held:
            if block.is_good(chunk):
                maps.good_at[chunk] = 1
        return [chunk for chunk in unsure if not maps.good_at[chunk]]

    def absent(self, chunks: Sequence[int]) -> list[int]:
        """Those of the chunks that were not written down; what was, is not compared."""
        maps = self.maps
        unsure = [chunk for chunk in chunks if not maps.good_at[chunk]]
        return [chunk for chunk in unsure if (block := self._block(maps, chunk)) is None or not block.holds(chunk)]

    def lacking_afresh(self, chunks: Sequence[int]) -> tuple[list[int], int]:
        """The same for who may now fetch them: another node may have written what this one has older pages of.

        And how many of them are here, but damaged: all are counted, one is named for an object and process.
        """
        blocks = {chunk: self._block(self.maps, chunk) for chunk in self.lacking(chunks)}
        held = {chunk: block is not None and block.holds(chunk) for chunk, block in blocks.items()}
        for number in {self.layout.place_of(chunk)[0] for chunk in held}:
            with contextlib.suppress(OSError):
                revalidate(block_path(self.path, number))
        lacking = self.lacking(chunks)
        if damaged := [chunk for chunk in lacking if held[chunk]]:
            what = f"chunk {damaged[0]} was damaged; fetched again, as will be others that are"
            _warn_once(f"{self.uri}: its copy in {self.path}", what)
        return lacking, len(damaged)

    # Keeping

    def keep(self, first: int, data: memoryview) -> bool:
        """Write neighbouring chunks from `first` on; whether they are here now."""
        size = self.layout.chunk_bytes
        numbers = range(first, first - (-len(data) // size))
        for number, group in itertools.groupby(numbers, key=lambda chunk: self.layout.place_of(chunk)[0]):
            chunks = [*group]
            part = data[(chunks[0] - first) * size : (chunks[-1] + 1 - first) * size]
            try:
                self._write(number, chunks[0], part)
            except OSError as error:
                self.room.full(f"cannot be written to: {error.strerror}")
                return False
        return not self.lacking(numbers)

    def _write(self, number: int, first: int, data: memoryview) -> None:
        path = block_path(self.path, number)
        for attempt in (1, 2):
            maps = self.maps
            block = self._block(maps, first, create=True)
            try:
                if block is not None:
                    # Of many that write to one file the kernel lets one, and the others burn their cores meanwhile.
                    with self._writing:
                        return write_chunks(path, self.layout, block, first, data)
            except FileNotFoundError:
                # Somebody removed files of a cache in use; what is mapped lives on.
                if attempt == 2:
                    raise
                self._let_go([number])
        raise OSError(errno.EAGAIN, "block cannot be mapped", path)

    # Blocks

    def _block(self, maps: Maps, chunk: int, *, create: bool = False) -> MappedBlock | None:
        """The block of a chunk, mapped; None where there is none, or with `create` where an evictor is at it."""
        number = self.layout.place_of(chunk)[0]
        block = maps.blocks[number]
        if block is not None:
            return block
        with self._lock:
            block = maps.blocks[number] or self._map(number, create)
            if block is not None:
                maps.add(block)
                maps.used[number] = self._tick
        return block

    def _map(self, number: int, create: bool) -> MappedBlock | None:
        path = block_path(self.path, number)
        try:
            try:
                block = map_block(path, self.layout, number, create=create)
            except OSError as error:
                if error.errno == errno.ENOENT and create:
                    write_meta(self.path, self._content)
                elif error.errno in NO_ROOM_TO_MAP:
                    self.release()
                else:
                    raise
                block = map_block(path, self.layout, number, create=create)
        except OSError as error:
            if create:
                raise
            _warn_once(self.path, f"a block cannot be read: {error}")
            return None
        if block is not None:
            _touch(path)
        return block

    def release(self) -> None:
        """Let go of the least recently used quarter of what this process has mapped, not of what it reads now."""
        mapped = [number for number in self.maps.mapped() if self.maps.used_at[number] < self._tick]
        self._let_go(mapped[: -(-len(mapped) // RELEASED_PART)])

    def beat(self) -> None:
        """Once a minute: say of the blocks in use that they are, and let go of the others."""
        now = time.monotonic()
        if now < self._beat_at:
            return
        self._beat_at = now + IDLE_SECONDS
        mapped = self.maps.mapped()
        idle = [number for number in mapped if self.maps.used_at[number] <= self._seen_tick]
        self._seen_tick = self._tick
        for number in mapped[len(idle) :]:
            _touch(block_path(self.path, number))
        self._let_go(idle)

    def _let_go(self, numbers: Sequence[int]) -> None:
        if numbers:
            with self._lock:
                self.maps = self.maps.without(numbers)


def cached_object(directory: str, content: CachedContent, limit: int | None) -> CachedObject:
    """The one of this process; the bound given last holds."""
    with _lock:
        key = (directory, content.key)
        found = _objects.get(key)
        if found is None:
            _objects[key] = found = CachedObject(directory, content, limit)
        elif found.writable:
            found.room = room_of(directory, limit)
        return found


def room_of(directory: str, limit: int | None) -> CacheQuota:
    """The one of this process, which asks all objects there to let go before it sweeps."""
    room = _rooms.get((directory, limit))
    if room is None:
        room = _rooms[directory, limit] = CacheQuota(directory, limit)
        room.release = lambda: _release_all(directory)
    return room


def _release_all(directory: str) -> None:
    for key, each in list(_objects.items()):
        if key[0] == directory:
            each.release()


def _touch(path: str) -> None:
    with contextlib.suppress(OSError):
        os.utime(path)


def _warn_once(subject: str, message: str) -> None:
    if subject not in _said:
        _said.add(subject)
        logger.warning("%s: %s", subject, message)


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for each in list(_objects.values()):
        each.after_fork()


_lock = threading.Lock()
_said: set[str] = set()
_objects: weakref.WeakValueDictionary[tuple[str, str], CachedObject] = weakref.WeakValueDictionary()
_rooms: weakref.WeakValueDictionary[tuple[str, int | None], CacheQuota] = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_after_fork)
