"""A disk cache that one process of a node fills while all train; processes are killed, and start again at step 0."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from simulation.cache_world import (
    BLOCK,
    CHUNK,
    EXTENT,
    CacheProcess,
    CacheWorld,
    Disk,
    Fault,
    SimulatedFilling,
    StoredObject,
)
from simulation.processes import Node
from simulation.real.limit import wall_phase
from simulation.real.nodes import Cluster, NodeProcess, Record, StartGate, sleep_until
from simulation.real.outcome import Outcome
from simulation.real.store_server import served_store
from simulation.stores import Store
from simulation.world import World

from binidx.storage.cache.fill_plan import ExtentUses, FillSizes
from binidx.storage.cache.filling import CacheFilling
from binidx.storage.effects import Steps
from binidx.storage.interfaces import Range
from binidx.storage.open import open_object

SCALE = 64
"""Bytes of a real chunk for each of a simulated one: 4 KiB."""
COUNT_SECONDS = 0.3
"""Time that the uses are counted: `SimulatedFilling.count_uses`."""


@dataclass(frozen=True)
class KilledFill:
    """Processes of one node.

    Args:
        num_chunks: of the object.
        num_steps: of a process; a step reads one to three ranges.
        step_seconds: of a step besides its reads.
        kills: time of a kill, and number of the process among those alive.
        restart_seconds: time from a kill to the begin of the next process.
    """

    num_nodes: int = 1
    num_processes: int = 2
    num_chunks: int = 1_600
    num_steps: int = 200
    step_seconds: float = 0.1
    kills: tuple[tuple[float, int], ...] = ((4.0, 0), (8.0, 1), (11.0, 0))
    restart_seconds: float = 1.0
    seconds: float = 45.0
    round_trip: float = 0.1

    @property
    def title(self) -> str:
        return f"fill of {self.num_chunks:,} chunks by {self.num_processes} processes, {len(self.kills)} kills"

    def draw_steps(self, seed: int) -> list[list[Range]]:
        """Return the ranges of each step, in bytes of the simulated object."""
        draw, size, steps = random.Random(seed), self.num_chunks * CHUNK, []
        for _ in range(self.num_steps):
            starts = sorted(draw.sample(range(0, size, 3 * CHUNK), draw.randint(1, 3)))
            steps.append([(start, start + draw.choice([1, 30, CHUNK])) for start in starts])
        return steps

    def simulate(self, seed: int, phase: float) -> Outcome:
        """Run the machines of the cache over a simulated disk."""
        cache = KilledFillWorld(seed, self)
        cache.world.run(self.seconds)
        for process in cache.processes:
            process.kill()
        counts = {"sent": cache.counts["requests"], "chunks fetched": cache.counts["fetched"]}
        counts |= {"steps": len(cache.step_times)}
        return Outcome(counts, {"step": cache.step_times, "until all is filled": [cache.last_fetch]})

    def confirm(self, cluster: Cluster, seed: int) -> tuple[Outcome, float]:
        """Run processes with a disk cache on their node."""
        [node], content = cluster.nodes, random.Random(seed).randbytes(self.num_chunks * CHUNK * SCALE)
        with served_store(Store(round_trip=self.round_trip), content, cluster.address) as server:
            environment = {
                **server.environment, "BINIDX_CACHE_DIR": str(node.directory / "cache"), "BINIDX_CACHE_FILL": "all",
                "BINIDX_CACHE_CHUNK_BYTES": str(CHUNK * SCALE), "BINIDX_MAX_GAP": "0",
            }  # fmt: skip
            gate, alive = StartGate(), list[NodeProcess]()

            def start(at: float) -> None:
                work = partial(self.train, seed, "s3://bucket/data/tokens.bin", gate, at)
                alive.append(node.start(work, environment))

            for _ in range(self.num_processes):
                start(0.0)
            server.begin(begin := gate.open(alive))
            for seconds, choice in self.kills:
                sleep_until(begin + seconds)
                killed = alive.pop(choice % len(alive))
                killed.kill()
                start(seconds + self.restart_seconds)
            sleep_until(begin + self.seconds)
            for process in alive:
                process.kill()
            cluster.check_ended(killed=True)
            log = server.log(self.seconds)
        chunks = [line for line in log if line.num_bytes % (CHUNK * SCALE) == 0]
        steps = [seconds for process in cluster.processes for [seconds] in process.records("step")]
        counts = {"sent": len(log), "chunks fetched": sum(line.num_bytes for line in chunks) // (CHUNK * SCALE)}
        counts |= {"steps": len(steps)}
        return Outcome(
            counts, {"step": steps, "until all is filled": [max(line.seconds for line in chunks)]}
        ), wall_phase(begin)

    def uses(self, steps: Sequence[Sequence[Range]]) -> ExtentUses:
        """Count what the steps read of each extent, in simulated bytes."""
        starts = np.arange(0, self.num_chunks * CHUNK, EXTENT)
        stops = np.minimum(starts + EXTENT, self.num_chunks * CHUNK)
        used, first, last = np.zeros(len(starts)), np.full(len(starts), 10**9), np.full(len(starts), -1)
        for step, (start, stop) in ((step, place) for step, ranges in enumerate(steps) for place in ranges):
            for extent in range(start // EXTENT, (stop - 1) // EXTENT + 1):
                used[extent] += min(stop, stops[extent]) - max(start, starts[extent])
                first[extent], last[extent] = min(first[extent], step), max(last[extent], step)
        return ExtentUses(np.zeros(len(starts), np.int64), np.arange(len(starts)), stops - starts, used, first, last)

    def train(self, seed: int, uri: str, gate: StartGate, at: float, record: Record) -> None:
        """Read the ranges of all steps from a time on, and fill meanwhile; record how long each step took."""
        steps = [[(start * SCALE, stop * SCALE) for start, stop in ranges] for ranges in self.draw_steps(seed)]

        def count_uses() -> ExtentUses:
            time.sleep(COUNT_SECONDS)
            counted = self.uses(self.draw_steps(seed))
            names = counted.objects, counted.numbers, counted.sizes * SCALE, counted.used * SCALE
            return ExtentUses(*names, counted.first, counted.last)

        reader = open_object(uri)
        filling = CacheFilling([reader], count_uses, is_expected=True, sizes=fill_sizes(EXTENT * SCALE))
        sleep_until(gate.wait(record) + at)
        filling.advance()
        for ranges in steps:
            asked = time.monotonic()
            with filling.progress.trainer_waiting():
                reader.read(ranges)
            time.sleep(self.step_seconds)
            filling.advance(1)
            record("step", time.monotonic() - asked)
        filling.stop()


def fill_sizes(extent_bytes: int) -> FillSizes:
    return FillSizes(extent_bytes, choose_seconds=1.5, most_choose_seconds=8.0, in_flight=4)


class KilledFillWorld(CacheWorld):
    """World of one object, whose processes all train the same steps.

    Attributes:
        step_times: seconds of each step.
        last_fetch: when chunks were requested last.
    """

    def __init__(self, seed: int, scenario: KilledFill) -> None:
        self.scenario, self.world, self.node = scenario, World(seed), Node("node")
        size = scenario.num_chunks * CHUNK
        self.objects, self.limit = [StoredObject(0, size)], None
        self.disk, self.latency_seconds = Disk(20 * (size + BLOCK), has_locks=True), scenario.round_trip
        self.num_processes, self.fills_all, self.has_filling = scenario.num_processes, True, True
        self.steps = [(0, ranges) for ranges in scenario.draw_steps(seed)]
        self.refuses_until = self.slow_until = self.breaks_until = 0.0
        self.faults = tuple(Fault(at, "kill", scenario.restart_seconds, choice) for at, choice in scenario.kills)
        self.step_times, self.last_fetch = list[float](), 0.0
        self._begin()

    def latency(self) -> float:
        return self.latency_seconds * (0.9 + 0.4 * self.world.random.random())

    def fetching(self, opened: Any, chunks: Sequence[int]) -> Any:
        self.last_fetch = self.world.now
        return super().fetching(opened, chunks)

    def start(self, name: str) -> CacheProcess:
        """Start a process that fills and trains."""
        process = CacheProcess(self, name)
        self.processes.append(process)
        uses = self.scenario.uses([ranges for _, ranges in self.steps])
        filling = process.filling = SimulatedFilling(process, uses, fill_sizes(EXTENT), range(1))
        filling.start()
        process.start(self.train(process, filling), "trainer")
        return process

    def train(self, process: CacheProcess, filling: SimulatedFilling) -> Steps[None]:
        """Train as `SimulatedFilling.train` does, and note how long each step takes."""
        for number, ranges in self.steps:
            asked = self.world.now
            yield from filling.train_step(number, ranges, self.scenario.step_seconds)
            self.step_times.append(self.world.now - asked)
        filling.stop()
