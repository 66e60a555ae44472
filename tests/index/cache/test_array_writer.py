"""Arrays built into their files: in place, whole or not at all, and right where the disk is full."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.memory_maps import file_under
from servers.latency_proxy import latency_proxy

from binidx.errors import IndexBuildError
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.storage.location import Location

ARRAY = np.arange(300_000, dtype=np.int32)


def build(writer: ArrayWriter) -> None:
    with (
        writer.array("a", ARRAY.shape, ARRAY.dtype, in_order=False) as out,
        writer.array("b", ARRAY.shape, ARRAY.dtype) as other,
    ):
        out[:] = ARRAY
        other[:] = ARRAY + 1


def cached(directory: Any, **sizes: int) -> np.ndarray:
    files = IndexFiles(Location.of(str(directory)), "0f-Kind-train")
    cache = IndexCache(files, open_writer=partial(ArrayWriter, **sizes))
    return cache.load_or_build("described", {"x": 1}, ["a"], build)["a"]


def files(directory: Path) -> list[str]:
    """All but claims, which lie about after a kill or a failure and only save work."""
    names = (path.name.removeprefix("0f-Kind-train-") for path in directory.iterdir())
    return sorted(name for name in names if "-claim" not in name)


@pytest.mark.parametrize("shuffled_in_file", [1 << 30, 1 << 10])
def test_arrays_served_after_a_build_are_the_files(tmp_path: Path, shuffled_in_file: int) -> None:
    for _ in range(2):  # built, then loaded
        array = cached(tmp_path, shuffled_in_file=shuffled_in_file)
        assert file_under(array) == f"{tmp_path}/0f-Kind-train-a.npy"
        np.testing.assert_array_equal(array, ARRAY)
        assert not array.flags.writeable
    np.save(tmp_path / "saved.npy", ARRAY)
    assert (tmp_path / "0f-Kind-train-a.npy").read_bytes() == (tmp_path / "saved.npy").read_bytes()


def test_small_arrays_take_no_descriptor(tmp_path: Path) -> None:
    writer = ArrayWriter(IndexFiles(Location.of(tmp_path), "0f"))
    with writer.array("a", (5,), np.int64) as out:
        out[:] = 7
    assert file_under(writer.arrays["a"]) == ""
    assert np.load(tmp_path / "0f-a.npy").tolist() == [7] * 5
    assert writer.stored["a"].bytes == (tmp_path / "0f-a.npy").stat().st_size


def test_without_uris_arrays_stay_in_memory() -> None:
    build(writer := ArrayWriter())
    np.testing.assert_array_equal(writer.arrays["a"], ARRAY)
    assert file_under(writer.arrays["a"]) == ""
    assert writer.stored == {}


@pytest.mark.parametrize("error", [OSError("no route"), NotImplementedError("no range"), ValueError("wrong")])
@pytest.mark.parametrize("shape", [(5,), ARRAY.shape])
@pytest.mark.parametrize("folder", [None, "{tmp_path}", "memory://array-writer"])
def test_an_error_of_the_data_that_fills_an_array_is_raised(
    folder: str | None, shape: tuple[int, ...], error: Exception, tmp_path: Path
) -> None:
    """It has the types of an error of the array's file, which only keeps the array from being published."""
    files = folder and IndexFiles(Location.of(folder.format(tmp_path=tmp_path)), "0f")
    writer = ArrayWriter(files or None)
    with pytest.raises(type(error), match=str(error)), writer.array("a", shape, np.int64):
        raise error
    assert (writer.arrays, writer.stored, writer.failure) == ({}, {}, None)


