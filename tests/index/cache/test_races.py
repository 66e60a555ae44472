"""Builders that race, and are killed at random instants: one valid cache and equal bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SPAN = {"local": 0.06, "careless": 0.12, "s3": 0.4}
"""Seconds that a builder takes, about."""
ROUNDS = {"local": 25, "careless": 12, "s3": 8}
HUNDREDS = {"local": 300, "careless": 300, "s3": 200}


def place(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind == "s3":
        return str(request.getfixturevalue("s3").fresh())
    return f"{'careless://' if kind == 'careless' else ''}{tmp_path}/races"


def race(uri: str, rounds: int, seed: int, span: float) -> dict[str, Any]:
    command = [sys.executable, "-W", "error", "-m", "helpers.build_race", uri, str(rounds), str(seed), str(span)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    done: dict[str, Any] = json.loads(ended.stdout)
    assert done["wrong"] == done["not_whole"] == 0, (done, ended.stderr[-5000:])
    assert done["rounds"] == rounds
    return done


@pytest.mark.parametrize("kind", [*SPAN])
def test_builders_that_race_and_are_killed_leave_one_valid_cache(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    done = race(place(kind, tmp_path, request), ROUNDS[kind], 1, SPAN[kind])
    # How many depends on the machine: 23 in 25 rounds were killed under the address sanitizer.
    assert done["killed"] > 0
    assert done["ended"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", [*SPAN])
def test_hundreds_of_races(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    race(place(kind, tmp_path, request), HUNDREDS[kind], time.time_ns() % 2**32, SPAN[kind])
