"""Samples from a real S3 server, 30 ms to the first byte of every answer; requests and bytes counted by the proxy.

Both read the same samples in the same order, cold, from one process. The limit without look-ahead is one round trip a
micro-batch: 8 samples / 30 ms = 267 samples/s, and 1.0 bytes moved per byte used, 8,194 a sample.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from binidx.tools.seaweed import s3_server
from servers.latency_proxy import latency_proxy

from binidx.format.convert import convert_dataset
from tests.bench.corpus import open_ours, open_theirs, write_corpus
from tests.bench.table import Row, seconds

DELAY_MS = 30
CORPUS_BYTES = 1 << 30
DEFAULT_BLOCK = 256 << 20
SMALL_BLOCK = 16 << 10
BATCH = 8
ROUNDS = 3


Figures = tuple[float, float, float]
"""Samples per second, bytes a sample, requests a sample."""


def rows(directory: Path) -> list[Row]:
    """Against Megatron's reader at its default block, and at a small one, where each range costs it one round trip."""
    prefix = write_corpus(directory / "en", CORPUS_BYTES)
    with s3_server(directory / "server") as server, server.in_environment():
        uri = f"{server.make_bucket('bench')}/en"
        convert_dataset(prefix, uri, verify="size")
        with latency_proxy(server.endpoint, delay_ms=DELAY_MS) as proxy, proxy.in_environment():
            ours = Reader(proxy, batches(open_ours(uri, f"{directory}/ours")), 10 * BATCH)
            default = Reader(proxy, iter(open_theirs(uri, f"{directory}/default", DEFAULT_BLOCK)), 2)
            small = Reader(proxy, iter(open_theirs(uri, f"{directory}/small", SMALL_BLOCK)), 24)
            runs = [(ours.measure(), default.measure(), small.measure()) for _ in range(ROUNDS)]
    ours_median, *medians = (medians_of(column) for column in zip(*runs, strict=True))
    names = ("its default block, 256 MiB", "a block of 16 KiB")
    return [row for name, theirs in zip(names, medians, strict=True) for row in compare(name, ours_median, theirs)]


def batches(dataset: Any) -> Iterator[Any]:
    """Samples one by one, read in micro-batches."""
    for first in range(0, len(dataset), BATCH):
        yield from dataset.__getitems__(range(first, first + BATCH))


class Reader:
    """Samples as they are read, and what each stretch of them costs. Opening and the first micro-batch do not count."""

    def __init__(self, proxy: Any, samples: Iterator[Any], num_samples: int) -> None:
        self.proxy, self.samples, self.num_samples = proxy, samples, num_samples
        self._take(BATCH)

    def measure(self) -> Figures:
        before = self.proxy.counts()
        elapsed = seconds(lambda: self._take(self.num_samples))
        moved = self.proxy.counts() - before
        return self.num_samples / elapsed, moved.bytes / self.num_samples, moved.requests / self.num_samples

    def _take(self, count: int) -> None:
        deque(islice(self.samples, count), maxlen=0)


def medians_of(runs: Sequence[Figures]) -> Figures:
    samples, moved, requests = (statistics.median(column) for column in zip(*runs, strict=True))
    return samples, moved, requests


def compare(name: str, ours: Figures, theirs: Figures) -> list[Row]:
    units = (("samples/s", True), ("bytes/sample", False), ("requests/sample", False))
    return [
        Row(f"from S3, {DELAY_MS} ms away", our, their, unit, better, f"its S3 reader, {name}")
        for (unit, better), our, their in zip(units, ours, theirs, strict=True)
    ]
