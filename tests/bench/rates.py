"""CPU, bytes and requests of each command for a gigabyte of tokens in S3, and what a driver of many parts takes.

Each command is a process of its own, one part at a time; its source and target are in a real S3 server behind the proxy
that counts. It runs over a small dataset of English text and a large one; their difference is the rate, so the start of
the process counts nothing. BINIDX_BENCH_RATES_BYTES is the size of the large one, in uint16 tokens.

The driver: a job of parts that do nothing, with a record of each part on this disk; then the same again, which finds
all records. CPU, and growth of the most memory. Half an hour on two cores; what is measured is also printed at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from servers.latency_proxy import Proxy

import binidx
from tests.bench.race import DELAY_MS, far_away, store
from tests.bench.remote import check_reached
from tests.bench.table import Conditions, Row
from tests.bench.text import documents, joined, tokenize, write_text

NUM_BYTES = int(os.environ.get("BINIDX_BENCH_RATES_BYTES", 512_000_000))
SMALL = 8
"""The small dataset has one of so many bytes."""
SEQUENCE_LENGTH = 4096
PARTS = [int(count) for count in os.environ.get("BINIDX_BENCH_RATES_PARTS", "6000,60000").split(",")]
CONDITIONS = Conditions(cores=1, size=f"{NUM_BYTES / 1e9:.1f} GB of uint16 tokens of text in S3", cached="nothing")
UPLOADS = ("PUT", "POST")
LINK_BYTES = 25e9 / 8

COMMANDS = {
    "preprocess": "preprocess {text} --to {out}/en --tokenizer {tokenizer} --append-eod --workers 1",
    "convert": "convert {prefix} --to {out}/en --workers 1",
    "convert --compress": "convert {prefix} --to {out}/en --compress --workers 1",
    "verify": "verify {prefix} --workers 1",
    "merge": "merge {prefix} {prefix} --to {out}/en",
    "shuffle": "shuffle {prefix} --to {out}/en --seed 1 --workers 1",
    "prepare index": "prepare index {run}",
    "prepare read-plan": "prepare read-plan {run} --to {out}/plan --workers 1",
    "prepare bake": "prepare bake {run} --to {out}/baked --workers 1",
    "where --count": "where {run} --documents {drop} --source {prefix} --count",
    "cache warm": "cache warm {prefix} --dir {scratch}/cache",
}
NAMES = os.environ.get("BINIDX_BENCH_RATES_COMMANDS", ",".join(COMMANDS)).split(",")

RUN = """
import sys
from binidx.tools import main
status = main(sys.argv[1:])
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(status)
"""
PART_JOB = """
import json, sys, time
from dataclasses import dataclass
from concurrent.futures import ThreadPoolExecutor
from binidx.jobs.job_folder import JobFolder
from binidx.jobs.parts import Workers, make_parts
from binidx.storage.location import Location

@dataclass(frozen=True)
class Part:
    number: int
    size: int = 1 << 30

    @property
    def name(self):
        return f"part-{self.number:06}"

def make(part):
    return {"bytes": part.size, "sums": [0] * 8}

