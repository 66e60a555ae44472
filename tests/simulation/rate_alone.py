"""Fleet of nodes that always have demand for one partition: the rate alone, without reads, processes and retries.

Each node is one `RequestRate`; it sends the requests that have tickets, and counts what comes back. A refused request
is sent again by the rate, as by `RateLimiter`. Good for 10 to 1,000 nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from simulation.stores import Store
from simulation.world import World

from binidx.storage.requests.rate_limiter import (
    CHUNK_SECONDS,
    FIRST_WINDOW,
    FLEET_GROWTH,
    FLEET_RATE,
    FLEET_WINDOW,
    LONGEST_SLEEP,
    WIDEN_SECONDS,
)
from binidx.storage.requests.request_rate import RequestRate
from binidx.storage.requests.retries import FIRST_PAUSE, LONGEST_PAUSE

LARGEST_WINDOW = 128
WAKE_SECONDS = 0.001
"""Time by which a process wakes late."""


@dataclass
class Node:
    """One node.

    Attributes:
        demand: requests a second that it wants; inf: always more.
        served_at: number of served requests at each second.
    """

    name: str
    rate: RequestRate
    demand: float = math.inf
    in_flight: int = 0
    window: float = FIRST_WINDOW
    widening: float = 1.0
    has_answered: bool = False
    served: int = 0
    refused: int = 0
    sent: int = 0
    wanted: float = 0.0
    wanted_at: float = 0.0
    is_waking: bool = False
    history: list[int] = field(default_factory=list)


class Fleet:
    """Nodes and a store in a world.

    Args:
        starts: when each node begins, in seconds; all at once within 50 ms if it is None.
        is_known: whether the nodes know their number.
    """

    def __init__(
        self,
        world: World,
        store: Store,
        num_nodes: int,
        *,
        demand: float = math.inf,
        starts: Sequence[float] = (),
        is_known: bool = False,
    ) -> None:
        self.world, self.store = world, store
        self.nodes = [Node(f"node {number}", RequestRate(), demand) for number in range(num_nodes)]
        for node in self.nodes if is_known else ():
            node.rate.first_limit = FLEET_RATE / num_nodes
            node.window, node.widening = max(1, min(FIRST_WINDOW, FLEET_WINDOW // num_nodes)), FLEET_GROWTH
        for number, node in enumerate(self.nodes):
            start = starts[number] if starts else 0.05 * world.random.random()
            world.later(start, node.name, "start", self.start, node)
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

    def start(self, node: Node) -> None:
        node.rate.updated = node.wanted_at = self.world.now
        self.pump(node)
        self.world.later(WIDEN_SECONDS, node.name, "widen", self.widen, node)

    def widen(self, node: Node) -> None:
        if node.has_answered:
            node.window = min(2 * node.window, LARGEST_WINDOW)
        node.has_answered = False
        self.pump(node)
        if node.window < LARGEST_WINDOW:
            self.world.later(WIDEN_SECONDS, node.name, "widen", self.widen, node)

    def waiting(self, node: Node) -> int:
        """Return how many requests wait to be sent."""
        if node.demand == math.inf:
            return LARGEST_WINDOW
        node.wanted += (self.world.now - node.wanted_at) * node.demand
        node.wanted_at = self.world.now
        return int(node.wanted)

    def pump(self, node: Node) -> int | None:
        """Send the requests that are allowed now; return how many."""
        rate, now, num_sent = node.rate, self.world.now, 0
        self.note(node)
        if not rate.is_limited:
            num_sent = min(self.waiting(node), int(node.window) - node.in_flight)
            for _ in range(num_sent):
                self.send(node)
            if node.demand < math.inf:
                self.wake(node, (1 - node.wanted % 1) / node.demand)
        elif not node.is_waking:
            count = min(self.waiting(node), max(1, math.ceil(rate.limit * CHUNK_SECONDS)))
            if count:
                self.wake(node, None, rate.take(now, count), count)
            else:
                self.wake(node, (1 - node.wanted % 1) / node.demand)
        return num_sent or None

    def note(self, node: Node, served: int = 0, refused: int = 0) -> None:
        node.rate.note(self.world.now, served, refused, wall=self.world.now)

    def wake(self, node: Node, seconds: float | None, ticket: float = 0.0, count: int = 0) -> None:
        if node.is_waking:
            return
        node.is_waking = True
        if seconds is None:
            seconds = max(0.0, min(node.rate.seconds_until(ticket), LONGEST_SLEEP))
        self.world.later(
            seconds + WAKE_SECONDS * self.world.random.random(), node.name, "wake", self.woken, node, ticket, count
        )

    def woken(self, node: Node, ticket: float, count: int) -> int | None:
        node.is_waking = False
        rate = node.rate
        self.note(node)
        if rate.is_limited and count:
            if rate.seconds_until(ticket) > 1e-9:
                self.wake(node, None, ticket, count)
                return None
            for _ in range(count):
                self.send(node)
        return (self.pump(node) or 0) + count

    def send(self, node: Node) -> None:
        node.in_flight += 1
        node.sent += 1
        node.wanted -= 1
        self.world.later(self.store.delay(self.world.random), node.name, "arrive", self.arrive, node)

    def arrive(self, node: Node) -> str:
        granted = self.store.grants("", self.world.now, self.world.random)
        self.world.later(self.store.delay(self.world.random), node.name, "end", self.end, node, granted)
        return "granted" if granted else "refused"

    def end(self, node: Node, granted: bool) -> None:
        node.in_flight -= 1
        self.note(node, int(granted), int(not granted))
        if granted:
            node.served += 1
            node.window = min(node.window + node.widening, LARGEST_WINDOW)
            node.has_answered = True
        elif node.rate.is_limited:
            node.wanted += 1
        else:
            node.window = max(1, node.window - 1)
            seconds = self.world.random.uniform(
                0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (node.refused // LARGEST_WINDOW))
            )
            node.in_flight += 1
            node.refused += 1
            self.world.later(seconds, node.name, "again", self.again, node)
            return
        if not node.is_waking:
            self.pump(node)

    def again(self, node: Node) -> None:
        node.in_flight -= 1
        node.wanted += 1
        if not node.is_waking:
            self.pump(node)
