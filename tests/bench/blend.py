"""Blends against Megatron's helper, both into arrays that are there: CPU time a sample (wall time where threads draw).

The limit is arithmetic, and the wait for a count to be stored and loaded again: 10 bytes a sample go out, a tenth of
what memory takes. Where 10^7 samples would take theirs long it draws fewer: one costs it the same at any size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from helpers.oracle import megatron

from binidx.native.arguments import LEVEL, LEVELS, Level
from binidx.native.blend_index import blend_exhaustive, blend_weighted
from tests.bench.table import Conditions, Row

CONDITIONS = Conditions(cores=1, size="10,000,000 samples", cached="nothing")
SIZE = 10_000_000
SMALL = 300_000
"""Samples of a short run, where the start of a call is a part of the cost."""
ROUNDS = 3
Index = tuple[np.ndarray, np.ndarray]


def medians(*runs: tuple[Callable[[], object], int], clock: Callable[[], float]) -> list[float]:
    """Median nanoseconds a sample of each (run, samples), in turns."""

    def timed(run: Callable[[], object], samples: int) -> float:
        start = clock()
        run()
        return (clock() - start) / samples * 1e9

    times = [[timed(*run) for run in runs] for _ in range(ROUNDS)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def empty(size: int) -> Index:
    return np.zeros(size, np.int16), np.zeros(size, np.int64)


def weights_of(kind: str, num: int) -> np.ndarray:
    rng = np.random.default_rng(num)
    kinds = {
        "random": rng.random(num) + 1e-6,
        "Zipf": 1 / np.arange(1, num + 1),
        "equal": np.ones(num),
        "equal within 1e-9": 1 + 1e-9 * rng.random(num),
        "tied": rng.integers(1, 20, num).astype(float),
    }
    weights: np.ndarray = kinds[kind] / kinds[kind].sum()
    return weights


def weighted(
    num: int, size: int, kind: str = "random", level: Level = LEVEL, num_threads: int = 1, drawn: int = SIZE
) -> Row:
    """`drawn` samples of `num` datasets, `size` of them by the peer: as many are compared."""
    weights = weights_of(kind, num)
    ours, theirs = empty(drawn), empty(size)
    clock = time.process_time if num_threads == 1 else time.perf_counter
    mine, peer = medians(
        (lambda: blend_weighted(weights, *ours, level=level, num_threads=num_threads), drawn),
        (lambda: megatron.helpers.build_blending_indices(*theirs, weights, num, size, False), size),
        clock=clock,
    )
    assert all((a[:size] == b).all() for a, b in zip(ours, theirs, strict=True))
    parts = [
        f"blend of {num:,} datasets, {kind} weights",
        f"{drawn:,} samples" if drawn != SIZE else "",
        level.name if level != LEVEL else "",
        f"{num_threads} threads" if num_threads > 1 else "",
    ]
    conditions = Conditions(cores=num_threads, size=f"{drawn:,} samples", cached="nothing")
    work = ", ".join(filter(None, parts))
    return Row(work, mine, peer, "ns", False, note(level, size, drawn), conditions=conditions)


def exhaustive(num: int, size: int, level: Level = LEVEL) -> Row:
    """About `size` samples in all, by both."""
    sizes = np.random.default_rng(num).integers(1, 2 * size // num, num)
    size = int(sizes.sum())
    ours, theirs = empty(size), empty(size)
    mine, peer = medians(
        (lambda: blend_exhaustive(sizes, *ours, level=level), size),
        (lambda: megatron.helpers.build_exhaustive_blending_indices(*theirs, sizes, num), size),
        clock=time.process_time,
    )
    assert all((a == b).all() for a, b in zip(ours, theirs, strict=True))
    conditions = Conditions(cores=1, size=f"{size:,} samples", cached="nothing")
    return Row(
        f"exhaustive blend of {num:,} datasets", mine, peer, "ns", False, note(level, size, size),
        conditions=conditions,
    )  # fmt: skip


def note(level: Level, peer: int, drawn: int) -> str:
    return f"{level.name}; 10 bytes out" + (f"; theirs draws {peer:,}, at one speed" if peer < drawn else "")


def rows(directory: Path) -> list[Row]:
    """Nanoseconds a sample."""
    few = SIZE // 20
    table = [weighted(num, SIZE if num < 1000 else few) for num in (2, 8, 16, 64, 128, 512, 2048)]
    table += [weighted(num, SMALL, drawn=SMALL) for num in (8, 64, 512, 2048)]
    table += [weighted(num, few, "tied") for num in (64, 512, 2048)]
    table += [weighted(num, SMALL, "tied", drawn=SMALL) for num in (512, 2048)]
    table += [weighted(num, few, level=level) for level in LEVELS[:-1] for num in (8, 64, 512, 2048)]
    table += [weighted(num, 10 * few if num < 500 else few, num_threads=2) for num in (8, 64, 512, 2048)]
    table += [weighted(num, few, kind) for num in (512, 2048) for kind in ("Zipf", "equal", "equal within 1e-9")]
    return [*table, exhaustive(8, SIZE), exhaustive(64, SIZE), exhaustive(512, 2 * few)]


def quick_rows(directory: Path) -> list[Row]:
    """Few and many datasets, few samples, ties."""
    few = SIZE // 20
    return [
        weighted(8, SIZE),
        weighted(2048, few),
        weighted(2048, SMALL, drawn=SMALL),
        weighted(2048, few, "tied"),
        exhaustive(64, SIZE // 5),
    ]
