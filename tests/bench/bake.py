"""Baking a run of 1 GB in S3, 30 ms away, into the same store, and reading it: CPU, requests, and samples a second.

Requests and bytes are those of the proxy's log, without uploads. The figures to reach: a request for 8 MiB that a stage
reads, and 30 MB/s a core: Exoshuffle-CloudSort sorts 29 MB/s a vCPU. The bake is read back whole and compared with the
run's own samples. Minutes, and 4 GB of disk. BINIDX_BENCH_BAKE_DATASETS=8 divides it into a blend of so many datasets.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from servers.latency_proxy import Proxy

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.jobs.parts import Workers
from binidx.run.global_order import GlobalOrder
from binidx.run.schedule import BatchSchedule
from tests.bench.corpus import SEQUENCE_LENGTH, write_corpus
from tests.bench.race import BATCH, DELAY_MS, far_away, store
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

NUM_BYTES = int(os.environ.get("BINIDX_BENCH_BAKE_BYTES", 1 << 30))
NUM_DATASETS = int(os.environ.get("BINIDX_BENCH_BAKE_DATASETS", 1))
CONDITIONS = Conditions(cores=1, size=f"{NUM_BYTES / 1e9:.1f} GB", cached="nothing", workers=1)
PART_BYTES = 128 << 20
"""Parts as large, for the size of this run, as 1 GiB is for 8 GiB."""

REQUEST_BYTES = 8 << 20
GOAL_MB_S, GOAL_SAMPLES, GOAL_MICROS = 30, 10_000, 20
NUM_SAMPLES = 25_000


def rows(directory: Path) -> list[Row]:
    """Bake once."""
    prefix = write_corpus(directory / "en", NUM_BYTES // NUM_DATASETS, dtype=np.int32)
    with store(directory) as (server, bucket):
        blend = {f"{bucket}/en-{number}": 1.0 for number in range(NUM_DATASETS)}
        for uri in blend:
            convert_dataset(prefix, uri, verify="size")
        with far_away(server) as proxy:
            train: Any = binidx.load_dataset(blend, SEQUENCE_LENGTH, random_seed=1234).wrapped
            order = binidx.RunOrder.of_dataset(train, GlobalOrder(BatchSchedule(8, 8, 1), len(train)))
            baked = binidx.plan_bake(order, range(order.num_steps() or 0), PART_BYTES)
            proxy.reset()
            began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
            done = binidx.bake(order, f"{bucket}/baked", baked, workers=Workers(count=1))
            after = resource.getrusage(resource.RUSAGE_SELF)
            log = proxy.log()
            check_reached("a bake", len(log), time.monotonic() - began, DELAY_MS)
            assert done.missing == 0
            served = read_back(proxy, binidx.BakedDataset(f"{bucket}/baked", train.config))
            check(order, binidx.BakedDataset(f"{bucket}/baked", train.config))
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    reads = [each for each in log if each.method == "GET" and each.bytes > 1 << 16]
    others = [each for each in log if each.method in ("GET", "HEAD") and each.bytes <= 1 << 16]
    read, size = sum(each.bytes for each in reads), (baked.stop - baked.first) * baked.stored_length * 4
    work = f"bake from and to S3 {DELAY_MS} ms away"
    print(f"{len(reads)} GETs for {read / size:.3f} bytes a byte of {size}; {seconds:.1f} CPU-s", file=sys.stderr)
    return [
        Row(work, size / 1e6 / seconds, GOAL_MB_S, "MB/s", True, "one core: CPU-seconds", "the goal"),
        Row(f"{work}, reads", len(reads) / (read / REQUEST_BYTES), 1, "a 8 MiB", False, "", "the goal"),
        Row(f"{work}, bytes read", read / size, 2, "a byte of the bake", False, "source, then exchange", "the goal"),
        Row(f"{work}, other requests", len(others), 10 * len(baked.parts()), "GET, HEAD", False, "", "10 a part"),
        *served,
    ]


def read_back(proxy: Proxy, dataset: binidx.BakedDataset) -> list[Row]:
    """Samples of the run, in its order, by the default loader."""
    proxy.reset()
    began, cpu = time.perf_counter(), time.process_time()
    first = dataset.stored.first
    batches = islice(binidx.build_pretraining_data_loader(dataset, first, BATCH), NUM_SAMPLES // BATCH)
    count = sum(len(batch["tokens"]) for batch in batches)
    taken, cpu = time.perf_counter() - began, time.process_time() - cpu
    log = [each for each in proxy.log() if each.method == "GET"]
    check_reached("a baked run", len(log), taken, DELAY_MS)
    work, note = f"{count:,} baked samples from S3, {DELAY_MS} ms away", f"cold; {len(log)} GETs"
    return [
        Row(f"{work}, with the first batch", count / taken, GOAL_SAMPLES, "samples/s", True, note, "the goal"),
        Row(f"{work}, CPU a sample", 1e6 * cpu / count, GOAL_MICROS, "µs", False, note, "the goal"),
    ]


def check(order: binidx.RunOrder, dataset: binidx.BakedDataset) -> None:
    """Compare samples all over the run."""
    positions = np.linspace(dataset.stored.first, dataset.stored.stop - 1, 512).astype(np.int64)
    needed = order.read(order.reading.samples_at(positions))
    found = dataset.__getitems__(positions.tolist())
    for text, sample in zip(needed, found, strict=True):
        assert np.array_equal(text[:-1], np.asarray(sample["tokens"])), "a baked sample differs"
