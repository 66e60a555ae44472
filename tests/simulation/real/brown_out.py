"""A store that refuses a share of all requests for a time, and nodes whose callers go on reading."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from simulation.real.limit import CONTENT, RANGE_BYTES, draw_ranges, wall_phase
from simulation.real.nodes import Cluster, Record, StartGate, sleep_until
from simulation.real.outcome import Outcome
from simulation.real.store_server import served_store
from simulation.request_world import Caller, Plan, Process, RequestWorld, SimulatedRead
from simulation.stores import Fault, Store
from simulation.world import World

from binidx.storage.open import open_object
from binidx.storage.settings import ReadSettings

FIRST_SECONDS = 0.2
"""Time within which callers begin."""


@dataclass(frozen=True)
class BrownOut:
    """Callers of processes of nodes, and the time in which the store refuses requests.

    Args:
        num_callers: of each process: threads that read, and wait for each of their reads.
        num_ranges: of a read.
        pause: mean seconds between a caller's reads.
        begin, end: time in which `share` of all requests is refused, whatever their rate.
    """

    num_nodes: int = 4
    num_processes: int = 2
    num_callers: int = 2
    num_ranges: int = 8
    pause: float = 1.0
    seconds: float = 50.0
    begin: float = 15.0
    end: float = 30.0
    share: float = 0.5
    round_trip: float = 0.1

    @property
    def title(self) -> str:
        return f"brown-out, {self.share:.0%} refused for {self.end - self.begin:g} of {self.seconds:g} s"

    @property
    def store(self) -> Store:
        return Store(round_trip=self.round_trip, faults=(Fault(self.begin, self.end, "random", self.share),))

    def simulate(self, seed: int, phase: float) -> Outcome:
        """Run the schedules of requests in virtual time."""
        world = World(seed)
        plan = Plan(
            store=self.store,
            num_nodes=self.num_nodes,
            num_processes=self.num_processes,
            num_callers=0,
            limit=128,
            size=RANGE_BYTES,
            settings=ReadSettings(),
        )
        requests = RequestWorld(world, plan)
        for process in requests.processes:
            process.rates.wall = phase
            process.callers = [SteadyCaller(process, number, self) for number in range(self.num_callers)]
        world.run(self.seconds)
        ends = [end for process in requests.processes for caller in process.callers for end in caller.ends]  # type: ignore[attr-defined]
        sent = sum(read.sent for read in requests.reads)
        return self.outcome(sent, sent - requests.plan.store.refused, ends)

    def confirm(self, cluster: Cluster, seed: int) -> tuple[Outcome, float]:
        """Run processes whose threads read."""
        with served_store(self.store, CONTENT, cluster.address) as server:
            gate = StartGate()
            for node in cluster.nodes:
                for number in range(self.num_processes):
                    work = partial(self.work, f"{seed} {node.number} {number}", "s3://bucket/data/tokens.bin", gate)
                    node.start(work, {**server.environment, "BINIDX_MAX_GAP": "0"})
            server.begin(begin := gate.open(cluster.processes))
            phase = wall_phase(begin)
            cluster.check_ended()
            log = server.log(self.seconds)
        ends = [(begun, seconds) for process in cluster.processes for begun, seconds in process.records("read")]
        return self.outcome(len(log), sum(line.granted for line in log), ends), phase

    def outcome(self, sent: int, served: int, ends: list[tuple[float, float]]) -> Outcome:
        """Return the outcome of requests, and of reads as (begin, seconds)."""
        calm = [seconds for begun, seconds in ends if not self.begin <= begun < self.end]
        troubled = [seconds for begun, seconds in ends if self.begin <= begun < self.end]
        counts = {"sent": sent, "served": served, "steps": len(ends)}
        return Outcome(counts, {"read": calm, "read in the brown-out": troubled})

    def work(self, seed: str, uri: str, gate: StartGate, record: Record) -> None:
        """Read by threads until the time is over; record when each read began, and how long it took."""
        reader = open_object(uri, cache=False)
        begin = gate.wait(record)
        callers = [
            threading.Thread(target=self.call, args=(random.Random(f"{seed} {number}"), reader, begin, record))
            for number in range(self.num_callers)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()

    def call(self, draw: random.Random, reader: Any, begin: float, record: Record) -> None:
        sleep_until(begin + FIRST_SECONDS * draw.random())
        while (asked := time.monotonic()) < begin + self.seconds:
            reader.read(draw_ranges(draw, self.num_ranges))
            if (now := time.monotonic()) < begin + self.seconds:
                record("read", asked - begin, now - asked)
            time.sleep(2 * self.pause * draw.random())


class SteadyCaller(Caller):
    """Caller that reads the same number of ranges again and again; `ends` are the begins and seconds of its reads."""

    def __init__(self, process: Process, number: int, scenario: BrownOut) -> None:
        self.scenario, self.ends = scenario, list[tuple[float, float]]()
        super().__init__(process, number)

    def read(self) -> None:
        ranges = draw_ranges(self.process.world.random, self.scenario.num_ranges)
        self.begun = self.process.world.now
        self.reads.append(SimulatedRead(self, ranges, self.process.plan.settings, False))
        self.process.later(0.0, "submit", self.process.submit, self.reads[-1])

    def returned(self, read: SimulatedRead) -> str:
        assert read.error is None, read.error
        world = self.process.world
        self.ends.append((self.begun, world.now - self.begun))
        world.later(2 * self.scenario.pause * world.random.random(), self.name, "next", self.read)
        return "ok"
