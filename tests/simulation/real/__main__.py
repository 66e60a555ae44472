"""Scenarios in virtual time beside real processes, as a table: python -m simulation.real [SCENARIO ...] [RUNS]

Each scenario is one description, carried out by its simulated world, and by processes of the real library in network
namespaces with a real server. Counts are those of requests that reached the server. A scenario of a minute is run five
times, unless RUNS is another number; without the right to make namespaces (root), nodes are directories.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import helpers.forked_imports  # noqa: F401 - once, for all forks
from simulation.real.brown_out import BrownOut
from simulation.real.build import KilledBuild
from simulation.real.convert import KilledConvert
from simulation.real.fill import KilledFill
from simulation.real.limit import SharedLimit
from simulation.real.nodes import open_cluster
from simulation.real.outcome import HEADER, Outcome, Scenario, compare
from simulation.real.readahead import AbandonedReadAhead

SCENARIOS: Mapping[str, Scenario] = {
    "limit": SharedLimit(),
    "brown-out": BrownOut(),
    "read-ahead": AbandonedReadAhead(),
    "convert": KilledConvert(),
    "build": KilledBuild(),
    "fill": KilledFill(),
}


def run(scenario: Scenario, num_runs: int) -> list[str]:
    """Carry a scenario out by processes, then in virtual time, with the same seeds; return the rows of the table."""
    simulated, real = list[Outcome](), list[Outcome]()
    for seed in range(num_runs):
        with tempfile.TemporaryDirectory() as directory, open_cluster(scenario.num_nodes, Path(directory)) as cluster:
            outcome, phase = scenario.confirm(cluster, seed)
        real.append(outcome)
        simulated.append(scenario.simulate(seed, phase))
        print(f"{scenario.title}, seed {seed}: {[dict(own[-1].counts) for own in (simulated, real)]}", file=sys.stderr)
    return compare(scenario.title, simulated, real)


def main(arguments: list[str]) -> int:
    """Run the scenarios of the command line; return 1 if one does not agree."""
    names = [argument for argument in arguments if not argument.isdecimal()] or list(SCENARIOS)
    num_runs = next((int(argument) for argument in arguments if argument.isdecimal()), 5)
    if unknown := {*names} - SCENARIOS.keys():
        print(f"{', '.join(unknown)}: unknown scenario, needs some of {', '.join(SCENARIOS)}", file=sys.stderr)
        return 2
    logging.disable(logging.WARNING)
    print(HEADER)
    lines = [line for name in names for line in shown(run(SCENARIOS[name], num_runs))]
    print(f"\n{num_runs} runs each on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end")
    return int(any("| no" in line for line in lines))


def shown(lines: list[str]) -> list[str]:
    """Print lines; return them."""
    print(*lines, sep="\n", flush=True)
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
