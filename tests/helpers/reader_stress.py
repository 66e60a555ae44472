"""Threads that read without a pause, and the resources that the process holds meanwhile.

    python -m helpers.reader_stress JSON

    uri, options     of an object whose byte i is `content(size)[i]`
    seconds          to read; `budget`, bytes that its chunks may have

Prints one line of JSON each half second: rss and most_kept in bytes, descriptors, threads, reads so far.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from binidx.storage.cache.memory import ChunkCache, ChunkStore
from binidx.storage.interfaces import RangeReader
from binidx.storage.open import open_object

THREADS = 4
PAGE = os.sysconf("SC_PAGE_SIZE")


def content(size: int) -> bytes:
    return random.Random(size).randbytes(size)


class Restless:
    """Reads of random ranges, each compared."""

    def __init__(self, reader: RangeReader, store: ChunkStore, data: bytes) -> None:
        self.reader, self.store, self.data = reader, store, data
        self.reads = self.most_kept = 0
        self.stop = False
        self.error: BaseException | None = None

    def work(self, seed: int) -> None:
        choose = random.Random(seed)
        try:
            while not self.stop:
                self.read(choose)
        except BaseException as error:
            self.error, self.stop = error, True

    def read(self, choose: random.Random) -> None:
        starts = [choose.randrange(len(self.data)) for _ in range(8)]
        ranges = [(start, min(start + choose.randrange(40_000), len(self.data))) for start in starts]
        for (start, stop), view in zip(ranges, self.reader.read(ranges), strict=True):
            assert view == self.data[start:stop], (start, stop)
        self.reads += 1
        self.most_kept = max(self.most_kept, self.store.bytes)

    def holds(self) -> dict[str, int]:
        return {
            "rss": int(Path("/proc/self/statm").read_text().split()[1]) * PAGE,
            "most_kept": self.most_kept,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "reads": self.reads,
        }


def main(told: dict[str, Any]) -> None:
    store = ChunkStore(told["budget"])
    below = open_object(told["uri"], storage_options=told["options"], cache=False)
    restless = Restless(ChunkCache(below, store=store), store, content(below.size))
    threads = [threading.Thread(target=restless.work, args=(seed,)) for seed in range(THREADS)]
    for each in threads:
        each.start()
    until = time.monotonic() + told["seconds"]
    while time.monotonic() < until and not restless.stop:
        time.sleep(0.5)
        print(json.dumps(restless.holds()), flush=True)
    restless.stop = True
    for each in threads:
        each.join()
    if restless.error:
        raise restless.error


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
