"""`peers` over 25,000 samples of uint16, a fifth of the corpus, in one run each; ten minutes.

Ours without a cache, and with a `cache_dir` that the loader fills while it serves, both cold.
A reader that takes longer than 40 s after its first batch is stopped: its rate is known by then.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench import peers
from tests.bench.table import Row

CONDITIONS = peers.CONDITIONS
NUM_SAMPLES = 25_000
ROUNDS = 1


def rows(directory: Path) -> list[Row]:
    """Time to the first batch, and samples a second over all of them."""
    peers.check_environment()
    return peers.rows_of(directory / "long", "uint16", {"": {}}, NUM_SAMPLES, ROUNDS, ("never", "auto"))
