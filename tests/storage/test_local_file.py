"""Mapped files: no copies, and the ways in which a file can be wrong."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from binidx.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.storage.backends import FsspecObject, LocalFile, open_object


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "en.bin"
    path.write_bytes(bytes(range(100)))
    return path


def test_views_are_of_the_map_and_copy_nothing(path: Path) -> None:
    (view,) = LocalFile(path).read([(10, 20)])
    with path.open("r+b") as file:
        file.seek(10)
        file.write(b"\xff")
    assert view[0] == 0xFF


def test_a_view_outlives_its_reader(path: Path) -> None:
    (view,) = LocalFile(path).read([(10, 20)])
    assert bytes(view) == bytes(range(10, 20))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=rf"^{tmp_path}/nope: no such file$"):
        LocalFile(tmp_path / "nope")
    with pytest.raises(FileNotFoundError):
        open_object(f"file://{tmp_path}/nope")


def test_a_file_where_a_directory_was_needed_is_not_found(path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        LocalFile(path / "below")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"^{tmp_path}: Is a directory"):
        LocalFile(tmp_path)


def test_a_file_that_shrank_is_an_error_and_not_a_dead_process(path: Path) -> None:
    reader = LocalFile(path)
    os.truncate(path, 50)
    with pytest.raises(ObjectChangedError, match=r"en.bin: has 50 bytes, had 100 when it was opened$"):
        reader.read([(0, 10)])


def test_a_file_that_grew_is_still_what_was_opened(path: Path) -> None:
    reader = LocalFile(path)
    with path.open("ab") as file:
        file.write(b"more")
    assert reader.size == 100
    assert bytes(reader.read([(0, 100)])[0]) == bytes(range(100))


def test_a_replaced_file_is_read_as_it_was(path: Path) -> None:
    reader = LocalFile(path)
    other = path.with_suffix(".new")
    other.write_bytes(b"new")
    other.replace(path)
    assert bytes(reader.read([(0, 3)])[0]) == b"\0\1\2"
    assert bytes(pickle.loads(pickle.dumps(reader)).read([(0, 3)])[0]) == b"new"


def test_mapped_or_not_it_is_the_same_content(path: Path) -> None:
    mapped, read = open_object(path), open_object(path, mmap=False)
    assert isinstance(mapped, LocalFile)
    assert isinstance(read, FsspecObject)
    assert mapped.identity == read.identity == {"size": 100, "mtime": path.stat().st_mtime}


def test_a_name_with_strange_characters_is_a_path(tmp_path: Path) -> None:
    for name in ("a::b", "a b#c?d%20", "[x]*"):
        path = tmp_path / name
        path.write_bytes(b"abc")
        assert bytes(open_object(path).read([(1, 2)])[0]) == b"b"
        assert bytes(open_object(path, mmap=False).read([(1, 2)])[0]) == b"b"
