"""Index files of remote stores come down once for a node, where a directory can be trusted, else into memory."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import Bucket
from helpers.forked import Child
from helpers.random_datasets import Document, build_ours
from servers.latency_proxy import latency_proxy

from binidx.errors import ConfigError
from binidx.format.pair import open_pair
from binidx.storage.cache import block_files
from binidx.storage.cache.block_files import directory_of_index
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.settings import ReadSettings
from binidx.storage.writing.publish import create_object

OPEN = """
import sys
from binidx.format.idx import get_idx_path
from binidx.format.idx import parse_index
from binidx.storage.open import open_object
from binidx.storage.open import read_whole
uri = get_idx_path(sys.argv[1])
print(parse_index(read_whole(open_object(uri, cache="disk")), uri=uri).num_tokens)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary directory of this process and its children; no index_dir is named."""
    monkeypatch.delenv("BINIDX_INDEX_DIR")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    block_files._default_directory.cache_clear()
    yield tmp_path
    block_files._default_directory.cache_clear()


def ours(directory: Path) -> Path:
    return directory / f"binidx-{os.getuid()}"


def put(uri: str, data: bytes) -> str:
    with create_object(Location.of(uri)) as out:
        out.write(data)
    return uri


def test_an_idx_goes_to_a_directory_of_this_user_and_a_bin_does_not(temporary: Path) -> None:
    assert isinstance(open_object(put("memory://index-dir/en.idx", b"i" * 9), cache="disk"), DiskCache)
    assert not isinstance(open_object(put("memory://index-dir/en.bin", b"b" * 9), cache="disk"), DiskCache)
    assert ours(temporary).stat().st_mode & 0o777 == 0o700


def test_it_can_be_named_or_switched_off(temporary: Path) -> None:
    def found(**given: str) -> object:
        return directory_of_index(ReadSettings.of({"binidx": given}))

    assert found() == str(ours(temporary))
    assert found(index_dir="/nvme/index") == "/nvme/index"
    assert [found(index_dir=each) for each in ("0", "off")] == [None, None]


def test_it_has_a_limit_of_its_own(tmp_path: Path) -> None:
    options = {"binidx": {"index_dir": str(tmp_path), "index_bytes": "2GB", "cache_bytes": "1GB"}}
    reader = open_object(put("memory://index-dir/limit.idx", b"i"), cache="disk", storage_options=options)
    assert isinstance(reader, DiskCache)
    assert (reader.directory, reader.limit) == (str(tmp_path), 2 * 10**9)


def test_a_cache_dir_has_the_index_files_too(temporary: Path, tmp_path: Path) -> None:
    options = {"binidx": {"cache_dir": str(tmp_path / "all"), "index_dir": str(tmp_path / "index")}}
    reader = open_object(put("memory://index-dir/all.idx", b"i"), cache="disk", storage_options=options)
    assert isinstance(reader, DiskCache)
    assert reader.directory == str(tmp_path / "all")


def link(path: Path) -> None:
    path.symlink_to("/")


def open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def of_another(path: Path) -> None:
    path.mkdir()
    os.chown(path, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "trouble"),
    [
        (link, "found something else there"),
        (open_to_all, r"others may write to it \(mode 777\)"),
        (of_another, "belongs to user 12345"),
        (lambda path: path.parent.rmdir(), "No such file"),
    ],
)
def test_a_directory_that_is_not_ours_alone_is_not_used_and_named_once(temporary: Path, make, trouble, caplog) -> None:
    if make is of_another and os.getuid():
        pytest.skip("needs root")
    tempfile.gettempdir()
    make(ours(temporary))
    with caplog.at_level(logging.WARNING):
        readers = [open_object(put(f"memory://index-dir/{n}.idx", b"i" * 9), cache="disk") for n in range(2)]
    assert [bytes(reader.read([(0, 9)])[0]) for reader in readers] == [b"i" * 9] * 2
    assert not any(isinstance(reader, DiskCache) for reader in readers)
    assert len(caplog.records) == 1
    assert re.search(f"{trouble}.*in its own memory", caplog.text)


def test_what_does_not_fit_is_read_into_memory_and_that_is_said_once(tmp_path: Path, caplog) -> None:
    options = {"binidx": {"index_dir": str(tmp_path), "index_bytes": 0}}
    with caplog.at_level(logging.WARNING):
        for n in range(3):
            uri = put(f"memory://index-dir/full{n}.idx", b"f" * 70_000)
            reader = open_object(uri, cache="disk", storage_options=options)
            assert bytes(reader.read([(0, 70_000)])[0]) == b"f" * 70_000
    assert len(caplog.records) == 1


def open_full(
    name: str, num_bytes: int, directory: Path | str, limit: int | str = 0, uncached_bytes: int = 150_000
) -> memoryview:
    """Read a whole index file whose index_dir has no room for it."""
    options = {"binidx": {"index_dir": str(directory), "index_bytes": limit}}
    uri = put(f"memory://index-dir/{name}.npy", b"f" * num_bytes)
    reader = open_object(uri, cache="disk", storage_options=options)
    if isinstance(reader, DiskCache):
        reader.uncached_bytes = uncached_bytes
    return read_whole(reader)


def test_more_than_a_little_memory_for_files_that_do_not_fit_is_an_error_that_names_the_way_out(tmp_path: Path) -> None:
    held = [open_full(f"held{n}", 70_000, tmp_path) for n in range(2)]
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"held2\.npy: no room in ") as refused:
            open_full("held2", 70_000, tmp_path)
    for part in (
        f"no room in {tmp_path} (everything in it is in use; found room for 0 bytes, need 70,000 bytes",
        "140,000 of other files are in memory already",
        "raise BINIDX_INDEX_BYTES",
        "BINIDX_INDEX_DIR=off",
    ):
        assert part in str(refused.value)
    assert bytes(held[0]) == b"f" * 70_000
    del held[0]
    assert bytes(open_full("held2", 70_000, tmp_path)) == b"f" * 70_000
    assert bytes(open_full("asked", 200_000, "off")) == b"f" * 200_000


def test_other_reads_past_a_full_directory_go_on(tmp_path: Path) -> None:
    options = {"binidx": {"index_dir": str(tmp_path), "cache_dir": str(tmp_path), "cache_bytes": 0}}
    for name, ranges in [("parts.npy", [(0, 50_000), (50_000, 70_000)]), ("tokens.bin", [(3, 70_000)])]:
        reader = open_object(put(f"memory://index-dir/{name}", b"f" * 70_000), cache="disk", storage_options=options)
        assert isinstance(reader, DiskCache)
        reader.uncached_bytes = 0
        assert [len(view) for view in reader.read(ranges)] == [stop - start for start, stop in ranges]


FULL = """
import resource, signal, sys
from storage.cache.test_index_dir import open_full
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    open_full("limited", 70_000, sys.argv[1], "1GB", uncached_bytes=0)
except ValueError as error:
    print(error)
"""


def test_a_disk_that_refuses_writes_is_named_with_its_reason(tmp_path: Path) -> None:
    out, _ = Child(FULL, str(tmp_path)).communicate()
    assert f"no room in {tmp_path} (cannot be written to: File too large; found room for" in out


def test_eight_processes_fetch_the_bytes_of_one(s3: Bucket, tmp_path: Path) -> None:
    prefix = build_ours(f"{s3.fresh()}/en", [Document([1] * 40_000, [1] * 40_000, [])], np.uint16)
    size = open_object(f"{prefix}.idx", cache=False).size
    with latency_proxy(s3.server.endpoint, delay_ms=5) as proxy, proxy.in_environment():
        moved = []
        for processes in (1, 8):
            before = proxy.counts()
            place = {"BINIDX_INDEX_DIR": str(tmp_path / str(processes))}
            running = [Child(OPEN, prefix, environment=place) for _ in range(processes)]
            assert [each.communicate()[0].strip() for each in running] == ["40000"] * processes
            moved.append((proxy.counts() - before).bytes)
    assert size <= moved[0]
    assert moved[0] == moved[1]
    assert open_pair(Location.of(prefix), cache=False).index.num_tokens == 40_000
