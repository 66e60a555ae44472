"""Start of a run on simulated nodes: time and bytes of the index build, and of a failed or killed builder.

Each node is a directory of its own (BINIDX_INDEX_DIR); ranks are processes with torch's gloo backend, or without it;
the store is SeaweedFS behind the proxy that counts. All share the cores of one machine: eight processes that check the
sums of what they load have less of them each than those of a cluster. So what they share is loaded before: torch, the
driver of the store.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from helpers.ports import free_port
from servers.latency_proxy import Proxy, latency_proxy
from servers.log import Logged
from servers.seaweed import s3_server

import binidx
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=0, size="2,500,000 sequences, 4 epochs, S3 5 ms away", cached="see the work", workers=8)
SEQUENCES = int(os.environ.get("BINIDX_BENCH_SEQUENCES", 2_500_000))
EPOCHS = 4
SEQUENCE_LENGTH = 16
MEAN_TOKENS = 8
ROUNDS = 3
DELAY_MS = 5.0


@dataclass
class Place:
    """Where the runs of a bench happen: a directory, a store, the data there."""

    directory: Path
    proxy: Proxy
    base: str
    prefix: str
    runs: int = 0

    def run(self, processes: int, nodes: int, *, gloo: bool, cache: str | None = None, **how: Any) -> Run:
        """So many processes on so many nodes, started and ready. A new cache, unless one is named."""
        self.runs += 1
        directory = self.directory / f"run{self.runs}"
        directory.mkdir()
        return Run(self, directory, processes, nodes, gloo, cache or f"{self.base}/cache{self.runs}", how)


class Run:
    """Processes that build their datasets at once."""

    def __init__(
        self, place: Place, directory: Path, count: int, nodes: int, gloo: bool, cache: str, how: dict[str, Any]
    ) -> None:
        self.place, self.directory, self.cache = place, directory, cache
        self.log, self.gate = directory / "log", directory / "gate"
        self.log.touch()
        asked = {
            "prefix": place.prefix, "cache": cache, "sequence_length": SEQUENCE_LENGTH, "log": str(self.log),
            "start": str(self.gate), "samples": SEQUENCES * MEAN_TOKENS * EPOCHS // SEQUENCE_LENGTH * 9 // 10, **how,
        }  # fmt: skip
        about = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        about["OMP_NUM_THREADS"] = "1"
        self.processes = []
        for rank in range(count):
            mine = {"RANK": str(rank), "WORLD_SIZE": str(count if gloo else 1)}
            mine["BINIDX_INDEX_DIR"] = str(directory / f"node{rank % nodes}")
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "helpers.build_process", json.dumps(asked)],
                    env={**about, **mine},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        place.proxy.reset()

    def go(self) -> None:
        self.gate.touch()

    def builders(self) -> list[tuple[int, float]]:
        """Process and time of each that began to build."""
        return [(int(pid), float(at)) for pid, at in (line.split() for line in self.log.read_text().splitlines())]

    def wait_for_builder(self) -> int:
        while not self.builders():
            time.sleep(0.01)
        return self.builders()[0][0]

    def results(self, without: Sequence[int] = ()) -> list[dict[str, Any]]:
        found = []
        for process in self.processes:
            out = process.communicate()[0]
            if process.pid not in without:
                found.append(json.loads(out.splitlines()[-1]))
        taken = max(each["ended"] for each in found) - min(each["began"] for each in found)
        check_reached("a build", self.place.proxy.counts().requests, taken, DELAY_MS)
        return found

    def finish(self) -> tuple[float, list[dict[str, Any]]]:
        """Let them go; seconds from then until the last has its datasets."""
        self.go()
        found = self.results()
        assert len({json.dumps(each["digest"]) for each in found}) == 1, found
        return max(each["ended"] for each in found) - min(each["began"] for each in found), found


def write_pair(prefix: str) -> None:
    """Sequences of 1 to 15 tokens: many of them, and little else."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * MEAN_TOKENS, SEQUENCES, np.int32)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for part in np.array_split(lengths, 50):
            builder.add_document(rng.integers(0, 1000, int(part.sum()), np.uint16), part.tolist())
        builder.finalize(f"{prefix}.idx")


def fetched(log: Sequence[Logged]) -> int:
    """Bytes that came down: the plan of a run counts no uploads."""
    return sum(each.bytes for each in log if each.method == "GET")


