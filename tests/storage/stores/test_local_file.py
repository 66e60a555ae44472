"""Mapped files: no copies, and the ways in which a file can be wrong."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from binidx.errors import AccessError, ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.stores.local import READ_AT_ONCE, LocalFile, node_view
from binidx.storage.writing.publish import write_object

DATA = bytes(range(250)) * 2000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Large enough to be mapped."""
    path = tmp_path / "en.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.bin"
    path.write_bytes(DATA[:READ_AT_ONCE])
    return path


def overwrite(path: Path, data: bytes) -> None:
    """In place, as Megatron's builder writes: the inode stays."""
    time.sleep(0.02)  # the time of a change is as fine as the kernel's tick
    with path.open("r+b") as file:
        file.write(data)


def test_views_are_of_the_map_and_copy_nothing(path: Path) -> None:
    (view,) = LocalFile(path).read([(10, 20)])
    with path.open("r+b") as file:
        file.seek(10)
        file.write(b"\xff")
    assert view[0] == 0xFF


def test_a_small_file_is_read_at_once_and_no_longer_held(small: Path) -> None:
    before = os.listdir("/dev/fd")
    reader = LocalFile(small)
    assert os.listdir("/dev/fd") == before
    overwrite(small, b"\xff" * 20)
    assert bytes(reader.read([(0, READ_AT_ONCE)])[0]) == DATA[:READ_AT_ONCE]


def test_a_view_outlives_its_reader(path: Path) -> None:
    (view,) = LocalFile(path).read([(10, 20)])
    assert bytes(view) == bytes(range(10, 20))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=rf"^{tmp_path}/nope: no such file$"):
        LocalFile(tmp_path / "nope")
    with pytest.raises(FileNotFoundError):
        open_object(f"file://{tmp_path}/nope")


@pytest.mark.parametrize("name", ["a\0b", "a\ud800"])
def test_what_is_no_file_name_is_an_error(name: str) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"^'/tmp/a.*': not a file name \(.*\); correct it$"):
        LocalFile(f"/tmp/{name}")


def test_a_file_where_a_directory_was_needed_is_not_found(path: Path) -> None:
    with pytest.raises(ObjectNotFoundError):
        LocalFile(path / "below")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"^{tmp_path}: Is a directory"):
        LocalFile(tmp_path)


def test_a_file_that_shrank_is_an_error_and_not_a_dead_process(path: Path) -> None:
    reader = LocalFile(path)
    os.truncate(path, 50)
    with pytest.raises(ObjectChangedError, match=rf"en.bin: changed .*\(size {len(DATA)}, .*, now size 50, .*open it"):
        reader.read([(0, 10)])


@pytest.mark.parametrize("farewell", ["rename", "unlink"])
def test_a_file_that_shrinks_under_another_name_or_none_is_an_error(path: Path, farewell: str) -> None:
    reader = LocalFile(path)
    with path.open("r+b") as file:
        path.rename(path.with_suffix(".old")) if farewell == "rename" else path.unlink()
        assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]
        file.truncate(50)
        with pytest.raises(ObjectChangedError, match=rf"en.bin: has 50 bytes, had {len(DATA)} when it was opened$"):
            reader.read([(0, 10)])


@pytest.mark.parametrize("new", [b"new", DATA + b"more"], ids=["same size", "longer"])
def test_a_file_written_to_in_place_is_an_error(path: Path, new: bytes) -> None:
    reader = LocalFile(path)
    overwrite(path, new)
    with pytest.raises(ObjectChangedError, match=rf"^{path}: changed since it was opened \(size {len(DATA)}, mtime .*"):
        reader.read([(0, 10)])
    assert bytes(LocalFile(path).read([(0, 3)])[0]) == new[:3]


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_written_to_in_place_under_its_old_times_is_an_error(path: Path, mmap: bool) -> None:
    reader = open_object(path, mmap=mmap)
    reader.read([(0, 10)])
    rewrite_under_old_times(path, b"new")
    for _ in range(2):
        with pytest.raises(ObjectChangedError, match=r"changed since it was opened \(size .* ctime .*; open it again"):
            reader.read([(0, 10)])


def rewrite_under_old_times(path: Path, data: bytes) -> None:
    was = path.stat()
    while path.stat().st_ctime_ns == was.st_ctime_ns:  # within a tick of the clock nothing tells
        overwrite(path, data)
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)


def replace_under_old_times(path: Path, data: bytes) -> None:
    was, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(data + path.read_bytes()[len(data) :])
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)


def change_mode(path: Path) -> None:
    was = path.stat()
    while path.stat().st_ctime_ns == was.st_ctime_ns:
        path.chmod(0o600 if path.stat().st_mode & 0o77 else 0o640)
    path.chmod((was.st_mode ^ 0o20) & 0o777)


def add_link(path: Path) -> None:
    was = path.stat()
    while path.stat().st_ctime_ns == was.st_ctime_ns:
        path.with_suffix(".link").unlink(missing_ok=True)
        os.link(path, path.with_suffix(".link"))


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("size", [len(DATA), 1000], ids=["large", "small"])
@pytest.mark.parametrize("change", [rewrite_under_old_times, replace_under_old_times])
def test_a_pickled_file_that_changed_under_its_old_times_is_an_error_at_the_first_read(
    change: Callable[[Path, bytes], None], size: int, mmap: bool, path: Path
) -> None:
    os.truncate(path, size)
    data = pickle.dumps(open_object(path, mmap=mmap))
    assert bytes(pickle.loads(data).read([(0, 3)])[0]) == DATA[:3]
    change(path, b"new")
    twin = pickle.loads(pickle.dumps(pickle.loads(data)))  # not opened between
    for _ in range(2):
        with pytest.raises(ObjectChangedError, match=r"inode \d+, ctime .*; open it again$"):
            twin.read([(0, 3)])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("change", [change_mode, add_link])
