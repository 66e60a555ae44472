"""Time for which a trainer waits for batches from S3, 30 ms away, with look-ahead and without.

The trainer takes 200,000 tokens a second: a micro-batch of 8 samples of 4,096 tokens every 164 ms. Then 400,000 over
ten minutes, where the longest wait counts, too: once with Python's garbage collector as it is, which looks at all
objects of a process now and then (100 ms with torch imported), and once with collections between steps, as trainers of
many ranks have them. A process beside it that only sleeps shows what the machine itself holds up. The same asked for as
fast as it comes: the limit is what the link carries, requests in flight / 30 ms, over 5 requests a sample.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from servers.latency_proxy import Proxy

from binidx.loader.readahead import BUDGET_BYTES
from binidx.storage.settings import ReadSettings
from tests.bench.corpus import SEQUENCE_LENGTH
from tests.bench.race import BATCH, DELAY_MS, Entrant, call, far_away, publish_corpus, store
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

Trainer = Callable[[int | None, dict[str, Any]], dict[str, Any]]
"""Runs a trainer with a look-ahead at a pace; returns what it measured."""

CONDITIONS = Conditions(cores=0, size="1 GiB of uint16 tokens in S3, micro-batches of 8 x 4,096", cached="nothing")
TOKENS_PER_SECOND = 200_000
STEP_SECONDS = BATCH * SEQUENCE_LENGTH / TOKENS_PER_SECOND
LONG_SECONDS = 600
PACED_STEPS = 120
FAST_STEPS = 150
RANGES_PER_SAMPLE = 5
ROUNDS = 3

PACED = {"num_steps": PACED_STEPS, "step_seconds": STEP_SECONDS, "rest_seconds": 0, "collect_steps": 0}
FAST = {"num_steps": FAST_STEPS, "step_seconds": 0, "rest_seconds": 0, "collect_steps": 0}
COLLECT_STEPS = 100
STALL_MS = 20
NO_AHEAD = "without look-ahead"
RESTING = {**FAST, "num_steps": 3 * FAST_STEPS, "rest_seconds": 4}
"""The window opens as far as waiting opens it, and then all of it is read."""


def rows(directory: Path) -> list[Row]:
    """Share of the time, seconds, samples a second, bytes."""
    with store(directory) as (server, bucket):
        _, uri = publish_corpus(directory, bucket, "uint16")
        with far_away(server) as proxy:
            trainer = functools.partial(train, proxy, directory, uri)
            return [*paced_rows(trainer), *long_rows(trainer), *fast_rows(trainer), memory_row(trainer)]


def paced_rows(trainer: Trainer) -> list[Row]:
    ahead, plain = (trainer(look_ahead, PACED) for look_ahead in (None, 0))
    worst = f"longest {1e3 * max(ahead['waits']):.0f} ms, median {1e6 * statistics.median(ahead['waits']):.0f} µs"
    name = f"of {TOKENS_PER_SECOND:,} tokens/s, waiting for a batch from S3, {DELAY_MS} ms away"
    return [
        Row(name, share(ahead), 0.01, "of the time", False, worst, "the goal"),
        Row(name, share(ahead), share(plain), "of the time", False, "", NO_AHEAD, NO_AHEAD),
        Row("opened dataset to the first batch", ahead["first"], plain["first"], "s", False, "", NO_AHEAD),
    ]


def long_rows(trainer: Trainer) -> list[Row]:
    rate, minutes = f"{2 * TOKENS_PER_SECOND:,} tokens/s", LONG_SECONDS // 60
    name = f"of {rate} over {minutes} minutes, waiting for a batch from S3, {DELAY_MS} ms away"
    rows = []
    for collect_steps, way in ((0, ""), (COLLECT_STEPS, ", garbage collected between steps")):
        pace = {"num_steps": round(2 * LONG_SECONDS / STEP_SECONDS), "step_seconds": STEP_SECONDS / 2}
        with subprocess.Popen([sys.executable, "-c", SLEEPER, str(LONG_SECONDS)], stdout=subprocess.PIPE) as sleeper:
            found = trainer(None, {**PACED, **pace, "collect_steps": collect_steps})
            late = json.loads(sleeper.communicate()[0])
        waits = sorted(1e3 * wait for wait in found["waits"])
        machine = (
            f"a process that only sleeps: {count_stalls(late)} above {STALL_MS} ms, the longest {max(late):.0f} ms"
        )
        stalls = f"{count_stalls(waits)} above {STALL_MS} ms; {machine}"
        median = f"median {1e3 * statistics.median(waits):.0f} µs"
        rows += [
            Row(f"{name}{way}", share(found), 0.01, "of the time", False, median, "the goal"),
            Row(f"{name}{way}, the longest", waits[-1], STALL_MS, "ms", False, stalls, "the goal"),
        ]
    return rows


SLEEPER = """
import json, sys, time
late, last = [], time.monotonic()
end = last + float(sys.argv[1])
while last < end:
    time.sleep(0.002)
    late.append(1e3 * (time.monotonic() - last - 0.002))
    last = time.monotonic()
print(json.dumps(late))
"""


def count_stalls(milliseconds: Sequence[float]) -> int:
    return sum(each > STALL_MS for each in milliseconds)


def fast_rows(trainer: Trainer) -> list[Row]:
    runs = [[trainer(look_ahead, FAST) for look_ahead in (None, 0)] for _ in range(ROUNDS)]
    ahead, plain = (statistics.median(map(per_second, column)) for column in zip(*runs, strict=True))
    limit = (ReadSettings().concurrency or 128) / (DELAY_MS / 1e3) / RANGES_PER_SAMPLE
    name = f"from S3, {DELAY_MS} ms away, as fast as it comes"
    return [
        Row(name, ahead, plain, "samples/s", True, "", NO_AHEAD, NO_AHEAD),
        Row(
            name,
            ahead,
            limit,
            "samples/s",
            True,
            "of one machine: it has 2 cores for all",
            "requests in flight / 30 ms",
        ),
    ]


def memory_row(trainer: Trainer) -> Row:
    rested = trainer(None, RESTING)
    note = "growth of resident memory after the first batch, all read that a trainer without rest has asked ahead"
    return Row("memory of look-ahead", rested["grown"] / 2**20, BUDGET_BYTES / 2**20, "MiB", False, note, "its budget")


def train(proxy: Proxy, directory: Path, uri: str, look_ahead: int | None, pace: dict[str, Any]) -> dict[str, Any]:
    trainer = Entrant("trainer", "train_binidx.py", uri, {"look_ahead": look_ahead, **pace})
    before = proxy.counts()
    found = call(trainer, {"uri": uri, "directory": str(directory)})
    check_reached(f"look_ahead={look_ahead}", (proxy.counts() - before).requests, found["seconds"], DELAY_MS)
    return found


def share(found: dict[str, Any]) -> float:
    """Of the time after the first batch, spent waiting."""
    return float(sum(found["waits"]) / found["seconds"])


def per_second(found: dict[str, Any]) -> float:
    waits: Sequence[float] = found["waits"]
    return BATCH * len(waits) / float(found["seconds"])
