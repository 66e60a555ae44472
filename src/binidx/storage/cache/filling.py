"""Fill disk caches in the background with the extents that the steps ahead read, while samples are read by ranges.

    node lock      one process of the node fills; the others wait for it, and one of them goes on if it is killed
    rounds         the plan chooses extents; workers fetch them, each one at a time
    stop           the loader has ended: extents in flight are cancelled, filled ones stay

`fill_plan` decides which extents, in which order; `Filling` carries that out in steps, and `CacheFilling` has the
threads. Blocks that no later step needs are unmapped, so that they can be evicted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from binidx.errors import CancelledReadError, warn_once
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.eviction import CacheQuota
from binidx.storage.cache.fill_plan import YIELD_SECONDS, ExtentUses, FillPlan, FillSizes
from binidx.storage.cache.fill_progress import FillProgress
from binidx.storage.cache.memory import Flight, chunks_of
from binidx.storage.cache.node_lock import NodeLock, acquire_node_lock
from binidx.storage.interfaces import RangeReader
from binidx.storage.ranges import as_composite
from binidx.storage.requests.cancellation import Scope, cancellable
from binidx.storage.stats import add_usage
from binidx.storage.steps import Call, Now, Steps, run
from binidx.storage.threads import available_cores
from binidx.storage.usage_report import bytes_text

logger = logging.getLogger("binidx")

FILL_SIZES = FillSizes(in_flight=8 if available_cores() <= 2 else 16)
"""Extents in flight are at most an eighth of the requests that a process sends at once, so ranges find a connection.
On two cores 8 take a tenth less CPU than 16, whose bytes have left the cores' caches when they are written.
"""

DONE = b"filled"
"""Message of the process that filled all, for those that waited."""


class FillShell(Protocol):
    """Process of a filling: `CacheFilling`, or a simulated one; it cancels all that waits once the filling is stopped.

    Attributes:
        cache_of: returns the disk cache of an object, None if it has none to fill.
        opened: returns the caches that have been found so far.
        lock_node: locks the node for this filling, or waits for the process that has; `unlock_node` follows.
        count_uses: returns what the steps ahead read.
        work: carries out steps beside each other, to the end of all.
        wait_until_calm: waits while the trainer waits for ranges, at most for some seconds.
    """

    def cache_of(self, number: int) -> DiskCache | None: ...
    def opened(self) -> list[DiskCache]: ...
    def lock_node(self) -> NodeLock: ...
    def unlock_node(self) -> None: ...
    def count_uses(self) -> ExtentUses: ...
    def work(self, workers: Sequence[Steps[None]]) -> None: ...
    def pause(self, seconds: float) -> None: ...
    def wait_until_calm(self, seconds: float) -> None: ...


class Filling:
    """Steps of a filling."""

    def __init__(self, progress: FillProgress, shell: FillShell) -> None:
        self._progress, self._plan, self._shell = progress, progress.plan, shell
        self._errors: list[BaseException] = []

    def fill_or_wait(self, quota: CacheQuota, *, fills_all: bool) -> Steps[None]:
        """Fill, if this is the first process of the node that would; else wait for that, and go on if it is killed."""
        is_done = False
        while not is_done:
            lock = yield Call(self._shell.lock_node)
            try:
                if lock.first and (yield from self._fill(quota, fills_all)):
                    lock.leave_message(DONE)
                is_done = lock.first or lock.message == DONE
            finally:
                yield Call(self._shell.unlock_node)

    def _fill(self, quota: CacheQuota, fills_all: bool) -> Steps[bool]:
        """Fill what is chosen, and choose again, until all that pays is there, or not needed any more.

        Returns:
            False if the filling was stopped before.
        """
        plan = self._plan
        plan.count((yield Call(self._shell.count_uses)), keeps_all=fills_all)
        quota.keepers.append(plan.needs)
        try:
            while True:
                step = plan.step  # before unmapping: what it needs no more can then be evicted for what is chosen
                self._unmap_unneeded()
                now, capacity = (yield Now()), quota.capacity()
                # Without the lock, as a choice of 10 TiB takes a second: no worker runs, and reads do not change it.
                pause = plan.choose(capacity, step, now)
                if pause is None:
                    return not plan.has_ended
                if pause:
                    yield Call(self._shell.pause, (pause,))
                else:
                    yield from self._fetch_round()
        finally:
            quota.keepers.remove(plan.needs)

    def _unmap_unneeded(self) -> None:
        """Unmap blocks that no later step needs in this process, so that they can be evicted."""
        for cache in self._shell.opened():
            numbers = {cache.cached.files.block_path(number): number for number in cache.cached.maps.mapped()}
            cache.cached.unmap([numbers[path] for path in self._plan.unneeded(numbers)])

    def _fetch_round(self) -> Steps[None]:
        """Fetch the chosen extents by several workers.

        Raises:
            The first error; the other workers then end.
        """
        yield Call(self._shell.work, ([self._work() for _ in range(self._plan.sizes.in_flight)],))
        with self._progress.lock:
            self._plan.end_round()
        self._progress.note_arrival()
        if self._errors:
            raise self._errors[0]

    def _work(self) -> Steps[None]:
        plan, lock = self._plan, self._progress.lock
        try:
            while True:
                now = yield Now()
                with lock:
                    place = plan.next(now)
                if place is None:
                    return
                has_room = yield from self._fetch_extent(place)
                with lock:
                    plan.end_extent(place, has_room=has_room)
                self._progress.note_arrival()
        except BaseException as error:
            self._errors.append(error)
            plan.end()

    def _fetch_extent(self, place: int) -> Steps[bool]:
        """Fetch the missing chunks of an extent, unless no later step needs it; return False if there is no room."""
        plan, lock, size = self._plan, self._progress.lock, int(self._plan.uses.sizes[place])
        number = int(plan.uses.numbers[place])
        cache, start = self._shell.cache_of(int(plan.uses.objects[place])), number * plan.sizes.extent_bytes
        if cache is None or not plan.is_needed(place):
            return True
        cached, content = cache.cached, cache.content
        blocks = range(start // content.block_bytes, -(-(start + size) // content.block_bytes))
        plan.keep(place, map(cached.files.block_path, blocks))
        missing = cached.absent(chunks_of([(start, start + size)], content.chunk_bytes))
        if not missing:
            return True
        if plan.yields((yield Now())):
            yield Call(self._shell.wait_until_calm, (YIELD_SECONDS,))
        key, num_bytes, read = (content.key, number), min(len(missing) * content.chunk_bytes, size), 0
        now = yield Now()
        with lock:
            plan.begin_fetch(key, now)
        try:
            yield Call(cache.fill_chunks, (missing,))
            read = 0 if cached.absent(missing) else num_bytes
        finally:
            now = yield Now()
            with lock:
                plan.end_fetch(key, read, now)
        if not read:
            return False
        add_usage({"filled extents": 1, "filled bytes": read})
        return True


class CacheFilling:
    """Filling of the disk caches of some objects, by daemon threads, from the first `advance` to `stop`.

    Args:
        readers: of the objects, in the numbering of `ExtentUses`; lazy ones are opened when they are filled.
        count_uses: returns what the steps ahead read; called in a thread, and only if this process fills.
        is_expected: whether most extents are likely to pay: missing bytes are then read by ranges from now on.
        sizes: of the filling.

    Attributes:
        progress: extents in flight, and rates.
        thread: the thread that chooses; it ends when all is filled, and soon after `stop`.
    """

    def __init__(
        self,
        readers: Sequence[RangeReader],
        count_uses: Callable[[], ExtentUses],
        *,
        is_expected: bool,
        sizes: FillSizes = FILL_SIZES,
    ) -> None:
        self._readers, self._count_uses, self._is_expected = readers, count_uses, is_expected
        self.plan = FillPlan(sizes, sum(reader.size for reader in readers) if is_expected else 0)
        self.progress = FillProgress(self.plan)
        self._caches: dict[int, DiskCache | None] = {}
        self._scope, self._node_lock = Scope(), contextlib.ExitStack()
        self.thread = threading.Thread(target=self._run, name="binidx-fill", daemon=True)
        for number, reader in enumerate(readers):
            if isinstance(reader, DiskCache):
                self.cache_of(number)

    def advance(self, steps: int = 0) -> bool:
        """Count served steps; begin to fill at the first call, and return whether this was it."""
        self.plan.step += steps
        is_first = self.thread.ident is None and not self._scope.cancelled
        if is_first:
            self.plan.begin(time.monotonic())
            self.thread.start()
        return is_first

    def stop(self) -> None:
        """Stop filling: cancel the extents in flight. Extents that were filled stay."""
        self._scope.cancel()
        self.plan.end()
        self.progress.note_arrival()
        for cache in self.opened():
            if cache.cached.filling is self.progress:
                cache.cached.filling = None

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
        cache = next(filter(None, map(self.cache_of, range(len(self._readers)))), None)
        if cache is None or not cache.cached.writable:
            return
        began, extents = time.monotonic(), self.plan.extents
        uris = "\n".join(reader.uri for reader in self._readers)
        self._lock_path = os.path.join(cache.directory, f"filling-{xxhash.xxh3_128_hexdigest(uris.encode())}")
        try:
            run(Filling(self.progress, self).fill_or_wait(cache.cached.quota, fills_all=cache.fill == "all"))
        finally:
            if extents.count:
                moved, seconds = bytes_text(extents.num_bytes), time.monotonic() - began
                about = f"filled with {moved} in {seconds:.1f} s; {self.plan.share:.2g} of an extent pays"
                logger.info("%s: %s", cache.directory, about)

    # FillShell

    def cache_of(self, number: int) -> DiskCache | None:
        """Return the disk cache of an object, None if it has none to fill; a lazy reader is opened for that."""
        if number not in self._caches:
            reader = self._readers[number]
            if (composite := as_composite(reader)) is not None:
                _, reads = composite.split([])
                reader = reads[0][0] if reads else reader  # that of a lazy one; others split nothing into nothing
            cache = reader if isinstance(reader, DiskCache) and reader.fill != "never" else None
            if cache is not None and self._is_expected:
                self.plan.objects[cache.content.key], cache.cached.filling = number, self.progress
            self._caches[number] = cache
        return self._caches[number]

    def opened(self) -> list[DiskCache]:
        """Return the caches that have been found so far."""
        return [cache for cache in [*self._caches.values()] if cache is not None]

    def count_uses(self) -> ExtentUses:
        return self._count_uses()

    def lock_node(self) -> NodeLock:
        return self._node_lock.enter_context(acquire_node_lock(self._lock_path, self._scope.check))

    def unlock_node(self) -> None:
        self._node_lock.close()

    def work(self, workers: Sequence[Steps[None]]) -> None:
        def carry_out(steps: Steps[None]) -> None:
            with cancellable(self._scope):
                run(steps)

        threads = [
            threading.Thread(target=carry_out, args=(steps,), name="binidx-fill", daemon=True) for steps in workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def pause(self, seconds: float) -> None:
        Flight[int, None]().wait(seconds)

    def wait_until_calm(self, seconds: float) -> None:
        self.progress.calm.wait(seconds)
