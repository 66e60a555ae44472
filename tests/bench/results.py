"""Records of benches: measured ones in bench-results/, which git ignores, committed ones in results/, a file a CPU.

A record is what one bench gave in one run: rows with their conditions, the machine, its load, versions, the commit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.machine import describe_commit, slug
from tests.bench.table import Row, to_json

Record = dict[str, Any]
Results = dict[str, Any]

MEASURED = Path("bench-results")
COMMITTED = Path(__file__).parent / "results"


def record_of(
    name: str,
    rows: Sequence[Row],
    machine: dict[str, Any],
    versions: dict[str, str],
    seconds: float,
    load: tuple[float, float],
) -> Record:
    """Return the record of a run of a bench that has just ended."""
    return {
        "bench": name,
        "measured": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "commit": describe_commit(),
        "seconds": round(seconds),
        "machine": {**machine, "load_before": load[0], "load_after": load[1]},
        "versions": versions,
        "rows": [to_json(row) for row in rows],
    }


def read_committed(folder: Path = COMMITTED) -> list[Results]:
    """Return the results of all CPUs, in the order of their file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def merge(records: Iterable[Record], folder: Path = COMMITTED) -> None:
    """Put records into the file of their CPU, each in place of an earlier one of the same bench."""
    folder.mkdir(exist_ok=True)
    for record in records:
        here = {name: value for name, value in record["machine"].items() if not name.startswith("load")}
        path = folder / f"{slug(here)}.json"
        results: Results = json.loads(path.read_text()) if path.exists() else {"benches": {}}
        benches = dict(sorted({**results["benches"], record["bench"]: record}.items()))
        path.write_text(json.dumps({"machine": here, "benches": benches}, indent=1) + "\n")


def nearest(machine: dict[str, Any], results: Sequence[Results]) -> Results | None:
    """Return the results of the CPU that is most like `machine`; None if there are none."""

    def likeness(other: Results) -> tuple[bool, ...]:
        there = other["machine"]
        same = [there[name] == machine[name] for name in ("vendor", "family", "model", "cores")]
        return tuple(same)

    return max(results, key=likeness, default=None)


def find_row(record: Record | None, work: str, setting: str | None = None) -> dict[str, Any] | None:
    """Return the row of a work and a setting of the peer; without a setting the best one, or the only row."""
    rows = {row["setting"]: row for row in (record or {}).get("rows", ()) if row["work"] == work}
    if setting is None:
        setting = next(iter(rows)) if len(rows) == 1 else "best"
    return rows.get(setting)


def change(now: float, before: float) -> float:
    """Return how far two ratios are apart, as a factor of 1 or more."""
    return math.exp(abs(math.log(now / before)))
