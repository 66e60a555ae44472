"""kill -9 of processes that hammer one disk cache: never a wrong byte, and the cache goes on working."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def hammer(directory: Path, kills: int, seed: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "helpers.disk_cache_stress", directory, str(kills), str(seed)],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any], kills: int) -> None:
    assert found["kills"] == kills
    assert found["wrong"] == 0
    assert found["whole"]
    # It was a cache all the time, and not only a reader of the store.
    assert found["hits"] > found["fetches"] > kills / 4
    # Sparse, in tables and in what killed processes had reserved; the next eviction counts all of it.
    assert found["disk_bytes"] < 1.5 * found["limit"]


def test_no_wrong_byte_after_hundreds_of_kills(tmp_path: Path) -> None:
    check(hammer(tmp_path, 250, seed=1), 250)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [2, 3])
def test_no_wrong_byte_after_thousands_of_kills(tmp_path: Path, seed: int) -> None:
    check(hammer(tmp_path, 6000, seed), 6000)