def test_a_file_is_still_checked_after_another_mode_or_link(
    change: Callable[[Path], None], mmap: bool, path: Path
) -> None:
    """By its reader, and by twins that were pickled before the change and after it."""
    reader = open_object(path, mmap=mmap)
    reader.read([(0, 3)])
    twin = pickle.loads(pickle.dumps(reader))
    change(path)
    for each in (reader, twin, pickle.loads(pickle.dumps(reader))):
        assert bytes(each.read([(0, 3)])[0]) == DATA[:3]
    late = pickle.loads(pickle.dumps(reader))
    rewrite_under_old_times(path, b"new")
    for each in (reader, twin, late):
        with pytest.raises(ObjectChangedError, match=r"ctime .*; open it again$"):
            each.read([(0, 3)])


@pytest.mark.parametrize("mmap", [True, False])
def test_on_another_node_inode_and_ctime_mean_nothing(mmap: bool, path: Path) -> None:
    data, node = pickle.dumps(open_object(path, mmap=mmap)), node_view().encode()
    assert node in data
    replace_under_old_times(path, DATA[:3])
    elsewhere = data.replace(node, bytes(reversed(node)))
    assert bytes(pickle.loads(elsewhere).read([(0, 3)])[0]) == DATA[:3]
    with pytest.raises(ObjectChangedError):
        pickle.loads(data).read([(0, 3)])


def test_processes_of_one_container_see_the_same_files() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(node_view) == node_view()


@pytest.mark.parametrize("mmap", [True, False])
def test_another_mode_or_link_is_no_other_content(path: Path, mmap: bool) -> None:
    reader = open_object(path, mmap=mmap)
    change_mode(path)
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]
    os.link(path, path.with_suffix(".link"))
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]


def test_a_relative_path_means_the_directory_of_its_opening(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    reader = LocalFile(path.name)
    monkeypatch.chdir("/")
    overwrite(path, b"new")
    with pytest.raises(ObjectChangedError):
        reader.read([(0, 10)])


def test_a_replaced_file_is_read_as_it_was(path: Path) -> None:
    reader = LocalFile(path)
    other = path.with_suffix(".new")
    other.write_bytes(b"new")
    other.replace(path)
    assert bytes(reader.read([(0, 3)])[0]) == b"\0\1\2"
    twin = pickle.loads(pickle.dumps(reader))
    for _ in range(2):
        with pytest.raises(ObjectChangedError, match=rf"^{path}: .*'size': 3, .* in the process that pickled it; open"):
            twin.read([(0, 3)])


def test_mapped_or_not_it_is_the_same_content(path: Path) -> None:
    mapped, read = open_object(path), open_object(path, mmap=False)
    assert isinstance(mapped, LocalFile)
    assert isinstance(read, RemoteObject)
    assert mapped.identity == read.identity == {"size": len(DATA), "mtime": path.stat().st_mtime}


def test_a_name_with_strange_characters_is_a_path(tmp_path: Path) -> None:
    for name in ("a::b", "a b#c?d%20", "[x]*", "ünï 文"):
        path = tmp_path / name
        path.write_bytes(b"abc")
        assert bytes(open_object(path).read([(1, 2)])[0]) == b"b"
        assert bytes(open_object(path, mmap=False).read([(1, 2)])[0]) == b"b"
        assert bytes(open_object(f"file://{path}").read([(1, 2)])[0]) == b"b"


def test_a_file_of_another_user_is_no_matter_of_cloud_credentials(tmp_path: Path) -> None:
    from binidx.storage.stores.driver_errors import translated

    denied = PermissionError(13, "Permission denied")
    for name in (f"{tmp_path}/en.bin", f"file://{tmp_path}/en.bin"):
        error = translated(name, denied)
        assert isinstance(error, AccessError)
        assert str(error) == f"{name}: Permission denied; check owner and mode of the file and its folders (ls -ld)"
    assert "AWS_ACCESS_KEY_ID" in str(translated("s3://corpus/en.bin", denied))


def test_a_file_that_can_have_no_folder_names_the_part_of_its_path_that_prevents_it(tmp_path: Path) -> None:
    (text := tmp_path / "a.jsonl").write_text("{}")
    places = {f"{text}/x/en.bin": f"{text}: is a file, needed a folder"}
    if sys.platform == "linux":
        places["/proc/none/x/en.bin"] = "/proc/none: no folder can be made there"
    for place, problem in places.items():
        with pytest.raises(AccessError, match=f"^{problem}; name another place$"):
            write_object(Location.of(place), [b"x"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused_with_its_owner_and_mode_to_check(tmp_path: Path) -> None:
    (tmp_path / "en.bin").write_bytes(b"x")
    (tmp_path / "en.bin").chmod(0)
    with pytest.raises(AccessError, match="check owner and mode"):
        LocalFile(tmp_path / "en.bin")
