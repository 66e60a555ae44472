"""Copying and compressing a dataset on one disk by `binidx convert`, against `cp` and `zstd`: CPU and wall time.

Each is a process of its own, so the start of Python counts. Ours reads back what it wrote, as it does by default, and
so does `zstd -t`; `cp` does not. zstd's window is as large as our segments: the text repeats, as no corpus does. The
source is in the page cache, and nothing is dirty before a run. Each is run twice, and the second time counts, whose
output takes the memory of the first one's: in a virtual machine a page that nobody used costs ten times its copy.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from tests.bench.table import Conditions, Row
from tests.bench.text import tokenize, write_text

NUM_BYTES, ROUNDS = 1_200_000_000, 3
SIZE = f"{NUM_BYTES / 1e9:.1f} GB"
CONDITIONS = Conditions(cores=0, size=f"{SIZE} of uint16 tokens of text", cached="the source")
PEERS = {"convert": "cp", "compression": "zstd -3 -T1, windows of 64 KiB, then zstd -t"}
CONVERT = """
import sys
from binidx.corpus.convert import StorageFormat, convert_dataset
convert_dataset(*sys.argv[1:3], way=StorageFormat(*sys.argv[3:]))
"""
NOTES = {"convert": "goal of its CPU: 1.2 s", "compression": "level 3; goal 0.83x"}


def rows(directory: Path) -> list[Row]:
    """Seconds of each way, and the compressed size."""
    _, encoded = tokenize(directory)
    source = write_text(directory / "source.bin", encoded, NUM_BYTES // 2, np.uint16)
    out = directory / "out"
    convert = [sys.executable, "-c", CONVERT, source, f"{out}/corpus"]
    compress = ["zstd", "-q", "-3", "-T1", "--zstd=wlog=16", f"{source}.bin", "-o", f"{out}/corpus.zst"]
    ways = {
        "convert": [convert],
        PEERS["convert"]: [["cp", f"{source}.bin", f"{source}.idx", str(out)]],
        "compression": [[*convert, "zstd"]],
        PEERS["compression"]: [compress, ["zstd", "-q", "-t", f"{out}/corpus.zst"]],
    }
    runs = [{name: spent_on(commands, out) for name, commands in ways.items()} for _ in range(ROUNDS)]
    cpu, wall, size = ({name: statistics.median(run[name][of] for run in runs) for name in ways} for of in range(3))
    times = [
        Row(f"{work} of {SIZE}, verified, {clock}", took[work], took[peer], "s", False, NOTES[work], peer)
        for work, peer in PEERS.items()
        for clock, took in (("CPU", cpu), ("wall", wall))
    ]
    peer = PEERS["compression"]
    packed = Row(f"compressed size of {SIZE}", size["compression"] / 1e6, size[peer] / 1e6, "MB", False, "", peer)
    return [*times, packed]


def spent_on(commands: list[list[str]], out: Path) -> tuple[float, float, float]:
    """Return CPU and wall seconds of commands the second time, and the bytes of what they leave in an empty folder."""
    out.mkdir(exist_ok=True)
    os.sync()
    for _ in range(2):
        shutil.rmtree(out)
        out.mkdir()
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        for command in commands:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after, taken = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, taken, sum(path.stat().st_size for path in out.glob("corpus.*zst"))
