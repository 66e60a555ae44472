"""A cache directory is private unless its user shares it, and no link in it is followed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from helpers.versioned_objects import MarkedObject

from binidx.storage.cache.block_files import CachedContent, map_block, write_meta
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.maintenance import cached_contents
from binidx.storage.cache.quota_files import QuotaDirectory, object_directories

DATA = bytes(range(251)) * 1000


def reader(directory: Path) -> DiskCache:
    return DiskCache(MarkedObject(DATA), directory, chunk_bytes=4096)


def modes(directory: Path) -> set[tuple[bool, int]]:
    """(is a directory, permissions) of the directory and all that is in it."""
    found = [each.stat().st_mode for each in (directory, *directory.rglob("*"))]
    return {(stat.S_ISDIR(mode), stat.S_IMODE(mode)) for mode in found}


@pytest.fixture(autouse=True)
def _no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    assert bytes(reader(tmp_path / "new").read([(0, 9000)])[0]) == DATA[:9000]
    assert modes(tmp_path / "new") == {(True, 0o700), (False, 0o600)}


def test_files_in_a_shared_directory_are_shared_with_the_same_users(tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o770)
    assert bytes(reader(tmp_path / "team").read([(0, 9000)])[0]) == DATA[:9000]
    assert modes(tmp_path / "team") == {(True, 0o770), (False, 0o660)}


@pytest.mark.parametrize("name", ["usage", "locks", "00000000.block", "meta.json", "KEY", "objects"])
def test_a_link_in_the_directory_is_not_followed(tmp_path: Path, name: str) -> None:
    cache, private = tmp_path / "cache", tmp_path / "private"
    key = reader(tmp_path / "other").content.key
    (cache / "objects").mkdir(parents=True)
    private.mkdir()
    (private / "file").write_bytes(b"secret")
    if name == "objects":
        (cache / "objects").rmdir()
        (cache / "objects").symlink_to(private)
    elif name == "KEY":
        (cache / "objects" / key).symlink_to(private)
    elif name == "usage":
        (cache / "usage").symlink_to(private / "file")
    else:
        (cache / "objects" / key).mkdir()
        (cache / "objects" / key / name).symlink_to(private / "file")
    found = reader(cache)
    for _ in range(2):
        assert bytes(found.read([(0, 9000)])[0]) == DATA[:9000]
    assert os.listdir(private) == ["file"]
    assert (private / "file").read_bytes() == b"secret"


def test_a_linked_object_is_not_listed_and_its_blocks_are_not_used(tmp_path: Path) -> None:
    theirs = reader(tmp_path / "theirs")
    theirs.read([(0, 9000)])
    QuotaDirectory(str(tmp_path))
    (tmp_path / "objects").mkdir()
    linked = tmp_path / "objects" / theirs.content.key
    linked.symlink_to(theirs.cached.path)
    assert object_directories(str(tmp_path)) == []
    assert cached_contents(str(tmp_path)) == []
    with pytest.raises(OSError, match="found a link or a file, needed a directory"):
        map_block(str(linked / "00000000.block"), theirs.content, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_directory_of_another_user_is_refused_where_others_may_not_write(tmp_path: Path) -> None:
    content = CachedContent("s3://b/k", 9, {"etag": "e"})
    for mode in (0o755, 0o777):
        root = tmp_path / f"{mode:o}"
        (root / "objects" / content.key).mkdir(parents=True)
        os.chown(root / "objects" / content.key, 12345, 12345)
        for each in (root, root / "objects"):
            each.chmod(mode)
    with pytest.raises(PermissionError, match="belongs to user 12345"):
        write_meta(f"{tmp_path}/755/objects/{content.key}", content)
    write_meta(f"{tmp_path}/777/objects/{content.key}", content)
