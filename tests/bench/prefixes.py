"""A blend of 1,000 prefixes on this disk: from a config to train, valid and test, on two threads.

Cold: no index cache is there. Warm: what the cold start left is. All files lie in the page cache. Wall time, medians of
starts in turn, each side over its own copy of the data; Megatron Core runs as in one process without torch.distributed,
which its blends cannot have a path_to_cache in. What both give is compared: the blends' arrays, and each dataset's.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from helpers.gpt_data import TOKENIZER
from helpers.oracle import megatron

import binidx
from tests.bench.table import Conditions, Row, seconds

CONDITIONS = Conditions(
    cores=2,
    size="1,000 prefixes of 200 documents on a local disk",
    cached="all files in the page cache",
)
NUM_PREFIXES = 1000
THREADS = 2
ROUNDS = 3
SIZES = [100_000, 2_000, 1_000]
"""Samples of train, valid and test: some epochs of each prefix."""
ARRAYS = ("document_index", "sample_index", "shuffle_index")


def rows(directory: Path) -> list[Row]:
    """Seconds from the config to the three blends."""
    weights = np.random.default_rng(0).uniform(0.5, 1.5, NUM_PREFIXES).tolist()
    starts = [Start(ours, directory / "ours", weights), Start(theirs, directory / "theirs", weights)]
    times = [[start.cold_and_warm() for start in starts] for _ in range(ROUNDS)]
    compare(*(start.build() for start in starts))
    medians = np.median(times, axis=0).T.tolist()
    notes = (
        "2,000 files opened; indices this small are built at their first use, 60 us each; theirs writes 12,000 files",
        "the same; theirs maps 9,000 files",
    )
    return [
        Row(f"{NUM_PREFIXES:,} prefixes, {kind} start, {THREADS} threads", *both, "s", False, note)
        for kind, both, note in zip(("cold", "warm"), medians, notes, strict=True)
    ]


quick_rows = rows


@dataclass
class Start:
    """One side's way to build, over its own copy of the data."""

    way: Callable[[dict[str, Any]], list[Any]]
    directory: Path
    weights: list[float]

    def __post_init__(self) -> None:
        self.directory.mkdir()
        self.prefixes = [write_prefix(self.directory / f"p{number}", number) for number in range(NUM_PREFIXES)]

    def cold_and_warm(self) -> list[float]:
        """Seconds of a start without caches, then of one with them."""
        for prefix in self.prefixes:
            shutil.rmtree(prefix, ignore_errors=True)
        return [self.start() for _ in range(2)]

    def start(self) -> float:
        gc.collect()  # what the other side left is not ours to collect
        built: list[Any] = []
        return seconds(lambda: built.append(self.build()))

    def build(self) -> list[Any]:
        return self.way(arguments(self.prefixes, self.weights))


def write_prefix(prefix: Path, seed: int) -> str:
    """A pair of about 200 documents and 100,000 tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.maximum(1, rng.lognormal(np.log(500) - 0.5, 1.0, rng.integers(150, 250)).astype(np.int32))
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        for length in lengths.tolist():
            builder.add_document(rng.integers(0, 999, length, np.uint16), [length])
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def arguments(prefixes: list[str], weights: list[float]) -> dict[str, Any]:
    return {
        "random_seed": 1234, "sequence_length": 1024, "blend": (prefixes, weights), "split": "90,7,3",
        "num_dataset_builder_threads": THREADS, "tokenizer": TOKENIZER, "mid_level_dataset_surplus": 0.5,
        "reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
    }  # fmt: skip


def ours(given: dict[str, Any]) -> list[Any]:
    config = binidx.GPTDatasetConfig(**given)
    return binidx.BlendedMegatronDatasetBuilder(binidx.GPTDataset, SIZES, lambda: True, config).build()


def theirs(given: dict[str, Any]) -> list[Any]:
    config = megatron.gpt.GPTDatasetConfig(**given)
    builder = megatron.builder.BlendedMegatronDatasetBuilder(megatron.gpt.GPTDataset, SIZES, lambda: True, config)
    return builder.build()  # type: ignore[no-any-return]


def compare(found: list[Any], needed: list[Any]) -> None:
    for ours, theirs in zip(found, needed, strict=True):
        assert (ours.dataset_index == theirs.dataset_index).all()
        assert (ours.dataset_sample_index == theirs.dataset_sample_index).all()
        for one, other in zip(ours.datasets, theirs.datasets, strict=True):
            assert all((getattr(one, name) == getattr(other, name)).all() for name in ARRAYS)
