"""`peers` over 25,000 samples of uint16, a fifth of the corpus, and over an epoch, in one run each; 15 minutes.

Ours without a cache, and with a `cache_dir` that the loader fills while it serves, both cold.
A reader that takes longer than 40 s after its first batch is stopped: its rate is known by then.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench import peers
from tests.bench.table import Row

CONDITIONS = peers.CONDITIONS
NUM_SAMPLES, EPOCH = 25_000, 128_000
"""Samples that are read. An epoch has 131,072, less what a packer drops at the end of a file."""

ROUNDS = 1


def rows(directory: Path) -> list[Row]:
    """Time to the first batch, and samples a second over all of them."""
    peers.check_environment()
    caches = {NUM_SAMPLES: ("never", "auto"), EPOCH: ("auto",)}
    return peers.rows_of(directory / "long", "uint16", {"": {}}, caches, ROUNDS)
