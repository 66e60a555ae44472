"""Fill disk caches in the background with the extents that the steps ahead read, while samples are read by ranges.

    extents of 8 MiB     0 1 2 3 4 5 6 7 ...      an extent is one request
    read ahead           9 % 0 11 % 8 % 10 % ...  share of it that this node reads in the steps ahead
    chosen               0 2 3 4                  those that pay, as many as there is room for, by first need
    filled               4 0 3 2                  by a few threads of one process of the node

An extent pays if its bytes arrive sooner than its needed bytes would by ranges: if the share exceeds the rate of ranges
divided by the rate of extents, both in bytes per second, both measured. Until they are, 1 % does.

Missing bytes of an object that is being filled are read as exact ranges, or are waited for if their extent is in flight
and expected sooner. A trainer that waits most of the time anyway waits for extents, those that it needs next first, if
all is filled in a few seconds. Blocks with chosen extents that a later step needs are not evicted, so a cache smaller
than its objects keeps what it has instead of exchanging it: with every future read known, that is Belady's rule,
applied to the blocks that a fill brought.

A process holds the node lock while it fills. The others wait for it, and one of them goes on if it is killed.

Source: ours; NoPFS (Dryden et al. 2021) for the known future, CoorDL (Mohan et al. 2020) for the cache that keeps.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from binidx.errors import CancelledReadError, warn_once
from binidx.storage.cache.block_files import block_path
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.eviction import CacheQuota
from binidx.storage.cache.fill_progress import FILL_PROBES, YIELD_SECONDS, FillProgress
from binidx.storage.cache.memory import Flight, chunks_of
from binidx.storage.cache.node_lock import acquire_node_lock
from binidx.storage.interfaces import RangeReader
from binidx.storage.ranges import as_composite
from binidx.storage.requests.cancellation import Scope, cancellable
from binidx.storage.stats import add_usage
from binidx.storage.threads import available_cores
from binidx.storage.usage_report import bytes_text

logger = logging.getLogger("binidx")

EXTENT_BYTES = 8 << 20
"""Bytes that one request fetches: at 25 ms to the first byte and 100 MB/s a connection is then 77 % busy."""

PAYING_SHARE = 0.01
"""Share of an extent that pays before rates are measured: ranges of 2.6 MB/s against extents of 273 (30 ms, S3)."""

FILLS_IN_FLIGHT = 8 if available_cores() <= 2 else 16
"""Extents in flight, at most an eighth of the requests that a process sends at once, so ranges find a connection.
On two cores 8 take a tenth less CPU than 16, whose bytes have left the cores' caches when they are written.
"""

ROOM_PART = 8
"""An eighth of the room of a cache stays for its tables, index files and chunks of other reads."""

FOREVER = np.iinfo(np.int64).max
"""Step of the last read of an extent that is to stay."""

DONE = b"filled"
"""Message of the process that filled all, for those that waited."""


@dataclass(frozen=True)
class ExtentUses:
    """Extents of some objects, and their use by the steps ahead; each array has shape (n,).

    Attributes:
        objects, numbers: number of the object, and of the extent in it.
        sizes: bytes of the extent.
        used: bytes of it that are read; counted twice if they are read twice.
        first, last: steps of the first and of the last read; -1: none.
    """

    objects: NDArray[np.int64]
    numbers: NDArray[np.int64]
    sizes: NDArray[np.int64]
    used: NDArray[np.float64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


def paying_share(range_rate: float = 0.0, extent_rate: float = 0.0) -> float:
    """Return the share of an extent that pays.

    Args:
        range_rate: needed bytes per second by ranges; 0: unknown.
        extent_rate: bytes per second by extents; 0: unknown.
    """
    return range_rate / extent_rate if range_rate > 0 and extent_rate > 0 else PAYING_SHARE


def choose_extents(uses: ExtentUses, share: float, room_bytes: float, step: int) -> NDArray[np.int64]:
    """Return the extents to have in the cache at a step, in the order of their first need.

    Of those that pay the most used ones fit first.

    Args:
        uses: what the steps ahead read.
        share: least share of an extent that pays; 0: all of those with a later step.
        room_bytes: bytes of extents that the cache has room for.
        step: number of the next step; extents without a later one are left out.
    """
    worth = uses.used / np.maximum(uses.sizes, 1)
    pays = np.flatnonzero((worth >= share) & (uses.last >= step))
    by_worth = pays[np.lexsort((uses.first[pays], -worth[pays]))]
    chosen = by_worth[np.cumsum(uses.sizes[by_worth]) <= room_bytes]
    ordered: NDArray[np.int64] = chosen[np.argsort(uses.first[chosen], kind="stable")]
    return ordered


class CacheFilling:
    """Filling of the disk caches of some objects, by daemon threads, from the first `advance` to `stop`.

    Args:
        readers: of the objects, in the numbering of `ExtentUses`; lazy ones are opened when they are filled.
        count_uses: returns what the steps ahead read; called in a thread, and only if this process fills.
        is_expected: whether most extents are likely to pay: missing bytes are then read by ranges from now on.

    Attributes:
        extent_bytes: bytes that one request fetches.
        choose_seconds, most_choose_seconds: shortest and longest time between two choices while the room is full.
        step: number of the next step.
        progress: extents in flight, and rates.
        thread: the thread that chooses; it ends when all is filled, and soon after `stop`.
    """

    extent_bytes, choose_seconds, most_choose_seconds = EXTENT_BYTES, 15.0, 480.0

    def __init__(
        self, readers: Sequence[RangeReader], count_uses: Callable[[], ExtentUses], *, is_expected: bool
    ) -> None:
        self.step = 0
        self.progress = FillProgress(self.extent_bytes, sum(reader.size for reader in readers) if is_expected else 0)
        self._readers, self._count_uses, self._is_expected = readers, count_uses, is_expected
        self._caches: dict[int, DiskCache | None] = {}
        self._scope = Scope()
        self._last_steps: dict[str, int] = {}
        self.thread = threading.Thread(target=self._run, name="binidx-fill", daemon=True)
        for number, reader in enumerate(readers):
            if isinstance(reader, DiskCache):
                self._cache_of(number)

    def advance(self, steps: int = 0) -> bool:
        """Count served steps; begin to fill at the first call, and return whether this was it."""
        self.step += steps
        is_first = self.thread.ident is None and not self._scope.cancelled
        if is_first:
            self.progress.begin()
            self.thread.start()
        return is_first

    def stop(self) -> None:
        """Stop filling: cancel the extents in flight. Extents that were filled stay."""
        self._scope.cancel()
        self.progress.bytes_left = 0
        self.progress.note_arrival()
        for cache in [*self._caches.values()]:
            if cache is not None and cache.cached.filling is self.progress:
                cache.cached.filling = None

    def needs(self, path: str) -> bool:
        """Return whether a later step needs an extent that is kept in a block, by the path of its file."""
        return self._last_steps.get(path, -1) >= self.step

    def _cache_of(self, number: int) -> DiskCache | None:
        """Return the disk cache of an object, None if it has none to fill; a lazy reader is opened for that."""
        if number not in self._caches:
            reader = self._readers[number]
            if (lazy := as_composite(reader)) is not None:
                reader = lazy.split([])[1][0][0]
            cache = reader if isinstance(reader, DiskCache) and reader.fill != "never" else None
            if cache is not None and self._is_expected:
                self.progress.objects[cache.content.key], cache.cached.filling = number, self.progress
            self._caches[number] = cache
        return self._caches[number]

    def _run(self) -> None:
        try:
            with cancellable(self._scope):
                self._fill_or_wait()
        except CancelledReadError:
            pass
        except Exception as error:
            warn_once(f"disk cache of {self._readers[0].uri}", f"not filled any more, reads go on: {error!r}")
        finally:
            self.stop()

    def _fill_or_wait(self) -> None:
        """Fill, if this is the first process of the node that would; else wait for that, and go on if it is killed."""
        cache = next(filter(None, map(self._cache_of, range(len(self._readers)))), None)
        if cache is None or not cache.cached.writable:
            return
        uris = "\n".join(reader.uri for reader in self._readers)
        path = os.path.join(cache.directory, f"filling-{xxhash.xxh3_128_hexdigest(uris.encode())}")
        is_done = False
        while not is_done:
            with acquire_node_lock(path, self._scope.check) as lock:
                if lock.first:
                    self._fill(cache.cached.quota, fills_all=cache.fill == "all")
                    lock.leave_message(DONE)
                is_done = lock.first or lock.message == DONE

    def _fill(self, quota: CacheQuota, *, fills_all: bool) -> None:
        """Fill what is chosen, and choose again, until all that pays is there, or not needed any more."""
        uses, began = self._count_uses(), time.monotonic()
        if fills_all:
            uses = replace(uses, last=np.full(len(uses.sizes), FOREVER))
        filled = np.zeros(len(uses.sizes), bool)
        pause, share = self.choose_seconds, 0.0

        def choose(room: float, step: int) -> NDArray[np.int64]:
            nonlocal share
            share = 0.0 if fills_all else paying_share(self.progress.ranges.rate, self.progress.extents.rate)
            return choose_extents(uses, share, room, step)

        quota.keepers.append(self.needs)
        try:
            while True:
                step = self.step  # before unmapping: what it needs no more can then be evicted for what is chosen
                self._unmap_unneeded()
                room = quota.capacity() * (1 - 1 / ROOM_PART)
                chosen = choose(room, step)
                missing = chosen[~filled[chosen]]
                self.progress.bytes_left = int(uses.sizes[missing].sum())
                if len(missing) and self._fetch(uses, missing, filled, lambda room=room: choose(room, self.step)):  # type: ignore[misc]
                    pause = self.choose_seconds
                elif len(chosen) == len(choose(math.inf, step)) and not len(missing):
                    break
                else:  # wait until extents in the room are not needed any more, or others have left room
                    Flight[int, None]().wait(pause)
                    pause = min(2 * pause, self.most_choose_seconds)
        finally:
            quota.keepers.remove(self.needs)
        if self.progress.extents.count:
            moved, seconds = bytes_text(self.progress.extents.num_bytes), time.monotonic() - began
            logger.info("%s: filled with %s in %.1f s; %.2g of an extent pays", quota.directory, moved, seconds, share)

    def _unmap_unneeded(self) -> None:
        """Unmap blocks that no later step needs in this process, so that they can be evicted."""
        for cache in filter(None, [*self._caches.values()]):
            paths = {number: block_path(cache.cached.path, number) for number in cache.cached.maps.mapped()}
            cache.cached.unmap([n for n, path in paths.items() if self._last_steps.get(path, FOREVER) < self.step])

    def _fetch(
        self,
        uses: ExtentUses,
        places: NDArray[np.int64],
        filled: NDArray[np.bool_],
        choose: Callable[[], NDArray[np.int64]],
    ) -> bool:
        """Fetch extents in several threads, and those that `choose` leaves out once rates are measured no more.

        Returns:
            False if there was no room for some.

        Raises:
            The first error; the other threads then end.
        """
        progress = self.progress
        pending, begun, errors = deque(places.tolist()), set[int](), list[BaseException | None]()
        probes, lock = 0 if progress.extents.count else FILL_PROBES, threading.Lock()
        extents = zip(uses.objects[places].tolist(), uses.numbers[places].tolist(), strict=True)
        progress.coming = dict(zip(extents, pending, strict=True)) if progress.ends_soon else {}

        def next_place() -> int | None:
            nonlocal pending, probes
            with lock:
                if 0 < probes <= progress.extents.count:
                    chosen, probes = begun | {*choose().tolist()}, 0
                    pending = deque(filter(chosen.__contains__, pending))
                    progress.coming = {extent: place for extent, place in progress.coming.items() if place in chosen}
                for queue in (progress.urgent, pending):
                    while queue:
                        if (place := queue.popleft()) not in begun and not filled[place]:
                            begun.add(place)
                            return place
            return None

        def work() -> None:
            try:
                with cancellable(self._scope):
                    while not errors and (place := next_place()) is not None:
                        if not self._fetch_extent(uses, place):
                            errors.append(None)
                        filled[place] = not errors
                        progress.bytes_left -= int(uses.sizes[place])
                        with lock:
                            progress.coming.pop((int(uses.objects[place]), int(uses.numbers[place])), None)
                        progress.note_arrival()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, name="binidx-fill", daemon=True) for _ in range(FILLS_IN_FLIGHT)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        progress.coming = {}  # where there was no room, nothing comes for a while
        progress.note_arrival()
        if error := next(filter(None, errors), None):
            raise error
        return not errors

    def _fetch_extent(self, uses: ExtentUses, place: int) -> bool:
        """Fetch the missing chunks of an extent, unless no later step needs it; return False if there is no room."""
        cache, start = self._cache_of(int(uses.objects[place])), int(uses.numbers[place]) * self.extent_bytes
        last, size = int(uses.last[place]), int(uses.sizes[place])
        if cache is None or last < self.step:
            return True
        cached, content = cache.cached, cache.content
        for number in range(start // content.block_bytes, -(-(start + size) // content.block_bytes)):
            path = block_path(cached.path, number)
            self._last_steps[path] = max(last, self._last_steps.get(path, -1))
        missing = cached.absent(chunks_of([(start, start + size)], content.chunk_bytes))
        if not missing:
            return True
        progress = self.progress
        if not progress.is_awaited:
            progress.calm.wait(YIELD_SECONDS)
        key, num_bytes = (content.key, start // self.extent_bytes), min(len(missing) * content.chunk_bytes, size)
        progress.in_flight[key] = time.monotonic()
        try:
            with progress.extents.measured(num_bytes):
                cache.fill_chunks(missing)
        finally:
            progress.in_flight.pop(key, None)
        if cached.absent(missing):
            return False
        add_usage({"filled extents": 1, "filled bytes": num_bytes})
        return True
