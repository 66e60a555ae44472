"""Processes that share one disk cache and are killed at random instants.

    python -m helpers.disk_cache_stress DIRECTORY KILLS SEED

Each worker is a forked child that reads random ranges of three objects through a cache too small for them, so that it
fetches, writes, maps, evicts and waits for others all the time, and compares every byte. Every third one fills the
cache meanwhile. After some reads and 1
to 30 ms it gets a SIGKILL and another takes its place. Now and then all are killed and pages are lost, as when the
power fails.

Prints one JSON object: what was done, and the wrong reads, of which there must be none. At the end all objects are read
by a process of its own, and all that lies in the cache is compared with its sums.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from helpers.versioned_objects import MarkedObject

from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.fill_plan import ExtentUses, FillSizes
from binidx.storage.cache.filling import CacheFilling
from binidx.storage.cache.maintenance import prune
from binidx.storage.interfaces import Range

SIZES = (700_000, 1_000_003, 300_000)
OBJECTS = [(f"object-{number}", random.Random(number).randbytes(size)) for number, size in enumerate(SIZES)]
LIMIT = 900_000
EXTENT = 32 << 10
WORKERS = 4
KILLS_BETWEEN_POWER_FAILURES = 150
READS, WRONG, FETCHES, HITS, DONE = range(5)

# Counted by all processes, also by those that are killed; a count that two write at once may lose one.
counters = np.frombuffer(mmap.mmap(-1, 4096), np.int64)


class SlowObject(MarkedObject):
    """An object whose answers take up to 3 ms, so that most kills meet somebody who fetches."""

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        counters[FETCHES] += len(ranges)
        time.sleep(random.random() * 0.003)
        return super().read(ranges)


def work(directory: str, seed: int) -> None:
    """Read until killed."""
    choose = random.Random(seed)
    random.seed(seed)
    readers = [open_cached(directory, number) for number in range(len(OBJECTS))]
    if seed % 3 == 0:
        CacheFilling(readers, uses, is_expected=bool(seed % 2), sizes=FillSizes(extent_bytes=EXTENT)).advance()
    while True:
        reader = choose.choice(readers)
        data = reader.reader.data  # type: ignore[attr-defined]
        # A stretch of the object for this worker, so that the rest can be evicted.
        first = seed * 131_071 % (len(data) - 150_000)
        starts = [first + choose.randrange(100_000) for _ in range(choose.randrange(1, 5))]
        asked = [(start, start + int(min(49_000, choose.paretovariate(0.4)))) for start in starts]
        before = reader.stats.hits
        if [bytes(view) for view in reader.read(asked)] != [data[start:stop] for start, stop in asked]:
            counters[WRONG] += 1
        counters[READS] += len(asked)
        counters[HITS] += reader.stats.hits - before
        if choose.random() < 0.02:
            prune(directory, limit=LIMIT // 2)


def uses() -> ExtentUses:
    """Every extent of every object is read whole at step 0, the only one."""
    counts = [-(-size // EXTENT) for size in SIZES]
    owners, numbers = np.repeat(np.arange(len(SIZES)), counts), np.concatenate([np.arange(count) for count in counts])
    sizes = np.minimum(EXTENT, np.array(SIZES)[owners] - numbers * EXTENT)
    first = np.zeros(len(sizes), np.int64)
    return ExtentUses(owners, numbers, sizes, sizes.astype(float), first, first)


def open_cached(directory: str, number: int) -> DiskCache:
    uri, data = OBJECTS[number]
    return DiskCache(SlowObject(data, uri), directory, LIMIT, chunk_bytes=8 << 10, block_bytes=64 << 10, fill="auto")


def start(directory: str, seed: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(directory, seed)
    except BaseException as error:
        print(f"worker {seed}: {error!r}", file=sys.stderr)
        counters[WRONG] += 1
    os._exit(1)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def fail_power(directory: str, choose: random.Random) -> int:
    """Lose pages of files, as a disk does that had not written them yet; how many."""
    blocks = sorted(Path(directory).glob("objects/*/*.block"))
    for block in blocks:
        with block.open("r+b") as file:
            pages = range(0, block.stat().st_size, 4096)
            for page in choose.sample(pages, min(len(pages), choose.randrange(4))):
                file.seek(page)
                file.write(bytes(4096))
        if choose.random() < 0.05:
            os.truncate(block, choose.randrange(block.stat().st_size + 1))
    return len(blocks)


def hammer(directory: str, kills: int, seed: int) -> None:
    choose = random.Random(seed)
    workers = [start(directory, seed + number) for number in range(WORKERS)]
    for number in range(kills):
        # A slow machine needs longer for a read: else its workers would be killed before they have done anything.
        enough = counters[READS] + choose.randrange(WORKERS)
        while counters[READS] < enough:
            time.sleep(0.0005)
        time.sleep(choose.uniform(0.001, 0.03) / WORKERS)
        kill(workers.pop(choose.randrange(WORKERS)))
        counters[DONE] += 1
        if number % KILLS_BETWEEN_POWER_FAILURES == KILLS_BETWEEN_POWER_FAILURES - 1:
            while workers:
                kill(workers.pop())
            fail_power(directory, choose)
        while len(workers) < WORKERS:
            workers.append(start(directory, seed + WORKERS * (number + 1) + len(workers)))
    while workers:
        kill(workers.pop())


def read_everything(directory: str) -> bool:
    for number, (_, data) in enumerate(OBJECTS):
        reader = open_cached(directory, number)
        for first in range(0, len(data), 50_000):
            if bytes(reader.read([(first, min(first + 50_000, len(data)))])[0]) != data[first : first + 50_000]:
                return False
    return True


def main(directory: str, kills: int, seed: int) -> None:
    logging.disable(logging.WARNING)
    hammer(directory, kills, seed)
    disk_bytes = sum(path.stat().st_blocks * 512 for path in Path(directory).glob("objects/*/*.block"))
    whole = read_everything(directory)
    done = {name: int(counters[place]) for place, name in enumerate(("reads", "wrong", "fetches", "hits", "kills"))}
    print(json.dumps({**done, "whole": whole, "disk_bytes": disk_bytes, "limit": LIMIT}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
