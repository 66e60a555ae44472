"""More files than a process may usually open: its own limit is raised, and where it cannot be, the error says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from binidx.storage.stores.local import READ_AT_ONCE

# Opened first and used last: what else needs descriptors in a process full of mapped files.
OPEN_MANY = """
import resource, sys
from binidx.storage.open import open_object

path, count, hard = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
readers = [open_object(path) for _ in range(count)]
assert all(bytes(each.read([(5, 8)])[0]) == b"xxx" for each in readers)
others = [open("/dev/null") for _ in range(30)]
print("all read")
"""


def open_many(path: Path, count: int, hard: int) -> str:
    """The last line that a process of its own says, with a soft limit of 64 descriptors."""
    ended = subprocess.run(
        [sys.executable, "-c", OPEN_MANY, str(path), str(count), str(hard)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    return (ended.stdout + ended.stderr).strip().splitlines()[-1]


@pytest.fixture
def mapped(tmp_path: Path) -> Path:
    path = tmp_path / "en.bin"
    path.write_bytes(b"x" * (READ_AT_ONCE + 1))
    return path


@pytest.mark.parametrize("count", [20, 40, 60, 1000])
def test_a_soft_limit_is_raised_before_others_run_out(mapped: Path, count: int) -> None:
    assert open_many(mapped, count, 4000) == "all read"


def test_small_files_need_no_descriptors(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"x" * READ_AT_ONCE)
    assert open_many(path, 2000, 64) == "all read"


def test_where_the_hard_limit_is_low_the_error_names_it(mapped: Path) -> None:
    found = open_many(mapped, 100, 80)
    assert found.startswith(f"binidx.errors.StorageError: {mapped}: Too many open files; raise the limit of open files")
    assert "ulimit -n" in found