def count(log: Sequence[Logged], method: str, part: str) -> int:
    return sum(each.method == method and part in each.path and each.status in (200, 204) for each in log)


def cold(place: Place) -> list[Row]:
    """Eight ranks on two nodes against one process: who builds, and how long all wait for it."""
    alone, eight, notes = [], [], ""
    for _ in range(ROUNDS):
        alone.append(place.run(1, 1, gloo=False).finish()[0])
        run = place.run(8, 2, gloo=True)
        eight.append(run.finish()[0])
        log = place.proxy.log()
        puts = sum(each.method in ("PUT", "POST") and f"/{Path(run.cache).name}/" in each.path for each in log)
        manifests = count(log, "PUT", "binidx.json") - count(log, "PUT", "-claim")
        notes = f"{len(run.builders())} of 8 built, {puts} PUTs, {manifests} manifest; {len(log)} requests, "
        notes += f"{fetched(log) / 1e6:.0f} MB down"
        assert len(run.builders()) == 1
    ours, theirs = sorted(eight)[ROUNDS // 2], sorted(alone)[ROUNDS // 2]
    return [Row("8 gloo ranks on 2 nodes, cold", ours, theirs, "s", False, notes, "one process alone, cold")]


def once_per_node(place: Place) -> list[Row]:
    """Bytes that come down for a start with a cached index."""
    cache = f"{place.base}/warm"
    place.run(1, 1, gloo=False, cache=cache).finish()
    sizes = []
    for processes in (8, 1):
        place.run(processes, 1, gloo=processes > 1, cache=cache).finish()
        sizes.append(fetched(place.proxy.log()) / 1e6)
    return [
        Row("bytes fetched by a node, index cached, 8 processes", sizes[0], sizes[1], "MB", False, "", "one process")
    ]


def failing(place: Place) -> list[Row]:
    """From what the builder raises to the last rank that raises it."""
    rows = []
    for gloo, name in ((True, "gloo"), (False, "plain processes")):
        run = place.run(8, 2, gloo=gloo, fail="made to fail", slow=3.0)
        run.go()
        found = run.results()
        assert len(run.builders()) == 1, run.builders()
        assert all("made to fail" in each["text"] for each in found)
        failed = run.builders()[0][1] + 3.0
        seconds = max(each["ended"] for each in found) - failed
        rows.append(Row(f"an error reaches 8 ranks on 2 nodes, {name}", seconds, 1800.0, "s", False, "", "its timeout"))
    return rows


def dying(place: Place) -> list[Row]:
    """From kill -9 of the builder to the last of the others that has its datasets; less what building takes."""
    rows = []
    for whole_node, name in ((False, "builder"), (True, "builder's node")):
        run = place.run(8, 2, gloo=False, slow=3.0)
        run.go()
        victim = run.wait_for_builder()
        place_of_victim = next(rank for rank, each in enumerate(run.processes) if each.pid == victim) % 2
        time.sleep(1.0)
        dead = [
            each.pid for rank, each in enumerate(run.processes)
            if each.pid == victim or (whole_node and rank % 2 == place_of_victim)
        ]  # fmt: skip
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        found = run.results(dead)
        assert len({json.dumps(each["digest"]) for each in found}) == 1
        (_, again) = run.builders()[1]
        note = f"{len(found)} others; all had it {max(each['ended'] for each in found) - killed:.1f} s after the kill"
        rows.append(
            Row(f"kill -9 of the {name}: another builds", again - killed, 1800.0, "s", False, note, "a timeout")
        )
    return rows


def rows(directory: Path) -> list[Row]:
    with ExitStack() as stack:
        (directory / "s3").mkdir()
        server = stack.enter_context(s3_server(directory / "s3"))
        stack.enter_context(server.in_environment())
        base = server.make_bucket("nodes")
        write_pair(f"{directory}/pair")
        for suffix in (".bin", ".idx"):
            with create_object(Location.of(f"{base}/pair{suffix}")) as out:
                out.write((directory / f"pair{suffix}").read_bytes())
        proxy = stack.enter_context(latency_proxy(server.endpoint, delay_ms=DELAY_MS))
        stack.enter_context(proxy.in_environment())
        place = Place(directory, proxy, base, f"{base}/pair")
        return [*cold(place), *once_per_node(place), *failing(place), *dying(place)]
