"""Worlds of one node: processes with threads that read through one disk cache, and may fill it, in virtual time.

    disk        blocks as real bytes, the record of the quota, all locks; full, slow, or lost without its unsynced pages
    store       objects that answer late, refuse, or change
    process     real `CachedObject`, `ChunkFetcher`, `CacheQuota`, `Filling`, `FillPlan` over the simulated files
    faults      drawn from the seed: kills, stops, forks, cancelled reads, ended loaders, a full disk, a lost node

`CacheWorld(seed).run()` checks the claims of `check` after each event, and those of `finish` at the end.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import random
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from simulation.processes import Node, Objects, Process, Signal, Task
from simulation.world import World

from binidx.errors import CancelledReadError, ObjectChangedError, StorageError
from binidx.storage import effects
from binidx.storage.cache.block_files import ENTRY_BYTES, CachedContent, MappedBlock
from binidx.storage.cache.cached_object import BlockMaps, CachedObject
from binidx.storage.cache.chunk_fetch import ChunkFetcher, FetchSizes
from binidx.storage.cache.eviction import BlockFile, CacheQuota, Change, Usage
from binidx.storage.cache.fill_plan import ExtentUses, FillPlan, FillSizes
from binidx.storage.cache.fill_progress import FillProgress
from binidx.storage.cache.filling import Filling
from binidx.storage.cache.memory import Flight, chunks_of, runs_of
from binidx.storage.cache.node_lock import NodeLock
from binidx.storage.cache.seals import Seal
from binidx.storage.effects import Call, Sleep, Steps
from binidx.storage.interfaces import Range

CHUNK, EXTENT, BLOCK = 64, 128, 256
SIZES = FetchSizes(at_once=4 * CHUNK, request=2 * CHUNK)
END = 4_000.0
"""Virtual time by which all has ended: faults stop after `FAULTS` seconds, and no pause is longer than 480."""
FAULTS = 30.0


class SimulatedBlock(MappedBlock):
    """Block that a process has mapped; its file is locked while this lives, and its process."""

    def __init__(self, file: BlockData, content: CachedContent, number: int, process: CacheProcess) -> None:
        self.file, self.process = file, process
        self.number, self.inode, self._content = number, (0, id(file)), content
        self._offset, self._chunk_bytes = content.table_bytes(number), content.chunk_bytes
        self._first_chunk = number * content.chunks_per_block
        whole = memoryview(file.bytes).toreadonly()
        self._table, self.data = whole[: self._offset], whole[self._offset :]
        self.address = int(np.frombuffer(self.data, np.uint8).ctypes.data)
        file.mapped.add(self)

    def read_ahead(self, chunk: int) -> None:
        """All is in memory."""


class BlockData:
    """File of a block: its bytes, what is not synced of them, and the bytes on the disk of each written chunk."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes, self.used_at = bytearray(num_bytes), 0.0
        self.unsynced: list[tuple[int, bytes]] = []
        self.cut: set[int] = set()
        """Places of chunks whose checksums are written in part: for good, if the process is killed meanwhile."""
        self.chunks: dict[int, int] = {}
        self.mapped: weakref.WeakSet[SimulatedBlock] = weakref.WeakSet()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        self.unsynced.append((offset, bytes(self.bytes[offset : offset + len(data)])))
        self.bytes[offset : offset + len(data)] = data

    def disk_bytes(self) -> int:
        return sum(self.chunks.values())

    def is_locked(self) -> bool:
        return any(block.process.is_alive for block in self.mapped)

    def lose(self, chance: random.Random) -> None:
        """Lose any of the pages that are not synced."""
        for offset, before in reversed(self.unsynced):
            if chance.random() < 0.5:
                self.bytes[offset : offset + len(before)] = before
        self.unsynced.clear()


@dataclass
class NodeLockFile:
    holder: CacheProcess | None = None
    message: bytes = b""


@dataclass
class Disk:
    """Disk of the node, which all its processes see."""

    capacity: int
    files: dict[str, BlockData] = field(default_factory=dict)
    record: Usage = field(default_factory=Usage)
    holders: dict[Any, CacheProcess] = field(default_factory=dict)
    """Of each lock: the process that holds it."""
    node_lock: NodeLockFile | None = None
    slowness: float = 1.0
    is_full: bool = False
    has_locks: bool = True
    slack: int = 0
    """Bytes by which the blocks may exceed the limit: those that a count has left out, at most."""

    def num_bytes(self) -> int:
        return sum(file.disk_bytes() for file in self.files.values())

    def try_lock(self, name: Any, process: CacheProcess) -> bool:
        if not self.has_locks:
            return True
        return self.holders.setdefault(name, process) is process

    def unlock(self, name: Any, process: CacheProcess) -> None:
        if self.holders.get(name) is process:
            del self.holders[name]

    def has_entry(self, path: str, content: CachedContent, chunk: int) -> bool:
        """Return whether a chunk has a checksum, also if that is wrong."""
        file, place = self.files.get(path), chunk % content.chunks_per_block
        return file is not None and any(file.bytes[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])

    def is_good(self, path: str, content: CachedContent, chunk: int) -> bool:
        """Return whether a chunk lies there, whole."""
        file, block = self.files.get(path), chunk // content.chunks_per_block
        if file is None:
            return False
        place, offset = chunk % content.chunks_per_block, content.table_bytes(block)
        entry = bytes(file.bytes[place * ENTRY_BYTES : (place + 1) * ENTRY_BYTES])
        start, stop = content.range_of(chunk, chunk + 1)
        data = bytes(file.bytes[offset + place * CHUNK :][: stop - start])
        return any(entry) and entry == content.entry_of(chunk, data)


