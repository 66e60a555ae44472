"""What a shuffle must give, told in memory: documents sorted by their keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from binidx.corpus import shuffle, shuffle_buckets
from binidx.corpus.lineage import lineage_transfer
from binidx.corpus.random_numbers import shuffle_keys
from binidx.format.indexed_dataset import IndexedDataset
from binidx.prepare.text import line_shuffle


def new_order(seed: int, count: int) -> list[int]:
    """Which record stands where: Python's own sort of the keys."""
    keys = shuffle_keys(seed, 0, count).tolist()
    return sorted(range(count), key=lambda record: (keys[record], record))


def read_documents(prefix: str | Path) -> list[tuple[list[bytes], list[int]]]:
    """The sequences of each document, and their modes."""
    found = IndexedDataset(str(prefix))
    modes = found.index.sequence_modes
    documents = []
    for first, stop in zip(found.document_indices[:-1].tolist(), found.document_indices[1:].tolist(), strict=True):
        sequences = [np.asarray(found.get(number)[0] if modes is not None else found.get(number)).tobytes()
                     for number in range(first, stop)]  # fmt: skip
        documents.append((sequences, [] if modes is None else modes[first:stop].tolist()))
    return documents


def small_buckets(
    patch: pytest.MonkeyPatch,
    num_buckets: int,
    round_bytes: int,
    bucket_bytes: int = 1 << 20,
    *,
    chunk_bytes: int = shuffle_buckets.BUCKET_CHUNK_BYTES,
    extent_bytes: int = shuffle_buckets.BUCKET_EXTENT_BYTES,
) -> None:
    """Let the shuffles that follow have so many buckets, whatever their memory."""
    plan_shuffle = shuffle_buckets.plan_shuffle

    def plan(*given: int) -> shuffle_buckets.ShufflePlan:
        plan_shuffle(*given)
        return shuffle_buckets.ShufflePlan(num_buckets, round_bytes, bucket_bytes)

    for module in (shuffle, line_shuffle, lineage_transfer):
        patch.setattr(module, "plan_shuffle", plan)
    patch.setattr(shuffle_buckets, "BUCKET_CHUNK_BYTES", chunk_bytes)
    patch.setattr(shuffle_buckets, "BUCKET_EXTENT_BYTES", extent_bytes)
