"""Random 16 KiB from a cold file of this machine's disk, against fio on the same file with 64 reads in flight.

Token-aligned ranges are not page-aligned: 16 KiB lie in 5 pages, so 0.8 of the limit is all there is to have where the
disk's bandwidth binds. Before each run the file leaves the page cache (nothing maps it then); what the disk gave is
counted by the kernel, per byte asked: 1.25 is the floor. Without read-ahead advice a mapped file read 125.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import binidx
from binidx.storage.open import open_object
from tests.bench.corpus import SEQUENCE_LENGTH, open_ours, write_corpus
from tests.bench.table import Conditions, Row, seconds

CONDITIONS = Conditions(cores=1, size="a file of 4 GiB, 16 KiB at a time", cached="indices; nothing of the file")
FILE_BYTES = 4 << 30
READ_BYTES = 16 << 10
DEPTH = 64
MICRO_BATCH = 8
NUM_READS = 1 << 16
NUM_SAMPLES = 1 << 14
ROUNDS = 3
FIO = "fio"
LIMIT = f"fio, direct, {DEPTH} in flight"

Figures = tuple[float, float]
"""MB asked a second, bytes from the disk for each byte asked."""


def rows(directory: Path) -> list[Row]:
    """Ranges in batches of 64, and training samples in micro-batches as the loader gives them."""
    if not shutil.which(FIO):
        print("cold local reads: fio not found, needed on PATH (Debian's package fio); left out", file=sys.stderr)
        return []
    prefix = write_corpus(directory / "cold", FILE_BYTES, dtype=np.int32, long_documents=True)
    open_ours(prefix, f"{directory}/indices")  # builds them
    path = Path(f"{prefix}.bin")
    ways: dict[str, Callable[[int], Figures]] = {
        f"ranges of 16 KiB, {DEPTH} at once": lambda seed: read_ranges(path, seed),
        f"samples of 16 KiB, micro-batches of {MICRO_BATCH}": lambda _: read_samples(prefix, directory),
        LIMIT: lambda _: (fio(path), 1.0),
    }
    runs = [{name: measured(path, way, seed) for name, way in ways.items()} for seed in range(ROUNDS)]
    rates, disk = ({name: statistics.median(run[name][kind] for run in runs) for name in ways} for kind in (0, 1))
    limit = rates.pop(LIMIT)
    return [
        Row(f"cold local {name}", rate, limit, "MB/s", True, f"{disk[name]:.2f} bytes from the disk for each", LIMIT)
        for name, rate in rates.items()
    ]


def measured(path: Path, way: Callable[[int], Figures], seed: int) -> Figures:
    forget(path)
    return way(seed)


def forget(path: Path) -> None:
    """Out of the page cache; pages that are dirty or mapped would stay."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_ranges(path: Path, seed: int) -> Figures:
    """Ranges in random order, none twice, each batch copied to where a batch would be."""
    rng = np.random.default_rng(seed)
    slots = rng.permutation(path.stat().st_size // READ_BYTES - 1)[:NUM_READS]
    starts = slots * READ_BYTES + rng.integers(0, READ_BYTES // 4, len(slots)) * 4
    batches = [[(start, start + READ_BYTES) for start in batch] for batch in np.split(starts, len(starts) // DEPTH)]
    reader = open_object(path)
    batch = np.empty((DEPTH, READ_BYTES), np.uint8)

    def read() -> None:
        for ranges in batches:
            for row, view in zip(batch, reader.read(ranges), strict=True):
                row[:] = view

    return timed(read, NUM_READS * READ_BYTES)


def read_samples(prefix: str, directory: Path) -> Figures:
    """The first samples of an epoch, all shuffled, in one process without workers."""
    loader = binidx.build_pretraining_data_loader(open_ours(prefix, f"{directory}/indices"), 0, MICRO_BATCH)
    batches = iter(loader)

    def read() -> None:
        for _ in range(NUM_SAMPLES // MICRO_BATCH):
            next(batches)

    return timed(read, NUM_SAMPLES * SEQUENCE_LENGTH * 4)


def timed(read: Callable[[], None], num_bytes: int) -> Figures:
    before = disk_bytes()
    elapsed = seconds(read)
    return num_bytes / elapsed / 1e6, (disk_bytes() - before) / num_bytes


def disk_bytes() -> int:
    """What this process made the disk read, all threads."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def fio(path: Path) -> float:
    """MB a second."""
    found = subprocess.run(arguments(path), capture_output=True, text=True, check=True, cwd=path.parent)
    return float(json.loads(found.stdout[found.stdout.index("{") :])["jobs"][0]["read"]["bw_bytes"]) / 1e6


def arguments(path: Path) -> Sequence[str]:
    return (
        FIO, "--name=limit", f"--filename={path}", "--readonly", "--rw=randread", f"--bs={READ_BYTES}", "--direct=1",
        "--ioengine=io_uring", f"--iodepth={DEPTH}", "--randrepeat=0", f"--io_size={NUM_READS * READ_BYTES}",
        "--output-format=json",
    )  # fmt: skip