class StoredObject:
    """Object in the store, whose content may change."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size, self.version = number, size, 0

    def bytes_of(self, version: int) -> bytes:
        return random.Random(1000 * self.number + version).randbytes(self.size)

    def content(self, version: int) -> CachedContent:
        return CachedContent(f"s3://bucket/{self.number}", self.size, {"etag": str(version)}, "raw", CHUNK, BLOCK)


class CacheProcess(Process):
    """Process of the node: its quota, and the objects that it has open."""

    def __init__(self, world: CacheWorld, name: str) -> None:
        super().__init__(world.world, world.node, Objects(world.world), name, pause=0.0005)
        self.cache_world, self.disk = world, world.disk
        self.writing: set[Any] = set()
        self.is_counting = False
        self.scopes: dict[str, Signal] = {}
        self.current: Task | None = None
        self.is_refused: dict[str, bool] = {}
        """Of each task: whether other processes held chunks that it wanted to lock last."""
        self.stopped_seconds = 0.0
        self.quota = CacheQuota(SimulatedQuotaFiles(self), world.limit)  # type: ignore[arg-type]
        self.opened: dict[int, OpenedObject] = {}
        self.filling: SimulatedFilling | None = None
        self.on_kill.append(self._release)

    def open(self, number: int) -> OpenedObject:
        if number not in self.opened:
            self.opened[number] = OpenedObject(self, self.cache_world.objects[number])
        return self.opened[number]

    def forked(self, name: str) -> CacheProcess:
        """Return a child: it has what this one has mapped, and none of its threads."""
        child = CacheProcess(self.cache_world, name)
        child.quota = copy.copy(self.quota)
        child.quota.files = SimulatedQuotaFiles(child)  # type: ignore[assignment]
        child.opened = {number: opened.forked(child) for number, opened in self.opened.items()}
        child.quota.after_fork()
        return child

    @property
    def task_name(self) -> str:
        """Name of the running thread."""
        return self.current.name if self.current else ""

    def scope(self) -> Signal:
        """Return the signal that cancels the running task."""
        name = self.task_name
        return max(
            ((key, signal) for key, signal in self.scopes.items() if name.startswith(key)), default=("", Signal())
        )[1]

    def _resume(self, task: Task, num_resumed: int, value: Any, error: BaseException | None) -> str | None:
        self.current = task
        action = super()._resume(task, num_resumed, value, error)
        if task.error is not None and not isinstance(task.error, OSError):  # of which StorageError is one
            self.cache_world.violations.append(f"{task.name} raises {task.error!r}")
        return action

    def _release(self) -> None:
        for name in [name for name, holder in self.disk.holders.items() if holder is self]:
            del self.disk.holders[name]
        if self.disk.node_lock is not None and self.disk.node_lock.holder is self:
            self.disk.node_lock.holder = None


class SimulatedQuotaFiles:
    """`eviction.QuotaFiles` on the simulated disk."""

    def __init__(self, process: CacheProcess) -> None:
        self.process, self.disk, self.world = process, process.disk, process.cache_world
        self.excess: dict[str, float] = {}  # thread -> bytes that it is still to remove, by its own count

    def read(self) -> tuple[Usage, float]:
        return self.disk.record, 1e9 + self.world.world.now

    def disk_excess(self) -> int:
        return self.disk.capacity // 10 - (self.disk.capacity - self.disk.num_bytes())

    def update(self, change: Change) -> Steps[tuple[Usage, float]]:
        is_ours = yield from self._lock("record", 2.0)
        try:
            if self.world.world.now < self.world.breaks_until and self.world.world.random.random() < 0.5:
                raise OSError(errno.EIO, "the record cannot be written")
            before, now = self.read()
            after = change(before, now)
            yield Sleep(1e-6)
            self.disk.record = after
            if after.failed_at != before.failed_at and self.world.is_exact:
                self.world.check_full(self.process, self.counted, self.refused_paths)
            self.world.check_record(self.process)
            return after, now
        finally:
            if is_ours:
                self.disk.unlock("record", self.process)

    def count(self, change: Callable[[int, float], Usage]) -> Steps[tuple[list[BlockFile], Usage]]:
        process = self.process
        is_old = not 1.0 <= 1e9 + self.world.world.now - self.disk.record.counted_at <= 3600.0
        if self.world.is_exact and not is_old and self.disk.holders.get("evictor") is not process:
            self.world.violations.append("blocks are counted without need")
        self.refused_paths: set[str] = set()
        while process.is_counting:
            yield Sleep(0.001)
        process.is_counting = True
        try:
            while process.writing:
                yield Sleep(0.001)
            is_ours = yield from self._lock("record", 2.0)
            try:
                blocks = [BlockFile(path, file.disk_bytes(), file.used_at) for path, file in self.disk.files.items()]
                needs = self.process.quota.keepers  # now: a filling may end during the eviction
                self.counted = {block.path for block in blocks if not any(need(block.path) for need in needs)}
                self.disk.slack = max(self.disk.slack, self.world.coming_of_others(process))
                yield Sleep(0.001 * len(blocks) * self.disk.slowness)
                usage = change(sum(block.num_bytes for block in blocks), 1e9 + self.world.world.now)
                self.disk.record, self.sizes = usage, {block.path: block.num_bytes for block in blocks}
                excess = usage.used - (self.world.limit or 0)
                goal = excess + (self.world.limit or 0) // 16 if excess > 0 else 0
                self.excess[self.caller] = goal
                self.disk.slack = max(self.disk.slack, self.world.coming_of_others(process))
                return blocks, usage
            finally:
                if is_ours:
                    self.disk.unlock("record", process)
        finally:
            process.is_counting = False

    def write(self, path: str, write: Callable[[], Steps[None]], written: Callable[[], None]) -> Steps[None]:
        while self.process.is_counting or path in self.process.writing:
            yield Sleep(0.001)
        self.process.writing.add(path)
        try:
            yield from write()
            written()
        finally:
            self.process.writing.discard(path)

    def begin_eviction(self) -> Steps[bool]:
        return (yield from self._lock("evictor", 5.0))

    def end_eviction(self) -> Steps[None]:
        self.disk.unlock("evictor", self.process)
        yield Sleep(0.0)

    def remove(self, path: str) -> Steps[bool]:
        if path in self.disk.files:
            self.world.check_order(self.process, path)
        if self.excess.get(self.caller, 0) <= 0 and self.world.limit is not None:
            self.world.violations.append(f"{path} is evicted, and enough is free")
        yield Sleep(0.002 * self.disk.slowness)
        file = self.disk.files.get(path)
        if file is not None:
            if file.is_locked() or not self.disk.has_locks:
                self.refused_paths.add(path)
                return False
            self.world.check_need(self.process, path)
            self.world.counts["removed"] += 1
            del self.disk.files[path]
        self.excess[self.caller] -= self.sizes[path]
        return True

    def release(self) -> None:
        for opened in self.process.opened.values():
            opened.cached.release()

    def warn(self, problem: str) -> None:
        """Log nothing."""

    def renew_locks(self) -> None:
        self.process.writing, self.process.is_counting = set(), False

    counted: frozenset[str] | set[str] = frozenset()
    sizes: Mapping[str, int]
    """Bytes of the counted blocks."""

    @property
    def caller(self) -> str:
        """Name of the thread that calls the running steps."""
        return self.process.task_name.rpartition(" ")[0]

    def _lock(self, name: str, seconds: float) -> Steps[bool]:
        """Wait for a lock of one thread of one process, at most for some seconds."""
        deadline, pause = self.world.world.now + seconds, 0.0005
        while True:
            holder = self.disk.holders.get(name)
            if not self.disk.has_locks or holder is None or not holder.is_alive:
                if self.disk.has_locks:
                    self.disk.holders[name] = self.process
                return True
            if self.world.world.now >= deadline:
                return False
            yield Sleep(pause)
            pause = min(2 * pause, 0.02)


class SimulatedFiles:
    """`ObjectFiles` on the simulated disk."""

    directory = "cache"

    def __init__(self, process: CacheProcess, content: CachedContent) -> None:
        self.process, self.disk, self.content = process, process.disk, content
        self.path = f"cache/{content.key[:6]}"

    def exists(self) -> bool:
        return True

    def prepare_to_write(self) -> None:
        """The directory exists."""

    def block_path(self, number: int) -> str:
        return f"{self.path}/{number}"

    def map(self, number: int, *, create: bool, release: Callable[[], None]) -> MappedBlock | None:
        path = self.block_path(number)
        if path not in self.disk.files:
            if not create:
                return None
            if self.disk.is_full:
                raise OSError(errno.ENOSPC, "No space left")
            self.disk.files[path] = BlockData(self.content.file_bytes(number))
        self.touch(number)
        return SimulatedBlock(self.disk.files[path], self.content, number, self.process)

    def write(self, block: SimulatedBlock, first: int, data: memoryview) -> Steps[None]:
        path, content, chance = self.block_path(block.number), self.content, self.process.world.random
        pause = 0.0001 * self.disk.slowness
        yield Sleep(pause)
        if self.disk.files.get(path) is not block.file:
            raise FileNotFoundError(errno.ENOENT, "block was replaced", path)
        place, offset = first % content.chunks_per_block, content.table_bytes(block.number)
        cut = chance.randrange(len(data) + 1)
        numbers = range(place, place - (-len(data) // CHUNK))
        sizes = {number: min(CHUNK, len(data) - (number - place) * CHUNK) for number in numbers}
        block.file.write(offset + place * CHUNK, data[:cut])
        block.file.chunks |= {number: size for number, size in sizes.items() if (number - place) * CHUNK < cut}
        yield Sleep(pause)
        if self.disk.is_full:
            self.process.world.later(1.0, "world", "pause?", self._check_pause, self.process.world.now)
            raise OSError(errno.ENOSPC, "No space left")
        block.file.write(offset + place * CHUNK + cut, data[cut:])
        block.file.chunks |= sizes
        yield Sleep(pause)
        entries = b"".join(
            content.entry_of(first + step, data[step * CHUNK : (step + 1) * CHUNK]) for step in range(len(numbers))
        )
        cut = chance.randrange(len(entries) + 1)
        block.file.write(place * ENTRY_BYTES, entries[:cut])
        is_cut = {place + cut // ENTRY_BYTES} if cut % ENTRY_BYTES else set()
        block.file.cut |= is_cut
        yield Sleep(pause)
        block.file.write(place * ENTRY_BYTES + cut, entries[cut:])
        block.file.cut -= is_cut

    def _check_pause(self, failed_at: float) -> None:
        process = self.process
        is_late = process.is_alive and process.world.now >= process.stopped_until
        if is_late and self.process.cache_world.is_exact and process.quota.paused_until < failed_at + 10.0:
            process.cache_world.violations.append("a write has failed, and caching goes on")

    def touch(self, number: int) -> None:
        if self.block_path(number) in self.disk.files:
            self.disk.files[self.block_path(number)].used_at = self.process.world.now

    def refresh(self, number: int) -> None:
        """There is no other node."""

    def version_key(self, block: MappedBlock | None) -> None:
        return None

    def seal(self, block: MappedBlock | None) -> Seal:
        return Seal()

    def lock_chunks(self, chunks: Sequence[int]) -> list[tuple[int, int]]:
        locked = [chunk for chunk in chunks if self.disk.try_lock((self.path, chunk), self.process)]
        self.process.is_refused[self.process.task_name] = len(locked) < len(chunks)
        return runs_of(locked)

    def unlock_chunks(self, runs: Sequence[tuple[int, int]]) -> None:
        for run in runs:
            for chunk in range(*run):
                self.disk.unlock((self.path, chunk), self.process)


class SimulatedSource:
    """`ChunkSource` of an object in the simulated store."""

    def __init__(self, opened: OpenedObject) -> None:
        self.opened, self.process = opened, opened.process
        self.world, self._looks = self.process.cache_world, 0

    def read(self, ranges: Sequence[Range]) -> Steps[list[memoryview]]:
        chunks = chunks_of(ranges, CHUNK)
        return self.opened.fetch(ranges, self.world.fetching(self.opened, chunks), self.process.scope())

    def check(self) -> None:
        if self.opened.stored.version != self.opened.version:
            raise ObjectChangedError("changed")

    def wait(self, flight: Flight[int, None], seconds: float) -> Steps[Mapping[int, None]]:
        if not flight.keys and not self.process.is_refused[self.process.task_name]:
            self.world.violations.append("a thread waits for chunks that nobody fetches")
        return wait_for(flight, seconds, self.process.scope())

    def cpu_seconds(self) -> float:
        self._looks += 1
        return 1e-4 * self._looks

    def add(self, **counts: float) -> None:
        self.world.counts["damaged"] += int(counts.get("damaged", 0))


def wait_for(flight: Flight[int, None], seconds: float, scope: Signal) -> Steps[Mapping[int, None]]:
    """Wait as `Flight.wait` does."""
    signal = Signal()
    scope.waiting.append(signal.set)
    flight._landed.add_done_callback(lambda _: signal.set())
    if not scope.is_set:
        yield effects.WaitForSignal(signal, seconds)
    if scope.is_set:
        raise CancelledReadError("cancelled")
    return {}


class OpenedObject:
    """Object that a process has open: what `DiskCache` has."""

    def __init__(self, process: CacheProcess, stored: StoredObject) -> None:
        self.process, self.stored, self.version = process, stored, stored.version
        self.content = stored.content(self.version)
        self.data = stored.bytes_of(self.version)
        files, clock = SimulatedFiles(process, self.content), lambda: process.world.now
        self.cached = CachedObject(files, 0, lambda limit: process.quota, clock)  # type: ignore[arg-type]
        self._make_fetcher()

    def _make_fetcher(self) -> None:
        self.fetcher = ChunkFetcher(self.cached, SimulatedSource(self), SIZES, (30.0, 0.5))

    def forked(self, child: CacheProcess) -> OpenedObject:
        """Return the same in a forked child, which holds the locks of mapped blocks, too."""
        own = copy.copy(self)
        own.process, own.cached = child, copy.copy(self.cached)
        own.cached.files = SimulatedFiles(child, self.content)  # type: ignore[assignment]
        own.cached._quota, own.cached._open_quota = child.quota, lambda limit: child.quota
        own.cached.maps = BlockMaps(self.content, self.cached.maps)
        blocks: list[SimulatedBlock] = self.cached.maps.blocks  # type: ignore[assignment]
        own.cached.maps.blocks = [
            block and SimulatedBlock(block.file, block._content, block.number, child) for block in blocks
        ]
        own.cached.after_fork()
        own._make_fetcher()
        return own

    def fill_chunks(self, missing: Sequence[int]) -> Steps[None]:
        return self.fetcher.fetch(missing)

    def read(self, ranges: Sequence[Range]) -> Steps[None]:
        """Read as `DiskCache` does, and compare all bytes."""
        cached, filling = self.cached, self.cached.filling
        cached.unmap_idle()
        views, missing, _ = cached.views(ranges)
        if missing:
            chunks = cached.check_chunks(chunks_of(ranges, CHUNK))
            if chunks:
                wanted = (yield from filling.chunks_to_await(self.content, chunks)) if filling else chunks
                yield Call(self.fill_chunks, (wanted,))
            views, _, _ = cached.views(ranges)
            exact = [place for place, view in zip(ranges, views, strict=True) if view is None]
            if exact:
                scope = self.process.scope()
                self.process.cache_world.counts["exact"] += 1
                num_bytes = sum(stop - start for start, stop in exact)
                with filling.measuring_ranges(num_bytes) if filling else contextlib.nullcontext():
                    began, read = self.process.world.now, 0
                    try:
                        answers = iter((yield Call(self.fetch, (exact, None, scope))))
                        read = num_bytes
                    finally:
                        if filling:
                            plan: WatchedPlan = filling.plan  # type: ignore[assignment]
                            plan.durations["ranges"] += [self.process.world.now - began] if read else []
                            plan.spans["ranges"].append((began, self.process.world.now, read))
                if self.stored.version != self.version:
                    raise ObjectChangedError("changed")
                views = [next(answers) if view is None else view for view in views]
        for view, (start, stop) in zip(views, ranges, strict=True):
            assert view is not None
            assert bytes(view) == self.data[start:stop], f"wrong bytes of {self.content.uri} at {start}"
        self.process.cache_world.counts["reads"] += 1

    def fetch(self, ranges: Sequence[Range], about: Fetch | None, scope: Signal) -> Steps[list[memoryview]]:
        """Read from the store."""
        world = self.process.cache_world
        world.counts["requests"] += len(ranges)
        try:
            for _ in range(3):
                if scope.is_set:
                    raise CancelledReadError("cancelled")
                yield Sleep(world.latency() / 3)
            if world.refuses():
                error = StorageError(f"refused {len(world.refused)}")
                world.refused.append(error)
                raise error
            data = self.stored.bytes_of(self.stored.version)
            return [memoryview(data[start:stop]) for start, stop in ranges]
        finally:
            if about is not None:
                world.fetches.remove(about)


@dataclass(eq=False)
class Fetch:
    """Chunks of an object that a process is fetching into the directory."""

    process: CacheProcess
    key: str
    chunks: frozenset[int]


class WatchedPlan(FillPlan):
    """Plan whose answers are compared with what the trainer, the requests and the disk show."""

    def __init__(self, sizes: FillSizes, bytes_left: int, filling: SimulatedFilling) -> None:
        super().__init__(sizes, bytes_left)
        self.filling, self.total = filling, bytes_left
        self.durations: dict[str, list[float]] = {"ranges": [], "extents": []}
        self.spans: dict[str, list[tuple[float, float, int]]] = {"ranges": [], "extents": []}
        self.round: list[int] = []
        self.hurried: set[int] = set()
        self.pause, self.was_full = sizes.choose_seconds, False

    def fail(self, problem: str) -> None:
        self.filling.world.violations.append(problem)

    def is_awaited(self, now: float) -> bool:
        answer, trainer = super().is_awaited(now), self.filling
        waited = trainer.waited + (now - trainer.waits_since if trainer.waits_since is not None else 0.0)
        if abs(waited - 0.5 * (now - trainer.began)) > 1e-9 and answer != (waited > 0.5 * (now - trainer.began)):
            self.fail(f"the trainer has waited {waited:.3f} s of {now - trainer.began:.3f}")
        return answer

    def ends_soon(self, now: float) -> bool:
        answer = super().ends_soon(now)
        if answer and (self.has_ended or self.bytes_left <= 0 or now > self.filling.began + 30.0):
            self.fail("nothing is left to end soon")
        if not 0 <= self.bytes_left <= self.total:
            self.fail(f"{self.bytes_left} bytes of {self.total} are left")
        return answer

    def chunks_to_await(self, content: CachedContent, chunks: Sequence[int], now: float) -> list[int]:
        answer = super().chunks_to_await(content, chunks, now)
        means = [sum(times) / len(times) if times else np.inf for times in self.durations.values()]
        for chunk in chunks:
            sent = self.in_flight.get((content.key, chunk * CHUNK // EXTENT))
            is_sooner = sent is not None and np.isfinite(means[1]) and sent + means[1] < now + means[0] - 1e-9
            is_later = sent is None or not np.isfinite(means[1]) or sent + means[1] > now + means[0] + 1e-9
            if (chunk in answer and is_later) or (chunk not in answer and is_sooner):
                self.fail(f"chunk {chunk} comes sooner otherwise")
        return answer

    def coming(self, content: CachedContent, chunks: Sequence[int], now: float) -> list[int]:
        answer = super().coming(content, chunks, now)
        if answer and not (self.is_awaited(now) and self.ends_soon(now)):
            self.fail("a trainer waits for extents that does not have to")
        wanted = {(content.key, chunk * CHUNK // EXTENT) for chunk in chunks}
        for place in answer:
            owner = self.filling.caches[int(self.uses.objects[place])].content.key
            if (owner, int(self.uses.numbers[place])) not in wanted or self.filled[place]:
                self.fail(f"extent {place} does not bring what is waited for")
        self.hurried |= {*answer}
        return answer

    def choose(self, capacity: int, step: int, now: float) -> float | None:
        pause = super().choose(capacity, step, now)
        self._check_share(now)
        if pause == 0.0:
            self.round, self.room = [], 0.875 * capacity
            if self.bytes_left != (left := sum(self.uses.sizes[[*self._pending]])):
                self.fail(f"{self.bytes_left} bytes are left, and {left} of them are chosen")
        elif pause:
            if pause != self.pause:
                self.fail(f"a pause of {pause} s, not {self.pause}")
            self.pause = min(2 * pause, self.sizes.most_choose_seconds)
        return pause

    def end_extent(self, place: int, *, has_room: bool) -> None:
        super().end_extent(place, has_room=has_room)
        self.was_full |= not has_room

    def end_round(self) -> None:
        super().end_round()
        self.pause, self.was_full = self.pause if self.was_full else self.sizes.choose_seconds, False

    def _check_share(self, now: float) -> None:
        """Compare the share of extents that pays with what requests have brought."""
        rates = []
        for spans in self.spans.values():
            busy, end = 0.0, -1.0
            for began, ended, _ in sorted(spans):
                busy, end = busy + max(0.0, ended - max(began, end)), max(end, ended)
            rates.append(sum(num_bytes for _, _, num_bytes in spans) / busy if busy else 0.0)
        share = 0.0 if self.filling.world.fills_all else rates[0] / rates[1] if all(rates) else 0.01
        if not self.ranges._running and not np.isclose(self.share, share, rtol=0.1):
            self.fail(f"a share of {share} pays, not {self.share}")

    def _check_bytes(self, key: tuple[str, int], num_bytes: int) -> None:
        """Check that an extent whose bytes are counted lies on the disk."""
        caches = {opened.content.key: opened for opened in self.filling.opened()}
        content, files = caches[key[0]].content, caches[key[0]].cached.files
        for chunk in chunks_of([(key[1] * EXTENT, min(content.size, (key[1] + 1) * EXTENT))], CHUNK):
            path = files.block_path(chunk // content.chunks_per_block)
            if num_bytes and not self.filling.process.disk.has_entry(path, content, chunk):
                self.fail(f"chunk {chunk} is not there, and {num_bytes} bytes count as fetched")

    def next(self, now: float) -> int | None:
        place = super().next(now)
        if place is not None:
            first, ordered = self.uses.first, [begun for begun in self.round if begun not in self.hurried]
            if self.filled[place] or place in self.round or self.has_ended:
                self.fail(f"extent {place} is fetched again")
            if place not in self.hurried and ordered and first[ordered[-1]] > first[place]:
                self.fail(f"extent {place} is needed earlier than {ordered[-1]}")
            self.round.append(place)
            if sum(self.uses.sizes[self.round]) > self.room:
                self.fail("more is fetched than there is room for")
        return place

    def end_fetch(self, key: tuple[str, int], num_bytes: int, now: float) -> None:
        self._check_bytes(key, num_bytes)
        self.durations["extents"] += [now - self.in_flight[key]] if num_bytes else []
        self.spans["extents"].append((self.in_flight[key], now, num_bytes))
        super().end_fetch(key, num_bytes, now)


class SimulatedFilling:
    """`FillShell`, and the trainer that it serves."""

    def __init__(self, process: CacheProcess, uses: ExtentUses, sizes: FillSizes, numbers: Sequence[int]) -> None:
        self.process, self.world, self.uses = process, process.cache_world, uses
        total = sum(process.open(number).content.size for number in numbers)
        self.plan = WatchedPlan(sizes, total, self)
        self.began, self.waited = process.world.now, 0.0
        self.waits_since: float | None = None
        self.signal = Signal()
        self.progress = FillProgress(self.plan, lambda: process.world.now, self._wait)
        self.task: Task | None = None
        self.caches = {number: process.open(number) for number in numbers}
        for number, opened in self.caches.items():
            self.plan.objects[opened.content.key], opened.cached.filling = number, self.progress
        self._lock: NodeLockFile | None = None

    def start(self) -> None:
        self.process.scopes["fill"] = self.signal
        self.plan.begin(self.process.world.now)
        self.filling = Filling(self.progress, self)  # type: ignore[arg-type]
        self.task = self.process.start(self._run(), "fill")

    def _run(self) -> Steps[None]:
        try:
            yield from self.filling.fill_or_wait(self.process.quota, fills_all=self.world.fills_all)
        finally:
            self.stop()

    def stop(self) -> None:
        """End the filling, as `CacheFilling.stop` does."""
        self.signal.set()
        self.plan.end()
        self.progress.note_arrival()
        for opened in self.opened():
            if opened.cached.filling is self.progress:
                opened.cached.filling = None

    def train(self, samples: Sequence[tuple[int, Sequence[Range]]], seconds: float) -> Steps[None]:
        """Read the samples of each step, and compute."""
        for number, ranges in samples:
            yield from self.train_step(number, ranges, seconds)
        self.stop()

    def train_step(self, number: int, ranges: Sequence[Range], seconds: float) -> Steps[None]:
        """Read a sample, and compute."""
        with self.progress.trainer_waiting():
            self.waits_since = self.process.world.now
            yield from self.world.read(self.process, number, ranges)
            self.waited += self.process.world.now - self.waits_since
            self.waits_since = None
        yield Sleep(seconds)
        self.plan.step += 1

    # FillShell

    def cache_of(self, number: int) -> OpenedObject:
        return self.caches[number]

    def opened(self) -> list[OpenedObject]:
        return [*self.caches.values()]

    def lock_node(self) -> Steps[NodeLock]:
        disk = self.process.disk
        while disk.has_locks:
            file = disk.node_lock
            if file is None or file.holder is None or not file.holder.is_alive:
                disk.node_lock = self._lock = file or NodeLockFile()
                self._lock.holder, self._lock.message = self.process, b""
                break
            if file.holder is self.process:
                raise AssertionError("two fillings of a process at once")
            while file.holder is not None and file.holder.is_alive:
                if self.signal.is_set:
                    raise CancelledReadError("cancelled")
                yield Sleep(0.1)
            return NodeLock(False, message=file.message)
        return SimulatedNodeLock(self)

    def unlock_node(self) -> None:
        if self._lock is not None:
            self._lock.holder, self._lock, self.process.disk.node_lock = None, None, None

    def count_uses(self) -> Steps[ExtentUses]:
        yield Sleep(0.3)
        return self.uses

    def work(self, workers: Sequence[Steps[None]]) -> Steps[None]:
        assert len(workers) == self.plan.sizes.in_flight
        tasks = [self.process.start(steps, f"fill worker {number}") for number, steps in enumerate(workers)]
        for task in tasks:
            yield effects.WaitForTask(task, 1e6)
        assert not self.plan.in_flight, "an extent is in flight after its round"

    def pause(self, seconds: float) -> Steps[Any]:
        return wait_for(Flight(), seconds, self.signal)

    def wait_until_calm(self, seconds: float) -> Steps[None]:
        deadline = self.process.world.now + seconds
        while self.plan._waits_since < np.inf and self.process.world.now < deadline:
            yield Sleep(seconds / 10)

    def _wait(self, flight: Flight[int, None], seconds: float) -> Steps[Any]:
        return wait_for(flight, seconds, self.process.scope())


class SimulatedNodeLock(NodeLock):
    def __init__(self, filling: SimulatedFilling) -> None:
        super().__init__(True)
        self.filling, self.file = filling, filling._lock

    def leave_message(self, data: bytes) -> None:
        plan, world = self.filling.plan, self.filling.world
        if plan.has_ended:
            world.violations.append("a filling that was stopped has filled all")
        world.check_filled(self.filling)
        if self.file is not None:
            self.file.message = data


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong at a time, for some seconds if it lasts.

    Args:
        kind: kill, stop, fork, cancel, end, refuse, slow, full, change, lose, broken.
        choice: which process or object.
    """

    at: float
    kind: str
    seconds: float
    choice: int

    def __str__(self) -> str:
        return f"{self.kind} {self.choice} at {self.at:.1f} s for {self.seconds:.1f} s"


