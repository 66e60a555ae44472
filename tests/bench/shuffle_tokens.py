"""Shuffling documents: CPU time and memory, against a plain gather of the same documents in memory.

    gather     .bin and .idx read whole, documents put in the same order by C, both written: twice the data in memory
    ours       two passes over a scratch file, in the memory that is allowed

Each in a process of its own, CPU time of all its threads, after its imports; the outputs are compared. The goal: 0.7 of
the gather's speed. Documents are of OSCAR's size: 870 tokens of 2 bytes, log-normal.

Lines of text: ours from file to file, beside what terashuf is told to take for 1.2 TB, on one core: 2 h, and 150 GB of
memory.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from binidx.format.idx import format_idx_header
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=1, size="400 M tokens in documents of 870", cached="the files in the page cache")
NUM_TOKENS = 400_000_000
MEAN_TOKENS = 870
MEMORY_BYTES = 640 << 20
ROUNDS = 3
TERASHUF_SECONDS, TERASHUF_BYTES, TERASHUF_MEMORY = 2 * 3600, 1.2e12, 150e9

OURS = """
from binidx.corpus.shuffle import shuffle_datasets
work = lambda: shuffle_datasets([source], target, seed=1, memory_bytes=memory)
"""
GATHER = """
import numpy as np
from binidx.format.idx import format_idx_header
from binidx.format.indexed_dataset import IndexedDataset
from binidx.native.token_files import copy_pieces
from binidx.corpus.random_numbers import shuffle_keys
from binidx.corpus.shuffle_buckets import shuffle_order
def work():
    index = IndexedDataset(source, mmap=False).index
    lengths = np.array(index.sequence_lengths)
    tokens = np.fromfile(source + ".bin", np.uint8)
    bounds = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths * np.int64(2), out=bounds[1:])
    order = shuffle_order(shuffle_keys(1, 0, len(lengths)))
    out = np.empty(len(tokens), np.uint8)
    copy_pieces(tokens, bounds, order, out)
    out.tofile(target + ".bin")
    lengths = lengths[order]
    with open(target + ".idx", "wb") as file:
        file.write(format_idx_header(np.uint16, len(lengths), len(lengths) + 1))
        file.write(lengths.astype("<i4").tobytes())
        file.write((np.cumsum(lengths, dtype=np.int64) - lengths).__mul__(2).tobytes())
        file.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
"""
LINES = """
from binidx.prepare.text.line_shuffle import shuffle_lines
work = lambda: shuffle_lines([source], target, seed=1, memory_bytes=memory)
"""
MEASURED = """
import json, sys, time
source, target, memory = sys.argv[1], sys.argv[2], int(sys.argv[3])
{given}
began = time.process_time()
work()
seconds = time.process_time() - began
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
print(json.dumps([seconds, peak]))
"""


def rows(directory: Path) -> list[Row]:
    """CPU time and memory of tokens; CPU time of text."""
    source = write_source(directory / "source")
    runs: dict[str, list[list[float]]] = {"ours": [], "gather": []}
    for _ in range(ROUNDS):
        for name, given in (("ours", OURS), ("gather", GATHER)):
            for end in ("bin", "idx"):
                Path(f"{directory}/{name}.{end}").unlink(missing_ok=True)
            runs[name].append(measured(given, source, f"{directory}/{name}"))
    for end in ("bin", "idx"):
        ours, theirs = (Path(f"{directory}/{name}.{end}").read_bytes() for name in ("ours", "gather"))
        assert ours == theirs
    (ours_s, ours_bytes), (gather_s, gather_bytes) = (
        [statistics.median(run[kind] for run in runs[name]) for kind in (0, 1)] for name in ("ours", "gather")
    )
    speed = NUM_TOKENS / 1e6 / ours_s
    core_hours = 264.5e9 / (speed * 1e6) / 3600
    note = f"the same bytes; goal 0.7x. OSCAR's 264.5 G tokens: {core_hours:.2f} CPU-hours (projected)"
    of_memory = f"allowed: {MEMORY_BYTES / 1e6:.0f} MB, tokens: {NUM_TOKENS * 2 / 1e6:.0f} MB"
    return [
        Row("shuffle of tokens, CPU", speed, NUM_TOKENS / 1e6 / gather_s, "Mtok/s", True, note, "gather in memory"),
        Row("shuffle of tokens, memory", ours_bytes / 1e6, gather_bytes / 1e6, "MB", False, of_memory, "gather"),
        of_lines(directory),
    ]


def of_lines(directory: Path) -> Row:
    """Text, line by line."""
    source = directory / "source.jsonl"
    text = b"the quick brown fox jumps over the lazy dog and " * 100
    rng = np.random.default_rng(2)
    with source.open("wb") as file:
        for number, length in enumerate(rng.lognormal(8, 1, 200_000).astype(int).tolist()):
            file.write(b'{"id": %d, "text": "%s"}\n' % (number, (text * (length // len(text) + 1))[:length]))
    size, found = source.stat().st_size, []
    for _ in range(ROUNDS):
        (directory / "lines.jsonl").unlink(missing_ok=True)
        found.append(measured(LINES, str(source), str(directory / "lines.jsonl")))
    seconds, peak = (statistics.median(run[kind] for run in found) for kind in (0, 1))
    hours = TERASHUF_BYTES / (size / seconds) / 3600
    note = f"1.2 TB: {hours:.2f} CPU-hours (projected) in {peak / 1e6:.0f} MB, terashuf 2 h in 150 GB (published)"
    theirs = TERASHUF_BYTES / TERASHUF_SECONDS / 1e6
    return Row("shuffle of lines, CPU", size / 1e6 / seconds, theirs, "MB/s", True, note, "terashuf, published")


def write_source(prefix: Path) -> str:
    """Documents of one sequence each."""
    rng = np.random.default_rng(1)
    lengths = rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1, NUM_TOKENS // MEAN_TOKENS).astype("<i4")
    lengths[-1] = 1
    count, total = len(lengths), int(lengths.sum(dtype=np.int64))
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(format_idx_header(np.uint16, count, count + 1))
        file.write(lengths.tobytes())
        file.write(((np.cumsum(lengths, dtype=np.int64) - lengths) * 2).astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())
    rng.integers(0, 50257, total, dtype=np.uint16).tofile(f"{prefix}.bin")
    return str(prefix)


def measured(given: str, source: str, target: str) -> list[float]:
    """CPU seconds, and the most memory that was resident, of a fresh process."""
    command = [sys.executable, "-c", MEASURED.format(given=given), source, target, str(MEMORY_BYTES)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    told: list[float] = json.loads(found.splitlines()[-1])
    return told
