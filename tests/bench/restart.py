"""A run of 1,000 and of 4,096 prefixes starts again on its node: seconds and requests to the first batch, and memory.

The start before left indices, the blend's and the bundle in `path_to_cache`, and index files in BINIDX_INDEX_DIR of the
node. Data and `path_to_cache` lie on this disk, or in S3 30 ms away, there with a pinned file and without. Each start
is a process of its own, the first rank of a run, which also lists the objects of a pinned file. Time and CPU are from
the end of the imports to the first batch of 8 samples, medians of starts; memory is the growth of anonymous memory
since then, at the first batch and at most over 200 more. Requests are those besides tokens.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from servers.latency_proxy import Proxy

from tests.bench.cold_start import DELAY_MS, begin, pin, upload, wait, write_prefix
from tests.bench.race import far_away, store
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=0, size="prefixes of 200 documents", cached="index files and indices of a start before")
COUNTS = [int(count) for count in os.environ.get("BINIDX_BENCH_PREFIXES", "1000,4096").split(",")]
ROUNDS, BATCHES = 2, 200
GOAL_SECONDS, GOAL_MIB = 0.3, 100


def rows(directory: Path) -> list[Row]:
    """Seconds, requests and MiB of a start."""
    prefixes = [write_prefix(directory / f"p{number:04}", number) for number in range(max(COUNTS))]
    weights = np.random.default_rng(0).uniform(0.5, 1.5, len(prefixes)).tolist()
    found = []
    for count in COUNTS:
        given = {"side": "binidx", "prefixes": prefixes[:count], "weights": weights[:count]}
        found += report("a local disk", {**given, "cache": f"{directory}/cache-{count}"}, directory)
    with store(directory) as (server, bucket):
        upload(prefixes, f"{bucket}/corpus")
        for count in COUNTS:
            remote = [f"{bucket}/corpus/{Path(prefix).name}" for prefix in prefixes[:count]]
            given = {
                "side": "binidx",
                "prefixes": remote,
                "weights": weights[:count],
                "cache": f"{bucket}/cache-{count}",
            }
            for place in (f"S3 {DELAY_MS} ms away", f"S3 {DELAY_MS} ms away, pinned"):
                if place.endswith("pinned"):
                    pin(remote, weights[:count], given["cache"])
                with far_away(server) as proxy:
                    found += report(place, given, directory, partial(count_requests, proxy))
    return found


def count_requests(proxy: Proxy) -> int:
    """Return the number of requests since the last call, without those for tokens."""
    log = [each for each in proxy.log() if not each.path.endswith(".bin")]
    proxy.reset()
    return len(log)


def report(place: str, given: Mapping[str, Any], directory: Path, count: Callable[[], int] = lambda: 0) -> list[Row]:
    """Start once, then again and again; return the rows of the later starts."""
    index_dir = directory / "index" / place / str(len(given["prefixes"]))
    starts, requests = list[Mapping[str, float]](), list[int]()
    for _ in range(ROUNDS + 1):
        starts.append(wait(begin({**given, "batches": BATCHES}, str(index_dir))))
        if (num_requests := count()) or "S3" in place:
            check_reached(place, num_requests, starts[-1]["seconds"], DELAY_MS)
        requests.append(num_requests)
    print(place, starts, requests, file=sys.stderr, flush=True)  # a run takes long, and may be broken off
    work = f"{len(given['prefixes']):,} prefixes on {place}"
    seconds, cpu, at_first, later = (
        [each[name] for each in starts[1:]] for name in ("seconds", "cpu", "anonymous", "later")
    )
    note = f"least {min(seconds):.2f}; CPU {statistics.median(cpu):.2f} s, least {min(cpu):.2f}"
    note = f"{statistics.median(requests[1:]):,.0f} requests; {note}"
    first = f"{max(at_first) / 2**20:.0f} MiB at the first batch; of the start before {starts[0]['later'] / 2**20:.0f}"
    conditions = replace(CONDITIONS, size=f"{len(given['prefixes']):,} prefixes of 200 documents")
    return [
        Row(f"{work}, started again, to the first batch", statistics.median(seconds), GOAL_SECONDS, "s", False, note,
            "the goal", conditions=conditions),
        Row(f"{work}, anonymous memory of a loader over {BATCHES} batches", max(later) / 2**20, GOAL_MIB, "MiB", False,
            first, "the goal", conditions=conditions),
    ]  # fmt: skip
