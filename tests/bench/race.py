"""Readers of the same tokens, each in a process of its own, cold, one after the other in turns.

    start ──► imports done ──► first batch ──► ... ──► last batch        by the machine's monotonic clock
    proxy's log before the start ─────────────────────► after the end    requests and bytes, what was asked ahead too

A reader is a script in readers/; the directory it may cache in is new and empty each time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from servers.latency_proxy import Proxy, latency_proxy
from servers.seaweed import S3Server, s3_server

from binidx.corpus.convert import convert_dataset
from tests.bench.corpus import SEQUENCE_LENGTH, write_corpus
from tests.bench.remote import check_reached

READERS = Path(__file__).parent / "readers"


DELAY_MS = 30
BATCH = 8
CORPUS_BYTES = 1 << 30
NUM_SAMPLES = 1000
# A reader that needs longer for its samples is asked no further: its rate is known by then.
SECONDS = 40.0
ROUNDS = 3


@dataclass(frozen=True)
class Lap:
    """One run, or the medians of several.

    Args:
        first_batch: seconds from the end of the imports to the first batch; opening, indices and order count.
        from_start: the same from the start of the process.
        per_second: samples a second after the first batch; of a reader with workers after the first of each worker.
        through: samples a second from the end of the imports to the last of them.
        bytes_per_sample, requests_per_sample: by the proxy's log.
        places: thousandths of the corpus that the samples begin in. A permutation of it all meets 632 in 1,000 samples.
        num_samples: that were taken.
        cpu_per_sample: CPU seconds of the reader's process over the samples of `per_second`; without workers.
    """

    first_batch: float
    from_start: float
    per_second: float
    through: float
    bytes_per_sample: float
    requests_per_sample: float
    places: float
    num_samples: float
    cpu_per_sample: float


@dataclass(frozen=True)
class Entrant:
    """A reader: its script, what it is told beside `uri` and the like, and the Python that has its packages."""

    name: str
    script: str
    uri: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = sys.executable
    num_samples: int = NUM_SAMPLES


def run(entrant: Entrant, proxy: Proxy, dtype: str) -> Lap:
    """One lap."""
    before = proxy.counts()
    with tempfile.TemporaryDirectory() as directory:
        started = time.monotonic()
        found = call(entrant, {"directory": directory, "dtype": dtype, "uri": entrant.uri})
    moved = proxy.counts() - before
    samples, timed = found["samples"], found["samples"] - found["batch"] * (1 + found["warm"])
    check_reached(entrant.name, moved.requests, found["last"] - found["imported"], DELAY_MS)
    return Lap(
        first_batch=found["first"] - found["imported"],
        from_start=found["first"] - started,
        per_second=timed / (found["last"] - found["warmed"]),
        through=samples / (found["last"] - found["imported"]),
        bytes_per_sample=moved.bytes / samples,
        requests_per_sample=moved.requests / samples,
        places=found["places"],
        num_samples=samples,
        cpu_per_sample=found["cpu"] / timed,
    )


def call(entrant: Entrant, more: Mapping[str, Any]) -> dict[str, Any]:
    """What the script prints as its last line. What it leaves in a place for temporary files goes with it."""
    given = {
        "sequence_length": SEQUENCE_LENGTH, "batch": BATCH, "num_samples": entrant.num_samples, "seconds": SECONDS,
        **entrant.options, **more,
    }  # fmt: skip
    arguments = [entrant.python, str(READERS / entrant.script), json.dumps(given)]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        environment = {**os.environ, "TMPDIR": scratch}
        # Peers are installed with their bytecode; ours is written by the first reader. Compiling it takes 0.4 s.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{entrant.name}: ended with {done.returncode}\n{done.stderr[-3000:]}")
    lines = done.stdout.splitlines()
    return dict(json.loads(lines[-1])) if lines and lines[-1].startswith("{") else {}


def medians(entrants: Sequence[Entrant], proxy: Proxy, dtype: str, rounds: int = ROUNDS) -> dict[str, Lap]:
    """Of each entrant by its name; they run in turns, so that a slow minute of the machine meets them all."""
    laps: dict[str, list[Lap]] = {each.name: [] for each in entrants}
    for _ in range(rounds):
        for entrant in entrants:
            laps[entrant.name].append(run(entrant, proxy, dtype))
    return {name: median_of(found) for name, found in laps.items()}


def median_of(laps: Sequence[Lap]) -> Lap:
    return Lap(*(statistics.median(column) for column in zip(*map(astuple, laps), strict=True)))


@contextmanager
def store(directory: Path) -> Iterator[tuple[S3Server, str]]:
    """A real S3 server and its bucket; the environment points there, without the proxy: for writing."""
    with s3_server(directory / "server") as server, server.in_environment():
        yield server, server.make_bucket("bench")


@contextmanager
def far_away(server: S3Server, **weather: Any) -> Iterator[Proxy]:
    """The same with 30 ms to every first byte, counted, for all who look at the environment."""
    with latency_proxy(server.endpoint, delay_ms=DELAY_MS, **weather) as proxy, proxy.in_environment():
        # Streaming's own name for the endpoint.
        os.environ["S3_ENDPOINT_URL"] = proxy.endpoint
        try:
            yield proxy
        finally:
            del os.environ["S3_ENDPOINT_URL"]


def publish_corpus(directory: Path, bucket: str, dtype: str, *, long_documents: bool = False) -> tuple[str, str]:
    """Write the corpus: its local prefix, and its URI in the store."""
    name = f"{dtype}-{'long' if long_documents else 'mixed'}"
    prefix = write_corpus(directory / name, CORPUS_BYTES, dtype=np.dtype(dtype).type, long_documents=long_documents)
    convert_dataset(prefix, f"{bucket}/{name}", verify="size")
    return prefix, f"{bucket}/{name}"


def publish_packed(entrant: Entrant, prefix: str, dtype: str, directory: Path) -> None:
    """Let a reader's own writer pack the corpus, and put that where the entrant looks for it."""
    packed = directory / "packed"
    call(entrant, {"directory": str(packed), "dtype": dtype, "source": f"{prefix}.bin"})
    target = fsspec.filesystem("s3", use_listings_cache=False, endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    target.put(f"{packed}/", f"{entrant.uri}/", recursive=True)
    for path in sorted(packed.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    packed.rmdir()