KINDS = ("kill", "kill", "stop", "fork", "cancel", "end", "refuse", "slow", "full", "change", "lose", "broken")


HARMLESS = {"cancel", "end", "refuse", "slow", "change"}
"""Faults after which each byte that was reserved has been written or returned: none has ended a write."""


class CacheWorld:
    """World of one seed.

    Args:
        seed: of all that is drawn.
        faults: those of the world; None: they are drawn.
    """

    def __init__(self, seed: int, faults: Sequence[Fault] | None = None) -> None:
        self.world, self.node = World(seed), Node("node")
        draw = self.world.random
        self.objects = [
            StoredObject(number, draw.randrange(2 * CHUNK, 40 * CHUNK)) for number in range(draw.randint(1, 3))
        ]
        total = sum(stored.size for stored in self.objects)
        self.limit = draw.choice([None, int(0.35 * total), int(0.7 * total), 2 * total])
        self.disk = Disk(draw.choice([2, 20]) * total, has_locks=draw.random() < 0.95)
        self.latency_seconds = draw.choice([0.01, 0.1, 0.5])
        self.num_processes, self.fills_all = draw.randint(1, 4), draw.random() < 0.3
        self.has_filling = draw.random() < 0.7
        self.steps = [self._sample() for _ in range(draw.randint(3, 25))]
        self.refuses_until = self.slow_until = self.breaks_until = 0.0
        if faults is None:
            count = draw.choice([0, 1, 3, 8, 16])
            faults = [
                Fault(
                    draw.uniform(0.05, FAULTS / 2),
                    draw.choice(KINDS),
                    draw.choice([0.1, 1.0, 6.0, 50.0]),
                    draw.randrange(8),
                )
                for _ in range(count)
            ]
        self.faults = tuple(faults)
        self._begin()

    def _begin(self) -> None:
        """Start the processes, and set the faults."""
        self.violations: list[str] = []
        self.fetches: list[Fetch] = []
        self.refused: list[StorageError] = []
        self.noted: list[StorageError] = []
        self.processes: list[CacheProcess] = []
        self.counts = {
            "reads": 0,
            "errors": 0,
            "damaged": 0,
            "fetched": 0,
            "begun": 0,
            "evicted": 0,
            "filled": 0,
            "removed": 0,
            "exact": 0,
            "requests": 0,
        }
        self.world.invariants.append(self.check)
        for number in range(self.num_processes):
            self.start(f"process {number}")
        for fault in self.faults:
            self.world.later(fault.at, "world", str(fault), self._happen, fault)

    def _sample(self) -> tuple[int, list[Range]]:
        draw = self.world.random
        stored = draw.choice(self.objects)
        ranges = []
        for _ in range(draw.randint(1, 3)):
            start = draw.randrange(stored.size)
            ranges.append((start, min(stored.size, start + draw.choice([1, 30, 100, 400]))))
        return stored.number, ranges

    def start(self, name: str) -> CacheProcess:
        """Start a process with its threads."""
        process = CacheProcess(self, name)
        self.processes.append(process)
        if self.has_filling:
            filling = process.filling = SimulatedFilling(process, self._uses(), self._sizes(), range(len(self.objects)))
            filling.start()
            seconds = self.world.random.choice([0.0, 0.05, 0.5])
            process.start(filling.train(self.steps, seconds), "trainer")
        for number in range(self.world.random.randint(0 if self.has_filling else 1, 2)):
            process.start(self._reader(process, self.world.random.randint(1, 12)), f"reader {number}")
        return process

    def _sizes(self) -> FillSizes:
        if self.world.random.random() < 0.3:
            return FillSizes(EXTENT, choose_seconds=1.5, most_choose_seconds=8.0)
        return FillSizes(EXTENT, choose_seconds=1.5, most_choose_seconds=8.0, in_flight=4)

    def _uses(self) -> ExtentUses:
        """Count what the steps read of each extent."""
        rows = []
        for stored in self.objects:
            for number, start in enumerate(range(0, stored.size, EXTENT)):
                stop = min(start + EXTENT, stored.size)
                used, steps = 0, []
                for step, (owner, ranges) in enumerate(self.steps):
                    own = sum(
                        max(0, min(stop, last) - max(start, first)) for first, last in ranges if owner == stored.number
                    )
                    used += own
                    steps += [step] * (own > 0)
                rows.append(
                    (stored.number, number, stop - start, used, min(steps, default=10**9), max(steps, default=-1))
                )
        objects, numbers, sizes, used_bytes, first, last = (np.array(column) for column in zip(*rows, strict=True))
        return ExtentUses(objects, numbers, sizes, used_bytes.astype(float), first, last)

    def _reader(self, process: CacheProcess, num_reads: int) -> Steps[None]:
        for _ in range(num_reads):
            number, ranges = self._sample()
            yield from self.read(process, number, ranges)
            yield Sleep(self.world.random.uniform(0.0, 1.0))

    def read(self, process: CacheProcess, number: int, ranges: Sequence[Range]) -> Steps[None]:
        """Read once, which ends with the bytes, or with an error that the world has caused."""
        began, scope, name = self.world.now, Signal(), process.current.name if process.current else ""
        process.scopes[name] = scope
        self.counts["begun"] += 1
        opened = process.open(number)
        try:
            yield from opened.read(ranges)
        except ObjectChangedError:
            if opened.version == opened.stored.version:
                self.violations.append("an unchanged object has changed")
            if process.opened.get(number) is opened:
                del process.opened[number]
            self.counts["errors"] += 1
        except CancelledReadError:
            if not scope.is_set:
                self.violations.append("a read was cancelled by others")
            self.counts["errors"] += 1
        except StorageError as error:
            self.note(error)
            self.counts["errors"] += 1
        slowed = sum(fault.seconds for fault in self.faults if fault.kind == "slow")
        if self.world.now - began > 100.0 + slowed + process.stopped_seconds:
            self.violations.append(f"a read took {self.world.now - began:.0f} s")

    # The store

    def latency(self) -> float:
        slow = 30.0 if self.world.random.random() < 0.02 else 1.0
        return self.latency_seconds * self.world.random.uniform(0.5, 1.5) * slow

    def refuses(self) -> bool:
        return self.world.now < self.refuses_until and self.world.random.random() < 0.5

    def note(self, error: BaseException) -> None:
        """An error has been reported to a user."""
        if not any(error is refused for refused in self.refused):
            self.violations.append(f"nothing has caused {error!r}")
        if any(error is noted for noted in self.noted):
            self.violations.append(f"{error!r} was reported twice")
        self.noted.append(error)  # type: ignore[arg-type]

    def fetching(self, opened: OpenedObject, chunks: Sequence[int]) -> Fetch:
        """A thread begins to fetch chunks into the directory."""
        fetch = Fetch(opened.process, opened.content.key, frozenset(chunks))
        for other in self.fetches:
            is_same = other.key == fetch.key and other.chunks & fetch.chunks
            if is_same and other.process.is_alive and self.disk.has_locks:
                self.violations.append(f"{fetch.chunks & other.chunks} are fetched by two threads")
        for chunk in chunks:
            path = opened.cached.files.block_path(chunk // opened.content.chunks_per_block)
            if self.disk.has_locks and self.disk.is_good(path, opened.content, chunk):
                self.violations.append(f"chunk {chunk} is fetched, and lies there")
        self.fetches.append(fetch)
        self.counts["fetched"] += len(chunks)
        return fetch

    # Claims

    @property
    def is_exact(self) -> bool:
        """Whether no update of the record can be lost."""
        return self.disk.has_locks and not any(fault.kind in ("stop", "lose", "broken") for fault in self.faults)

    def coming_of_others(self, process: CacheProcess) -> int:
        return sum(other.quota.coming for other in self.processes if other.is_alive and other is not process)

    def check_record(self, process: CacheProcess) -> None:
        for reservation in process.quota.reservations:
            if not 0 <= reservation.left <= reservation.count:
                self.violations.append(f"{reservation.left} bytes of {reservation.count} are left")

    def check_filled(self, filling: SimulatedFilling) -> None:
        """A filling has ended: what pays is there, unless it was evicted.

        Chunks that have a checksum are not read by a filling, which would take as long as a read of the whole cache:
        one whose checksum a kill has cut is found, and fetched again, by its reader.
        """
        if self.counts["evicted"] or any(fault.kind in ("change", "lose") for fault in self.faults):
            return
        plan, uses = filling.plan, filling.uses
        for place in range(len(uses.sizes)):
            pays = self.fills_all or (
                uses.used[place] / uses.sizes[place] >= plan.share and uses.last[place] >= plan.step
            )
            opened, start = filling.caches[int(uses.objects[place])], int(uses.numbers[place]) * EXTENT
            for chunk in chunks_of([(start, start + int(uses.sizes[place]))], CHUNK):
                block, chunk_place = divmod(chunk, opened.content.chunks_per_block)
                file = self.disk.files.get(path := opened.cached.files.block_path(block))
                is_cut = file is not None and chunk_place in file.cut
                if pays and not is_cut and not self.disk.is_good(path, opened.content, chunk):
                    self.violations.append(f"extent {place} pays, and is not there")
        self.counts["filled"] += 1

    def check_full(self, process: CacheProcess, counted: Iterable[str], in_use: Iterable[str]) -> None:
        """An eviction has failed: all counted blocks are gone, in use, or needed."""
        left = {path for path in counted if path in self.disk.files} - {*in_use}
        if left := {path for path in left if not any(needs(path) for needs in process.quota.keepers)}:
            self.violations.append(f"everything is in use but {left}")

    def check_order(self, process: CacheProcess, path: str) -> None:
        """A block is about to be evicted: those before it have been, or are in use, or needed."""
        self.counts["evicted"] += 1
        used, files = self.disk.record.used, self.disk.files
        if self.limit is not None and self.is_exact and used and not files[path].is_locked():
            older = [
                other
                for other in process.quota.files.counted  # type: ignore[attr-defined]
                if other in files and not files[other].is_locked() and files[other].used_at < files[path].used_at
            ]
            older = [other for other in older if not any(needs(other) for needs in process.quota.keepers)]
            if {*older} - process.quota.files.refused_paths:  # type: ignore[attr-defined]
                self.violations.append(f"{path} is evicted before {older}")

    def check_need(self, process: CacheProcess, path: str) -> None:
        """A block is removed: none that a filling of the process needs.

        The eviction has asked for that before. A filling that begins to need the block since then maps it, so it is in
        use, or finds it gone, and fetches it.
        """
        filling = process.filling
        if filling is not None and filling.task is not None and not filling.plan.has_ended and filling.plan.needs(path):
            self.violations.append(f"{path} is evicted, and a later step needs it")

    def check(self) -> None:
        """Check the claims that hold after each event."""
        assert not self.violations, self.violations
        if self.limit is not None and self.is_exact:
            over = self.disk.num_bytes() - self.limit - self.disk.slack
            assert over <= 0, f"{over} bytes more than the limit"
        for process in self.processes:
            if process.is_alive and process.filling is not None:
                assert len(process.filling.plan.in_flight) <= min(16, process.filling.plan.sizes.in_flight)

    def run(self) -> CacheWorld:
        """Run to the end, and check what holds then."""
        try:
            self.world.run(until=END)
            self.check_idle()
            return self.finish()
        finally:
            for process in self.processes:
                process.kill()

    def check_idle(self) -> None:
        """Check that nothing is left once all threads have ended."""
        alive = [process for process in self.processes if process.is_alive]
        for process in alive:
            assert not process.tasks, [task.name for task in process.tasks]
            assert process.quota.coming == 0, "reserved for ever"
            assert not process.quota.reservations
            assert not process.quota.keepers
            for opened in process.opened.values():
                assert not opened.cached.flights._flights, "chunks are in flight for ever"
                assert opened.cached.filling is None
            if process.filling is not None:
                for error in process.filling.filling._errors:
                    if isinstance(error, StorageError) and not isinstance(
                        error, CancelledReadError | ObjectChangedError
                    ):
                        self.note(error)
        assert not any(fetch.process.is_alive for fetch in self.fetches)
        assert not any(holder.is_alive for holder in self.disk.holders.values()), self.disk.holders
        assert self.disk.node_lock is None or self.disk.node_lock.holder is None
        if self.is_exact:
            used, here = self.disk.record.used, self.disk.num_bytes()
            assert self.disk.record.counted_at or not used, "never counted"
            assert used >= here, f"{here} bytes, of which {used} are counted"
            if len(self.processes) == 1 and all(fault.kind in HARMLESS for fault in self.faults):
                assert used == here, f"{here} bytes, of which {used} are counted"

    def finish(self) -> CacheWorld:
        """Read all objects by a new process: bytes are equal, and nothing is fetched twice."""
        self.has_filling = False
        for _ in range(2):
            process, before, exact = CacheProcess(self, "last"), self.counts["fetched"], self.counts["exact"]
            self.processes.append(process)
            for stored in self.objects:
                process.start(self.read(process, stored.number, [(0, stored.size)]), f"last {stored.number}")
            self.world.run(until=self.world.now + 300.0)
            assert not process.tasks
            fetched, exact = self.counts["fetched"] - before, self.counts["exact"] - exact
        room = self.limit if self.limit is not None else 0.9 * self.disk.capacity
        held = sum(file.disk_bytes() for file in self.disk.files.values() if file.is_locked())
        if room > held + 2.2 * sum(stored.size + CHUNK for stored in self.objects) and self.disk.has_locks:
            assert fetched == exact == 0, f"{fetched} chunks were fetched again, {exact} ranges read by the way"
        return self

    # Faults

    def _happen(self, fault: Fault) -> str:
        now = self.world.now
        alive = [process for process in self.processes if process.is_alive]
        process = alive[fault.choice % len(alive)] if alive else None
        match fault.kind:
            case "kill" if process:
                process.kill()
                self.world.later(fault.seconds, "world", "restart", self.start, f"{process.name} again")
            case "stop" if process:
                process.stop(4 * fault.seconds)
                process.stopped_seconds += 4 * fault.seconds
            case "fork" if process:
                child = process.forked(f"child {len(self.processes)}")
                self.processes.append(child)
                child.start(self._reader(child, 3), "reader 0")
            case "cancel" if process:
                for name, scope in process.scopes.items():
                    if not name.startswith("fill"):
                        scope.set()
            case "end" if process and process.filling:
                process.filling.stop()
            case "refuse":
                self.refuses_until = now + fault.seconds
            case "slow":
                self.disk.slowness = 100.0
                self.world.later(fault.seconds, "world", "fast again", self._set_disk, 1.0, False)
            case "broken":
                self.breaks_until = now + fault.seconds
            case "full":
                self.disk.is_full = True
                self.world.later(fault.seconds, "world", "room again", self._set_disk, 1.0, False)
            case "change":
                self.objects[fault.choice % len(self.objects)].version += 1
            case "lose":
                for each in alive:
                    each.kill()
                for file in self.disk.files.values():
                    file.lose(self.world.random)
                if self.world.random.random() < 0.5:
                    self.disk.record = Usage()
                self.disk.files = {
                    path: file for path, file in self.disk.files.items() if self.world.random.random() < 0.8
                }
                self.disk.node_lock = None
                for number in range(self.num_processes):
                    self.world.later(fault.seconds, "world", "restart", self.start, f"process {number} anew")
        return "done" if process else "nobody is there"

    def _set_disk(self, slowness: float, is_full: bool) -> None:
        self.disk.slowness, self.disk.is_full = slowness, is_full
