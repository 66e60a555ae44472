"""Bytes moved from S3 for each byte of the samples, counted by the proxy: exact ranges, and with default settings.

The limit is 1.0. A token more than a sample has is read with each, which is 0.0002 of it. Exact ranges (`max_gap` 0, or
BINIDX_MAX_GAP=0) fetch nothing in vain; by default a gap between two ranges is fetched where it is cheaper than one
more request. Opening does not count: .idx files and indices are read before. The last samples of the epoch are read, so
that nothing is asked ahead that nobody takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers.latency_proxy import Proxy

import binidx
from tests.bench.corpus import SEQUENCE_LENGTH, run_config
from tests.bench.race import BATCH, DELAY_MS, far_away, publish_corpus, store
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=0, size="2,000 samples of 4,096 tokens", cached=".idx and indices")
DATA = tuple((dtype, long) for dtype in ("uint16", "int32") for long in (False, True))
NUM_SAMPLES = 2000


def rows(directory: Path) -> list[Row]:
    """Both dtypes, documents shuffled and contiguous, both ways to read."""
    return [row for dtype, long in DATA for row in rows_of(directory / f"{dtype}{long:d}", dtype, long)]


def rows_of(directory: Path, dtype: str, long_documents: bool) -> list[Row]:
    directory.mkdir()
    data = f"{dtype}, {'contiguous' if long_documents else 'documents shuffled'}"
    with store(directory) as (server, bucket):
        _, uri = publish_corpus(directory, bucket, dtype, long_documents=long_documents)
        with far_away(server) as proxy:
            ways = {"exact ranges": "0", "by default": None}
            return [moved(proxy, uri, dtype, f"{directory}/{way}", f"{data}, {way}", gap) for way, gap in ways.items()]


def moved(proxy: Proxy, uri: str, dtype: str, cache: str, data: str, max_gap: str | None) -> Row:
    with environment("BINIDX_MAX_GAP", max_gap):
        config = binidx.GPTDatasetConfig(**run_config(uri, cache))
        sizes = [None, 0, 0]
        dataset = binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, sizes, lambda: True, config).build()[0]
        before, began = proxy.counts(), time.perf_counter()
        loader = binidx.build_pretraining_data_loader(dataset, len(dataset) - NUM_SAMPLES, BATCH)
        samples = sum(len(batch["tokens"]) for batch in loader)
        taken, found = time.perf_counter() - began, proxy.counts() - before
    check_reached(data, found.requests, taken, DELAY_MS)
    used = samples * SEQUENCE_LENGTH * (2 if dtype == "uint16" else 4)
    note = f"{found.requests / samples:.2f} requests a sample"
    return Row(f"bytes moved per byte used, {data}", found.bytes / used, 1.0, "B", False, note, "the bytes used")


@contextmanager
def environment(name: str, value: str | None) -> Iterator[None]:
    """A variable set or missing for the block."""
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
