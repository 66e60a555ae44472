"""Lineage for datasets of tests: made up, but with the hashes of their documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import xxhash
from helpers.random_datasets import build_ours, random_documents
from helpers.shuffle_oracle import read_documents

from binidx.corpus.lineage.lineage_writer import LineageWriter, build_lineage_table
from binidx.storage.adapters import ReadableFile
from binidx.storage.location import Location
from binidx.storage.open import open_object

END = ".lineage.parquet"


def build_with_lineage(prefix: Path, count: int, seed: int, dtype: Any = np.uint16) -> str:
    """A dataset, and its lineage: two files, some ids, rising rows."""
    rng = np.random.default_rng(seed)
    source = build_ours(prefix, random_documents(rng, dtype, count), dtype)
    hashes = [xxhash.xxh3_64_intdigest(b"".join(sequences)) for sequences, _ in read_documents(source)]
    ids: list[str | None] = [None if number % 3 else f"id-{seed}-{'é' * (number % 7)}" for number in range(count)]
    numbers = np.arange(count, dtype=np.int32) % 2
    files = [f"s3://text/{seed}-a.jsonl", f"s3://text/{seed}-b.jsonl"]
    rows = np.arange(count) * 3 + seed
    writer = LineageWriter(Location.of(source + END))
    writer.write(build_lineage_table(files, numbers, rows, rows * 100, ids, np.array(hashes, np.uint64)))
    writer.publish()
    return source


def read_lineage(prefix: str | Path) -> list[dict[str, Any]]:
    """Its rows."""
    found: list[dict[str, Any]] = parquet.read_table(
        ReadableFile(open_object(f"{prefix}{END}", cache=False))
    ).to_pylist()
    return found
