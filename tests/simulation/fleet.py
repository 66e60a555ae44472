"""Fleet of nodes and their processes, which read from folders of one bucket: the real limiters over a simulated store.

    fleet = Fleet(World(7), Store(220.0), num_nodes=40)             # each process always has requests to send
    Fleet(world, store, 10, demand=50.0)                            # 50 requests a second and process
    Fleet(world, store, 10, 8, steps=Steps(num_ranges=50))          # batches; the ranks wait for one another

A node has rates that its processes share; a process has a `RateLimiter` for each folder, and one of the bucket. A
refused request is sent again as `retries` says: by its limiter, or after a pause. Good for 1 to 1,000 nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from simulation.stores import Store
from simulation.world import World

from binidx.storage.requests.rate_limiter import FirstLimits, RateLimiter
from binidx.storage.requests.request_rate import RequestRate
from binidx.storage.requests.request_schedule import TRIES_BY_RATE
from binidx.storage.requests.retries import longest_pause

Result = TypeVar("Result")
LARGEST_WINDOW = 128
WAKE_SECONDS = 0.001
"""Time by which a timer of a process is late."""


class Timer:
    """Call in virtual time that can be cancelled."""

    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Rates:
    """Rates that the processes of a node share, by partition.

    Args:
        busy_share: changes that find another process at work.

    Attributes:
        wall: wall time at time 0 of the world.
        waited: seconds in which processes waited for a rate.
        lines: seconds at which a process logged that it is throttled.
    """

    def __init__(self, world: World, busy_share: float = 0.0) -> None:
        self.world, self.busy_share, self.by_partition = world, busy_share, dict[str, RequestRate]()
        self.wall, self.waited, self.lines = 0.0, 0.0, list[float]()

    def change(
        self, partition: str, new: Callable[[], RequestRate], change: Callable[[RequestRate, float, float], Result]
    ) -> Result | None:
        if self.busy_share and self.world.random.random() < self.busy_share:
            return None
        if (rate := self.by_partition.get(partition)) is None:
            rate = self.by_partition[partition] = new()
            rate.updated = self.world.now
        limit, issued, line = rate.limit, rate.issued, len(change.__self__._line)  # type: ignore[attr-defined]
        result = change(rate, self.world.now, self.wall + self.world.now)
        assert rate.issued - issued <= line, "a process takes more tickets than it has requests"
        if rate.is_limited and limit < math.inf:
            burst = max(1.0, 0.05 * max(limit, rate.limit))
            assert rate.clock - rate.issued <= burst + 1e-6, f"{rate.clock - rate.issued} tickets are due at once"
        return result

    def note_waiting(self, now: float, seconds: float, rate: RequestRate) -> None:
        self.waited += seconds

    def log_throttling(self, partition: str, waited_seconds: float, rate: RequestRate) -> None:
        self.lines.append(self.world.now)


@dataclass
class Node:
    """Node: its rates, and what it has sent; `history` is the number of served requests at each second."""

    name: str
    rates: Rates
    sent: int = 0
    served: int = 0
    history: list[int] = field(default_factory=list)

    @property
    def rate(self) -> RequestRate:
        """Rate of the first folder."""
        return self.rates.by_partition["0"]


@dataclass
class Steps:
    """Batches of ranges.

    Args:
        num_ranges: of a batch.
        pause: seconds between a batch and the next one.
        number: of batches.
        wait_for_others: whether a process reads its next batch only when all have theirs, as ranks that train together.
    """

    num_ranges: int
    pause: float = 0.0
    number: float = math.inf
    wait_for_others: bool = False


class Read:
    """One read of a process. `failures`: refusals of a request since it was first sent."""

    def __init__(self, number: int, folder: str, limiter: RateLimiter, num_ranges: int, begun: float) -> None:
        self.number, self.folder, self.limiter, self.over = number, folder, limiter, False
        self.unanswered, self.begun, self.failures = num_ranges, begun, dict[int, int]()


class Process:
    """Process of a node; its timers and requests are events of the world."""

    def __init__(self, fleet: Fleet, node: Node, name: str, folders: Sequence[str]) -> None:
        self.fleet, self.world, self.node, self.name, self.folders = fleet, fleet.world, node, name, folders
        self.num_reads = self.num_steps = self.outstanding = self.in_flight = 0
        self.waits: list[float] = []
        own: Any = fleet.first, node.rates, self.call_later, self.send, LARGEST_WINDOW
        self.bucket = RateLimiter("*", *own, is_above=True)
        self.limiters = {folder: RateLimiter(folder, *own, bucket=self.bucket) for folder in folders}

    def call_later(self, seconds: float, function: Callable[[], None]) -> Timer:
        timer = Timer()
        late = seconds + WAKE_SECONDS * self.world.random.random()
        self.world.later(late, self.name, "timer", self.fire, timer, function)
        return timer

    def fire(self, timer: Timer, function: Callable[[], None]) -> None:
        """Call the function of a timer; later if this process stands still."""
        if not timer.is_cancelled and not self.stands_still("timer", self.fire, timer, function):
            function()

    def stands_still(self, event: str, function: Callable[..., Any], *arguments: Any) -> bool:
        """Return whether this process stands still now; if so, the event comes again when it goes on."""
        begin, end = self.fleet.pause
        if is_standing := begin <= self.world.now < end:
            seconds = end - self.world.now + WAKE_SECONDS * self.world.random.random()
            self.world.later(seconds, self.name, event, function, *arguments)
        return is_standing

    def read(self, num_ranges: int) -> None:
        """Begin a read of the next folder."""
        folder = self.folders[self.num_reads % len(self.folders)]
        self.num_reads += 1
        self.outstanding += num_ranges
        read = Read(self.num_reads, folder, self.limiters[folder], num_ranges, self.world.now)
        for place in range(num_ranges):
            self.submit(read, place)

    def submit(self, read: Read, place: int) -> None:
        if self.stands_still("again", self.submit, read, place):
            return
        if read.limiter.admits(read, place):
            self.send(read, place)

    def send(self, read: Read, place: int) -> None:
        self.node.sent += 1
        self.in_flight += 1
        self.world.later(self.fleet.store.delay(self.world.random), self.name, "arrive", self.arrive, read, place)

    def arrive(self, read: Read, place: int) -> str:
        store, draw = self.fleet.store, self.world.random
        granted = store.grants(read.folder, self.world.now, draw)
        self.world.later(store.delay(draw), self.name, "end", self.end, read, place, granted)
        return "granted" if granted else "refused"

    def end(self, read: Read, place: int, granted: bool) -> None:
        if self.stands_still("end", self.end, read, place, granted):
            return
        self.in_flight -= 1
        self.fleet.touched = self, read.folder
        if not granted:
            read.limiter.note_refusal()
            failures = read.failures[place] = read.failures.get(place, 0) + 1
            failures -= TRIES_BY_RATE if read.limiter.is_limited else 0
            longest = longest_pause(failures) if failures > 0 else 0.0
            self.world.later(self.world.random.uniform(0, longest), self.name, "again", self.submit, read, place)
            return
        read.limiter.note_response(self.world.now)
        self.node.served += 1
        self.outstanding -= 1
        read.unanswered -= 1
        if not read.unanswered:
            read.over = True
            self.waits.append(self.world.now - read.begun)
            self.fleet.on_read(self)


class Fleet:
    """Nodes, their processes and a store in a world.

    Args:
        num_processes: of each node.
        demand: requests a second of each process; inf: as many as it may send.
        steps: batches instead.
        starts: when each process begins; all within 50 ms if there are none.
        is_known: whether the processes know their number, and that of the nodes.
        num_folders: folders of which each process reads, one after the other.
        ceiling: requests a second of all nodes, and the seconds in which they double, where `is_known`.
        pause: begin and end of a time in which all processes stand still, as on machines that are suspended.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        num_nodes: int,
        num_processes: int = 1,
        *,
        demand: float = math.inf,
        steps: Steps | None = None,
        starts: Sequence[float] = (),
        is_known: bool = False,
        num_folders: int = 1,
        ceiling: tuple[float, float] = (math.inf, math.inf),
        pause: tuple[float, float] = (math.inf, math.inf),
    ) -> None:
        self.world, self.store, self.demand, self.steps, self.pause = world, store, demand, steps, pause
        self.first = FirstLimits.of_fleet(num_nodes, *ceiling) if is_known and num_nodes > 1 else FirstLimits()
        self.nodes = [Node(f"node {number}", Rates(world)) for number in range(num_nodes)]
        folders = [*map(str, range(num_folders))]
        self.processes = [
            Process(self, node, f"{node.name} process {number}", folders)
            for node in self.nodes
            for number in range(num_processes)
        ]
        self.num_arrived, self.steps_at = 0, list[float]()
        self.touched: tuple[Process, str] | None = None  # process and folder of the last response
        self._begin: Callable[[Process], Any] = self.take_step
        if steps is None:
            self._begin = self.keep_sending if demand == math.inf else self.send_steadily
        for number, process in enumerate(self.processes):
            start = starts[number] if starts else 0.05 * world.random.random()
            world.later(start, process.name, "start", self._begin, process)
        world.later(1.0, "clock", "second", self.second)

    @property
    def sent(self) -> int:
        return sum(node.sent for node in self.nodes)

    @property
    def served(self) -> int:
        return sum(node.served for node in self.nodes)

    def served_between(self, begin: int, end: int) -> list[int]:
        """Return the requests of each node that were served in a window, sorted."""
        return sorted(node.history[end - 1] - node.history[begin - 1] for node in self.nodes)

    def second(self) -> None:
        for node in self.nodes:
            node.history.append(node.served)
        self.world.later(1.0, "clock", "second", self.second)

    def keep_sending(self, process: Process) -> None:
        """Keep as many requests outstanding as may be in flight."""
        while process.outstanding < LARGEST_WINDOW:
            process.read(1)

    def send_steadily(self, process: Process) -> None:
        """Begin a read now, unless as many wait as may be in flight, and later the next one."""
        if process.outstanding < LARGEST_WINDOW:
            process.read(1)
        self.world.later(1 / self.demand, process.name, "demand", self.send_steadily, process)

    def take_step(self, process: Process) -> None:
        """Read a batch."""
        assert self.steps is not None
        if process.num_steps < self.steps.number:
            process.read(self.steps.num_ranges)

    def on_read(self, process: Process) -> None:
        """Go on after a whole read."""
        if self.steps is None:
            if self.demand == math.inf:
                process.read(1)
            return
        process.num_steps += 1
        self.num_arrived += 1
        going_on = [process]
        if self.steps.wait_for_others:
            if self.num_arrived % len(self.processes):
                return
            self.steps_at.append(self.world.now)
            going_on = self.processes
        for other in going_on:
            self.world.later(self.steps.pause, other.name, "step", self.take_step, other)
