"""Outcome of a scenario in one run, and the comparison of simulated and real ones as rows of a table.

Source of the bounds: the issue of machines. Medians of five runs agree within 15 %, p99 within 40 %.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from simulation.real.nodes import Cluster

MEDIANS_WITHIN, P99_WITHIN = 0.15, 0.40
ENOUGH_FOR_P99 = 100

HEADER = "| scenario | | simulated | real | real / simulated | |\n" + "|---" * 6 + "|"


@dataclass(frozen=True)
class Outcome:
    """Result of one run.

    Attributes:
        counts: requests, steps and the like, by name.
        seconds: durations, by name of what lasted so long.
    """

    counts: Mapping[str, float]
    seconds: Mapping[str, Sequence[float]] = field(default_factory=dict)


class Scenario(Protocol):
    """A scenario that is carried out twice.

    Attributes:
        title: its name in the table, with its sizes.
        num_nodes: nodes of the cluster.
    """

    @property
    def title(self) -> str: ...
    @property
    def num_nodes(self) -> int: ...

    def simulate(self, seed: int, phase: float) -> Outcome:
        """Run it in virtual time.

        Args:
            phase: seconds of the wall clock at time 0.
        """

    def confirm(self, cluster: Cluster, seed: int) -> tuple[Outcome, float]:
        """Run it by processes of a cluster; return its outcome, and the seconds of the wall clock at time 0."""


def compare(title: str, simulated: Sequence[Outcome], real: Sequence[Outcome]) -> list[str]:
    """Return the rows of a scenario: medians of the runs' counts and of their median durations, and p99 of all."""
    lines = []
    for name in simulated[0].counts:
        values = [statistics.median(outcome.counts[name] for outcome in outcomes) for outcomes in (simulated, real)]
        lines.append(format_row(title, name, values, MEDIANS_WITHIN))
    for name in simulated[0].seconds:
        own = [
            [outcome.seconds[name] for outcome in outcomes if outcome.seconds[name]] for outcomes in (simulated, real)
        ]
        if not all(own):
            continue
        medians = [statistics.median(map(statistics.median, runs)) for runs in own]
        lines.append(format_row(title, f"{name}, median", medians, MEDIANS_WITHIN, " s"))
        pooled = [sorted(value for run in runs for value in run) for runs in own]
        if min(map(len, pooled)) >= ENOUGH_FOR_P99:
            p99 = [statistics.quantiles(values, n=100, method="inclusive")[98] for values in pooled]
            lines.append(format_row(title, f"{name}, p99", p99, P99_WITHIN, " s"))
    return lines


def format_row(title: str, name: str, values: Sequence[float], within: float, unit: str = "") -> str:
    """Return a row: a simulated and a real value, their ratio, and whether they agree."""
    simulated, real = values
    ratio = real / simulated if simulated else 1.0 if not real else float("inf")
    verdict = "yes" if abs(ratio - 1) <= within else f"no: more than {within:.0%}"
    shown = " | ".join(f"{value:,.3g}{unit}" if unit else f"{value:,.0f}" for value in values)
    return f"| {title} | {name} | {shown} | {ratio:.2f} | {verdict} |"
