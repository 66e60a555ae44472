"""Processes of nodes that want indices of one store, with faults: who builds, who waits, who takes over.

    world = BuildWorld(seed)               # or BuildWorld(seed, faults): fewer of the faults of this seed
    world.run()                            # raises AssertionError, with the seed and the last events

A fault strikes a process at one of its effects, a node or the store at a time. After `CALM` seconds there is none, and
all requests are answered. What a store does not allow (writes, deletes, put-if-absent) it never allows.

Once faults end, all processes end within `limit`: a waiting node finds a dead holder after a pause, `DEAD_SECONDS` and
a pause; the node that takes over may have died as well, after which each builds alone; before, between and after that
are builds of living processes, and the locks of the node, whose waiting processes come after their first one.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from simulation.lock_files import Descriptors, LockDisk
from simulation.processes import Node, Objects, Process, Task
from simulation.world import World

from binidx.errors import PeerError, StorageError
from binidx.index.cache.build_lock import LAST_BEAT_SECONDS, BuildLock
from binidx.index.cache.lease import (
    BUILDING,
    DEAD_SECONDS,
    FAILED,
    LEASE_FILE,
    UNPUBLISHED,
    LeaseRecord,
    parse_lease_record,
)
from binidx.storage import effects
from binidx.storage.cache.block_files import lock_path
from binidx.storage.effects import Steps
from binidx.storage.location import Location

CALM = 60.0
LONGEST_BUILD = 45.0
MOST_SLOW = 400.0
LONGEST_REQUEST = MOST_SLOW * 0.03 * 1.2
LONGEST_PAUSE = 1.25 * 2.0 * 4
"""Seconds: end of the faults, a build, a slow request with its response, a pause of a process that waits for four; how
many times longer than usual a slow request takes."""

FOLDER = Location.of("s3://bucket/cache", {"binidx": {"index_dir": "/node"}})
EARLIER = "earlier"
"""Beginning of the holders of an earlier run."""


@dataclass(frozen=True)
class Fault:
    """What happens to a process, a node or the store.

    Attributes:
        kind: "kill", "stop", "fork" (of a process, at an effect); "lost", "cut" (of a node), "out" (of the store).
        target: number of the process or node.
        begin: its time; of a process the seconds after the effect.
        seconds: its length.
        effect: name of the effect; empty for any.
        count: number of effects of this name.
    """

    kind: str
    target: int
    begin: float
    seconds: float = 0.0
    effect: str = ""
    count: int = 0

    def __str__(self) -> str:
        at = f" effect {self.count} {self.effect}" if self.count else ""
        return f"{self.kind} {self.target}{at} at {self.begin:.4g} for {self.seconds:.3g} s"


KILLED_AT = ("ReadObject", "PutIfAbsent", "WriteObject", "DeleteObject", "LeaveMessage", "CloseLockFile", "TryLock")


@dataclass(frozen=True)
class Left:
    """Lease of an earlier run, and the marker of a takeover that was not ended.

    Attributes:
        state: of the record; empty for damaged bytes.
        node: name of the node lock that its holder had, and that of the marker.
    """

    state: str = BUILDING
    node: str = ""
    has_marker: bool = False

    @classmethod
    def drawn(cls, draw: random.Random) -> Left:
        state = draw.choice((BUILDING, BUILDING, FAILED, UNPUBLISHED, ""))
        return cls(state, draw.choice(("", "another", "boot 0.0:0")), draw.random() < 0.4)


@dataclass(frozen=True)
class Setting:
    """What is no fault at a time: sizes, durations, and what the store and the nodes allow.

    Attributes:
        seconds: of a build, by index.
        num_faults: most faults.
        starts: times at which the first processes start.
        late_share, interrupted_share: processes that start late, and those of a rank that fails while they wait.
        has_locks, can_open, has_boot, has_node_lock: whether files can be locked, and made; a boot ID; a directory.
        failing, unpublishable: indices whose builds raise, or cannot be published.
        earlier: leases that an earlier run has left, by index.
    """

    num_nodes: int = 2
    num_processes: int = 1
    num_indices: int = 1
    seconds: tuple[float, ...] = (LONGEST_BUILD,)
    num_faults: int = 0
    starts: tuple[float, ...] = ()
    late_share: float = 0.0
    interrupted_share: float = 0.0
    lost_share: float = 0.0
    slow_share: float = 0.0
    slow_factor: float = 100.0
    can_write: bool = True
    can_delete: bool = True
    is_conditional: bool = True
    has_locks: bool = True
    can_open: bool = True
    has_boot: bool = True
    has_node_lock: bool = True
    failing: frozenset[int] = frozenset()
    unpublishable: frozenset[int] = frozenset()
    earlier: tuple[Left, ...] = ()

    @classmethod
    def drawn(cls, draw: random.Random) -> Setting:
        """Return a setting: one of 25 is large, and one of four has no faults of the store, of builds, or at a time."""
        is_large, is_calm = draw.random() < 0.04, draw.random() < 0.25

        def rarely(share: float = 0.08) -> bool:
            return draw.random() < share and not is_calm

        num_nodes = draw.randint(6, 20) if is_large else draw.randint(1, 4)
        return cls(
            num_nodes=num_nodes,
            num_processes=draw.randint(1, 8 if is_large else 8 // num_nodes),
            num_indices=1 if is_large else draw.choice((1, 1, 1, 2, 3, 4)),
            seconds=tuple(draw.choice((0.05, 1.0, 5.0, LONGEST_BUILD)) * draw.uniform(0.5, 1.0) for _ in range(4)),
            num_faults=0 if is_calm else 5,
            late_share=draw.choice((0.0, 0.0, 0.3)),
            interrupted_share=0.2 if rarely(0.25) else 0.0,
            lost_share=draw.choice((0.02, 0.2)) if rarely(0.16) else 0.0,
            slow_share=draw.choice((0.02, 0.2)) if rarely(0.2) else 0.0,
            slow_factor=draw.choice((100.0, MOST_SLOW)),
            can_write=not rarely(),
            can_delete=not rarely(),
            is_conditional=not rarely(),
            has_locks=draw.random() > 0.08,
            can_open=draw.random() > 0.04,
            has_boot=draw.random() > 0.08,
            has_node_lock=draw.random() > 0.04,
            failing=frozenset(index for index in range(4) if rarely()),
            unpublishable=frozenset(index for index in range(4) if rarely()),
            earlier=tuple(Left.drawn(draw) for _ in range(4 if rarely(0.3) else 0)),
        )


class InterruptedByRank(Exception):
    """Raised by a check: another rank of the run has failed."""


class BuildWorld:
    """World of one seed.

    Args:
        faults: those that happen; None: those that the seed draws.
        setting: None: one that the seed draws.

    Attributes:
        num_builds: builds that began, by index.
        num_failed: builds that raised, by index.
        ended_at: times at which a process got arrays that were missing.
    """

    def __init__(self, seed: int, faults: Sequence[Fault] | None = None, setting: Setting | None = None) -> None:
        self.world, draw = World(seed), random.Random(f"builds {seed}")
        self.setting = setting = Setting.drawn(draw) if setting is None else setting
        drawn = [self.draw_fault(draw) for _ in range(draw.randint(0, setting.num_faults))]
        self.faults = drawn if faults is None else list(faults)
        self.num_builds, self.num_failed = Counter[int](), Counter[int]()
        self.builders = defaultdict[int, list[Process]](list)
        self.changes = defaultdict[str, list[float]](list)
        self.lease_reads = defaultdict[tuple[str, str], list[float]](list)
        self.holders, self.ended_at = set[str](), list[float]()
        self.tasks: list[tuple[Process, int, Task]] = []
        self.interrupted = set[str]()
        self.nodes = [Node(f"node {number}") for number in range(setting.num_nodes)]
        self.disks = [self.new_disk(number) for number in range(setting.num_nodes)]
        self.processes: list[Process] = []
        self.descriptors: list[Descriptors] = []
        self.objects = WatchedObjects(self)
        self.leave_leases()
        for number in range(setting.num_nodes * setting.num_processes):
            late = draw.uniform(0.0, CALM) if draw.random() < setting.late_share else draw.uniform(0.0, 0.5)
            late = late if number >= len(setting.starts) else setting.starts[number]
            wanted = draw.sample(range(setting.num_indices), draw.randint(1, setting.num_indices))
            gone = late + draw.uniform(0.0, 30.0) if draw.random() < setting.interrupted_share else None
            self.world.later(late, "world", f"process {number} starts", self.start, number, sorted(wanted), gone)
        for fault in self.faults:
            if fault.kind == "out":
                self.objects.outages.append((fault.begin, fault.begin + fault.seconds))
            elif fault.kind == "cut":
                self.nodes[fault.target].cuts.append((fault.begin, fault.begin + fault.seconds))
            elif fault.kind == "lost":
                self.world.later(fault.begin, "world", f"node {fault.target} is lost", self.lose, fault.target)
        self.world.later(CALM, "world", "calm", self.calm)

    def draw_fault(self, draw: random.Random) -> Fault:
        kind = draw.choice(("kill", "kill", "kill", "stop", "stop", "fork", "lost", "cut", "out"))
        begin, seconds = draw.uniform(0.0, CALM / 2), draw.choice((1.0, 10.0, 30.0)) * draw.uniform(0.7, 1.3)
        if kind in ("kill", "stop", "fork"):
            target, delay = (
                draw.randrange(self.setting.num_nodes * self.setting.num_processes),
                draw.choice((0.0, 5e-5, 0.02)),
            )
            name = draw.choice(("", *KILLED_AT))
            count = int((5 if name else 300) ** draw.random() * (3 if name == "ReadObject" else 1))
            return Fault(kind, target, delay, seconds, name, count)
        return Fault(kind, draw.randrange(self.setting.num_nodes), begin, 0.0 if kind == "lost" else seconds)

    def leave_leases(self) -> None:
        for index, left in enumerate(self.setting.earlier):
            record = LeaseRecord(f"{EARLIER}{index}", left.state, node=left.node)
            claim = claim_of(index).uri
            self.objects.data[claim] = LEASE_FILE.encode(record) if left.state else b"damaged"
            if left.has_marker:
                marker = LEASE_FILE.encode(LeaseRecord(f"{EARLIER}{index}b", node=left.node))
                self.objects.data[f"{claim}-after-{parse_lease_record(self.objects.data[claim]).holder}"] = marker

    def new_disk(self, number: int, boots: int = 0) -> LockDisk:
        boot = f"boot {number}.{boots}" if self.setting.has_boot else ""
        return LockDisk(boot, has_locks=self.setting.has_locks, can_open=self.setting.can_open)

    def start(self, number: int, wanted: list[int], gone: float | None) -> None:
        """Start a process, which wants some indices at once, and leaves its waits at a time."""
        node = number % self.setting.num_nodes
        process = Process(self.world, self.nodes[node], self.objects, f"process {number}")
        self.processes.append(process)
        disk = self.disks[node]
        self.descriptors.append(Descriptors(process, disk))
        counts, faults = Counter[str](), [fault for fault in self.faults if fault.count and fault.target == number]

        def watch(effect: effects.Effect[Any], task: Task) -> None:
            if isinstance(effect, effects.ReadObject) and effect.location.uri.endswith("-claim"):
                self.lease_reads[process.name, effect.location.uri].append(self.world.now)
            counts.update(("", type(effect).__name__) if faults else ())
            for fault in faults:
                if fault.effect in ("", type(effect).__name__) and counts[fault.effect] == fault.count:
                    self.world.later(fault.begin, process.name, fault.kind, self.strike, process, fault)

        process.on_effect.append(watch)

        def check(exact: bool) -> None:
            if gone is not None and self.world.now > gone:
                self.interrupted.add(process.name)
                raise InterruptedByRank

        class ProcessLock(BuildLock):
            waits = []  # noqa: RUF012

        for index in wanted:
            load, build = cast(Any, partial(self.load, index)), cast(Any, partial(self.build, index, process))
            manifest = manifest_of(index, self.setting.has_node_lock)
            lock = ProcessLock(manifest, load, build, () if gone is None else (check,))
            self.tasks.append((process, index, process.start(self.request(lock, index, disk), f"index {index}")))

    def strike(self, process: Process, fault: Fault) -> None:
        if self.world.now > CALM or not process.is_alive:
            return
        if fault.kind == "kill":
            process.kill()
        elif fault.kind == "stop":
            process.stop(min(fault.seconds, CALM - self.world.now))
        else:
            child = Process(self.world, process.node, self.objects, f"child of {process.name}")
            own = next(each for each in self.descriptors if each.process is process)
            self.world.later(0.02 * self.world.random.random(), child.name, "closes", own.fork(child).close_all)

    def lose(self, node: int) -> None:
        """Lose a node: its processes, its files, and its boot. Late processes come to it again."""
        for process in self.processes:
            if process.node is self.nodes[node]:
                process.kill()
        self.disks[node] = self.new_disk(node, 1)

    def calm(self) -> None:
        self.objects.lost_share = self.objects.slow_share = 0.0

    def request(self, lock: BuildLock, index: int, disk: LockDisk) -> Steps[Any]:
        """Load, or build or wait: what `IndexCache` does."""
        arrays, path = (yield from self.load(index)), lock_path(lock.manifest)
        if arrays is None:
            arrays = yield from cast(Any, lock.steps())
            self.ended_at.append(self.world.now)
            return arrays
        if path is not None and path in disk.files:
            yield from effects.suppressed(lock.removal(path))
        return arrays

    def load(self, index: int) -> Steps[str | None]:
        try:
            data = yield from effects.ReadObject(manifest_of(index))
        except StorageError:
            return None
        return None if data is None else data.decode()

    def build(self, index: int, process: Process) -> Steps[tuple[str, bool]]:
        """Build, and publish."""
        self.check_builders(index)
        self.num_builds[index] += 1
        self.builders[index].append(process)
        try:
            yield from effects.Sleep(
                self.setting.seconds[index % len(self.setting.seconds)] * self.world.random.uniform(0.9, 1.0)
            )
            if index in self.setting.failing:
                self.num_failed[index] += 1
                raise ValueError("no tokens")
            try:
                if index in self.setting.unpublishable:
                    raise StorageError("the disk is full")
                yield from effects.WriteObject(manifest_of(index), arrays_of(index).encode())
            except StorageError:
                return arrays_of(index), False
            return arrays_of(index), True
        finally:
            self.builders[index].remove(process)

    def explains(self, *kinds: str) -> bool:
        """Return whether a fault of one of these kinds may be at work; what a store does not allow counts as one."""
        return not {fault.kind for fault in self.faults}.isdisjoint(kinds)

    def may_build_twice(self, index: int) -> bool:
        """Return whether two living processes may build an index at the same time."""
        return (
            not (self.setting.can_write and self.setting.is_conditional)
            or self.explains("stop", "cut", "out")
            or sum(fault.kind in ("kill", "lost") for fault in self.faults) > 1  # the node that takes over, too
            or self.setting.lost_share > 0
            or bool(self.setting.earlier)  # with a marker of a takeover
            or index in self.setting.unpublishable
        )

    def check_builders(self, index: int) -> None:
        """Check, before a build, that no other living process builds the index, unless a fault explains that."""
        others = [process.name for process in self.builders[index] if process.is_alive]
        assert not others or self.may_build_twice(index), f"two builders of index {index}: {others}"

    def check_takeover(self, claim: str, record: LeaseRecord, taker: LeaseRecord) -> None:
        """Check that a lease which another process rewrites was silent for as long as that of a dead holder.

        After one of an index that cannot be published, any process that waited may remove the marker of the next one.
        """
        is_next = claim not in self.objects.data or taker.after == record.holder
        assert is_next or self.setting.unpublishable, f"{taker} instead of {record}"
        assert taker.node == "" or taker.node.startswith("boot"), taker
        is_own = taker.node and taker.node == record.node
        if record.state != BUILDING or is_own or claim not in self.objects.data or not is_next:
            return
        times = [*self.changes[claim], self.world.now]
        longest = max((end - begin for begin, end in itertools.pairwise(times)), default=0.0)
        if record.holder.startswith((EARLIER, "unknown")):
            longest = max(longest, times[0])
        assert longest >= DEAD_SECONDS, f"taken over from {record}, silent for {longest:.1f} s at most"

    @property
    def limit(self) -> float:
        """Seconds after the last fault and the last start in which all ends."""
        found_dead = LONGEST_PAUSE + DEAD_SECONDS + LONGEST_PAUSE + 4 * LONGEST_REQUEST
        return 2 * found_dead + 4 * LONGEST_BUILD

    def run(self) -> BuildWorld:
        """Run until all has ended; check the end."""
        try:
            self.world.run(CALM + self.limit)
            self.check_end()
        finally:
            for process in self.processes:
                process.kill()
        return self

    def check_end(self) -> None:
        """Check how each process ended, and what is left in the store and on the nodes."""
        try:
            for process, index, task in self.tasks:
                if process.is_alive:
                    self.check_task(process, index, task)
            if not self.explains("kill", "lost", "stop", "cut", "out", "fork") and not self.has_trouble:
                for index in range(self.setting.num_indices):
                    wanted = any(of == index for _, of, _ in self.tasks)
                    assert self.num_builds[index] == wanted, f"{self.num_builds[index]} builds of index {index}"
            self.check_left()
            self.check_requests()
        except AssertionError as error:
            error.add_note("\n".join([f"seed {self.world.seed}", *map(str, self.faults), *self.world.trace]))
            raise

    @property
    def has_trouble(self) -> bool:
        """Whether something else than a fault at a time may lead to several builds."""
        return bool(
            not (self.setting.can_write and self.setting.is_conditional)
            or self.setting.lost_share
            or bool(self.setting.earlier)
            or self.setting.failing
            or self.setting.unpublishable
            or self.setting.interrupted_share
        )

    def check_task(self, process: Process, index: int, task: Task) -> None:
        assert task.ended.is_set, f"{process.name} has not ended index {index}"
        if task.error is None:
            assert task.result == arrays_of(index), task.result
        elif isinstance(task.error, PeerError):
            assert self.num_failed[index], f"{process.name}: {task.error!r} without a failed build"
        elif isinstance(task.error, ValueError):
            assert index in self.setting.failing, f"{process.name}: {task.error!r}"
        else:
            assert process.name in self.interrupted, f"{process.name}: {task.error!r}"

    def check_left(self) -> None:
        """Check that no living process has left a lease, a marker or a file, unless a request for it failed."""
        living = {process.name for process in self.processes if process.is_alive}
        given = self.setting
        is_late = given.slow_share > 0 and given.slow_factor * 0.03 > LAST_BEAT_SECONDS  # a last renewal may be
        is_reliable = given.can_write and given.can_delete and given.is_conditional and not given.lost_share
        is_reliable = is_reliable and not is_late
        for uri, data in self.objects.data.items() if is_reliable and not self.explains("stop", "cut", "out") else ():
            record = parse_lease_record(data) if "-claim" in uri else None
            if record is not None and record.state == BUILDING:
                assert record.where not in living, f"{uri}: left by {record.where}"
        if self.setting.has_locks and self.setting.can_open and not self.explains("kill", "lost"):
            left = [path for disk in self.disks for path in disk.files]
            assert not left, f"files of node locks: {left}"
        for descriptors in self.descriptors:
            assert not descriptors.opened, f"{descriptors.process.name}: open files"

    def check_requests(self) -> None:
        """Check the polls of waiting processes: many in the first seconds, then one in 1.5 s at most.

        Pauses are 0.15 s or more, from 1.6 s on a 32nd of three times the time waited, at most 1.5 s or more.
        """
        for (name, uri), times in self.lease_reads.items():
            waited = max(times) - min(times)
            assert len(times) <= 45 + waited / 1.5, f"{name}: {len(times)} polls of {uri} in {waited:.0f} s"


class WatchedObjects(Objects):
    """Store that checks what comes to it."""

    def __init__(self, builds: BuildWorld) -> None:
        self.builds, given = builds, builds.setting
        super().__init__(builds.world, lost_share=given.lost_share, slow_share=given.slow_share)
        self.can_write, self.can_delete, self.is_conditional = given.can_write, given.can_delete, given.is_conditional

    def one_way(self) -> float:
        """Return the seconds of half a request."""
        draw, given = self.world.random.random, self.builds.setting
        return self.round_trip * (0.4 + 0.2 * draw()) * (given.slow_factor if draw() < self.slow_share else 1.0)

    def apply(self, effect: effects.Effect[Any]) -> Any:
        """Do a request; check it if it is for a lease."""
        builds = self.builds
        match effect:
            case effects.WriteObject(location, data) if location.uri.endswith("-claim"):
                taker = parse_lease_record(data)
                if taker.holder not in builds.holders:
                    builds.check_takeover(location.uri, parse_lease_record(self.data.get(location.uri, b"")), taker)
                builds.holders.add(taker.holder)
            case effects.PutIfAbsent(location, data) if location.uri.endswith("-claim"):
                builds.holders.add(parse_lease_record(data).holder)
        before = dict.get(self.data, claim := getattr(effect, "location").uri)  # noqa: B009
        result = super().apply(effect)
        if claim.endswith("-claim") and self.data.get(claim) != before:
            builds.changes[claim].append(self.world.now)
        return result


def manifest_of(index: int, has_node_lock: bool = True) -> Location:
    folder = FOLDER if has_node_lock else Location.of(FOLDER.uri, {"binidx": {"index_dir": "off"}})
    return folder / f"index{index}.json"


def claim_of(index: int) -> Location:
    return manifest_of(index) + "-claim"


def arrays_of(index: int) -> str:
    return f"arrays of index {index}"
