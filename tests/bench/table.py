"""Medians of interleaved runs, and how they are shown."""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MEGATRON = "Megatron Core 0.16.1"


@dataclass(frozen=True)
class Conditions:
    """Conditions of a figure.

    Args:
        cores: cores that the measured work may use; 0 is all of the machine.
        workers: processes beside the main one, of a DataLoader or a pool.
        size: amount of data or work: documents, samples, bytes.
        cached: caches and files that are warm before the clock starts.
    """

    cores: int
    size: str
    cached: str
    workers: int = 0


@dataclass(frozen=True)
class Row:
    """One figure: our value and the value of a peer or a limit.

    Args:
        work: the measured work. Together with `setting` it is unique in a bench.
        note: the limit of both, a goal, or a side figure.
        against: name of the peer or the limit.
        setting: "best" or "default" if the peer has several settings for this work, or a name of another one.
        options: the peer's options behind `setting`.
        conditions: None stands for those of the bench, its CONDITIONS.
        series: lines of a curve, or the parts of `ours`: line -> point -> value.
    """

    work: str
    ours: float
    theirs: float
    unit: str
    more_is_better: bool
    note: str = ""
    against: str = MEGATRON
    setting: str = ""
    options: str = ""
    conditions: Conditions | None = None
    series: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

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


def to_json(row: Row) -> dict[str, Any]:
    """Return all fields of a row, its conditions among them, and its ratio; `series` only if it has one."""
    fields = asdict(row)
    conditions, series = fields.pop("conditions") or {}, fields.pop("series")
    return {**fields, **conditions, "ratio": row.ratio, **({"series": series} if series else {})}


def show(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| work | binidx | against | | ratio | |", "|---|---:|---:|---|---:|---|"]
    for row in rows:
        ours, theirs = (f"{figure(value)} {row.unit}" for value in (row.ours, row.theirs))
        peer = ", ".join(filter(None, (row.against, row.setting, row.options)))
        lines.append(f"| {row.work} | {ours} | {theirs} | {peer} | {figure(row.ratio)}x | {row.note} |")
    return "\n".join(lines)


def figure(value: float) -> str:
    """Return a number in three significant digits, with thousands separated."""
    digits = max(0, 2 - (len(str(int(abs(value)))) - 1)) if value >= 1 else 3
    return f"{value:,.{digits}f}"
