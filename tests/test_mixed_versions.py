"""This tree and an earlier commit share a node and a bucket: `mixed_versions.py` says how."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mixed_versions
import pytest

from binidx.errors import ObjectExistsError
from binidx.jobs.job_folder import JobFolder
from binidx.storage.location import Location


def test_the_page_of_promises_has_each_kind_of_file_once() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/versions.md").read_text()
    rows = page.partition("| kind of file | promise |\n|---|---|\n")[2].partition("\n\n")[0].splitlines()
    named = [row.split(" | ")[0].removeprefix("| ") for row in rows]
    listed = ", ".join(named).replace("cache: usage, locks", "cache: usage and locks").split(", ")
    assert sorted(listed) == sorted(kind.replace(", ", " and ") for kind in mixed_versions.KINDS)


def test_a_bake_that_another_version_has_begun_is_refused_by_an_expected_error(tmp_path: Path) -> None:
    folder = Location.of(tmp_path)
    JobFolder(folder, {"options": 1}).claim()
    (tmp_path / "part.json").touch()
    with pytest.raises(ObjectExistsError) as raised:
        JobFolder(folder, {"options": 2}).claim()
    assert mixed_versions.has_refused({"error": str(raised.value)}, mixed_versions.AT_ONCE["bake"])


@pytest.mark.slow
def test_each_of_two_versions_goes_on_where_the_other_stopped() -> None:
    program = [sys.executable, mixed_versions.__file__, mixed_versions.SECOND]
    done = subprocess.run(program, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    if done.returncode == mixed_versions.NOT_IN_CLONE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
