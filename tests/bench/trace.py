"""A step of a run traced: its config, caches and `.idx` in a bucket on loopback, nothing of them on this machine.

300 million documents: an `.idx` of 6 GB and 2 GB of index arrays, behind `servers.far_object`, which costs nearly
nothing; the tokens are a hole, which nobody reads. BINIDX_BENCH_DOCUMENTS=30000000 is a tenth. Cold: a process with an
empty index_dir, from its imports to the answer. Again: the same step, after another one. On request only: 17 GB of
disk, ten minutes.

Limit, cold: each document of a step is in another place, so it is a request for its length; what client and server can
do on these cores, 0.1 ms of one each.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from servers.far_object import far_object
from servers.latency_proxy import latency_proxy

from binidx.dataset.config import GPTDatasetConfig
from binidx.index.cache.manifest import format_manifest, parse_manifest
from binidx.run.run_file import Run, SavedTokenizer
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import object_identity
from tests.bench.cold_start_large import NUM_DOCUMENTS, SEQUENCE_LENGTH, write
from tests.bench.race import READERS
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row, seconds

CONDITIONS = Conditions(
    cores=0,
    size="300,000,000 documents, behind a server that costs nearly nothing",
    cached="indices in the bucket",
)
GOAL = "the goal"
ROUNDS = 3
MICRO_BATCH, RANKS = 8, 64
ACCESS = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}


def rows(directory: Path) -> list[Row]:
    """Seconds, and what came from the bucket."""
    root = directory / "bucket"
    root.mkdir()
    write(root)
    with far_object(root, delay_ms=0) as endpoint, reached_at(endpoint):
        prepare(root)
        found = [ask() for _ in range(ROUNDS)]
        alone = [ask(17) for _ in range(ROUNDS)]
        command = statistics.median(command_seconds() for _ in range(ROUNDS))
        with latency_proxy(endpoint, delay_ms=0) as proxy, reached_at(proxy.endpoint):
            ask()
            moved = proxy.counts()
    check_reached("a step traced", moved.requests, min(each[0] for each in found), 0)
    cold, warm, again, cpu = (statistics.median(column) for column in zip(*found, strict=True))
    what = f"a step of {MICRO_BATCH * RANKS} samples of {NUM_DOCUMENTS / 1e6:,.0f} M documents in a bucket"
    note = f"of two steps {moved.requests:,} requests, {moved.bytes / 1e6:.1f} MB; CPU {cpu:.2f} s"
    one = statistics.median(each[0] for each in alone)
    return [
        Row(f"{what} traced, cold", cold, 1, "s", False, note, GOAL),
        Row(f"{what} traced, again", warm * 1e3, 20, "ms", False, "", GOAL),
        Row(f"{what} traced, in a process after", again, 1, "s", False, "from index_dir", GOAL),
        Row(f"the {MICRO_BATCH} samples of one rank traced, cold", one, 1, "s", False, "", GOAL),
        Row("`binidx trace --rank`, the process", command, 1, "s", False, "cold, with Python and imports", GOAL),
    ]


@contextmanager
def reached_at(endpoint: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({**ACCESS, "AWS_ENDPOINT_URL": endpoint})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def prepare(root: Path) -> None:
    """The caches, built on the disk and told to be what the bucket has, and the file of the run."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=SEQUENCE_LENGTH, blend=(["s3://bench/corpus"], None), split="1,0,0",
        tokenizer=SavedTokenizer({"class": "none"}, eod=0, pad=1), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, path_to_cache=str(root / "indices"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(dir=root.parent) as scratch:
        program = "import sys; from binidx.run.run_file import Run; Run.load(sys.argv[1]).build()"
        Run(config, [None, None, None], MICRO_BATCH, RANKS).save(str(root / "local.json"))
        environment = {**os.environ, "BINIDX_INDEX_DIR": scratch}
        subprocess.run([sys.executable, "-c", program, str(root / "local.json")], env=environment, check=True)
    for path in (root / "indices").glob("*-binidx.json"):
        manifest = parse_manifest(path.read_bytes(), str(path))
        name = path.name.removesuffix("binidx.json")
        arrays = {
            array: replace(stored, identity=object_identity(Location.of(f"s3://bench/indices/{name}{array}.npy")))
            for array, stored in manifest.arrays.items()
        }
        path.write_bytes(format_manifest(replace(manifest, arrays=arrays)))
    there = replace(config, path_to_cache="s3://bench/indices")
    Run(there, [None, None, None], MICRO_BATCH, RANKS).save(str(root / "run.json"))


def ask(rank: int | None = None, uri: str = "s3://bench/run.json") -> tuple[float, float, float, float]:
    """Seconds: cold, again, of a process that finds what this one left, and of CPU for the first."""
    with tempfile.TemporaryDirectory() as scratch:
        first, then = (_process(scratch, rank, uri) for _ in range(2))
    return first[0], first[1], then[0], first[2]


def _process(scratch: str, rank: int | None, uri: str) -> list[float]:
    environment = {**os.environ, "BINIDX_INDEX_DIR": scratch}
    command = [sys.executable, str(READERS / "trace.py"), json.dumps([uri, rank])]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def command_seconds() -> float:
    """All of a cold `binidx trace`."""
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, "BINIDX_INDEX_DIR": scratch}
        arguments = ["s3://bench/run.json", "--steps", "100", "--rank", "17"]
        command = [sys.executable, "-m", "binidx", "trace", *arguments]
        return seconds(lambda: subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True))
