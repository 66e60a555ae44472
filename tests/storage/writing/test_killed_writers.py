"""Staging files of killed processes are removed by the next writer, those of living ones never."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

from helpers.conversion import build, pair

from binidx.storage.effects import RemoveFolder
from binidx.storage.location import Location
from binidx.storage.stores.local import node_id
from binidx.storage.writing import staging
from binidx.storage.writing.publish import create_file, create_object, put_if_absent
from binidx.tools import main

WRITER = """
import sys
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_object
with create_object(Location(sys.argv[1])) as out:
    out.write(bytes(3_000_000))
    print("written", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has written most of a file, and publishes it when its input is closed."""
    command = [sys.executable, "-c", WRITER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        yield process


def killed(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def write(path: Path) -> None:
    with create_object(Location.of(path)) as out:
        out.write(b"new")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    users = f"notes.{'5' * 32}.tmp"
    (tmp_path / users).touch()
    with writer(tmp_path / "a") as killed_one, writer(tmp_path / "b") as living_one:
        assert len(names(tmp_path)) == 3
        killed(killed_one)
        write(tmp_path / "a")
        [_, living, _] = names(tmp_path)
        assert living.startswith("b.")
        put_if_absent(Location.of(tmp_path / "a"), b"other")
        assert names(tmp_path) == ["a", living, users]
        living_one.communicate()
    assert names(tmp_path) == ["a", "b", users]
    assert (tmp_path / "b").read_bytes() == bytes(3_000_000)


def test_a_file_is_safe_until_it_has_its_name(tmp_path: Path) -> None:
    with create_object(Location.of(tmp_path / "x"), before_publish=lambda: write(tmp_path / "y")) as out:
        out.write(b"x")
    with create_file(f"{tmp_path}/mapped", 4096) as file:
        mapped = file.map()
    with open(tmp_path / "mapped", "rb") as found:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a mapping keeps no lock of the published file
    assert names(tmp_path) == ["mapped", "x", "y"]
    assert mapped[:1] == b"\0"


def test_files_of_other_nodes_are_removed_after_a_day_by_the_next_writer_of_their_target(tmp_path: Path) -> None:
    other = "0" * 8 if node_id() != "0" * 8 else "1" * 8
    fresh, old, locked, elsewhere = (
        tmp_path / f"{name}.{other}{digit * 24}.tmp" for name, digit in (("x", "a"), ("x", "b"), ("x", "c"), ("y", "d"))
    )
    for each in (fresh, old, locked, elsewhere):
        each.touch()
    for each in (old, locked, elsewhere):
        os.utime(each, (1, 1))
    with open(locked, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        write(tmp_path / "x")
    assert names(tmp_path) == ["x", fresh.name, locked.name, elsewhere.name]


def test_a_large_directory_is_not_listed_for_every_file(tmp_path: Path) -> None:
    for number in range(3 * staging.LISTED_EACH):
        (tmp_path / str(number)).touch()
    write(tmp_path / "x")
    left = tmp_path / f"x.{node_id()}{'0' * 24}.tmp"
    left.touch()
    for _ in range(3):
        assert left.exists()
        write(tmp_path / "x")
    write(tmp_path / "x")
    assert not left.exists()


def test_a_merge_that_was_killed_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    sources, target = [build(tmp_path / name, 100, n) for n, name in enumerate("ab")], tmp_path / "new" / "all"
    code = f"""
import os, signal
from binidx.corpus.merge import merge_datasets
from binidx.jobs.progress import SilentWatcher
class Killer(SilentWatcher):
    def begin(self, what, *counts):
        if what == "tokens":
            os.kill(os.getpid(), signal.SIGKILL)
merge_datasets({sources!r}, {str(target)!r}, watch=Killer())
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert any(name.endswith(".tmp") for name in names(target.parent))
    assert main(["merge", *sources, "--to", str(target)]) == 0
    assert not any(name.endswith(".tmp") for name in names(target.parent))
    assert pair(str(target))[0] == b"".join(pair(source)[0] for source in sources)


def test_a_removed_folder_loses_what_killed_writers_left_and_nothing_of_living_ones(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    left = folder / f"left.{uuid.uuid4().hex}.tmp"
    left.touch()
    with create_object(Location(str(folder / "record.json"))) as out:
        out.write(b"late")
        RemoveFolder(Location(str(folder))).perform()
        assert not left.exists()
    assert (folder / "record.json").read_bytes() == b"late"
    (folder / "record.json").unlink()
    RemoveFolder(Location(str(folder))).perform()
    assert not folder.exists()
