"""Merging datasets: the index against Megatron Core, and what passes through the client on S3.

    index work     4 datasets of 5 M documents of one token: add_index + finalize; each in a process of its own, CPU
                   time. The .bin is 40 MB in all, so the tokens are no work for either
    real documents 4 datasets of 550 MB of web-length documents, 1,000 tokens on average: copying tokens is most of it.
                   Wall time, sources in the page cache, nothing dirty before each run; what the disk takes is in it.
                   Of two runs the second counts: a page that nobody used costs a virtual machine ten copies of it
    memory         the most that process had resident, beyond what it had after its imports
    bytes on S3    of 4 datasets of 16 MB, counted by a proxy, against the bytes of their tokens

The goals: 15 times less time, at most 100 MB; on S3 the index only.
"""

from __future__ import annotations

import filecmp
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from servers.latency_proxy import latency_proxy
from servers.seaweed import s3_server

from binidx.corpus.convert import convert_dataset
from binidx.corpus.merge import merge_datasets
from binidx.format.idx import format_idx_header
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=1, size="4 datasets", cached="sources in the page cache")
NUM_SOURCES = 4
NUM_DOCUMENTS = 5_000_000
REAL_BYTES, MEAN_TOKENS = 550_000_000, 1000
S3_TOKENS = 8_000_000
ROUNDS = 3
SYNCED = "the same bytes; by copy_file_range, and synced to the disk, which theirs is not"
OURS = "from binidx.corpus.merge import merge_datasets"
RUN_OURS = "merge_datasets(sources, target)"
THEIRS = """
import warnings
warnings.simplefilter("ignore")
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
import numpy as np
"""
RUN_THEIRS = """
builder = IndexedDatasetBuilder(target + ".bin", np.uint16)
for source in sources:
    builder.add_index(source)
builder.finalize(target + ".idx")
"""
MEASURED = """
import json, sys, threading, time
sources, target = json.loads(sys.argv[1]), sys.argv[2]
{imports}
def resident():
    with open("/proc/self/status") as file:
        return {{line.split(":")[0]: line.split()[1] for line in file if line.startswith("Vm")}}
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = int(resident()["VmRSS"])
cpu, wall = time.process_time(), time.perf_counter()
{work}
taken = time.process_time() - cpu, (int(resident()["VmHWM"]) - before) * 1024, time.perf_counter() - wall
print(json.dumps(taken))
"""


def rows(directory: Path) -> list[Row]:
    """Index work, real documents, memory, bytes on S3."""
    return [*tiny_rows(directory), *real_rows(directory), on_s3(directory)]


def quick_rows(directory: Path) -> list[Row]:
    """Index work and memory."""
    return tiny_rows(directory)


def tiny_rows(directory: Path) -> list[Row]:
    lengths = np.ones(NUM_DOCUMENTS, np.int32)
    sources = [write_source(directory / f"part-{number}", lengths) for number in range(NUM_SOURCES)]
    ours, theirs = medians(directory, sources)
    work = f"merge of {NUM_SOURCES} x {NUM_DOCUMENTS / 1e6:g} M documents of one token"
    conditions = replace(CONDITIONS, size=f"{NUM_SOURCES * NUM_DOCUMENTS:,} documents, 40 MB")
    return [
        Row(f"{work}, CPU", ours.cpu, theirs.cpu, "s", False, "the same bytes; goal 15x", conditions=conditions),
        Row(
            f"{work}, memory", ours.memory / 1e6, theirs.memory / 1e6, "MB", False, "goal: <= 100 MB",
            conditions=conditions,
        ),
    ]  # fmt: skip


def real_rows(directory: Path) -> list[Row]:
    rng, count = np.random.default_rng(0), REAL_BYTES // 2 // MEAN_TOKENS
    lengths = np.maximum(rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0, count), 1).astype(np.int32)
    sources = [write_source(directory / f"real-{number}", lengths) for number in range(NUM_SOURCES)]
    ours, theirs = medians(directory, sources)
    num_bytes = sum(Path(f"{source}.bin").stat().st_size for source in sources)
    for source in sources:
        remove(source)
    work = f"merge of {num_bytes / 1e9:.1f} GB of real documents"
    conditions = replace(CONDITIONS, size=f"{NUM_SOURCES * count:,} documents, {num_bytes / 1e9:.1f} GB")
    return [
        Row(f"{work}, wall", ours.wall, theirs.wall, "s", False, SYNCED, conditions=conditions),
        Row(f"{work}, CPU", ours.cpu, theirs.cpu, "s", False, "the kernel's included", conditions=conditions),
    ]


