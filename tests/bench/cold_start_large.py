"""From a config to the first batch of 300 million documents, nothing on this machine: 6 GB of `.idx`, 2 GB of arrays.

The dataset and its index lie in a bucket on loopback (`servers.far_object`, so that the server costs nearly nothing);
the `.bin` is 600 GB of holes. Ours is a process of its own with an empty index_dir; time from the end of the imports to
the first batch of 8 samples. The other is the bare client, aiohttp with 16 ranges of 8 MiB in flight, writing the same
bytes to files; it checks nothing. Both in turns, medians.

On request only: 17 GB of disk, some minutes. BINIDX_BENCH_DOCUMENTS=30000000 is a tenth. The limit: each byte is copied
from the kernel, through Python, into the page cache, and read twice for its sum, when it is written and when it is
believed, those of the arrays once more for their digests. The `.idx` is not gone through: its manifest vouches for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from servers.far_object import far_object

from binidx.format.idx import format_idx_header
from tests.bench.race import READERS
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(
    cores=0,
    size="300,000,000 documents: 6 GB of .idx, 2 GB of indices",
    cached="indices in the bucket, nothing on this machine",
)
NUM_DOCUMENTS = int(os.environ.get("BINIDX_BENCH_DOCUMENTS", 300_000_000))
SEQUENCE_LENGTH = 4096
STRETCH = 2**22
ROUNDS = 3
PART_BYTES = 8 << 20
IN_FLIGHT = 16


def rows(directory: Path) -> list[Row]:
    """Seconds, and memory that is this process's alone."""
    root = directory / "bucket"
    root.mkdir()
    write(root)
    with far_object(root, delay_ms=0) as endpoint:
        start(directory, endpoint, cache=str(root / "indices"))
        names = ["corpus.idx", *(f"indices/{each.name}" for each in (root / "indices").glob("*.npy"))]
        sizes = {name: (root / name).stat().st_size for name in names}
        ours, theirs = [], []
        for _ in range(ROUNDS):
            ours.append(start(directory, endpoint, cache="s3://bench/indices"))
            check_reached("a cold start", ours[-1]["requests"], ours[-1]["first"] - ours[-1]["imported"], 0)
            theirs.append(download(directory, endpoint, sizes))
    needed = f"{sum(sizes.values()) / 1e9:.2f} GB needed, {sizes['corpus.idx'] / 1e9:.2f} of them the .idx"
    cpu, memory = (statistics.median(found[name] for found in ours) for name in ("cpu", "anonymous"))
    work = f"{NUM_DOCUMENTS:,} documents in a bucket on loopback, cold start to first batch"
    note = f"goal 1.2x its time; {needed}; CPU {cpu:.1f} s; {memory / 2**20:.0f} MiB of its own memory"
    seconds = statistics.median(found["first"] - found["imported"] for found in ours)
    return [Row(work, seconds, statistics.median(theirs), "s", False, note, "download of these bytes by aiohttp")]


def write(root: Path) -> None:
    """The index of NUM_DOCUMENTS documents of one sequence each, some 1,000 tokens, and a `.bin` of holes."""
    stretch = np.maximum(np.random.default_rng(0).lognormal(np.log(1000) - 0.5, 1.0, STRETCH), 1).astype(np.int32)
    pieces = [stretch[: NUM_DOCUMENTS - first] for first in range(0, NUM_DOCUMENTS, STRETCH)]
    with open(root / "corpus.idx", "wb") as file:
        file.write(format_idx_header(np.uint16, NUM_DOCUMENTS, NUM_DOCUMENTS + 1))
        for piece in pieces:
            file.write(piece.data)
        end = 0
        for piece in pieces:
            ends = end + 2 * np.cumsum(piece, dtype=np.int64)
            file.write(np.concatenate([[end], ends[:-1]]).data)
            end = int(ends[-1])
        for first in range(0, NUM_DOCUMENTS + 1, STRETCH):
            file.write(np.arange(first, min(first + STRETCH, NUM_DOCUMENTS + 1), dtype=np.int64).data)
    with open(root / "corpus.bin", "wb") as file:
        file.truncate(end)


def start(directory: Path, endpoint: str, cache: str) -> dict[str, Any]:
    """One start in a process of its own, in an empty directory for index files."""
    given = {
        "side": "binidx", "prefixes": ["s3://bench/corpus"], "weights": None, "cache": cache, "split": "1,0,0",
        "sizes": [None, 0, 0], "sequence_length": SEQUENCE_LENGTH,
    }  # fmt: skip
    access = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        environment = {**os.environ, **access, "AWS_ENDPOINT_URL": endpoint, "BINIDX_INDEX_DIR": scratch}
        command, given_to = [sys.executable, str(READERS / "start.py")], json.dumps(given)
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True, input=given_to)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def download(directory: Path, endpoint: str, sizes: dict[str, int]) -> float:
    """Seconds to bring the objects into files."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        began = time.perf_counter()
        asyncio.run(fetch_all(endpoint, sizes, Path(scratch)))
        return time.perf_counter() - began


async def fetch_all(endpoint: str, sizes: dict[str, int], scratch: Path) -> None:
    import aiohttp

    room = asyncio.Semaphore(IN_FLIGHT)
    async with aiohttp.ClientSession() as session:

        async def fetch(name: str, first: int, last: int, file: Any) -> None:
            headers = {"Range": f"bytes={first}-{last}"}
            async with room, session.get(f"{endpoint}/bench/{name}", headers=headers) as response:
                os.pwrite(file.fileno(), await response.read(), first)

        files = {name: open(scratch / Path(name).name, "wb") for name in sizes}  # noqa: SIM115  closed with the process
        await asyncio.gather(
            *(
                fetch(name, first, min(first + PART_BYTES, size) - 1, files[name])
                for name, size in sizes.items()
                for first in range(0, size, PART_BYTES)
            )
        )
        for file in files.values():
            file.close()
