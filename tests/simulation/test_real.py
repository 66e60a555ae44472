"""Real processes beside the simulation, once each: programs of `simulation.real` run, and counts are of one size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["limit", "brown-out", "read-ahead", "convert", "build", "fill"])
def test_a_scenario_by_real_processes_counts_what_its_simulation_counts_within_a_factor_of_two(scenario: str) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    command = [sys.executable, "-m", "simulation.real", scenario, "1"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert run.returncode in (0, 1), run.stderr  # 1: not within the bounds, which a busy machine may miss
    rows = [line.split("|")[1:-1] for line in run.stdout.splitlines() if line.startswith("| ")][1:]
    assert rows, run.stderr
    for _, name, simulated, real, ratio, _ in rows:
        if not simulated.endswith(" s ") and float(simulated.replace(",", "")) >= 10:
            assert 0.5 <= float(ratio) <= 2, f"{scenario}: {name}: {simulated} simulated, {real} real"
