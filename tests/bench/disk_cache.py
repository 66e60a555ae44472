"""Reading through a disk cache against a local file, and bytes moved by processes that share one.

second epoch    shuffled samples, 4,096 tokens each, in micro-batches of 8, out of a warm cache in one process
first epoch     of a new process over what others kept: each chunk of 64 KiB is compared with its sum once
from S3         4 processes read one epoch of the same corpus at once; bytes by the proxy's log
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from servers.latency_proxy import latency_proxy
from servers.seaweed import s3_server

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.maintenance import Warming
from binidx.storage.stores.local import LocalFile
from tests.bench.corpus import SEQUENCE_LENGTH, open_ours, run_config, write_corpus
from tests.bench.remote import remote_seconds
from tests.bench.table import Conditions, Row, interleaved_medians, seconds

CONDITIONS = Conditions(cores=1, size="256 MiB of uint16 tokens", cached="the disk cache, in the page cache")
CORPUS_BYTES = 256 << 20
SHARED_BYTES = 32 << 20
NUM_SAMPLES = 800
BATCH = 8
ROUNDS = 9
PROCESSES = 4
SHARED_DELAY_MS = 5
LOCAL = "mmap of the same file"


def rows(directory: Path) -> list[Row]:
    """Rates against the local file, bytes against no cache."""
    prefix = write_corpus(directory / "en", CORPUS_BYTES)
    return [*against_local_file(directory, prefix), *shared(directory)]


def against_local_file(directory: Path, prefix: str) -> list[Row]:
    for end in ("bin", "idx"):
        with fsspec.open(f"memory://bench/en.{end}", "wb") as out:
            out.write(Path(f"{prefix}.{end}").read_bytes())
    options = {"binidx": {"cache_dir": str(directory / "cache")}}
    local = open_ours(prefix, f"{directory}/indices")
    ours = open_kept("memory://bench/en", f"{directory}/indices-kept", options)
    reader, file = ours.dataset.bin_reader, local.dataset.bin_reader
    assert isinstance(reader, DiskCache)
    assert isinstance(file, LocalFile)
    first = seconds(lambda: Warming([(reader, [(0, reader.size)])]).run())
    idxs = np.random.default_rng(0).integers(0, len(ours), NUM_SAMPLES).tolist()
    batches = [idxs[at : at + BATCH] for at in range(0, NUM_SAMPLES, BATCH)]
    kept, mapped = interleaved_medians(
        lambda: read(ours, batches), lambda: read(local, batches), rounds=ROUNDS, clock=time.thread_time
    )
    ranges = [(at, at + 2000) for at in np.random.default_rng(1).integers(0, reader.size - 2000, 50).tolist()]
    one, other = interleaved_medians(lambda: reader.read(ranges), lambda: file.read(ranges), rounds=200)
    anew, again = interleaved_medians(lambda: compare_all(reader), lambda: hash_all(file), rounds=3)
    tokens = f"{SEQUENCE_LENGTH:,} tokens"
    size = f"{CORPUS_BYTES >> 20} MiB"
    return [
        Row(
            f"samples of {tokens} from a warm disk cache, second epoch", NUM_SAMPLES / kept, NUM_SAMPLES / mapped,
            "samples/s", True, "micro-batches of 8, CPU time; the goal is 0.8", LOCAL,
        ),
        Row("a range of 2,000 bytes from it, of 50", 1e6 * one / 50, 1e6 * other / 50, "µs", False, "", LOCAL),
        Row(
            f"comparing {size} with their sums, once a process", reader.size / anew / 1e6, file.size / again / 1e6,
            "MB/s", True, f"filling it took {first:.1f} s", "XXH3 alone over the file",
        ),
    ]  # fmt: skip


def open_kept(uri: str, indices: str, options: dict[str, Any]) -> Any:
    config = binidx.GPTDatasetConfig(**run_config(uri, indices), storage_options=options)
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, [None, 0, 0], lambda: True, config).build()[0]


def read(dataset: Any, batches: list[list[int]]) -> None:
    deque((dataset.__getitems__(batch) for batch in batches), maxlen=0)


def compare_all(reader: DiskCache) -> None:
    """As a process does that maps the blocks for the first time."""
    reader.cached.unmap(reader.cached.maps.mapped())
    assert reader.cached.check_chunks(range(reader.content.num_chunks)) == []


def hash_all(file: LocalFile) -> None:
    import xxhash

    view, size = file.read([(0, file.size)])[0], 64 << 10
    for start in range(0, file.size, size):
        xxhash.xxh3_128_digest(view[start : start + size])


# Many processes

READER = """
import sys
from pathlib import Path
sys.path[:0] = [{tests!r}, {root!r}]
from tests.bench.disk_cache import open_kept, read
options = {{"binidx": {{"cache_dir": {cache!r}}}}} if {cache!r} else {{}}
dataset = open_kept({uri!r}, {indices!r}, options)
order = list(range(len(dataset)))
turn = {number} * len(order) // {processes}
order = order[turn:] + order[:turn]
read(dataset, [order[at : at + 8] for at in range(0, len(order), 8)])
"""


def shared(directory: Path) -> list[Row]:
    """Each process reads all samples, from another place on, so that they meet."""
    prefix = write_corpus(directory / "shared", SHARED_BYTES)
    with s3_server(directory / "server") as server, server.in_environment():
        uri = f"{server.make_bucket('bench')}/en"
        convert_dataset(prefix, uri, verify="size")
        with latency_proxy(server.endpoint, delay_ms=SHARED_DELAY_MS) as proxy, proxy.in_environment():
            open_kept(uri, f"{directory}/shared-indices", {})
            moved = {cache: epoch_of_all(proxy, directory, uri, cache) for cache in (f"{directory}/shared-cache", "")}
    kept, exact = moved.values()
    size = Path(f"{prefix}.bin").stat().st_size + Path(f"{prefix}.idx").stat().st_size
    note = f"one epoch each of {size >> 20} MiB, which is 1.0; {SHARED_DELAY_MS} ms away"
    return [
        Row(
            f"bytes moved by {PROCESSES} processes at one disk cache", kept / size, exact / size, "times the corpus",
            False, note, "the same without a cache",
        )
    ]  # fmt: skip


def epoch_of_all(proxy: Any, directory: Path, uri: str, cache: str) -> int:
    before = proxy.counts()
    root = str(Path(__file__).parents[2])
    names = {"tests": f"{root}/tests", "root": root, "cache": cache, "uri": uri, "processes": PROCESSES}
    codes = [
        READER.format(**names, number=number, indices=f"{directory}/shared-indices") for number in range(PROCESSES)
    ]

    def run() -> None:
        readers = [subprocess.Popen([sys.executable, "-c", code], env=os.environ) for code in codes]
        assert [reader.wait() for reader in readers] == [0] * PROCESSES

    remote_seconds("an epoch of all processes", SHARED_DELAY_MS, run, lambda: proxy.counts().requests)
    return int((proxy.counts() - before).bytes)
