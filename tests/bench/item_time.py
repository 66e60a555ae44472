"""Time of one sample from local files in the page cache: `__getitem__` of both, and our micro-batch of 8.

The limit is the copy: 8 KiB in, 96 KiB of int64 tokens, labels, positions and float loss mask out, about 10 us at the
store bandwidth of one core. The rest is Python and NumPy per range; a gather in C is its own piece of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tests.bench.corpus import SEQUENCE_LENGTH, open_ours, open_theirs, write_corpus
from tests.bench.table import Row, interleaved_medians

NUM_SAMPLES = 400
BATCH = 8
ROUNDS = 7


def drain(samples: Iterator[object]) -> None:
    """Let go of each sample before the next: keeping them times the page faults of new memory instead."""
    deque(samples, maxlen=0)


def rows(directory: Path) -> list[Row]:
    """Microseconds per sample."""
    prefix = write_corpus(directory / "local", 128 << 20)
    ours, theirs = open_ours(prefix, f"{directory}/ours"), open_theirs(prefix, f"{directory}/theirs")
    idxs = np.random.default_rng(0).integers(0, len(ours), NUM_SAMPLES).tolist()
    batches = [idxs[i : i + BATCH] for i in range(0, NUM_SAMPLES, BATCH)]
    one, batched, peer = interleaved_medians(
        lambda: drain(map(ours.__getitem__, idxs)),
        lambda: drain(map(ours.__getitems__, batches)),
        lambda: drain(map(theirs.__getitem__, idxs)),
        rounds=ROUNDS,
    )
    micro = 1e6 / NUM_SAMPLES
    length = f"{SEQUENCE_LENGTH:,} tokens"
    return [
        Row(f"one sample of {length}, local, warm", one * micro, peer * micro, "µs", False),
        Row(f"the same, in micro-batches of {BATCH}", batched * micro, peer * micro, "µs", False, "`__getitems__`"),
    ]
