"""State of one cached object in one process: mapped blocks, checked chunks, and fetches in progress.

    range -> chunk checked?  yes: view of the mapped block           0.5 us, no system call, no lock
                             no: map the block, compare the chunk with its checksum; once for a chunk and process
                                 different or absent: the chunk is missing

`BlockMaps` only ever grows, so threads read it without a lock: a chunk marked as checked in one `BlockMaps` is checked
in the block that the same one has mapped. To unmap blocks, the object gets another `BlockMaps`; readers of the old one
keep its blocks mapped.

`chunk_fetch` brings missing chunks, `eviction` decides whether there is room.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from binidx.errors import warn_once
from binidx.forks import ProcessLock
from binidx.native.arguments import PlacedBlocks
from binidx.storage.cache.block_files import CachedContent, MappedBlock
from binidx.storage.cache.eviction import CacheQuota, Reservation
from binidx.storage.cache.fill_progress import FillProgress
from binidx.storage.cache.memory import SingleFlight
from binidx.storage.cache.object_files import ObjectFiles
from binidx.storage.cache.quota_files import QuotaDirectory
from binidx.storage.interfaces import Range
from binidx.storage.stats import DiskTimer
from binidx.storage.steps import Steps, run


class BlockMaps:
    """Mapped blocks of an object, and which of its chunks were checked.

    Args:
        content: identity of the object.
        like: instance to copy; None: nothing is mapped.
        without: numbers of blocks that are not copied.

    Attributes:
        blocks, addresses: for each block, the mapping, and the address of its bytes.
        used: for each block, number of the last read that used it.
        good: for each chunk, 1 if it was checked, else 0.
    """

    def __init__(self, content: CachedContent, like: BlockMaps | None = None, without: Sequence[int] = ()) -> None:
        if like is None:
            self.blocks: list[MappedBlock | None] = [None] * content.num_blocks
            self.addresses: NDArray[np.int64] = np.zeros(content.num_blocks, np.int64)
            self.used: NDArray[np.int64] = np.zeros(content.num_blocks, np.int64)
            self.good: NDArray[np.uint8] = np.zeros(content.num_chunks, np.uint8)
        else:
            self.blocks = list(like.blocks)
            self.addresses, self.used, self.good = like.addresses.copy(), like.used.copy(), like.good.copy()
        for number in without:
            self.blocks[number], self.addresses[number] = None, 0
            chunks = content.chunks_in(number)
            self.good[chunks.start : chunks.stop] = 0
        # Python takes one element of a memoryview in half the time that NumPy needs.
        self.good_at, self.used_at = self.good.data, self.used.data
        sizes = content.size, content.chunk_bytes, content.block_bytes
        self.placed = PlacedBlocks(self.good, self.addresses, self.used, *sizes)

    def add(self, block: MappedBlock) -> None:
        """Add a mapped block: to `blocks` last, since other threads mark chunks as checked once they find it there."""
        self.addresses[block.number] = block.address
        self.blocks[block.number] = block

    def mapped(self) -> list[int]:
        """Return the numbers of the mapped blocks, least recently used first."""
        return sorted(np.flatnonzero(self.addresses).tolist(), key=self.used.__getitem__)


IDLE_SECONDS = 60.0
"""A block without a read for so long is unmapped; the file of any other is marked as used, for all processes."""

RELEASED_PART = 4
GOOD = "good"
"""Seal of an object whose chunks all agree with their checksums."""


class CachedObject:
    """One stored object in a cache directory. A process has one instance per object: see `get_cached_object`.

    Args:
        files: of the object.
        limit: bytes of all blocks in the directory; None: as many as leave a tenth of its file system free.
        open_quota: returns the quota of the directory for a limit; called when the first chunk is to be added.
        clock: seconds of a clock that never goes back.

    Attributes:
        maps: memory-mapped blocks, and the chunks whose checksums this process has compared.
        flights: fetches in progress in the threads of this process.
        filling: progress of the filling that brings most of the object in the background; None: there is none.
    """

    def __init__(
        self,
        files: ObjectFiles,
        limit: int | None,
        open_quota: Callable[[int | None], CacheQuota],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.files, self.content, self.path = files, files.content, files.path
        self.limit, self._open_quota, self.clock = limit, open_quota, clock
        self.maps = BlockMaps(self.content)
        self._tick, self._check_idle_at, self._seen_tick = 0, clock() + IDLE_SECONDS, 0
        self._quota: CacheQuota | None = None
        self._writable: bool | None = None
        self.after_fork()
        if not files.exists():
            self._writable = self._prepare_to_write()

    @property
    def writable(self) -> bool:
        """True if chunks can be added; cached chunks are read in any case. A start with a full cache never asks."""
        if self._writable is None:
            with _lock():
                if self._writable is None:
                    self._writable = self._prepare_to_write()
        return self._writable

    @property
    def quota(self) -> CacheQuota:
        """Quota of the directory, if chunks can be added."""
        assert self.writable
        assert self._quota is not None
        return self._quota

    def _prepare_to_write(self) -> bool:
        try:
            self.files.prepare_to_write()
            self._quota = self._open_quota(self.limit)
        except OSError as error:
            problem = f"disk cache cannot be written to, reads go on without being cached: {error}"
            warn_once(self.files.directory, problem)
            return False
        return True

    def change_limit(self, limit: int | None) -> None:
        """Limit the bytes of the directory anew."""
        self.limit = limit
        if self.writable:
            self._quota = self._open_quota(limit)

    def after_fork(self) -> None:
        """Renew the locks, which a thread of the parent may have held; its filling has no thread in this process."""
        self._lock = threading.RLock()
        self.flights: SingleFlight[int, None] = SingleFlight()
        self.filling: FillProgress | None = None

    # Reading

    def begin(self) -> tuple[BlockMaps, int]:
        """Start a read; return the current `BlockMaps` and the next read number.

        The caller stores the number in `used` for each block that it reads; `release` keeps the blocks marked with the
        latest number. Blocks stay mapped while the caller holds the `BlockMaps`. No call ends a read.
        """
        self._tick = tick = self._tick + 1
        return self.maps, tick

    def views(self, ranges: Sequence[Range]) -> tuple[list[memoryview | None], int, int]:
        """Return one view per range, the number of views that are None, and the number of chunks the ranges touch.

        A view is None if a chunk of its range is not cached, or its checksum has not been compared yet. A range that
        crosses a block boundary is copied. Ranges must lie in the object.
        """
        maps, tick = self.begin()
        chunk_bytes, block_bytes = self.content.chunk_bytes, self.content.block_bytes
        good, blocks, used = maps.good_at, maps.blocks, maps.used_at
        views: list[memoryview | None] = []
        count, missing = len(ranges), 0
        for start, stop in ranges:
            chunk, first = start // chunk_bytes, start % block_bytes
            if start < stop <= (chunk + 1) * chunk_bytes:
                number = start // block_bytes
                block = blocks[number] if good[chunk] else None
                used[number] = tick
                missing += block is None
                views.append(block.data[first : first + stop - start] if block else None)
            elif start == stop:
                count -= 1
                views.append(memoryview(b""))
            else:
                last = -(-stop // chunk_bytes)
                count += last - chunk - 1
                view = self._join_blocks(maps, start, stop) if 0 not in good[chunk:last] else None
                missing += view is None
                views.append(view)
        return views, missing, count

    def _join_blocks(self, maps: BlockMaps, start: int, stop: int) -> memoryview:
        """Return the bytes of a range that crosses chunks, all of them checked."""
        size, parts = self.content.block_bytes, []
        for number in range(start // size, -(-stop // size)):
            block, first = maps.blocks[number], number * size
            maps.used_at[number] = self._tick
            assert block is not None
            parts.append(block.data[max(start - first, 0) : stop - first])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def check_chunks(self, chunks: Sequence[int]) -> list[int]:
        """Check sorted chunks; return those that are absent or damaged."""
        maps = self.maps
        for number in {chunk // self.content.chunks_per_block for chunk in chunks}:
            maps.used_at[number] = self._tick
        unsure = [chunk for chunk in chunks if not maps.good_at[chunk]]
        absent = {*self.absent(unsure)}
        # Those of a sealed object are good since `absent` has mapped their block.
        unsure = [chunk for chunk in unsure if not maps.good_at[chunk]]
        written = [(chunk, block) for chunk in unsure if chunk not in absent and (block := self._block(maps, chunk))]
        for chunk, block in written:
            block.read_ahead(chunk)
        timer = DiskTimer("cache_read")
        for chunk, block in written:
            if block.is_good(chunk):
                maps.good_at[chunk] = 1
            timer.add(self.content.chunk_bytes)
        if written:
            timer.end()
        missing = [chunk for chunk in unsure if not maps.good_at[chunk]]
        if written and not missing and len(chunks) == self.content.num_chunks:
            self.files.seal(self.maps.blocks[0]).write(GOOD)
        return missing

    def absent(self, chunks: Sequence[int]) -> list[int]:
        """Return the chunks that were never written; damage is not checked."""
        maps, absent = self.maps, list[int]()
        unsure = [chunk for chunk in chunks if not maps.good_at[chunk]]
        for _, group in itertools.groupby(unsure, key=lambda chunk: chunk // self.content.chunks_per_block):
            own = [*group]
            block = self._block(maps, own[0])
            absent += own if block is None else block.absent(own)
        return absent

    def recheck(self, chunks: Sequence[int]) -> tuple[list[int], int]:
        """Check chunks again after locking them: another node may have written chunks of which this one has old pages.

        Returns:
            The absent or damaged chunks, and the number of damaged ones; the first damaged one of an object is logged.
        """
        unsure = self.check_chunks(chunks)
        written = {*unsure} - {*self.absent(unsure)}
        for number in {chunk // self.content.chunks_per_block for chunk in unsure}:
            self.files.refresh(number)
        missing = self.check_chunks(chunks)
        if damaged := [chunk for chunk in missing if chunk in written]:
            what = f"chunk {damaged[0]} was damaged; fetched again, as will be others that are"
            warn_once(f"{self.content.uri}: its copy in {self.path}", what)
        return missing, len(damaged)

    # Keeping

    def store(self, first: int, data: memoryview, reservation: Reservation | None = None) -> Steps[None]:
        """Write neighbouring chunks from `first` on, and check them once for all threads that wait for them.

        Args:
            first: number of a chunk in the object.
            data: whole chunks; the last of the object may be shorter.
            reservation: of these bytes; None: they replace a damaged copy, which is counted already.
        """
        size = self.content.chunk_bytes
        numbers = range(first, first - (-len(data) // size))
        for number, group in itertools.groupby(numbers, key=lambda chunk: chunk // self.content.chunks_per_block):
            chunks = [*group]
            part = data[(chunks[0] - first) * size : (chunks[-1] + 1 - first) * size]
            try:
                yield from self._write(number, chunks[0], part, reservation)
            except OSError as error:
                yield from self.quota.pause(f"cannot be written to: {error.strerror}")
                return
        self.check_chunks(numbers)

    def store_whole(self, data: memoryview) -> Steps[None]:
        """Write all bytes of the object, if there is room."""
        quota = self.quota  # another one after a change of the limit
        reservation = yield from quota.reserve(len(data))
        if reservation is not None:
            try:
                yield from self.store(0, data, reservation)
            finally:
                yield from quota.end(reservation)

    def _write(self, number: int, first: int, data: memoryview, reservation: Reservation | None) -> Steps[None]:
        for attempt in (1, 2):
            try:
                block = self._block(self.maps, first, create=True)
                if block is None:
                    raise OSError(errno.EAGAIN, "block cannot be mapped", self.files.block_path(number))
                write = partial(self.files.write, block, first, data)
                yield from self.quota.write(self.path, write, len(data), reservation)
                return
            except FileNotFoundError:
                # The files of a cache in use were removed; mapped blocks live on.
                if attempt == 2:
                    raise
                self.unmap([number])

    # Blocks

    def _block(self, maps: BlockMaps, chunk: int, *, create: bool = False) -> MappedBlock | None:
        """Map the block of a chunk; return None if there is none, or if an evictor has locked it."""
        number = chunk // self.content.chunks_per_block
        block = maps.blocks[number]
        if block is not None:
            return block
        with self._lock:
            block = maps.blocks[number] or self._map(number, create)
            if block is not None:
                maps.add(block)
                maps.used[number] = self._tick
                if self.files.seal(self.maps.blocks[0]).read() == GOOD:
                    maps.good[:] = 1
        return block

    def version_key(self) -> str | None:
        """See `SealableReader`: that of the mapped file of an object of one block; None for other objects."""
        return self.files.version_key(self.maps.blocks[0] if self.maps.blocks else None)

    def _map(self, number: int, create: bool) -> MappedBlock | None:
        try:
            return self.files.map(number, create=create, release=self.release)
        except OSError as error:
            if create:
                raise
            warn_once(self.path, f"a block cannot be read: {error}")
            return None

    def release(self) -> None:
        """Unmap the least recently used quarter of the mapped blocks, but none that the current read uses."""
        mapped = [number for number in self.maps.mapped() if self.maps.used_at[number] < self._tick]
        self.unmap(mapped[: -(-len(mapped) // RELEASED_PART)])

    def unmap_idle(self) -> None:
        """Once a minute, mark the files of used blocks as used, and unmap the others."""
        now = self.clock()
        if now < self._check_idle_at:
            return
        self._check_idle_at = now + IDLE_SECONDS
        mapped = self.maps.mapped()
        idle = [number for number in mapped if self.maps.used_at[number] <= self._seen_tick]
        self._seen_tick = self._tick
        for number in mapped[len(idle) :]:
            self.files.touch(number)
        self.unmap(idle)

    def unmap(self, numbers: Sequence[int]) -> None:
        """Unmap blocks, so that they can be evicted once no view of them is left; a later read maps them again."""
        if numbers:
            with self._lock:
                self.maps = BlockMaps(self.content, self.maps, numbers)


def get_cached_object(directory: str, content: CachedContent, limit: int | None) -> CachedObject:
    """Return the one `CachedObject` of this process for a directory and content.

    Args:
        limit: bytes of all blocks in the directory; None: as many as leave a tenth of its file system free.
    """
    with _lock():
        key = (directory, content.key)
        cached = _objects.get(key)
        if cached is None:
            _objects[key] = cached = CachedObject(ObjectFiles(directory, content), limit, partial(get_quota, directory))
        elif cached.limit != limit:
            cached.change_limit(limit)
        return cached


def get_quota(directory: str, limit: int | None) -> CacheQuota:
    """Return the one quota of this process for a directory and limit; before evicting it unmaps blocks there.

    All limits share the files of the directory: the kernel's locks do not separate two descriptors of a process, and
    the first one that is closed drops those of both.
    """
    quota = _quotas.get((directory, limit))
    if quota is None:
        if (files := _quota_directories.get(directory)) is None:
            files = _quota_directories[directory] = QuotaDirectory(directory, partial(_release_all, directory))
        quota = _quotas[directory, limit] = CacheQuota(files, limit)
    return quota


def recount(directory: str) -> None:
    """Count the bytes of all blocks of a cache directory anew.

    Raises:
        OSError: its files cannot be written.
    """
    with _lock():
        quota = get_quota(os.path.abspath(directory), None)
    run(quota.recount())


def _release_all(directory: str) -> None:
    for key, cached in list(_objects.items()):
        if key[0] == directory:
            cached.release()


def _after_fork() -> None:
    for cached in list(_objects.values()):
        cached.after_fork()
    for quota in list(_quotas.values()):
        quota.after_fork()


_lock = ProcessLock()
_objects: weakref.WeakValueDictionary[tuple[str, str], CachedObject] = weakref.WeakValueDictionary()
_quotas: weakref.WeakValueDictionary[tuple[str, int | None], CacheQuota] = weakref.WeakValueDictionary()
_quota_directories: weakref.WeakValueDictionary[str, QuotaDirectory] = weakref.WeakValueDictionary()


os.register_at_fork(after_in_child=_after_fork)
