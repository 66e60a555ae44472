"""Samples from a real S3 server, 30 ms to the first byte of every answer; requests and bytes counted by the proxy.

Both read the same samples in the same order, cold, from one process. The limit without look-ahead is one round trip a
micro-batch: 8 samples / 30 ms = 267 samples/s, and 1.0 bytes moved per byte used, 8,194 a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from binidx.format.convert import convert_dataset
from binidx.tools.seaweed import s3_server
from servers.latency_proxy import latency_proxy

from tests.bench.corpus import open_ours, open_theirs, write_corpus
from tests.bench.table import Row, seconds

DELAY_MS = 30
CORPUS_BYTES = 1 << 30
DEFAULT_BLOCK = 256 << 20  # Megatron's
BATCH = 8


def rows(directory: Path) -> list[Row]:
    """Samples per second, bytes and requests per sample, at Megatron's default block and at its best one."""
    prefix = write_corpus(directory / "en", CORPUS_BYTES)
    with s3_server(directory / "server") as server, server.in_environment():
        uri = f"{server.make_bucket('bench')}/en"
        convert_dataset(prefix, uri, verify="size")
        with latency_proxy(server.endpoint, delay_ms=DELAY_MS) as proxy, proxy.in_environment():
            ours = measure(proxy, 10 * BATCH, lambda: batches(open_ours(uri, f"{directory}/ours")))
            found = []
            for name, block, count in (
                ("default, 256 MiB", DEFAULT_BLOCK, 2),
                ("best of its blocks, 16 KiB", 16 << 10, 40),
            ):
                theirs = measure(proxy, count, lambda: iter(open_theirs(uri, f"{directory}/theirs", block)))  # noqa: B023
                found += compare(f"Megatron's reader at its {name}", ours, theirs)
    return found


def batches(dataset: Any) -> Any:
    """Samples one by one, read in micro-batches."""
    for first in range(0, len(dataset), BATCH):
        yield from dataset.__getitems__(range(first, first + BATCH))


def measure(proxy: Any, num_samples: int, open_samples: Callable[[], Any]) -> tuple[float, float, float]:
    """(samples per second, bytes per sample, requests per sample); opening is not counted."""
    samples = iter(open_samples())
    first = next(samples)  # opened, connected; at our side this is a whole micro-batch
    assert first
    for _ in range(BATCH - 1):
        next(samples)
    before = proxy.counts()
    elapsed = seconds(lambda: [next(samples) for _ in range(num_samples)])
    moved = proxy.counts() - before
    return num_samples / elapsed, moved.bytes / num_samples, moved.requests / num_samples


def compare(name: str, ours: tuple[float, float, float], theirs: tuple[float, float, float]) -> list[Row]:
    units = (("samples/s", True), ("bytes/sample", False), ("requests/sample", False))
    return [
        Row(f"S3, {DELAY_MS} ms: {unit}", our, their, "", better, name)
        for (unit, better), our, their in zip(units, ours, theirs, strict=True)
    ]