@pytest.mark.parametrize("in_memory", [1 << 30, 1 << 10])
def test_for_a_store_arrays_are_built_on_the_node_and_sent(
    s3: Any, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")
    uri = s3.fresh()
    built, loaded = (cached(uri, in_memory=in_memory) for _ in range(2))
    assert ("(deleted)" in file_under(built)) == (in_memory < ARRAY.nbytes)
    np.testing.assert_array_equal(built, ARRAY)
    np.testing.assert_array_equal(loaded, ARRAY)


@pytest.mark.parametrize("in_memory", [1 << 30, 1 << 10])
def test_sent_arrays_are_cached_for_the_node_which_fetches_nothing(
    s3: Any, in_memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_BYTES", "100000000")  # however full the disk is
    with latency_proxy(s3.server.endpoint) as proxy, proxy.in_environment():
        uri = s3.fresh()
        built, loaded = (cached(uri, in_memory=in_memory) for _ in range(2))
        assert not [each for each in proxy.log() if each.method == "GET" and each.path.endswith(".npy")]
    assert file_under(built) == file_under(loaded)
    assert file_under(built).startswith(os.environ["BINIDX_INDEX_DIR"])
    np.testing.assert_array_equal(built, ARRAY)
    np.testing.assert_array_equal(loaded, ARRAY)


def test_a_damaged_copy_is_fetched_from_the_store(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINIDX_INDEX_BYTES", "100000000")
    uri = s3.fresh()
    path = Path(file_under(cached(uri)))
    gc.collect()
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    code = LOADED.format(uri=uri)
    subprocess.run([sys.executable, "-c", code], check=True)


LOADED = """
import sys
from index.cache.test_array_writer import ARRAY, cached
assert (cached({uri!r}) == ARRAY).all()
"""


def test_a_failed_build_leaves_the_files_before_it(tmp_path: Path) -> None:
    cached(tmp_path)
    before = files(tmp_path)
    writer = ArrayWriter(IndexFiles(Location.of(tmp_path), "0f-Kind-train"))
    with pytest.raises(ValueError, match="broadcast"), writer.array("a", (1 << 20,), np.int32) as out:
        out[:] = ARRAY
    assert files(tmp_path) == before
    np.testing.assert_array_equal(cached(tmp_path), ARRAY)
    assert writer.arrays == {}


FULL = """
import logging, resource, signal, sys
from pathlib import Path
import numpy as np
from index.cache.test_array_writer import ARRAY, cached, file_under
logging.basicConfig(stream=sys.stdout, format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
array = cached({directory!r})
assert (array == ARRAY).all() and file_under(array) == ""
"""


def test_a_full_disk_costs_a_warning(tmp_path: Path) -> None:
    """The limit on a file's size stands for the full disk: posix_fallocate and write fail in the same places."""
    code = FULL.format(directory=f"{tmp_path}/cache")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    [line] = ended.stdout.splitlines()
    assert line.startswith(f"{tmp_path}/cache: index not kept, every start builds it again: ")
    assert "File too large" in line
    assert files(tmp_path / "cache") == []


LARGE = """
import resource, signal, sys
import numpy as np
from functools import partial
from binidx.index.cache.array_writer import ArrayWriter
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.storage.location import Location
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
open_writer = partial(ArrayWriter, shuffled_in_file=int(sys.argv[3]))
def build(writer):
    for name, size in ("small", 200_000), ("large", 80 << 20):
        with writer.array(name, (size,), np.int8, in_order=False) as out:
            pass
try:
    cache = IndexCache(IndexFiles(Location.of(sys.argv[1]), "0f-Kind-train"), open_writer=open_writer)
    cache.load_or_build("described", {"x": 1}, ["small", "large"], build)
except ValueError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize("limit", [100_000, 1_000_000], ids=["small array fails", "large array fails"])
@pytest.mark.parametrize("shuffled_in_file", [1 << 30, 0], ids=["in the file", "in memory, then written"])
def test_a_large_array_goes_from_a_full_disk_to_memory_only_if_that_is_asked_for(
    tmp_path: Path, limit: int, shuffled_in_file: int
) -> None:
    command = [sys.executable, "-c", LARGE, str(tmp_path), str(limit), str(shuffled_in_file)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith(f"IndexBuildError {tmp_path}/0f-Kind-train-large.npy: no room in {tmp_path} (")
    for part in ("bytes free, need 83,886,208)", "another path_to_cache", "BINIDX_INDEX_DIR=off"):
        assert part in ended.stdout
    environment = {**os.environ, "BINIDX_INDEX_DIR": "off"}
    asked = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert asked.stdout == ""
    assert "index not kept" in asked.stderr


def test_a_large_array_for_a_store_goes_from_a_full_node_to_memory_only_if_that_is_asked_for(s3: Any) -> None:
    command = [sys.executable, "-c", LARGE, s3.fresh(), "1000000", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "0f-Kind-train-large.npy: no room in " in ended.stdout
    assert "a larger BINIDX_INDEX_DIR" in ended.stdout


@pytest.fixture
def little_disk(tmp_path: Path) -> Any:
    """A filesystem of 1 MiB."""
    place = tmp_path / "little"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a filesystem")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("shuffled_in_file", [1 << 30, 1 << 10])
def test_a_full_disk_is_noticed_before_the_array_is_filled(
    little_disk: Path, shuffled_in_file: int, caplog: pytest.LogCaptureFixture
) -> None:
    np.testing.assert_array_equal(cached(little_disk, shuffled_in_file=shuffled_in_file), ARRAY)
    assert "No space left on device" in caplog.text
    assert files(little_disk) == []


def test_neither_disk_nor_memory_is_an_error(
    little_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")  # memory is asked for
    writer = ArrayWriter(IndexFiles(Location.of(little_disk), "0f"))
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(
            IndexBuildError, match=r"a.npy: found \d+ bytes of memory, need 4000000000000128, or a disk: .*No space"
        ),
        writer.array("a", (10**15,), np.int32),
    ):
        pass


KILLED = """
from binidx.index.cache.index_cache import IndexCache
from binidx.index.cache.index_files import IndexFiles
from binidx.storage.location import Location

def build(writer):
    with writer.array("a", (1 << 20,), "i4") as out:
        out[:] = 1
        print("in the middle", flush=True)
        input()

IndexCache(IndexFiles(Location.of({directory!r}), "0f-Kind-train")).load_or_build("described", {{"x": 1}}, ["a"], build)
"""


def test_a_builder_that_is_killed_leaves_no_array(tmp_path: Path) -> None:
    code = KILLED.format(directory=str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in the middle\n"
        assert all(name.endswith(".tmp") for name in files(tmp_path))
        process.send_signal(signal.SIGKILL)
    np.testing.assert_array_equal(cached(tmp_path), ARRAY)


def test_a_store_that_refuses_costs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    np.testing.assert_array_equal(cached("s3://no-such-bucket-of-ours/cache"), ARRAY)
    assert "index not kept" in caplog.text
    assert not fsspec.filesystem("memory").exists("/no-such-bucket-of-ours")


def test_an_array_that_fits_beside_one_that_does_not(little_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build(writer: ArrayWriter) -> None:
        with writer.array("a", (150_000,), np.int32) as one, writer.array("b", (150_000,), np.int32) as other:
            one[:], other[:] = 1, 2

    cache = IndexCache(IndexFiles(Location.of(str(little_disk)), "0f-Kind-train"))
    arrays = cache.load_or_build("described", {}, ["a", "b"], build)
    assert {name: array.sum() for name, array in arrays.items()} == {"a": 150_000, "b": 300_000}
    assert "No space left on device" in caplog.text
    assert "binidx.json" not in files(little_disk)
    assert not [name for name in files(little_disk) if name.endswith(".tmp")]
