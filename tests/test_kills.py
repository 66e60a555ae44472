"""kill -9 of every command that writes: nothing is ever half written, and the same command completes the job.

The disk cache has a test of its own, with thousands of kills: `storage/cache/test_disk_cache_kill.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "helpers.kill_rounds", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all jobs, of which each job has a copy."""
    folder = tmp_path_factory.mktemp("sources")
    run("sources", str(folder))
    return folder / "in"


def kill(job: str, sources: Path, folder: Path, *how: str) -> dict[str, Any]:
    shutil.copytree(sources, folder / "in")
    found: dict[str, Any] = json.loads(run(job, str(folder), *how))
    return found


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("job", "where"), [*((job, "disk") for job in JOBS), *((job, "s3") for job in ON_S3)], ids=None
)
def test_killed_at_any_moment_a_job_resumes(
    job: str,
    where: str,
    sources: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rounds = -(-request.config.getoption("--kill-rounds") // (len(JOBS) + len(ON_S3)))
    rounds = max(rounds, LEAST_KILLS.get((job, where), 0))
    uri = [request.getfixturevalue("s3").fresh()] if where == "s3" else []
    found = kill(job, sources, tmp_path, str(rounds), *uri)
    assert found["kills"] == rounds
    with capsys.disabled():
        print(f"\n{job} on {where}: {rounds} kills, {found['ends']} runs to the end")


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
def test_killed_after_each_step_of_its_publication_a_job_resumes(job: str, sources: Path, tmp_path: Path) -> None:
    assert kill(job, sources, tmp_path, "steps")["kills"] > 0
