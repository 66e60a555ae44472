"""This tree and an earlier commit share a node and a bucket: `mixed_versions.py` says how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mixed_versions
import pytest


@pytest.mark.slow
def test_each_of_two_versions_goes_on_where_the_other_stopped() -> None:
    program = [sys.executable, mixed_versions.__file__, mixed_versions.SECOND]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    if done.returncode == mixed_versions.NOT_IN_CLONE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
