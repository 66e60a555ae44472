"""Medians of interleaved runs, and how they are shown."""

from __future__ import annotations

import json
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass

MEGATRON = "Megatron Core 0.16.1"


@dataclass(frozen=True)
class Row:
    """One figure: ours, the peer's or the limit's, and what limits both; `against` names whose the other is."""

    work: str
    ours: float
    theirs: float
    unit: str
    more_is_better: bool
    note: str = ""
    against: str = MEGATRON

    @property
    def ratio(self) -> float:
        """How many times better ours is."""
        return self.ours / self.theirs if self.more_is_better else self.theirs / self.ours


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one run: wall time, or with `clock=time.thread_time` what this thread had of a core."""
    start = clock()
    run()
    return clock() - start


def interleaved_medians(
    *runs: Callable[[], object], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median seconds of each, run in turns so that a slow minute of the machine meets them all. One round warms up."""
    times = [[seconds(run, clock) for run in runs] for _ in range(rounds + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that NumPy held at once."""
    tracemalloc.start()
    run()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def show(rows: list[Row], as_json: bool) -> str:
    """The rows as a Markdown table, or as JSON."""
    if as_json:
        return json.dumps([{**asdict(row), "ratio": row.ratio} for row in rows], indent=1)
    lines = ["| work | binidx | against | | ratio | |", "|---|---:|---:|---|---:|---|"]
    for row in rows:
        ours, theirs = (f"{figure(value)} {row.unit}" for value in (row.ours, row.theirs))
        lines.append(f"| {row.work} | {ours} | {theirs} | {row.against} | {figure(row.ratio)}x | {row.note} |")
    return "\n".join(lines)


def figure(value: float) -> str:
    """Three significant digits, with thousands separated."""
    digits = max(0, 2 - (len(str(int(abs(value)))) - 1)) if value >= 1 else 3
    return f"{value:,.{digits}f}"
