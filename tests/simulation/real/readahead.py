"""Trainers that read ahead, and abandon their iterators in the middle: a new one goes on at the next batch."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from simulation.readahead_world import Pace, Store, Trainer
from simulation.real.limit import CONTENT, DISTANCE_BYTES, RANGE_BYTES, wall_phase
from simulation.real.nodes import Cluster, Record, StartGate, sleep_until
from simulation.real.outcome import Outcome
from simulation.real.store_server import served_store
from simulation.stores import Store as RequestStore
from simulation.world import World

from binidx.loader.readahead import ReadAheadDataset
from binidx.loader.samplers import PretrainingSampler, build_sampler
from binidx.storage.open import open_object

TOTAL = 1_000_000


@dataclass(frozen=True)
class AbandonedReadAhead:
    """Trainers of one process each, on nodes.

    Args:
        batch_size: samples of a batch; each is one range.
        pace: seconds of a step.
        lives: fewest and most batches of an iterator.
    """

    num_nodes: int = 4
    batch_size: int = 4
    pace: float = 0.1
    seconds: float = 50.0
    lives: tuple[int, int] = (5, 60)
    round_trip: float = 0.1
    budget_bytes: int = 256 << 10

    @property
    def title(self) -> str:
        first, last = self.lives
        return f"read-ahead, {self.num_nodes} trainers, iterators of {first} to {last} batches"

    def draw_lives(self, seed: int, trainer: int) -> Iterator[int]:
        """Yield the batches of each iterator of a trainer."""
        draw = random.Random(f"{seed} {trainer}")
        while True:
            yield draw.randint(*self.lives)

    def sampler(self, consumed: int) -> PretrainingSampler:
        return build_sampler("single", range(TOTAL), consumed, self.batch_size, 0, 1)

    def simulate(self, seed: int, phase: float) -> Outcome:
        """Run the windows in virtual time; a read takes as long as its slowest request."""
        world = World(seed)
        store = Store(world, self.round_trip * 1.1, sample_bytes=lambda number: RANGE_BYTES)
        lines = [SimulatedTrainers(self, world, store, seed, number) for number in range(self.num_nodes)]
        world.run(self.seconds)
        trainers = [trainer for line in lines for trainer in line.trainers]
        steps = [wait + self.pace for trainer in trainers for wait in trainer.waits]
        counts = {
            "sent": sum(trainer.num_sent for trainer in trainers),
            "steps": len(steps),
            "iterators": len(trainers),
        }
        return Outcome(counts, {"step": steps})

    def confirm(self, cluster: Cluster, seed: int) -> tuple[Outcome, float]:
        """Run processes that train."""
        with served_store(RequestStore(round_trip=self.round_trip), CONTENT, cluster.address) as server:
            gate = StartGate()
            for node in cluster.nodes:
                work = partial(self.train, seed, node.number, "s3://bucket/data/tokens.bin", gate)
                node.start(work, {**server.environment, "BINIDX_MAX_GAP": "0"})
            server.begin(begin := gate.open(cluster.processes))
            phase = wall_phase(begin)
            cluster.check_ended()
            log = server.log(self.seconds)
        steps = [seconds for process in cluster.processes for [seconds] in process.records("step")]
        num_iterators = sum(len(process.records("iterator")) for process in cluster.processes)
        counts = {"sent": len(log), "steps": len(steps), "iterators": num_iterators}
        return Outcome(counts, {"step": steps}), phase

    def train(self, seed: int, number: int, uri: str, gate: StartGate, record: Record) -> None:
        """Take batches until the time is over; record the seconds of each step, and each iterator."""
        data, consumed = Ranges(uri), 0
        begin = gate.wait(record)
        sleep_until(begin)
        for life in self.draw_lives(seed, number):
            record("iterator", life)
            ahead = ReadAheadDataset(data, self.sampler(consumed), in_groups=True, budget_bytes=self.budget_bytes)
            for batch in itertools.islice(self.sampler(consumed), life):
                asked = time.monotonic()
                ahead.__getitems__(batch)
                is_over = time.monotonic() >= begin + self.seconds
                if is_over:
                    return
                time.sleep(self.pace)
                record("step", time.monotonic() - asked)
            del ahead
            consumed += life * self.batch_size


class Ranges:
    """Map-style dataset whose sample is a range of an object, far from those of its neighbours."""

    def __init__(self, uri: str) -> None:
        self.reader = open_object(uri, cache=False)

    def __len__(self) -> int:
        return TOTAL

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        starts = sorted(number * DISTANCE_BYTES % len(CONTENT) for number in numbers)
        return [np.array(view) for view in self.reader.read([(start, start + RANGE_BYTES) for start in starts])]


class CountedTrainer(Trainer):
    """Trainer that counts the requests of its reads, and abandons its iterator after some batches."""

    def __init__(self, *arguments: Any, life: int, on_end: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.num_sent, self.life, self.on_end = 0, life, on_end
        start = self.threads.start

        def counted(group: Any) -> str | None:
            action = start(group)
            self.num_sent += len(group.samples) if (action or "").startswith("reads") else 0
            return action

        self.threads.start = counted  # type: ignore[method-assign]

    def read_alone(self) -> None:
        super().read_alone()
        self.num_sent += len(self.requested or ())

    def step(self) -> str | None:
        if not self.is_over and len(self.waits) == self.life:
            self.on_end()
            return self.abandon()
        return super().step()


class SimulatedTrainers:
    """The iterators of one trainer, one after the other."""

    def __init__(self, scenario: AbandonedReadAhead, world: World, store: Store, seed: int, number: int) -> None:
        self.scenario, self.world, self.store, self.number = scenario, world, store, number
        self.lives, self.consumed = scenario.draw_lives(seed, number), 0
        self.trainers = list[CountedTrainer]()
        self.begin()

    def begin(self) -> None:
        scenario, life = self.scenario, next(self.lives)
        self.trainers.append(
            CountedTrainer(
                self.world,
                f"trainer {self.number}",
                self.store,
                scenario.sampler(self.consumed),
                pace=Pace(scenario.pace),
                budget_bytes=scenario.budget_bytes,
                life=life,
                on_end=self.begin,
            )
        )
        self.consumed += life * scenario.batch_size
