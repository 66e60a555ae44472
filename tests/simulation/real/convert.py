"""Converts of one dataset to one target, one call after the other: the first ones are killed, the last one ends."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from servers.latency_proxy import Proxy
from simulation.convert_world import TARGET, Source
from simulation.processes import Node, Objects, Process, Task
from simulation.real.build import distant_s3
from simulation.real.nodes import LEAD_SECONDS, Cluster, NodeProcess, Record, sleep_until
from simulation.real.outcome import Outcome
from simulation.world import World

from binidx.corpus import token_parts
from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.copies.convert_owner import DiscardParts
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage import effects
from binidx.storage.codecs.segments import SEGMENT_BYTES

KINDS = {"owner": r"\.convert\.json$", "folder": r"-parts/job\.json$", "records": r"-parts/[^/]*\.json$"}
KINDS |= {"pieces": r"-parts/[^/]*\.bin"}
"""Kind of an object -> pattern of its name; the first that matches counts."""
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class KilledConvert:
    """Calls on one node.

    Args:
        num_parts: of the tokens.
        kills: of the first call, of the second, and so on: records that it has written, and seconds since the last one.
        pause: seconds between a kill and the next call.
    """

    num_nodes: int = 1
    num_parts: int = 32
    kills: tuple[tuple[int, float], ...] = ((6, 0.15), (8, 0.3), (5, 0.05))
    pause: float = 0.5
    round_trip: float = 0.1

    @property
    def title(self) -> str:
        return f"convert in {self.num_parts} parts, {len(self.kills)} kills"

    def simulate(self, seed: int, phase: float) -> Outcome:
        """Run the shells of the owner and of the folder in virtual time."""
        world, seen = World(seed), Seen()
        objects, source = Objects(world, round_trip=self.round_trip), Source("a", self.num_parts)
        apply = objects.apply

        def counted(effect: effects.Effect[Any]) -> Any:
            is_write = isinstance(effect, effects.WriteObject | effects.PutIfAbsent)
            seen.add(getattr(effect, "location", TARGET).uri, world.now, is_write=is_write)
            return apply(effect)

        objects.apply = counted  # type: ignore[method-assign]
        for num_records, seconds in self.kills:
            process, _ = self.begin(world, objects, source)
            before = len(seen.records)
            while len(seen.records) < before + num_records:
                world.run(world.now + POLL_SECONDS)
            world.run(seen.records[-1] + seconds)
            process.kill()
            seen.end_call()
            world.run(world.now + self.pause)
        _, task = self.begin(world, objects, source)
        world.run(world.now + 60.0)
        assert task.result == "copied", task.error
        return seen.outcome()

    def begin(self, world: World, objects: Objects, source: Source) -> tuple[Process, Task]:
        """Begin a simulated call."""
        process = Process(world, Node("node"), objects)
        process.performers[DiscardParts] = lambda effect, task: process.answer(task, None)
        return process, process.start(source.convert(), "convert")

    def confirm(self, cluster: Cluster, seed: int) -> tuple[Outcome, float]:
        """Run one process after the other."""
        [node], seen = cluster.nodes, Seen()
        source = node.directory / "source"
        write_source(source, self.num_parts, seed)
        with distant_s3(cluster, self.round_trip) as (server, proxy):
            target = server.make_bucket("bucket") + "/en"
            environment = {**server.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
            for kill in [*self.kills, None]:
                work = partial(self.convert, source, target, time.monotonic() + LEAD_SECONDS)
                process = node.start(work, environment)
                if kill is not None:
                    self.kill(process, proxy, *kill)
                    seen.add_log(proxy)
                    seen.end_call()
                    time.sleep(self.pause)
            cluster.check_ended(killed=True)
            seen.add_log(proxy)
        return seen.outcome(), 0.0

    def kill(self, process: NodeProcess, proxy: Proxy, num_records: int, seconds: float) -> None:
        """Kill a call some seconds after it has written some records."""
        while (
            len(written := [line for line in proxy.log() if line.sent and kind_of(line.path) == "records"])
            < num_records
        ):
            assert not process.has_ended(), Path(f"{process.file}.log").read_text()
            time.sleep(POLL_SECONDS)
        sleep_until(written[num_records - 1].began + seconds)
        process.kill()

    def convert(self, source: Path, target: str, began: float, record: Record) -> None:
        """Convert in parts of one segment each."""
        token_parts.LEAST_BYTES = SEGMENT_BYTES
        sleep_until(began)
        convert_dataset(source, target, way=StorageFormat("zstd"))


@dataclass
class Seen:
    """Requests that came to a store.

    Attributes:
        requests, written: by the kind of their object.
        records: when the records of this call were written.
        gaps: seconds between the records of the tokens in one call.
    """

    requests: Counter[str] = field(default_factory=Counter)
    written: Counter[str] = field(default_factory=Counter)
    records: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, name: str, at: float, *, is_write: bool) -> None:
        """Count a request."""
        kind = kind_of(name)
        self.requests[kind] += 1
        self.written[kind] += is_write
        if kind == "records" and is_write:
            self.records.append(at)

    def add_log(self, proxy: Proxy) -> None:
        """Count the requests of a call in the log of a proxy, and empty it."""
        for line in proxy.log():
            self.add(line.path, line.began, is_write=line.method == "PUT")
        proxy.reset()

    def end_call(self, *, is_last: bool = False) -> None:
        """Note the gaps of a call; the last record of the last call is that of the `.idx`, after the join of pieces."""
        self.gaps += [later - at for at, later in itertools.pairwise(self.records[: -1 if is_last else None])]
        self.records.clear()

    def outcome(self) -> Outcome:
        self.end_call(is_last=True)
        counts = {f"requests for {name}": self.requests[name] for name in ("owner", "folder", "records")}
        return Outcome({**counts, **{f"{name} written": self.written[name] for name in KINDS}}, {"part": self.gaps})


def kind_of(name: str) -> str:
    """Return the kind of an object, by its URI or path."""
    name = name.partition("?")[0]
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), "other")


def write_source(prefix: Path, num_parts: int, seed: int) -> None:
    """Write a dataset whose tokens are so many segments."""
    draw = random.Random(seed)
    with IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        for _ in range(num_parts):
            tokens: Sequence[int] = draw.choices(range(900), k=SEGMENT_BYTES // 2)
            builder.add_document(tokens, [SEGMENT_BYTES // 2])
        builder.finalize(f"{prefix}.idx")
