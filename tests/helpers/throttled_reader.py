"""A trainer that takes micro-batches of ranges through the read-ahead, as fast as a step lets it; prints JSON lines.

    python -m helpers.throttled_reader URI STEP_SECONDS SECONDS SEED        standard input: a line starts it

It prints "ready", waits for the line, and prints at the end its steps, the longest wait, and its counters.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import binidx
from binidx.loader.readahead import ReadAheadDataset
from binidx.loader.samplers import MegatronPretrainingSampler
from binidx.storage.open import open_object
from binidx.storage.stats import usage

RANGES, RANGE_BYTES = 45, 4096


class Ranges:
    """Sample i: one batch of `RANGES` random ranges."""

    def __init__(self, uri: str, seed: int) -> None:
        self.object, self.seed = open_object(uri, cache=False), seed

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, number: int) -> Any:
        draw = random.Random(self.seed * 1_000_003 + number)
        starts = sorted(draw.sample(range(self.object.size // 65_536), RANGES))
        return [bytes(view) for view in self.object.read([(65_536 * s, 65_536 * s + RANGE_BYTES) for s in starts])]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [self[number] for number in numbers]


def main(uri: str, step_seconds: float, seconds: float, seed: int) -> None:
    data = Ranges(uri, seed)
    sampler = MegatronPretrainingSampler(len(data), 0, 1, 0, 1)
    batches = ReadAheadDataset(data, sampler, num_batches=4)
    print("ready", flush=True)
    sys.stdin.readline()
    began, waits, late = time.monotonic(), [], [0.0]
    for batch in sampler:
        asked = time.monotonic()
        batches.__getitems__(batch)
        waits.append(time.monotonic() - asked)
        if asked > began + 5:
            late.append(waits[-1])
        if time.monotonic() > began + seconds:
            break
        time.sleep(step_seconds)
    counts = {name: count for name, count in usage().items() if count}
    ends = {"steps": len(waits), "longest": max(waits), "late": max(late)}
    print(json.dumps({**ends, "usage": counts, "report": binidx.report()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:4]), int(sys.argv[4]))
