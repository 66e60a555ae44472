"""A blend of 1,000 prefixes on this disk: from a config to train, valid and test, on two threads.

Cold: no index cache is there. Warm: what the cold start left is. All files lie in the page cache. Wall time, medians of
starts in turn, each side over its own copy of the data; Megatron Core runs as in one process without torch.distributed,
which its blends cannot have a path_to_cache in. What both give is compared: the blends' arrays, and each dataset's.

Then 4,096 prefixes: the memory of a process of its own that is no file's, after the first batch; and CPU to open one.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers.gpt_data import TOKENIZER
from helpers.oracle import megatron

import binidx
from tests.bench import cold_start
from tests.bench.table import Conditions, Row, interleaved_medians, seconds

CONDITIONS = Conditions(
    cores=2,
    size="1,000 prefixes of 200 documents on a local disk",
    cached="all files in the page cache",
)
NUM_PREFIXES, MANY_PREFIXES = 1000, 4096
THREADS = 2
ROUNDS = 3
SIZES = [100_000, 2_000, 1_000]
"""Samples of train, valid and test: some epochs of each prefix."""
ARRAYS = ("document_index", "sample_index", "shuffle_index")


def rows(directory: Path) -> list[Row]:
    """Seconds to the three blends, memory of many prefixes, and CPU of one."""
    return [*quick_rows(directory), *many_rows(directory / "many")]


def quick_rows(directory: Path) -> list[Row]:
    """Seconds from the config to the three blends."""
    weights = np.random.default_rng(0).uniform(0.5, 1.5, NUM_PREFIXES).tolist()
    starts = [Start(ours, directory / "ours", weights), Start(theirs, directory / "theirs", weights)]
    times = [[start.cold_and_warm() for start in starts] for _ in range(ROUNDS)]
    compare(*(start.build() for start in starts))
    medians = np.median(times, axis=0).transpose(1, 2, 0).tolist()
    notes = (
        "2,000 files opened; indices this small are built at their first use, 60 us each; theirs writes 12,000 files",
        "the same; theirs maps 9,000 files",
    )
    return [
        Row(f"{NUM_PREFIXES:,} prefixes, {kind} start, {THREADS} threads", *wall, "s", False,
            f"CPU {cpu[0]:.2f} s, its {cpu[1]:.2f}; {note}")
        for kind, (wall, cpu), note in zip(("cold", "warm"), medians, notes, strict=True)
    ]  # fmt: skip


def many_rows(directory: Path) -> list[Row]:
    """MiB of a start, and milliseconds to open a prefix."""
    directory.mkdir()
    prefixes = [write_prefix(directory / f"p{number}", number) for number in range(MANY_PREFIXES)]
    given = {"prefixes": prefixes, "weights": [1.0] * MANY_PREFIXES, "sequence_length": 1024}
    found = cold_start.start({**given, "side": "binidx", "cache": str(directory / "indices")})
    conditions = replace(CONDITIONS, size=f"{MANY_PREFIXES:,} prefixes of 200 KB on a local disk")
    work = f"private memory of {MANY_PREFIXES:,} prefixes, start to first batch"
    note = f"{found['seconds']:.2f} s, CPU {found['cpu']:.2f} s"
    opened = interleaved_medians(
        lambda: [binidx.IndexedDataset(prefix) for prefix in prefixes[:NUM_PREFIXES]],
        lambda: [megatron.indexed.IndexedDataset(prefix) for prefix in prefixes[:NUM_PREFIXES]],
        rounds=ROUNDS,
        clock=time.thread_time,
    )
    millis = [1e3 * each / NUM_PREFIXES for each in opened]
    return [
        Row(work, found["anonymous"] / 2**20, 100, "MiB", False, note, "the goal", conditions=conditions),
        Row("opening a prefix, CPU", *millis, "ms", False, "goal 0.2 ms", conditions=conditions),
    ]


@dataclass
class Start:
    """One side's way to build, over its own copy of the data."""

    way: Callable[[dict[str, Any]], list[Any]]
    directory: Path
    weights: list[float]

    def __post_init__(self) -> None:
        self.directory.mkdir()
        self.prefixes = [write_prefix(self.directory / f"p{number}", number) for number in range(NUM_PREFIXES)]

    def cold_and_warm(self) -> list[tuple[float, float]]:
        """Wall and CPU seconds of a start without caches, then of one with them."""
        for prefix in self.prefixes:
            shutil.rmtree(prefix, ignore_errors=True)
        return [self.start() for _ in range(2)]

    def start(self) -> tuple[float, float]:
        gc.collect()  # what the other side left is not ours to collect
        built, before = list[Any](), time.process_time()
        return seconds(lambda: built.append(self.build())), time.process_time() - before

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
