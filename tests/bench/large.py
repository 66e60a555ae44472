"""`document_sample` with 10^8 documents: ten minutes, 6 GiB of memory, 1.4 GB of disk."""

from __future__ import annotations

from pathlib import Path

from tests.bench.document_sample import time_rows
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=1, size="100,000,000 documents", cached="lengths in memory")
NUM_DOCUMENTS = 10**8


def rows(directory: Path) -> list[Row]:
    """Nanoseconds a document."""
    return time_rows(directory, NUM_DOCUMENTS)