class Used(NamedTuple):
    """CPU seconds, bytes of memory and wall seconds of one merge."""

    cpu: float
    memory: float
    wall: float


def medians(directory: Path, sources: list[str]) -> list[Used]:
    """Of ours and theirs, in turns; the outputs are compared and removed."""
    runs: dict[str, list[Used]] = {"ours": [], "theirs": []}
    for _ in range(ROUNDS):
        for name, imports, work in (("ours", OURS, RUN_OURS), ("theirs", THEIRS, RUN_THEIRS)):
            os.sync()
            for _ in range(2):
                remove(f"{directory}/{name}")
                used = measured(imports, work, sources, f"{directory}/{name}")
            runs[name].append(used)
    for end in ("bin", "idx"):
        assert filecmp.cmp(f"{directory}/ours.{end}", f"{directory}/theirs.{end}", shallow=False)
    for name in runs:
        remove(f"{directory}/{name}")
    return [Used(*map(statistics.median, zip(*found, strict=True))) for found in runs.values()]


def remove(prefix: str) -> None:
    for end in ("bin", "idx"):
        Path(f"{prefix}.{end}").unlink(missing_ok=True)


def write_source(prefix: Path, lengths: np.ndarray) -> str:
    """Write a dataset of documents of these lengths, one sequence each, as arrays; its tokens are noise."""
    ends = 2 * np.cumsum(lengths, dtype=np.int64)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(format_idx_header(np.uint16, len(lengths), len(lengths) + 1))
        for array in (lengths, np.concatenate([[0], ends[:-1]]), np.arange(len(lengths) + 1)):
            file.write(array.astype(array.dtype.newbyteorder("<")).tobytes())
    with Path(f"{prefix}.bin").open("wb") as file:
        rng = np.random.default_rng(0)
        for first in range(0, int(ends[-1]), 1 << 24):
            file.write(rng.bytes(min(1 << 24, int(ends[-1]) - first)))
    return str(prefix)


def measured(imports: str, work: str, sources: list[str], target: str) -> Used:
    """One merge in a fresh process."""
    code = MEASURED.format(imports=imports, work=work)
    command = [sys.executable, "-c", code, json.dumps(sources), target]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return Used(*json.loads(told.splitlines()[-1]))


def on_s3(directory: Path) -> Row:
    """What a merge from S3 to S3 moves through the client."""
    with s3_server(directory / "s3") as server, server.in_environment():
        base = f"{server.make_bucket('merge')}/x"
        count = 1000
        with Path(f"{directory}/source.idx").open("wb") as file:
            file.write(format_idx_header(np.uint16, count, count + 1))
            file.write(np.full(count, S3_TOKENS // count, "<i4").tobytes())
            file.write((np.arange(count) * (S3_TOKENS // count) * 2).astype("<i8").tobytes())
            file.write(np.arange(count + 1, dtype="<i8").tobytes())
        Path(f"{directory}/source.bin").write_bytes(bytes(2 * S3_TOKENS))
        sources = [f"{base}/{number}" for number in range(NUM_SOURCES)]
        for source in sources:
            convert_dataset(f"{directory}/source", source, verify="size")
        with latency_proxy(server.endpoint) as proxy, proxy.in_environment():
            before = proxy.counts()
            began = time.perf_counter()
            done = merge_datasets(sources, f"{base}/all")
            counted = proxy.counts() - before
            check_reached("a merge on S3", counted.requests, time.perf_counter() - began, 0)
            moved = counted.bytes
    note = f"all of it index and answers; {done.moved_bytes} bytes of tokens"
    return Row("merge on S3, to the client", moved / 1e6, done.bin_bytes / 1e6, "MB", False, note, "tokens merged")
