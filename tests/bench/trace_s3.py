"""A step of a run traced over a real S3 server: run file, indices and `.idx` in a bucket, nothing on this machine.

30 million documents in samples of five documents each, as samples of 4,096 tokens have of web text: documents have
16 tokens on average and samples 64, so that the `.bin`, which nobody reads, is 1 GB. The `.idx` has 600 MB. Cold: a
process with an empty index_dir, from its imports to the answer; on loopback, and 30 ms away. Again: the same step,
after another one. `trace` has 300 million documents behind a server that costs nearly nothing.

Limit, cold: each document of a step is in another place, so it is a request for its length. SeaweedFS keeps
chunks that compress well as gzip, and inflates one for each range: 10 ms of CPU, 2 ms where the bytes are random. So as
many ranges of the same `.idx`, fetched by a bare client, stand beside ours.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from servers.seaweed import s3_client

from binidx.corpus.convert import convert_dataset
from binidx.dataset.config import GPTDatasetConfig
from binidx.format.idx import format_idx_header
from binidx.run.run_file import Run, SavedTokenizer
from tests.bench.clients import fetch_bare
from tests.bench.race import DELAY_MS, far_away, store
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row
from tests.bench.trace import GOAL, MICRO_BATCH, RANKS, ask

NUM_DOCUMENTS = 30_000_000
MEAN_TOKENS, SEQUENCE_LENGTH = 16, 64
ROUNDS = 3
STEPS = 4
"""Steps that `ask` fetches the lengths of: two, in each of two processes."""
BARE, IN_FLIGHT = "as many ranges of 4 bytes by aiohttp, bare", 128
CONDITIONS = Conditions(
    cores=0, size=f"{NUM_DOCUMENTS:,} documents, 512 samples", cached="indices in the bucket, nothing on this machine"
)


def rows(directory: Path) -> list[Row]:
    """Seconds, and requests of a cold process."""
    prefix = write_corpus(directory / "corpus")
    with store(directory) as (server, bucket):
        convert_dataset(prefix, f"{bucket}/corpus", verify="size")
        run = f"{bucket}/run.json"
        build_indices(bucket, run)
        near = [ask(uri=run) for _ in range(ROUNDS)]
        with far_away(server) as proxy:
            far = []
            for _ in range(ROUNDS):
                before = proxy.counts()
                far.append(ask(uri=run)[0])
                moved = proxy.counts() - before
                check_reached("a step traced", moved.requests, far[-1], DELAY_MS)
        bare = statistics.median(bare_seconds(server, moved.requests // STEPS) for _ in range(ROUNDS))
    cold, again, after, cpu = (statistics.median(column) for column in zip(*near, strict=True))
    work = f"a step of {MICRO_BATCH * RANKS} samples traced over S3"
    requests = f"of two steps and two processes {moved.requests:,} requests, {moved.bytes / 1e6:.1f} MB"
    return [
        Row(f"{work} on loopback, cold", cold, bare, "s", False, f"CPU {cpu:.2f} s; the goal is 1 s", BARE),
        Row(f"{work} {DELAY_MS} ms away, cold", statistics.median(far), 1, "s", False, requests, GOAL),
        Row(f"{work}, again", again * 1e3, 20, "ms", False, "in the same process", GOAL),
        Row(f"{work} on loopback, in a process after", after, 1, "s", False, "from index_dir", GOAL),
    ]


def write_corpus(prefix: Path) -> str:
    """Write a dataset of NUM_DOCUMENTS short documents; its tokens are a hole in the file."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, NUM_DOCUMENTS), 1).astype(np.int32)
    ends = 2 * np.cumsum(lengths, dtype=np.int64)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(format_idx_header(np.uint16, NUM_DOCUMENTS, NUM_DOCUMENTS + 1))
        for array in (lengths, np.concatenate([[0], ends[:-1]]), np.arange(NUM_DOCUMENTS + 1)):
            file.write(array.data)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(int(ends[-1]))
    return str(prefix)


def bare_seconds(server: Any, count: int) -> float:
    """Seconds to fetch so many lengths at random places of the `.idx` from the server, and to do nothing else."""
    with contextlib.closing(s3_client(server.endpoint, server.key, server.secret)) as client:
        url = client.generate_presigned_url("get_object", Params={"Bucket": "bench", "Key": "corpus.idx"})
    starts = random.Random(2).choices(range(64, 4 * NUM_DOCUMENTS, 4), k=count)
    began = time.perf_counter()
    assert fetch_bare(url, starts, 4, IN_FLIGHT) == 4 * count
    return time.perf_counter() - began


def build_indices(bucket: str, run: str) -> None:
    """Build the indices of the run into the bucket, and save the run's file there."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQUENCE_LENGTH, blend=([f"{bucket}/corpus"], None), split="1,0,0",
        tokenizer=SavedTokenizer({"class": "none"}, eod=0, pad=1), path_to_cache=f"{bucket}/indices",
    )  # fmt: skip
    saved = Run(config, [None, None, None], MICRO_BATCH, RANKS)
    with tempfile.TemporaryDirectory() as scratch:
        saved.save(f"{scratch}/run.json")
        Run.load(f"{scratch}/run.json").build()
    saved.save(run)
