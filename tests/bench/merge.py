"""Merging datasets: the index against Megatron Core, and what passes through the client on S3.

    index work     4 datasets of 5 M documents of one token: add_index + finalize; each in a process of its own, CPU
                   time. The .bin is 40 MB in all, so the tokens are no work for either
    memory         the most that process had resident, beyond what it had after its imports
    bytes on S3    of 4 datasets of 16 MB, counted by a proxy, against the bytes of their tokens

The goals: 15 times less time, at most 100 MB; on S3 the index only.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
from servers.latency_proxy import latency_proxy

from binidx.corpus.convert import convert_dataset
from binidx.corpus.merge import merge_datasets
from binidx.format.idx import format_idx_header
from binidx.tools.seaweed import s3_server
from tests.bench.table import Row

NUM_SOURCES = 4
NUM_DOCUMENTS = 5_000_000
S3_TOKENS = 8_000_000
ROUNDS = 3
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
began = time.process_time()
{work}
print(json.dumps([time.process_time() - began, (int(resident()["VmHWM"]) - before) * 1024]))
"""


def rows(directory: Path) -> list[Row]:
    """Index work, memory, bytes on S3."""
    sources = [write_source(directory / f"part-{number}") for number in range(NUM_SOURCES)]
    ours, theirs = [], []
    for number in range(ROUNDS):
        ours.append(measured(OURS, RUN_OURS, sources, f"{directory}/ours-{number}"))
        theirs.append(measured(THEIRS, RUN_THEIRS, sources, f"{directory}/theirs-{number}"))
    for end in ("bin", "idx"):
        files = [Path(f"{directory}/{name}-0.{end}").read_bytes() for name in ("ours", "theirs")]
        assert files[0] == files[1]
    work = f"merge {NUM_SOURCES} x {NUM_DOCUMENTS / 1e6:g} M documents"
    times, memory = ([[run[kind] for run in runs] for runs in (ours, theirs)] for kind in (0, 1))
    return [
        Row(f"{work}, CPU", *map(statistics.median, times), "s", False, "the same bytes; goal 15x"),
        Row(f"{work}, memory", *(statistics.median(each) / 1e6 for each in memory), "MB", False, "goal: <= 100 MB"),
        on_s3(directory),
    ]


def write_source(prefix: Path) -> str:
    """A dataset of documents of one token, written as arrays."""
    count = NUM_DOCUMENTS
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(format_idx_header(np.uint16, count, count + 1))
        file.write(np.ones(count, "<i4").tobytes())
        file.write(np.arange(0, 2 * count, 2, "<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    Path(f"{prefix}.bin").write_bytes(bytes(2 * count))
    return str(prefix)


def measured(imports: str, work: str, sources: list[str], target: str) -> tuple[float, float]:
    """CPU seconds and bytes of memory of one merge in a fresh process."""
    code = MEASURED.format(imports=imports, work=work)
    command = [sys.executable, "-c", code, json.dumps(sources), target]
    seconds, memory = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    return seconds, memory


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
            done = merge_datasets(sources, f"{base}/all")
            moved = (proxy.counts() - before).bytes
    note = f"all of it index and answers; {done.moved_bytes} bytes of tokens"
    return Row("merge on S3, to the client", moved / 1e6, done.bin_bytes / 1e6, "MB", False, note, "tokens merged")
