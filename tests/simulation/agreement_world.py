"""Ranks that agree on builds, in virtual time: a store of one thread, and processes that fail, die, stop, or come late.

    world = Ranks(seed=7)          # size, builds, work and faults are drawn from the seed
    world.run()
    world.check()

The store is that of torch: it serves one request after another, and goes with the process that holds it; a client sends
one request at a time, for all threads of its process. A rank that raises ends its process, as a trainer does.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from simulation.processes import Node, Objects, Process, Task
from simulation.world import World

from binidx.dataset.rank_agreement import LEFT, Participant
from binidx.dataset.rank_comparison import Comparison
from binidx.errors import PeerError
from binidx.storage import effects
from binidx.storage.effects import Steps

ABSENT, SILENT, INFORM, HEARTBEAT, POLL, WAIT_FOR_FIELDS = 10.0, 30.0, 5.0, 3.0, 1.0, 60.0
"""Seconds that the documentation states."""

LONGEST = ABSENT + SILENT + 3 * HEARTBEAT + INFORM + 6 * POLL
"""Seconds after the last fault, entry and end of work in which all ranks have ended; without the time of requests."""

MAX_HARMLESS_STOP = 20.0
MAX_REQUESTS = 20_000


class Fault(NamedTuple):
    """What happens to a rank in one of the builds.

    Args:
        kind: "fails", "disagrees", "is absent", "is late", "stops", "all stop", "is disconnected"; or "is killed" or
            "is interrupted", after some effects of its shells in this build.
        at: seconds after the rank's call, or number of effects.
        seconds: of a stop, and by how much it is late.
    """

    kind: str
    rank: int
    build: int = 0
    at: float = 0.0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} {self.kind} in build {self.build} at {self.at:.3f} for {self.seconds:.1f} s"


@dataclass(frozen=True)
class Request(effects.Effect[Any]):
    """Request of a client to the store: method, key, arguments."""

    client: Client
    method: str
    key: str
    arguments: tuple[Any, ...] = ()


class KeyValueStore:
    """Store of a process group.

    Args:
        rate: requests that it serves in a second.
        one_way: median seconds of half a request, without those in its queue.
        holder: process with which it goes, if there is one.

    Attributes:
        arrivals: requests, by the second in which they came.
    """

    def __init__(self, world: World, rate: float, one_way: float) -> None:
        self.world, self.rate, self.one_way = world, rate, one_way
        self.holder: Process | None = None
        self.data: dict[str, Any] = {}
        self.arrivals = Counter[int]()
        self.busy_until = 0.0

    def is_gone(self) -> bool:
        return self.holder is not None and not self.holder.is_alive

    def way(self) -> float:
        return self.one_way * (0.7 + 0.6 * self.world.random.random())

    def apply(self, request: Request) -> Any:
        """Serve a request."""
        key, data = request.key, self.data
        match request.method, request.arguments:
            case "check", ():
                return key in data
            case "get", ():
                return data[key]
            case "set", (value,):
                assert data.get(key) != LEFT.encode(), f"{key}: a rank that has left sends a heartbeat"
                data[key] = value.encode()
            case "add", (number,):
                data[key] = data.get(key, 0) + number
                return data[key]
            case "compare_set", ("", value):
                return data.setdefault(key, value.encode())
            case _:
                raise AssertionError(request)
        return None


class Client:
    """Connection of a process to the store.

    Attributes:
        is_broken: whether all further requests fail.
        on_served: called with each request of this client, its result, and its task, when it is served.
    """

    def __init__(self, store: KeyValueStore, process: Process) -> None:
        self.store, self.process, self.is_broken = store, process, False
        self.on_served: Callable[[Request, Any, Task], None] = lambda request, result, task: None
        self._queue = deque[tuple[Request, Task, int]]()
        self._is_busy = False
        process.performers[Request] = self._append

    def _append(self, request: Request, task: Task) -> None:
        self._queue.append((request, task, task.num_resumed))
        if not self._is_busy:
            self._send()

    def _send(self) -> None:
        """Send the next request, if there is one, and the process runs."""
        self._is_busy = bool(self._queue) and self.process.is_alive
        if self._is_busy:
            left = max(0.0, self.process.stopped_until - self.store.world.now)
            request = self._queue[0][0]
            event = f"{request.method} {request.key} arrives"
            self.store.world.later(left + self.store.way(), self.process.name, event, self._arrive)

    def _arrive(self) -> str:
        world, store = self.store.world, self.store
        if not self.process.is_alive and world.random.random() < 0.5:
            return "lost"
        store.arrivals[int(world.now)] += 1
        begin = max(world.now, store.busy_until, store.holder.stopped_until if store.holder else 0.0)
        store.busy_until = begin + 1 / store.rate
        if begin > world.now:
            world.later(begin - world.now, "store", f"serves {self.process.name}", self._serve)
            return "waits"
        return self._serve()

    def _serve(self) -> str:
        request, task, num_resumed = self._queue.popleft()
        value, error = None, None
        if self.is_broken or self.store.is_gone():
            error = RuntimeError("Connection reset by peer")
        else:
            value = self.store.apply(request)
            self.on_served(request, value, task)
        way = self.store.way()
        if num_resumed == task.num_resumed:
            self.process.answer(task, value, way, error)
        self.store.world.later(way, self.process.name, "is answered", self._send)
        return "no response" if error else f"{str(value)[:60]}"


class Keys:
    """Keys below a name, with the methods of torch's stores; each returns a request."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name = client, name

    def check(self, keys: list[str]) -> Request:
        return Request(self.client, "check", f"{self.name}/{keys[0]}")

    def get(self, key: str) -> Request:
        return Request(self.client, "get", f"{self.name}/{key}")

    def set(self, key: str, value: str) -> Request:
        return Request(self.client, "set", f"{self.name}/{key}", (value,))

    def add(self, key: str, number: int) -> Request:
        return Request(self.client, "add", f"{self.name}/{key}", (number,))

    def compare_set(self, key: str, expected: str, value: str) -> Request:
        return Request(self.client, "compare_set", f"{self.name}/{key}", (expected, value))