folder, count = JobFolder(Location.of(sys.argv[1]), {"a": 1}), int(sys.argv[2])
peak = lambda: next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before, cpu = peak(), time.process_time()
folder.claim()
results = make_parts(make, [Part(number) for number in range(count)], Workers(executor=ThreadPoolExecutor(1)), folder)
assert len(results) == count
print(json.dumps({"cpu": time.process_time() - cpu, "memory": peak() - before, "made": results.num_made}))
"""


def rows(directory: Path) -> list[Row]:
    """CPU-seconds, bytes and requests a GB; MiB and CPU-seconds of a driver."""
    _, encoded = tokenize(directory)
    sizes = (NUM_BYTES // SMALL, NUM_BYTES)
    with store(directory) as (server, bucket):
        places = [write_sources(directory, bucket, encoded, size) for size in sizes]
        with far_away(server) as proxy:
            found = [row for name in NAMES if name in COMMANDS for row in command_rows(name, proxy, places, sizes)]
    return [*found, *(row for count in PARTS for row in driver_rows(directory, count))]


def write_sources(directory: Path, bucket: str, encoded: Sequence[NDArray[np.uint16]], size: int) -> dict[str, str]:
    """Write tokens, their text, a run and a list of documents; return what commands name."""
    from binidx.corpus.convert import convert_dataset

    scratch = directory / str(size)
    scratch.mkdir()
    local = write_text(scratch / "en.bin", encoded, size // 2, np.uint16)
    convert_dataset(local, prefix := f"{bucket}/{size}/en", verify="size")
    texts, tokens, text = list(joined(documents()[1])), 0, scratch / "text.jsonl"
    with text.open("w") as file:
        for number in range(sys.maxsize):
            file.write(json.dumps({"text": texts[number % len(texts)]}) + "\n")
            if (tokens := tokens + len(encoded[number % len(texts)])) >= size // 2:
                break
    config = binidx.GPTDatasetConfig(
        random_seed=1, sequence_length=SEQUENCE_LENGTH, blend=([prefix], None), split="1,0,0",
        tokenizer=binidx.SpecialTokens(eod=0), path_to_cache=f"{bucket}/{size}/indices",
    )  # fmt: skip
    num_samples = size // 2 // SEQUENCE_LENGTH // 8 * 8 - 8
    binidx.Run(config, [num_samples, 0, 0], 1, 8, global_batch_size=8).save(run := f"{scratch}/run.json")
    drop = scratch / "drop.txt"
    drop.write_text("".join(f"{prefix}\t{number}\n" for number in range(len(binidx.IndexedDataset(local)))))
    return {"prefix": prefix, "text": str(text), "tokenizer": str(directory / "tokenizer.json"), "run": run,
            "drop": str(drop), "scratch": str(scratch), "bucket": bucket}  # fmt: skip


def command_rows(name: str, proxy: Proxy, places: Sequence[dict[str, str]], sizes: Sequence[int]) -> list[Row]:
    """Run a command over both sizes; return its rates."""
    small, large = (run_command(name, proxy, place) for place in places)
    giga = (sizes[1] - sizes[0]) / 1e9
    rate = {of: (large[of] - small[of]) / giga for of in large}
    note = f"down {rate['down'] / 1e9:.2f} GB, up {rate['up'] / 1e9:.2f} GB; {rate['gets']:,.0f} GET and HEAD, "
    note += f"{rate['puts']:,.0f} PUT and POST; {large['memory'] / 2**20:,.0f} MiB; starts in {small['cpu']:.1f} CPU-s"
    print(f"{name}: {rate} {note}", file=sys.stderr, flush=True)
    link = max(rate["down"], rate["up"], 1) / LINK_BYTES
    return [Row(f"{name}, a GB of tokens", rate["cpu"], link, "CPU-s", False, note, "seconds of a link of 25 Gbit/s")]


def run_command(name: str, proxy: Proxy, place: dict[str, str]) -> dict[str, float]:
    """Run a command once: CPU-seconds, most bytes of memory, and what passed the proxy."""
    scratch = Path(place["scratch"])
    out = f"{place['bucket']}/{scratch.name}/{name.replace(' ', '')}"
    words = [word.format(**place, out=out) for word in COMMANDS[name].split()]
    index_dir = scratch / "index_dir"
    shutil.rmtree(index_dir, ignore_errors=True)
    proxy.reset()
    environment = {**os.environ, "BINIDX_INDEX_DIR": str(index_dir)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr
    told = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{name}: ended with {process.returncode}\n{told[-3000:].decode()}")
    log = proxy.log()
    check_reached(name, len(log), time.monotonic() - began, DELAY_MS)
    return {
        "cpu": used.ru_utime + used.ru_stime,
        "wall": time.monotonic() - began,
        "memory": int(told.split()[-1]) * 1024.0,
        "down": float(sum(each.bytes for each in log if each.method == "GET")),
        "up": float(sum(each.sent for each in log)),
        "gets": float(sum(each.method in ("GET", "HEAD") for each in log)),
        "puts": float(sum(each.method in UPLOADS for each in log)),
    }


def driver_rows(directory: Path, count: int) -> list[Row]:
    """Make so many parts, then find their records; return the CPU and memory of the driver."""
    folder = directory / f"job-{count}"
    command = [sys.executable, "-c", PART_JOB, str(folder), str(count)]
    found = [json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout) for _ in range(2)]
    print(f"driver of {count} parts: {found}", file=sys.stderr, flush=True)
    assert [each["made"] for each in found] == [count, 0]
    conditions = Conditions(cores=1, size=f"{count:,} parts that do nothing, with records on a disk", cached="nothing")
    return [
        Row(f"driver of {count:,} parts, {work}", 1e3 * each["cpu"] / count, 1, "ms a part", False,
            f"{each['cpu']:.1f} CPU-s, {each['memory'] / 2**20:,.0f} MiB", "a millisecond", conditions=conditions)
        for work, each in zip(("made", "found again"), found, strict=True)
    ]  # fmt: skip
