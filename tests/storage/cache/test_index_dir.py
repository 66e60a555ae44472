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

from binidx.format.pair import open_pair
from binidx.storage.cache import block_files
from binidx.storage.cache.block_files import directory_of_index
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.open import open_object
from binidx.storage.settings import ReadSettings
from binidx.storage.writing.publish import create_object

OPEN = """
import sys
from binidx.format.idx import get_idx_path, parse_index
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
    with create_object(uri) as out:
        out.write(data)
    return uri


def test_an_idx_goes_to_a_directory_of_this_user_and_a_bin_does_not(temporary: Path) -> None:
    assert isinstance(open_object(put("memory://index-dir/en.idx", b"i" * 9), cache="disk"), DiskCache)
    assert not isinstance(open_object(put("memory://index-dir/en.bin", b"b" * 9), cache="disk"), DiskCache)
    assert ours(temporary).stat().st_mode & 0o777 == 0o700


def test_it_can_be_named_or_switched_off(temporary: Path) -> None:
    def found(**given: str) -> object:
        return directory_of_index(ReadSettings.of({"binidx": given}))

    assert found() == (str(ours(temporary)), None)
    assert found(index_dir="/nvme/index", index_bytes="2GB") == ("/nvme/index", 2 * 10**9)
    assert [found(index_dir=each) for each in ("0", "off")] == [None, None]


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
    assert open_pair(prefix, cache=False).index.num_tokens == 40_000
