"""Local files of a known size, filled in place: room first, then the bytes, then the name."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.writing.publish import create_file, create_object


@pytest.mark.parametrize("durable", [True, False])
def test_a_mapped_file_appears_when_it_is_filled(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "deep" / "x"
    with create_file(str(path), 10_000, durable=durable) as file:
        mapped = file.map()
        assert mapped[:] == bytes(10_000)
        mapped[:5] = b"start"
        assert not path.exists()
    assert path.read_bytes() == b"start" + bytes(9995)
    assert [each.name for each in path.parent.iterdir()] == ["x"]


def test_the_map_goes_on_being_that_file_when_another_takes_its_name(tmp_path: Path) -> None:
    with create_file(f"{tmp_path}/x", 4096) as file:
        file.write(b"one" + bytes(4093))
        mapped = file.map()
    with create_object(Location.of(f"{tmp_path}/x"), durable=False) as out:
        out.write(b"two")
    assert mapped[:3] == b"one"
    assert (tmp_path / "x").read_bytes() == b"two"


def test_an_error_leaves_the_old_file_and_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(KeyError), create_file(f"{tmp_path}/x", 4096) as file:
        fill_and_fail(file.map())
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def fill_and_fail(mapped: mmap.mmap) -> None:
    mapped[:3] = b"new"
    raise KeyError


def test_a_disk_without_room_is_an_error_before_the_first_byte(tmp_path: Path) -> None:
    code = f"""
import resource, signal
from binidx.storage.writing.publish import create_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    with create_file({str(tmp_path / "x")!r}, 1_000_001):
        print("begun")
except OSError as error:
    print(type(error).__name__, error)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    [line] = ended.stdout.splitlines()
    assert line.startswith(f"{StorageError.__name__} {tmp_path}/x: ")
    assert "File too large" in line
    assert list(tmp_path.iterdir()) == []
