"""Time of one sample from local files in the page cache: `__getitem__` of both, and a micro-batch as a loader gives it.

The limit is the copy: 8 KiB in, 80 KiB of int64 tokens and labels and float loss mask out, and 32 KiB of positions that
are stacked: 2 to 4 us at the store bandwidth of one core. The rest is system calls, Python and NumPy for each batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import default_collate

from binidx.loader.torch import collate
from tests.bench.corpus import SEQUENCE_LENGTH, open_ours, open_theirs, write_corpus
from tests.bench.table import Row, interleaved_medians

NOTE = "of it 2 µs to write 112 KiB, 2.5 µs to ask the disk ahead for 6 documents"
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
    one, peer_one, batched, peer_batched = interleaved_medians(
        lambda: drain(map(ours.__getitem__, idxs)),
        lambda: drain(map(theirs.__getitem__, idxs)),
        lambda: drain(collate(ours.__getitems__(batch)) for batch in batches),
        lambda: drain(default_collate([theirs[idx] for idx in batch]) for batch in batches),
        rounds=ROUNDS,
    )
    micro = 1e6 / NUM_SAMPLES
    length = f"{SEQUENCE_LENGTH:,} tokens"
    return [
        Row(f"one sample of {length}, local, warm", one * micro, peer_one * micro, "µs", False),
        Row(f"a sample in a stacked micro-batch of {BATCH}", batched * micro, peer_batched * micro, "µs", False, NOTE),
    ]
