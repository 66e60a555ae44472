"""From a config to the first batch of a source in S3, 30 ms away, by a read plan and by the run's own indices.

Each start is a process of its own with an empty index_dir; all indices are cached in the bucket. Requests and bytes are
those of the proxy's log. A document has 20 tokens, so that 10 million fit a small disk: the plan, the `.idx` and the
arrays are as large as those of longer documents. A sample has about 5 pieces, or 20. On request only: minutes.
BINIDX_BENCH_DOCUMENTS sets the number of documents.

The limit of a plan: six requests that follow one another (description: size, content; rows: size, table, blocks; then
the tokens), 0.2 s. What a start reads of it does not grow with the documents.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from servers.latency_proxy import Proxy

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.format.idx import format_idx_header
from binidx.jobs.parts import Workers
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from tests.bench.cold_start import start
from tests.bench.race import DELAY_MS, far_away, store
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=0, size="1,000,000 documents", cached="indices in the bucket, nothing on this machine")
NUM_DOCUMENTS = [int(os.environ.get("BINIDX_BENCH_DOCUMENTS", 1_000_000))]
MEAN_TOKENS = 20
SEQUENCE_LENGTHS = {5: 80, 20: 380}
"""Pieces of a sample, about -> S."""

ROUNDS = 3


def rows(directory: Path) -> list[Row]:
    """Bytes, requests and seconds of a start, and the size and the cost of the plan."""
    return [row for count in NUM_DOCUMENTS for row in rows_of(directory, count)]


def rows_of(directory: Path, num_documents: int) -> list[Row]:
    write(directory / "en", num_documents)
    found: list[Row] = []
    with store(directory) as (server, bucket):
        convert_dataset(directory / "en", f"{bucket}/en", verify="size")
        for pieces, length in SEQUENCE_LENGTHS.items():
            run = {
                "side": "binidx", "prefixes": [f"{bucket}/en"], "weights": None, "cache": f"{bucket}/indices-{pieces}",
                "split": "1,0,0", "sizes": [None, 0, 0], "sequence_length": length,
            }  # fmt: skip
            planned = {**run, "plan": f"{bucket}/plan-{pieces}"}
            found += plan_rows(planned, pieces)
            start(run)
            with far_away(server) as proxy:
                found += start_rows(proxy, [planned, run], num_documents, pieces)
    return found


def plan_rows(planned: Mapping[str, Any], pieces: int) -> list[Row]:
    """Write the plan."""
    options = {"random_seed": 1234, "path_to_cache": planned["cache"], "num_dataset_builder_threads": 1}
    train: Any = binidx.load_dataset(planned["prefixes"][0], planned["sequence_length"], **options).wrapped
    order = binidx.RunOrder.of_dataset(train, GlobalOrder(BatchSchedule(8, 8, 1), len(train)))
    plan = binidx.plan_reads(order, range(order.num_steps() or 0))
    with tempfile.TemporaryDirectory() as scratch:
        began = time.process_time()
        binidx.write_read_plan(order, scratch, plan, workers=Workers(count=1))
        seconds = time.process_time() - began
        size = sum(file.stat().st_size for file in Path(scratch).glob("*.rows"))
        binidx.write_read_plan(order, planned["plan"], plan)
    each = f"a read plan of {pieces} pieces a sample"
    return [
        Row(f"{each}, written", plan.stop / seconds / 1e6, 1, "M samples/s", True, "one core", "the goal"),
        Row(f"{each}, size", size / plan.stop, 62 if pieces == 5 else 212, "B a sample", False, "", "the goal"),
    ]


def start_rows(proxy: Proxy, runs: Sequence[Mapping[str, Any]], num_documents: int, pieces: int) -> list[Row]:
    """Start by the plan and without, in turns."""
    laps: list[list[tuple[float, int, int, int]]] = [[], []]
    for _ in range(ROUNDS):
        for lap, run in zip(laps, runs, strict=True):
            proxy.reset()
            started = start(run)
            log = proxy.log()
            check_reached("a start", len(log), started["seconds"], DELAY_MS)
            index = [each for each in log if not each.path.endswith(".bin")]
            lap.append((started["seconds"], sum(each.bytes for each in index), len(index), int(started["tokens"])))
    assert len({started[3] for lap in laps for started in lap}) == 1
    ours, theirs = ([*map(float, np.median(lap, axis=0))] for lap in laps)
    work = f"start of {num_documents:,} documents, {pieces} pieces a sample, in S3 {DELAY_MS} ms away"
    conditions = replace(CONDITIONS, size=f"{num_documents:,} documents")
    units = {"s": "to the first batch", "B": "bytes besides tokens", "requests": "requests besides those for tokens"}
    return [
        Row(f"{work}, {name}", one, other, unit, False, "", "indices", conditions=conditions)
        for one, other, (unit, name) in zip(ours[:3], theirs[:3], units.items(), strict=True)
    ]


def write(prefix: Path, num_documents: int) -> None:
    """Documents of about MEAN_TOKENS tokens, whose tokens are their own positions modulo 2^16."""
    lengths = np.maximum(1, np.random.default_rng(0).poisson(MEAN_TOKENS, num_documents)).astype(np.int32)
    ends = np.cumsum(lengths, dtype=np.int64)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(format_idx_header(np.uint16, num_documents, num_documents + 1))
        for array in (lengths, (ends - lengths) * 2, np.arange(num_documents + 1)):
            array.tofile(file)
    np.arange(ends[-1], dtype=np.uint32).astype(np.uint16).tofile(f"{prefix}.bin")
