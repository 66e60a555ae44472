"""Nodes of processes that read batches of ranges from a store with a limit, in simulated time; no clock, one seed."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from servers.grants import Bucket

from binidx.storage.requests.rate_limiter import CHUNK_SECONDS, FIRST_WINDOW, LONGEST_SLEEP
from binidx.storage.requests.request_rate import RequestRate
from binidx.storage.requests.retries import FIRST_PAUSE, LONGEST_PAUSE

LARGEST_WINDOW = 128
ROUND_TRIP = 0.03


@dataclass
class Process:
    """One rank: its requests in the line and in flight, and the tickets it waits for."""

    rate: RequestRate
    line: int = 0
    in_flight: int = 0
    window: int = FIRST_WINDOW
    ticket: float | None = None
    num_tickets: int = 0
    unanswered: int = 0
    num_steps: int = 0
    num_failures: int = 0
    asked_at: float = 0.0


@dataclass
class Fleet:
    """The simulation.

    Args:
        num_nodes, num_ranks: nodes, and processes of each.
        bucket: what the store grants.
        num_ranges: ranges of a batch.
        step_seconds: between a batch and the request for the next one.
        num_steps: batches of each process.
        in_step: whether a process requests its next batch only when all have theirs, as ranks do that train together.
        random_share: refusals whatever the rate.
        first_limit: of each node: `RequestRate`.
    """

    num_nodes: int
    num_ranks: int
    bucket: Bucket
    num_ranges: int
    step_seconds: float = 0.0
    num_steps: float = math.inf
    in_step: bool = False
    random_share: float = 0.0
    first_limit: float = math.inf
    seed: int = 0
    now: float = 0.0
    sent: int = 0
    served: int = 0
    num_arrived: int = 0
    waits: list[float] = field(default_factory=list)
    steps_at: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()
        rates = [RequestRate(first_limit=self.first_limit) for _ in range(self.num_nodes)]
        self.processes = [Process(rate) for rate in rates for _ in range(self.num_ranks)]
        for process in self.processes:
            self.later(self.random.random() * 0.05, self.ask, process)

    @property
    def steps(self) -> list[int]:
        return [process.num_steps for process in self.processes]

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] < until:
            self.now, _, event, arguments = heapq.heappop(self.events)
            event(*arguments)

    def later(self, seconds: float, event: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.numbers), event, arguments))

    def ask(self, process: Process) -> None:
        if process.num_steps < self.num_steps:
            process.asked_at = self.now
            process.line = process.unanswered = self.num_ranges
            self.pump(process)

    def pump(self, process: Process) -> None:
        rate = process.rate
        if not rate.is_limited:
            while process.line and process.in_flight < min(process.window, LARGEST_WINDOW):
                self.send(process)
        elif process.ticket is None and process.line:
            rate.note(self.now)
            if not rate.is_limited:
                self.pump(process)
                return
            process.num_tickets = min(process.line, max(1, math.ceil(rate.limit * CHUNK_SECONDS)))
            process.ticket = rate.take(self.now, process.num_tickets)
            self.wake(process)

    def wake(self, process: Process) -> None:
        rate = process.rate
        rate.note(self.now)
        assert process.ticket is not None
        if rate.is_limited and (seconds := rate.seconds_until(process.ticket)) > 1e-9:
            self.later(min(seconds, LONGEST_SLEEP) + 0.001, self.wake, process)
            return
        if rate.is_limited:
            for _ in range(min(process.num_tickets, process.line)):
                self.send(process)
        process.ticket = None
        self.pump(process)

    def send(self, process: Process) -> None:
        process.line -= 1
        process.in_flight += 1
        self.sent += 1
        is_granted = self.bucket.grants(self.now) and self.random.random() >= self.random_share
        self.later(ROUND_TRIP * self.random.uniform(0.9, 1.3), self.end, process, is_granted)

    def end(self, process: Process, is_granted: bool) -> None:
        process.in_flight -= 1
        process.rate.note(self.now, int(is_granted), int(not is_granted))
        if is_granted:
            self.served += 1
            process.num_failures = 0
            process.window += 1
            process.unanswered -= 1
            if process.unanswered == 0:
                process.num_steps += 1
                self.waits.append(self.now - process.asked_at)
                self.arrive(process)
            self.pump(process)
        elif process.rate.is_limited:
            self.again(process)
        else:
            process.num_failures += 1
            doublings = process.num_failures // max(1, process.line + process.in_flight)
            self.later(self.random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**doublings)), self.again, process)

    def arrive(self, process: Process) -> None:
        """Request the next batch, or wait for the other processes."""
        self.num_arrived += 1
        if not self.in_step:
            self.later(self.step_seconds, self.ask, process)
        elif self.num_arrived % len(self.processes) == 0:
            self.steps_at.append(self.now)
            for other in self.processes:
                self.later(self.step_seconds, self.ask, other)

    def again(self, process: Process) -> None:
        process.line += 1
        self.pump(process)
