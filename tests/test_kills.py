"""kill -9 of every command that writes: nothing is ever half written, and the same command completes the job.

The disk cache has a test of its own, with thousands of kills: `storage/cache/test_disk_cache_kill.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.kill_rounds import JOBS

LEAST_KILLS = {("preprocess", "disk"): 150}
"""Least kills of a job, whatever `--kill-rounds` says."""

ON_S3 = [
    "merge",
    "cut split",
    "convert",
    "compress",
    "compress by workers",
    "preprocess",
    "pack",
    "bake",
    "index cache",
]


def kill(job: str, folder: Path, *how: str) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "helpers.kill_rounds", job, str(folder), *how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("job", "where"), [*((job, "disk") for job in JOBS), *((job, "s3") for job in ON_S3)], ids=None
)
def test_killed_at_any_moment_a_job_resumes(
    job: str, where: str, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = -(-request.config.getoption("--kill-rounds") // (len(JOBS) + len(ON_S3)))
    rounds = max(rounds, LEAST_KILLS.get((job, where), 0))
    uri = [request.getfixturevalue("s3").fresh()] if where == "s3" else []
    found = kill(job, tmp_path, str(rounds), *uri)
    assert found["kills"] == rounds
    with capsys.disabled():
        left = Counter(name.rsplit(".", 2)[0] for name in found["staging"])
        print(f"\n{job} on {where}: {rounds} kills, {found['ends']} runs to the end; staging files left: {dict(left)}")


@pytest.mark.parametrize(
    "job",
    [
        "merge",
        "merge --virtual",
        "cut split",
        "shuffle compressed",
        "convert",
        "compress",
        "convert by workers",
        "pack --back",
        "order",
        "index cache",
    ],
)
def test_killed_after_each_step_of_its_publication_a_job_resumes(job: str, tmp_path: Path) -> None:
    assert kill(job, tmp_path, "steps")["kills"] > 0
