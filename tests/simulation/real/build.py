"""Processes of nodes that want one index: its builder is killed, then the whole node of the next one."""

from __future__ import annotations

import random
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from servers.latency_proxy import Proxy, latency_proxy
from servers.seaweed import S3Server, s3_server
from simulation.build_world import BuildWorld, Setting
from simulation.processes import Process
from simulation.real.limit import wall_phase
from simulation.real.nodes import Cluster, Record, StartGate, sleep_until
from simulation.real.outcome import Outcome

from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.manifest import Origin
from binidx.index.cache.order_record import OrderKey
from binidx.storage import effects
from binidx.storage.effects import Steps
from binidx.storage.location import Location

NAME = "0123456789abcdef0123456789abcdef-Kind-train"
START_SECONDS = 0.3
"""Time within which all processes start."""
POLL_SECONDS = 0.02

Kill = tuple[Literal["process", "node"], float]
"""What is killed, and how many seconds after its build has begun."""


@dataclass(frozen=True)
class KilledBuild:
    """Nodes of some processes each.

    Args:
        build_seconds: of a build, at most a tenth shorter.
        kills: of the first builder, of the second, and so on.
    """

    num_nodes: int = 8
    num_processes: int = 3
    build_seconds: float = 4.0
    kills: tuple[Kill, ...] = (("process", 2.0), ("node", 2.0))
    round_trip: float = 0.05
    longest_seconds: float = 120.0

    @property
    def title(self) -> str:
        killed = ", ".join(kind for kind, _ in self.kills)
        return f"build, {self.num_nodes} nodes of {self.num_processes} processes, killed: {killed}"

    def simulate(self, seed: int, phase: float) -> Outcome:
        """Run the shells of the build in virtual time."""
        builds = KilledBuildWorld(seed, self)
        builds.world.run(self.longest_seconds)
        for process in builds.processes:
            process.kill()
        counts = {"sent": builds.num_sent, "served": builds.num_served, "builds": builds.num_builds[0]}
        return Outcome({**counts, "processes with arrays": len(builds.ended_at)}, {"arrays": builds.ended_at})

    def confirm(self, cluster: Cluster, seed: int) -> tuple[Outcome, float]:
        """Run processes with index caches of one folder."""
        with distant_s3(cluster, self.round_trip) as (server, proxy):
            folder, gate = server.make_bucket("cache") + "/indices", StartGate()
            for node in cluster.nodes:
                for number in range(self.num_processes):
                    work = partial(self.want, f"{seed} {node.number} {number}", folder, gate)
                    environment = {**server.environment, "AWS_ENDPOINT_URL": proxy.endpoint}
                    node.start(work, {**environment, "BINIDX_INDEX_DIR": str(node.directory / "index")})
            self.kill_builders(cluster, begin := gate.open(cluster.processes))
            cluster.check_ended(killed=True)
            log = [line for line in proxy.log() if "binidx.json" in line.path and line.began >= begin]
        ends = [seconds for process in cluster.processes for [seconds] in process.records("arrays")]
        num_builds = sum(len(process.records("build")) for process in cluster.processes)
        served = sum(line.status != 412 for line in log)
        counts = {"sent": len(log), "served": served, "builds": num_builds}
        return Outcome({**counts, "processes with arrays": len(ends)}, {"arrays": ends}), wall_phase(begin)

    def kill_builders(self, cluster: Cluster, begin: float) -> None:
        """Kill each builder that `kills` has a kill for, or its node."""
        known = set[tuple[int, float]]()
        for kind, seconds in self.kills:
            node, process, at = self.wait_for_builder(cluster, known)
            known.add((process.pid, at))
            sleep_until(begin + at + seconds)
            for killed in [process] if kind == "process" else node.processes:
                killed.kill()

    def wait_for_builder(self, cluster: Cluster, known: set[tuple[int, float]]) -> Any:
        """Return the node and the process of a build that has begun, and its time."""
        deadline = time.monotonic() + self.longest_seconds
        while time.monotonic() < deadline:
            for node in cluster.nodes:
                for process in node.processes:
                    for [at] in process.records("build"):
                        if (process.pid, at) not in known:
                            return node, process, at
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"no process builds within {self.longest_seconds:g} s")

    def want(self, seed: str, folder: str, gate: StartGate, record: Record) -> None:
        """Load or build the arrays; record when a build begins, and when they are there."""
        draw, array = random.Random(seed), np.arange(1000, dtype=np.int64)
        origin = Origin(content=lambda: {"index_digest": "1"})
        order = partial(OrderKey, 1, False, 0, 10)
        cache = IndexCache(IndexFiles(Location.of(folder), NAME), origin=origin, order=order)

        def build(writer: Any) -> None:
            record("build", time.monotonic() - begin)
            time.sleep(self.build_seconds * draw.uniform(0.9, 1.0))
            with writer.array("array", array.shape, array.dtype) as out:
                out[:] = array

        cache.load({}, ["other"])  # connects to the store
        begin = gate.wait(record)
        sleep_until(begin + START_SECONDS * draw.random())
        found = cache.load_or_build("described", {}, ["array"], build)
        record("arrays", time.monotonic() - begin)
        assert np.array_equal(found["array"], array)


class KilledBuildWorld(BuildWorld):
    """Builds of one index, whose first builders are killed.

    Attributes:
        num_sent, num_served: requests for leases and manifests, and those that were not refused as the object exists.
    """

    def __init__(self, seed: int, scenario: KilledBuild) -> None:
        self.kills, self.num_sent, self.num_served = deque(scenario.kills), 0, 0
        draw, count = random.Random(seed), scenario.num_nodes * scenario.num_processes
        starts = tuple(START_SECONDS * draw.random() for _ in range(count))
        sizes = scenario.num_nodes, scenario.num_processes, 1, (scenario.build_seconds,)
        super().__init__(seed, (), Setting(*sizes, starts=starts))
        self.objects.round_trip = scenario.round_trip
        apply = self.objects.apply

        def counted(effect: effects.Effect[Any]) -> Any:
            result = apply(effect)
            is_refused = isinstance(effect, effects.PutIfAbsent) and not result
            self.num_sent += 1
            self.num_served += not is_refused
            return result

        self.objects.apply = counted  # type: ignore[method-assign]

    def build(self, index: int, process: Process) -> Steps[tuple[str, bool]]:
        """Build, unless a kill comes before the end."""
        if self.kills:
            kind, seconds = self.kills.popleft()
            self.world.later(seconds, process.name, f"kill {kind}", self.kill, kind, process)
        return (yield from super().build(index, process))

    def kill(self, kind: str, process: Process) -> None:
        """Kill a builder or its node."""
        if kind == "process":
            process.kill()
        else:
            self.lose(self.nodes.index(process.node))


@contextmanager
def distant_s3(cluster: Cluster, round_trip: float) -> Iterator[tuple[S3Server, Proxy]]:
    """Run SeaweedFS, and before it a proxy that the nodes reach; a response takes `round_trip` seconds."""
    with (
        tempfile.TemporaryDirectory() as directory,
        s3_server(Path(directory)) as server,
        latency_proxy(server.endpoint, host=cluster.address, delay_ms=1e3 * round_trip) as proxy,
    ):
        yield server, proxy