@dataclass
class Part:
    """What one rank did in one build: times, or None if it did not come so far.

    Attributes:
        called, entered: when it began, and when the store counted it.
        worked: when its work had succeeded.
        failed: when it raised an error of its own, died, was disconnected, or stopped for long.
        ended, error: when and with what error it left.
        counted: when it read last how many ranks had entered, to decide whether it goes on. Its thread reads that again
            when the rank leaves, and decides by it only how long the thread waits.
        num_effects: so far.
    """

    called: float | None = None
    entered: float | None = None
    worked: float | None = None
    failed: float | None = None
    ended: float | None = None
    error: BaseException | None = None
    counted: float | None = None
    num_effects: int = 0


@dataclass
class Build:
    """Work of one build, and its end by rank.

    Args:
        builder: rank for which the others wait, as for a build lock; None: each works for itself.
        seconds: of work, by rank.
        checks: whether a rank that works checks five times a second whether another one failed.
        compares: whether ranks compare their orders.
    """

    builder: int | None
    seconds: list[float]
    checks: list[bool]
    compares: bool
    parts: list[Part]
    built: float | None = None
    failure: str | None = None


def draw_size(draw: random.Random) -> int:
    return draw.choice([2, 2, 3, 3, 4, 4, 5, 6, 8, draw.randint(9, 24)])


def draw_faults(draw: random.Random, size: int, num_builds: int) -> list[Fault]:
    """Return no fault, or one to three."""
    faults = []
    for _ in range(draw.choice([0, 1, 1, 1, 2, 2, 3])):
        kinds = ["fails", "fails", "disagrees", "is killed", "is killed", "is absent", "is late", "stops", "all stop"]
        kind = draw.choice([*kinds, "is interrupted", "is disconnected"])
        at, seconds = draw.choice([0.0, draw.uniform(0, 5), draw.uniform(0, 40)]), draw.choice([2.0, 18.0, 40.0, 100.0])
        if kind in ("is killed", "is interrupted"):
            at = draw.choice([draw.randint(1, 16), draw.randint(1, 120)])
        if kind == "is late":
            seconds = draw.choice([draw.uniform(0, 3), draw.uniform(0, 60)])
        faults.append(Fault(kind, draw.randrange(size), draw.randrange(num_builds), at, seconds))
    return faults


