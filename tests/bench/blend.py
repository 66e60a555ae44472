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
from tests.bench.table import Row

SIZE = 10_000_000
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
    }
    weights: np.ndarray = kinds[kind] / kinds[kind].sum()
    return weights


def weighted(num: int, size: int, kind: str = "random", level: Level = LEVEL, num_threads: int = 1) -> Row:
    """10^7 samples of `num` datasets, `size` of them by the peer: as many are compared."""
    weights = weights_of(kind, num)
    ours, theirs = empty(SIZE), empty(size)
    clock = time.process_time if num_threads == 1 else time.perf_counter
    mine, peer = medians(
        (lambda: blend_weighted(weights, *ours, level=level, num_threads=num_threads), SIZE),
        (lambda: megatron.helpers.build_blending_indices(*theirs, weights, num, size, False), size),
        clock=clock,
    )
    assert all((a[:size] == b).all() for a, b in zip(ours, theirs, strict=True))
    work = f"blend, {num} datasets, {kind} weights" + (f", {num_threads} threads" if num_threads > 1 else "")
    return Row(work, mine, peer, "ns", False, note(level, size))


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
    return Row(f"exhaustive blend, {num} datasets", mine, peer, "ns", False, note(level, size))


def note(level: Level, peer: int) -> str:
    return f"{level.name}; arithmetic, a store that is loaded again; 10 bytes out" + (
        f"; theirs draws {peer:,}" if peer < 0.9 * SIZE else ""
    )


def rows(directory: Path) -> list[Row]:
    """Nanoseconds a sample."""
    few = SIZE // 20
    table = [weighted(num, SIZE if num < 1000 else few) for num in (2, 8, 16, 64, 128, 512, 2048)]
    table += [weighted(num, few, level=level) for level in LEVELS[:-1] for num in (8, 64, 512, 2048)]
    table += [weighted(num, 10 * few if num < 500 else few, num_threads=2) for num in (8, 64, 512, 2048)]
    table += [weighted(num, few, kind) for num in (512, 2048) for kind in ("Zipf", "equal", "equal within 1e-9")]
    return [*table, exhaustive(8, SIZE), exhaustive(64, SIZE), exhaustive(512, 2 * few)]
