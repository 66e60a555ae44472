"""A limit that nodes share: each of them reads steps of ranges, one after the other, from one folder."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from functools import partial

from simulation.fleet import Fleet, Steps
from simulation.real.nodes import Cluster, Record, StartGate, sleep_until
from simulation.real.outcome import Outcome
from simulation.real.store_server import served_store
from simulation.stores import Store
from simulation.world import World

from binidx.storage.open import open_object

PERIOD_SECONDS = 64.0
"""Period of the wall clock in which limited nodes send less together: `request_rate.TOGETHER_SECONDS`."""
RANGE_BYTES, DISTANCE_BYTES = 512, 4096
CONTENT = random.Random(0).randbytes(4 << 20)


@dataclass(frozen=True)
class SharedLimit:
    """Nodes of one process each under one limit.

    Args:
        rate: requests a second that the store grants.
        num_ranges: of a step.
        seconds: length of the scenario.
        is_known: whether a launcher's variables show the number of nodes.
    """

    num_nodes: int = 16
    rate: float = 50.0
    num_ranges: int = 10
    seconds: float = 60.0
    is_known: bool = True
    round_trip: float = 0.1

    @property
    def title(self) -> str:
        return f"limit of {self.rate:g}/s, {self.num_nodes} nodes"

    def simulate(self, seed: int, phase: float) -> Outcome:
        """Run a fleet in virtual time."""
        world = World(seed)
        store = Store(self.rate, round_trip=self.round_trip)
        fleet = Fleet(world, store, self.num_nodes, steps=Steps(self.num_ranges), is_known=self.is_known)
        for node in fleet.nodes:
            node.rates.wall = phase
        world.run(self.seconds)
        waits = [seconds for process in fleet.processes for seconds in process.waits]
        return Outcome({"sent": fleet.sent, "served": fleet.served, "steps": len(waits)}, {"step": waits})

    def confirm(self, cluster: Cluster, seed: int) -> tuple[Outcome, float]:
        """Run processes that read."""
        with served_store(Store(self.rate, round_trip=self.round_trip), CONTENT, cluster.address) as server:
            gate, known = StartGate(), {"WORLD_SIZE": str(self.num_nodes), "LOCAL_WORLD_SIZE": "1"}
            for node in cluster.nodes:
                work = partial(self.read, f"{seed} {node.number}", f"s3://bucket/data/{node.number}.bin", gate)
                node.start(work, {**server.environment, **(known if self.is_known else {}), "BINIDX_MAX_GAP": "0"})
            server.begin(begin := gate.open(cluster.processes))
            phase = wall_phase(begin)
            cluster.check_ended()
            log = server.log(self.seconds)
        waits = [record[0] for process in cluster.processes for record in process.records("step")]
        granted = sum(line.granted for line in log)
        return Outcome({"sent": len(log), "served": granted, "steps": len(waits)}, {"step": waits}), phase

    def read(self, seed: str, uri: str, gate: StartGate, record: Record) -> None:
        """Read steps until the time is over; record how long each took."""
        draw, reader = random.Random(seed), open_object(uri, cache=False)
        begin = gate.wait(record)
        sleep_until(begin + 0.05 * draw.random())
        while True:
            asked = time.monotonic()
            reader.read(draw_ranges(draw, self.num_ranges))
            if time.monotonic() >= begin + self.seconds:
                os._exit(0)
            record("step", time.monotonic() - asked)


def draw_ranges(draw: random.Random, count: int) -> list[tuple[int, int]]:
    """Return ranges of the content of which each needs a request."""
    starts = sorted(draw.sample(range(len(CONTENT) // DISTANCE_BYTES), count))
    return [(DISTANCE_BYTES * start, DISTANCE_BYTES * start + RANGE_BYTES) for start in starts]


def wall_phase(moment: float) -> float:
    """Return a time of `time.monotonic` in the period of the wall clock."""
    return (time.time() + moment - time.monotonic()) % PERIOD_SECONDS