class Ranks:
    """World of ranks.

    Args:
        seed: of all that is not given.
        size: number of ranks.
        faults: what happens.
        num_builds: builds one after the other.
        rate, one_way: of the store.
        holder: rank whose process holds the store; None: no rank's.
        seconds: most seconds of work.
    """

    def __init__(
        self,
        seed: int,
        *,
        size: int | None = None,
        faults: Sequence[Fault] | None = None,
        num_builds: int | None = None,
        rate: float | None = None,
        holder: int | None = -1,
        seconds: float | None = None,
    ) -> None:
        self.world = world = World(seed)
        draw = world.random
        self.size = size = size or draw_size(draw)
        num_builds = num_builds or draw.randint(1, 3)
        self.faults = [*(draw_faults(draw, size, num_builds) if faults is None else faults)]
        self.store = KeyValueStore(world, rate or draw.choice([20_000.0, 2_000.0]), draw.choice([5e-5, 1e-3, 2e-2]))
        # Nodes of four.
        self.processes = [
            Process(world, Node(f"node {rank // 4}"), Objects(world), f"process {100 + rank}", pause=0.0005)
            for rank in range(size)
        ]
        self.clients = [Client(self.store, process) for process in self.processes]
        holder = draw.choice([0, 0, None]) if holder == -1 else holder
        self.store.holder = None if holder is None else self.processes[holder]
        self.builds = [self._draw_build(draw, seconds) for _ in range(num_builds)]
        self.now_in = [-1] * size
        """Build in which each rank is."""
        self.faults_at: list[float] = []
        self.by_effects = defaultdict[tuple[int, int], list[Fault]](list)
        for fault in self.faults:
            if fault.kind in ("is killed", "is interrupted"):
                self.by_effects[fault.build, fault.rank].append(fault)
        self.mains: list[Task] = []
        self.logged: list[effects.Log] = []
        for rank, process in enumerate(self.processes):
            process.performers[effects.Log] = self._log(process)
            process.performers = {kind: self._counted(rank, function) for kind, function in process.performers.items()}
            self.clients[rank].on_served = self._served(rank)
            self.mains.append(process.start(self._program(rank), "main"))

    def _draw_build(self, draw: random.Random, most: float | None) -> Build:
        longest = draw.choice([0.01, 1.0, 10.0, 50.0]) if most is None else most
        seconds = [draw.uniform(0, longest) for _ in range(self.size)]
        builder = draw.choice([None, draw.randrange(self.size)]) if most is None else None
        checks = [draw.random() < 0.5 for _ in range(self.size)]
        return Build(builder, seconds, checks, draw.random() < 0.5, [Part() for _ in range(self.size)])

    def run(self) -> None:
        """Run all builds."""
        self.world.run(10_000.0)

    # Processes

    def _program(self, rank: int) -> Steps[None]:
        process = self.processes[rank]
        for number, build in enumerate(self.builds):
            faults = [fault for fault in self.faults if fault.build == number and fault.rank == rank]
            if any(fault.kind == "is absent" for fault in faults):
                continue
            yield from effects.Sleep(0.01 + sum(fault.seconds for fault in faults if fault.kind == "is late"))
            part = build.parts[rank]
            part.called, self.now_in[rank] = self.world.now, number
            for fault in faults:
                self.world.later(fault.at, "world", str(fault), self._happen, fault)
            keys: Any = Keys(self.clients[rank], f"{number}")
            participant = Participant(keys, rank, self.size, f"rank {rank} ({process.name})")
            try:
                result = yield from participant.agree(lambda: self._work(rank, number, participant, keys))  # noqa: B023
                assert result == "built", result
            except (Exception, KeyboardInterrupt) as error:
                part.ended, part.error = self.world.now, error
                self._fault()
                self.world.later(self.world.random.uniform(0.0, 0.3), process.name, "exits", process.kill)
                return
            part.ended = self.world.now
        self.now_in[rank] = len(self.builds)

    def _work(self, rank: int, number: int, participant: Participant, keys: Any) -> Steps[str]:
        build, process = self.builds[number], self.processes[rank]
        part, draw = build.parts[rank], self.world.random
        fails = [fault.at for fault in self.faults if fault[:3] == ("fails", rank, number)]
        try:
            yield from participant.check(exact=draw.random() < 0.5)
            if fails or build.builder in (None, rank) or build.parts[build.builder].called is None:
                yield from self._compute(participant, min(fails, default=build.seconds[rank]), build.checks[rank])
                if fails:
                    raise ValueError(f"no tokens in the data of {process.name}")
                build.built = build.built or self.world.now
            while build.built is None:
                if build.failure is not None:
                    raise PeerError(build.failure)
                if not self.processes[build.builder or 0].is_alive:
                    build.built = self.world.now  # this one takes over
                yield from self._compute(participant, 0.2, True)
            if build.compares:
                yield from participant.check(exact=False)
                yield from self._compare(rank, number, keys)
        except BaseException as error:
            is_own = isinstance(error, ValueError) and not isinstance(error, PeerError)
            if is_own or "disagree" in str(error) or isinstance(error, KeyboardInterrupt):
                self._fail(rank, number)
            if is_own and rank == build.builder:
                build.failure = f"s3://bucket/binidx.json: {process.name} was to build it, and failed:\n\n{error}"
            raise
        part.worked = self.world.now
        self._fault()
        return "built"

    def _compute(self, participant: Participant, seconds: float, is_waiting: bool) -> Steps[None]:
        """Take some seconds; while a rank waits it looks whether another one failed, while it computes it does not."""
        until = self.world.now + seconds
        while is_waiting and self.world.now < until - 0.2:
            yield from participant.check(exact=False)
            yield from effects.Sleep(0.2)
        yield from effects.Sleep(max(0.0, until - self.world.now))

    def _compare(self, rank: int, number: int, keys: Any) -> Steps[None]:
        disagrees = any(fault[:3] == ("disagrees", rank, number) for fault in self.faults)
        name = f"rank {rank} ({self.processes[rank].name})"
        if disagrees:
            self._fail(rank, number)
        yield from Comparison(f"build() on {name}", keys, name, self.size).compare("order", [{"seed": int(disagrees)}])

    def _log(self, process: Process) -> Callable[[effects.Log, Task], None]:
        def log(effect: effects.Log, task: Task) -> None:
            self.logged.append(effect)
            process.answer(task, None)

        return log

    # Faults

    def _fault(self) -> None:
        self.faults_at.append(self.world.now)

    def last_fault_of(self, number: int, rank: int) -> float:
        """Return when the last fault, entry or end of work came before a rank ended a build."""
        ended = self.builds[number].parts[rank].ended
        assert ended is not None
        return max((at for at in self.faults_at if at <= ended), default=0.0)

    def _fail(self, rank: int, number: int) -> None:
        if 0 <= number < len(self.builds):
            part = self.builds[number].parts[rank]
            if part.failed is None and part.ended is None:
                part.failed = self.world.now
        self._fault()

    def _happen(self, fault: Fault) -> None:
        chosen = range(self.size) if fault.kind == "all stop" else [fault.rank]
        if fault.kind in ("stops", "all stop"):
            for rank in chosen:
                self.processes[rank].stop(fault.seconds)
                if fault.kind == "stops" and fault.seconds > MAX_HARMLESS_STOP:
                    self._fail(rank, self.now_in[rank])
            self.world.later(fault.seconds, "world", "the stop is over", self._fault)
        if fault.kind == "is disconnected":
            self.clients[fault.rank].is_broken = True
            self._fail(fault.rank, self.now_in[fault.rank])

    def _counted(self, rank: int, perform: Callable[[Any, Task], None]) -> Callable[[Any, Task], None]:
        """Return a performer of effects that counts them, and after which a fault may come."""
        process = self.processes[rank]

        def counted(effect: Any, task: Task) -> None:
            perform(effect, task)
            number = self.now_in[rank]
            if not 0 <= number < len(self.builds) or self.builds[number].parts[rank].ended is not None:
                return
            part = self.builds[number].parts[rank]
            part.num_effects += 1
            for fault in self.by_effects[number, rank]:
                if fault.at == part.num_effects:
                    self._fail(rank, number)
                    if fault.kind == "is killed":
                        self.world.later(0.0, "world", str(fault), process.kill)
                    else:
                        self.world.later(0.0, "world", str(fault), process.interrupt, self.mains[rank])

        return counted

    def _served(self, rank: int) -> Callable[[Request, Any, Task], None]:
        def served(request: Request, result: Any, task: Task) -> None:
            number, _, key = request.key.partition("/")
            part, data = self.builds[int(number)].parts[rank], self.store.data
            counts = [data.get(f"{number}/{name}", 0) for name in ("entered", "finished", "informed")]
            assert counts[1] <= counts[0] <= self.size, counts
            assert counts[2] <= counts[0] + self._num_interrupted(int(number)), counts
            if key == "entered" and task is self.mains[rank]:
                part.counted = self.world.now
                if request.arguments == (1,):
                    part.entered = self.world.now
                    self._fault()

        return served

    def _num_interrupted(self, number: int) -> int:
        return sum(fault.kind == "is interrupted" and fault.build == number for fault in self.faults)
