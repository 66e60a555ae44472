"""Orders exported and traced, packed orders opened at any position, and a baked run from S3.

The other column is the goal. Limits: an export without documents is parquet encoding 24 bytes a sample, 10 ns; with
them, of 53 bytes, 90 ns, most of it the levels of the one list; each piece by itself is three lists more and a cache
miss for its length. A disk that takes 1 GB/s takes 30 M samples/s of 32 bytes, as lz4 leaves them. A packed position
costs the permutations of the groups before it, 81 of 8,192 for a whole Gemstones worker. A baked micro-batch is one
request: micro-batch / round trip samples/s for each request in flight.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from servers.latency_proxy import Proxy, latency_proxy
from servers.log import Counts
from servers.seaweed import s3_server

from binidx import RunOrder
from binidx.corpus.convert import convert_dataset
from binidx.dataset.stored.baked import BakedDataset
from binidx.format.idx import format_idx_header
from binidx.loader.torch_loader import build_pretraining_data_loader
from binidx.packed.packed_order import AtEnd, PackedSet
from binidx.packed.packed_run import PackedReading, PackedRunOrder
from binidx.run.global_order import GlobalOrder
from binidx.run.provenance.export import export, plan_by_rank
from binidx.run.schedule import BatchSchedule
from binidx.run.stored.baking import bake, plan_bake
from tests.bench.corpus import open_ours, write_corpus
from tests.bench.remote import remote_seconds
from tests.bench.table import Conditions, Row, seconds

CONDITIONS = Conditions(cores=1, size="3,000,000 documents", cached="indices mapped")
GOAL = "the goal"
UNBAKED = "the run unbaked"
NUM_DOCUMENTS = 3_000_000
DELAY_MS = 30
CORPUS_BYTES = 256 << 20
BATCH = 8
NUM_BATCHES = 60
BAKED_BATCHES, PLAIN_BATCHES = 3125, 500
"""Batches of a pass with look-ahead: so many that its start, of a few round trips, hardly counts."""
ROUNDS = 3


def rows(directory: Path) -> list[Row]:
    """Everything but the tokens first."""
    return [*order_rows(directory), *packed_rows(), *baked_rows(directory)]


def order_rows(directory: Path) -> list[Row]:
    """Of a run of some 700,000 samples of 4,096 tokens, in CPU time of one core."""
    order = order_of(open_ours(write_index(directory / "sparse"), f"{directory}/cache"), ranks=8)
    steps, count = range(order.num_steps() or 0), len(order.order)

    def written(docs: Any) -> Callable[[], object]:
        names = iter(range(99))
        return lambda: export(order, f"{directory}/{docs}{next(names)}", plan_by_rank(8, steps), docs=docs)

    bare, ends, full = (median_cpu(written(docs)) for docs in (None, "ends", "spans"))
    traced = median_cpu(lambda: [order.trace(range(step, step + 1)) for step in range(0, 1000, 50)]) / 20
    return [
        Row("order exported, without documents", count / bare / 1e6, 5, "M samples/s", True, "one core", GOAL),
        Row("order exported, with documents", count / ends / 1e6, 5, "M samples/s", True, "one core", GOAL),
        Row("order exported, each piece with its length", count / full / 1e6, 5, "M samples/s", True, "one core", GOAL),
        Row("a step of 512 samples traced, warm", traced * 1e3, 20, "ms", False, "indices mapped", GOAL),
    ]


def packed_rows() -> list[Row]:
    """The numbers of the Gemstones: 256 workers, 82,998 steps of 8 blocks each."""

    def fresh() -> PackedRunOrder:
        files = PackedSet(256 * 4 * 82, 2048, 4, 1337, at_end=AtEnd.repeat)
        return PackedRunOrder(PackedReading([files], ["gemstones"], num_ranks=256, micro_batch_size=8))

    def whole() -> None:
        order = fresh()
        for rank in range(0, 256, 16):
            order.readings(range(82_998), rank)

    far = median_cpu(lambda: fresh().rows(range(82_000, 82_001), 17))
    return [
        Row(
            "packed order, 256 workers x 82,998 steps", 16 * median_cpu(whole), 60, "s", False, "16 workers x 16", GOAL
        ),
        Row("any position of it opened", far * 1e3, 10, "ms", False, "80 permutations before it", GOAL),
    ]


def baked_rows(directory: Path) -> list[Row]:
    """Cold, one process, the loader's defaults on both sides."""
    prefix = write_corpus(directory / "en", CORPUS_BYTES)
    with s3_server(directory / "server") as server, server.in_environment():
        bucket = server.make_bucket("bench")
        convert_dataset(prefix, f"{bucket}/en", verify="size")
        order = order_of(open_ours(f"{bucket}/en", f"{directory}/ours"), ranks=1)
        bake(order, f"{bucket}/baked", plan_bake(order, range(BAKED_BATCHES * BATCH // 64 + 8)))
        with latency_proxy(server.endpoint, delay_ms=DELAY_MS) as proxy, proxy.in_environment():
            opened = (
                (lambda: BakedDataset(f"{bucket}/baked", replace(order.config)), BAKED_BATCHES),
                (lambda: open_ours(f"{bucket}/en", f"{directory}/plain"), PLAIN_BATCHES),
            )
            runs = [[measure(proxy, *each) for each in opened] for _ in range(ROUNDS)]
    ours, theirs = (
        [statistics.median(column) for column in zip(*side, strict=True)] for side in zip(*runs, strict=True)
    )
    work, extents = f"baked, from S3 {DELAY_MS} ms away", f"{BAKED_BATCHES * BATCH:,} samples, in extents of 8 MiB"
    return [
        Row(f"{work}, no look-ahead", ours[0], theirs[0], "samples/s", True, "one round trip a micro-batch", UNBAKED),
        Row(f"{work}, look-ahead", ours[1], theirs[1], "samples/s", True, extents, UNBAKED),
        Row(f"{work}, CPU of this process", ours[2], theirs[2], "µs a sample", False, "opening counts", UNBAKED),
        Row(f"{work}, requests", ours[3], theirs[3], "a sample", False, "", UNBAKED),
        Row(f"{work}, bytes moved per byte used", ours[4], theirs[4], "", False, "", UNBAKED),
    ]


def measure(proxy: Proxy, opened: Callable[[], Any], num_batches: int) -> tuple[float, ...]:
    """Samples/s without and with look-ahead; of the second CPU and requests a sample, and bytes moved per byte used."""
    slow, _ = take(proxy, opened(), NUM_BATCHES, 0)
    count, before = num_batches * BATCH, time.process_time()
    quick, moved = take(proxy, opened(), num_batches, None)
    cpu = time.process_time() - before
    used = count * 4097 * 2
    return NUM_BATCHES * BATCH / slow, count / quick, 1e6 * cpu / count, moved.requests / count, moved.bytes / used


def take(proxy: Proxy, dataset: Any, num_batches: int, look_ahead: int | None) -> tuple[float, Counts]:
    """Seconds of so many batches, and what they moved."""

    def run() -> None:
        loader = build_pretraining_data_loader(dataset, 0, BATCH, look_ahead=look_ahead)
        assert loader is not None
        assert sum(1 for _ in islice(loader, num_batches)) == num_batches  # none is kept

    before = proxy.counts()
    taken = remote_seconds(f"{dataset!r}, look_ahead={look_ahead}", DELAY_MS, run, lambda: proxy.counts().requests)
    return taken, proxy.counts() - before


def order_of(dataset: Any, ranks: int) -> RunOrder:
    return RunOrder.of_dataset(dataset, GlobalOrder(BatchSchedule(64 * ranks, 8, ranks), len(dataset)))


def write_index(prefix: Path) -> str:
    """A dataset whose tokens are a hole: orders do not read them."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6.4, 1.0, NUM_DOCUMENTS)).astype(np.int32)
    pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * 2
    with open(f"{prefix}.idx", "wb") as file:
        file.write(format_idx_header(np.uint16, NUM_DOCUMENTS, NUM_DOCUMENTS + 1))
        for array in (lengths, pointers, np.arange(NUM_DOCUMENTS + 1)):
            array.tofile(file)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(lengths.sum(dtype=np.int64)) * 2)
    return str(prefix)


def medians(laps: Sequence[tuple[float, ...]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*laps, strict=True)]


def median_cpu(run: Callable[[], object]) -> float:
    """CPU seconds of the process."""
    return statistics.median(seconds(run, time.process_time) for _ in range(ROUNDS))
