"""The clock of a race, in the process of each reader: knows nothing of any of them, needs NumPy.

A reader's script imports all it needs, torch and the driver for S3 among it, which some would import in their own time;
then it calls `race(open_batches)`. One line of JSON goes to its standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

# As in corpus.py.
PLACES = 1000
FIRST_PLACE = 16
PLACE_BITS = 5
NOISE = 1 << 15
TELLING = 256
"""Tokens of a sample that are looked at: one in eight tells its place. All 4,096 took 8 us, as much as a reader."""


def arguments() -> dict[str, Any]:
    """What `race.py` gave: uri, directory (empty, for caches), dtype, sequence_length, batch, and more for some."""
    return dict(json.loads(sys.argv[1]))


def race(open_batches: Callable[[], Iterable[Any]], num_samples: int, seconds: float, warm: int = 0) -> None:
    """Take `num_samples`, or what comes in `seconds` after the first batch, and tell when they came.

    Args:
        open_batches: opens the data and gives batches of tokens, arrays of (B, S) or (B, S + 1). What it does counts.
        warm: batches after the first one that are no part of the rate: of workers, each has its first ready by then.

    Times are those of the machine's monotonic clock, which the process that started this one reads too.
    """
    imported = time.monotonic()
    arrived: list[float] = []
    cpu: list[float] = []
    places: list[int] = []
    for batch in open_batches():
        arrived.append(time.monotonic())
        cpu.append(time.process_time())
        places += places_of(batch)
        if len(places) >= num_samples or arrived[-1] > arrived[0] + seconds:
            break
    found = {
        "imported": imported,
        "first": arrived[0],
        "last": arrived[-1],
        "warm": warm,
        "warmed": arrived[warm],
        "cpu": cpu[-1] - cpu[warm],
        "samples": len(places),
        "batch": len(places) // len(arrived),
        "places": len(set(places)),
    }
    print(json.dumps(found), flush=True)
    leave()


def places_of(batch: Any) -> list[int]:
    """Which thousandth of the corpus each sample begins in; raises if these are not tokens of it."""
    tokens = np.asarray(batch[:, :TELLING]).astype(np.int64)
    first = np.argmax(tokens < NOISE, axis=1)
    places = (tokens[np.arange(len(tokens)), first] >> PLACE_BITS) - FIRST_PLACE
    if not ((places >= 0) & (places < PLACES)).all():
        raise ValueError(f"these are no tokens of the corpus: {tokens[:, :32]}")
    return [int(place) for place in places]


def leave() -> None:
    """Now, whatever threads a reader has: some wait for what they had asked ahead before they let a process end."""
    import os

    sys.stdout.flush()
    os._exit(0)


def tokens_of(path: Path, dtype: str, length: int) -> np.ndarray:
    """The whole `.bin`, cut into samples, shape (n, length): how the packers of fixed samples see it."""
    tokens = np.memmap(path, dtype, mode="r")
    return tokens[: len(tokens) // length * length].reshape(-1, length)
