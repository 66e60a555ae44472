"""What a disk cache cannot keep, for want of a mark, of room or of a right, is read all the same."""

from __future__ import annotations

import gc
import os
import pickle
import random
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.versioned_objects import LoggedObject, MarkedObject, fetched

from binidx.errors import ConfigError
from binidx.storage.cache.cached_object import CachedObject, get_cached_object
from binidx.storage.cache.disk_cache import DiskCache
from binidx.testing import MemoryObject, ended_well, forked

DATA = random.Random(1).randbytes(100_000)
small = partial(DiskCache, chunk_bytes=1000, block_bytes=8000)


def test_a_content_without_a_mark_is_not_cached(tmp_path: Path) -> None:
    unmarked = MemoryObject(DATA)
    with pytest.raises(ConfigError, match="memory-object: not cached, the store gives neither ETag"):
        DiskCache(unmarked, tmp_path)


def test_another_content_under_the_same_name_has_another_directory(tmp_path: Path) -> None:
    one, two = MarkedObject(b"1" * 5000), MarkedObject(b"2" * 5000)
    for _ in range(2):
        assert bytes(small(one, tmp_path).read([(10, 20)])[0]) == b"1" * 10
        assert bytes(small(two, tmp_path).read([(10, 20)])[0]) == b"2" * 10
    plain = small(one, tmp_path).content
    assert len({plain.key, *(each.key for each in variants(plain))}) == 7


def variants(plain: Any) -> Iterator[Any]:
    from dataclasses import replace

    yield replace(plain, uri="other")
    yield replace(plain, size=4999)
    yield replace(plain, identity={**plain.identity, "etag": "x"})
    yield replace(plain, codec="zstd")
    yield replace(plain, chunk_bytes=500)
    yield replace(plain, block_bytes=16_000)


def test_without_room_exactly_what_is_asked_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    below = MarkedObject(DATA)
    reader = small(below, tmp_path / "full", 3500)
    reader.read([(0, 3000)])
    for start in (5_000, 6_000):
        assert bytes(reader.read([(start, start + 10), (2_500, 2_600)])[0]) == DATA[start : start + 10]
    assert below.asked == [[(0, 3000)], [(5_000, 5_010)], [(6_000, 6_010)]]
    assert [record.message for record in caplog.records] == [
        f"{tmp_path}/full: everything in it is in use (bound: 3500 bytes); reads go on without being cached"
    ]


def test_a_file_size_limit_costs_the_cache_and_nothing_else(tmp_path: Path) -> None:
    assert ended_well(forked(partial(read_under_limit, tmp_path)))


def read_under_limit(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))
    reader = small(MarkedObject(DATA), directory / "cache")
    for _ in range(2):
        assert bytes(reader.read([(500, 60_000)])[0]) == DATA[500:60_000]


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one mebibyte."""
    place = tmp_path / "tiny"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs a right to mount")
    yield place
    gc.collect()
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up_costs_the_cache_and_nothing_else(tiny_disk: Path, caplog: Any) -> None:
    data = random.Random(2).randbytes(3 << 20)
    reader = DiskCache(MarkedObject(data), tiny_disk, 1 << 30, chunk_bytes=16 << 10, block_bytes=128 << 10)
    for _ in range(2):
        for start in range(0, len(data), 100_000):
            assert bytes(reader.read([(start, start + 40_000)])[0]) == data[start : start + 40_000]
    assert sum("cannot be written to: No space left" in record.message for record in caplog.records) == 1
    twin = pickle.loads(pickle.dumps(reader))
    assert bytes(twin.read([(0, len(data))])[0]) == data


def test_a_tenth_of_the_disk_stays_free(tiny_disk: Path) -> None:
    data = random.Random(2).randbytes(3 << 20)
    reader = DiskCache(MarkedObject(data), tiny_disk, chunk_bytes=16 << 10, block_bytes=64 << 10)
    for start in range(0, len(data), 50_000):
        reader.read([(start, start + 20_000)])
        stat = os.statvfs(tiny_disk)
        assert stat.f_bavail * stat.f_frsize >= 0.1 * (1 << 20) - 4 * 4096  # tables are not reserved
    assert stat.f_bavail * stat.f_frsize < 0.3 * (1 << 20)  # and no more than that


def test_a_directory_that_cannot_be_written_to_serves_what_it_has() -> None:
    # Not below tmp_path: nobody but its owner may look into that.
    with tempfile.TemporaryDirectory() as name:
        directory, log = Path(name), Path(name, "log")
        os.chmod(directory, 0o755)
        log.touch()
        os.chmod(log, 0o666)
        small(LoggedObject(100_000, str(log)), directory / "cache").read([(0, 3000)])
        gc.collect()
        assert ended_well(forked(partial(read_as_a_guest, str(log), directory / "cache")))
        assert fetched(log) == [(0, 3000), (5_100, 5_200)]
        for folder, _, _ in os.walk(directory):
            os.chmod(folder, 0o755)


def read_as_a_guest(log: str, directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        os.chmod(folder, 0o555)
        for file in files:
            os.chmod(os.path.join(folder, file), 0o444)
    if os.getuid() == 0:
        os.setuid(65534)
    reader = small(LoggedObject(100_000, log), directory)
    found = reader.read([(100, 200), (5_100, 5_200)])
    data = reader.reader.data  # type: ignore[attr-defined]
    assert [bytes(view) for view in found] == [data[100:200], data[5_100:5_200]]


def test_a_directory_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = MarkedObject(DATA)
    assert bytes(small(below, tmp_path / "file" / "cache").read([(100, 200)])[0]) == DATA[100:200]
    assert below.asked == [[(100, 200)]]


def test_objects_of_a_process_are_shared_and_go_with_their_readers(tmp_path: Path) -> None:
    one, two = small(MarkedObject(DATA), tmp_path), small(MarkedObject(DATA), tmp_path)
    assert one.cached is two.cached is get_cached_object(one.directory, one.content, None)
    held = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    one.read([(0, 100_000)])
    del one, two
    gc.collect()
    assert not any(type(each) is CachedObject and each.path.startswith(str(tmp_path)) for each in gc.get_objects())
    if held:
        assert len(os.listdir("/proc/self/fd")) <= held
