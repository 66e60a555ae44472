"""A builder that fails, or whose process forks, at any step: the old dataset, the new one, or none; never a mixture."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from fsspec.implementations.memory import MemoryFileSystem
from helpers.random_datasets import Document, build_ours

from binidx.errors import FormatError, ShortReadError, StorageError
from binidx.format import indexed_dataset_builder as builder_module
from binidx.format.index_columns import MEMORY_BYTES
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.writing import staging

OLD = [Document([1, 2, 3], [2, 1], []), Document([4], [1], [])]
MIB = 1 << 20


def pair(prefix) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_closed(builder: IndexedDatasetBuilder, because: str) -> None:
    uses = (builder.end_document, lambda: builder.add_item([1]), lambda: builder.add_document([1], [1]))
    for again in (*uses, lambda: builder.add_index("x"), lambda: builder.finalize("x")):
        with pytest.raises(
            ValueError, match=rf"en.bin: the builder is closed since it failed \(.*{because}.*build the dataset agai"
        ):
            again()


@contextlib.contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The disk is full, as far as this process can tell: a longer file is EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[IndexedDatasetBuilder]:
    """Of a dataset that stands already."""
    build_ours(tmp_path / "en", OLD, np.int32)
    with IndexedDatasetBuilder(tmp_path / "en.bin") as builder:
        builder.add_document([9], [1])
        yield builder


def test_a_disk_that_fills_up_under_the_tokens_closes_the_builder(builder, tmp_path: Path) -> None:
    before = pair(tmp_path / "en")
    with files_of_at_most(MIB), pytest.raises(StorageError, match="File too large"):
        builder.add_item(np.zeros(MIB, np.int32))
    assert_closed(builder, "File too large")
    assert pair(tmp_path / "en") == before
    assert left_in(tmp_path) == ["en.bin", "en.idx"]


def test_a_disk_that_fills_up_under_the_lengths_closes_the_builder(builder, tmp_path: Path) -> None:
    """Else the tokens stay and the lengths do not, and all that is added later is shifted."""
    num_sequences = MEMORY_BYTES // 4 + 1
    with files_of_at_most(MEMORY_BYTES // 2), pytest.raises(OSError, match="File too large"):
        builder.add_document(np.zeros(num_sequences, np.int32), [1] * num_sequences)
    assert_closed(builder, "File too large")


def test_a_disk_that_fills_up_under_the_document_bounds_closes_the_builder(builder, tmp_path: Path) -> None:
    for _ in range(MEMORY_BYTES // 8 - 2):
        builder.end_document()
    with files_of_at_most(MEMORY_BYTES // 2), pytest.raises(OSError, match="File too large"):
        builder.end_document()
    assert_closed(builder, "File too large")


def test_a_source_that_fails_in_the_middle_of_a_merge_closes_the_builder(builder, tmp_path: Path, monkeypatch) -> None:
    part = build_ours(tmp_path / "part", OLD, np.int32)
    really = builder_module.stream

    def breaking(*arguments) -> Iterator[memoryview]:
        yield from really(*arguments)
        raise ShortReadError("part.bin: the line went dead")

    monkeypatch.setattr(builder_module, "stream", breaking)
    with pytest.raises(ShortReadError):
        builder.add_index(part)
    assert_closed(builder, "the line went dead")


@pytest.mark.parametrize("failing", ["folder of the .idx", "sync of the .bin", "disk full under the .idx"])
def test_what_fails_before_the_first_step_leaves_the_old_dataset(failing, builder, tmp_path, monkeypatch) -> None:
    before, where, limit = pair(tmp_path / "en"), tmp_path / "en.idx", resource.RLIM_INFINITY
    (tmp_path / "no-folder").write_bytes(b"")
    if failing == "folder of the .idx":
        where = tmp_path / "no-folder" / "en.idx"
    if failing == "sync of the .bin":
        synced = []
        monkeypatch.setattr(os, "fsync", lambda file: synced.append(file) or fail_at(2, synced))
    if failing == "disk full under the .idx":
        limit = 50
    with files_of_at_most(limit), pytest.raises(StorageError, match=r"en\.(idx|bin)|no-folder: is a file"):
        builder.finalize(where)
    assert_closed(builder, "AccessError" if failing.startswith("folder") else "StorageError")
    assert pair(tmp_path / "en") == before
    assert left_in(tmp_path) == ["en.bin", "en.idx", "no-folder"]


def fail_at(count: int, done: list[object]) -> None:
    if len(done) == count:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("step", [1, 2])
def test_what_fails_between_the_steps_leaves_no_dataset_and_no_second_try(step, builder, tmp_path, monkeypatch) -> None:
    """A second finalize() would put the new index over the old tokens."""
    really, renamed = os.replace, []

    def replace(source: str, target: str) -> None:
        renamed.append(target)
        fail_at(step, renamed)
        really(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(StorageError, match="Input/output error"):
        builder.finalize(tmp_path / "en.idx")
    assert_closed(builder, "Input/output error")
    assert left_in(tmp_path) == ["en.bin"]
    assert [Path(name).name for name in renamed] == ["en.bin", "en.idx"][:step]


def test_a_store_that_refuses_to_delete_the_old_index_keeps_the_old_dataset(builder, tmp_path, monkeypatch) -> None:
    before, really = pair(tmp_path / "en"), os.unlink

    def unlink(path: str) -> None:
        if path.endswith(".idx"):
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        really(path)

    monkeypatch.setattr(os, "unlink", unlink)
    with pytest.raises(StorageError, match=r"en\.idx: Permission denied"):
        builder.finalize(tmp_path / "en.idx")
    assert pair(tmp_path / "en") == before
    assert left_in(tmp_path) == ["en.bin", "en.idx"]


class Watched(MemoryFileSystem):
    """Remembers what stood under the names after each change."""

    protocol = "watched"
    seen: ClassVar[list[tuple[bytes | None, ...]]] = []

    def pipe_file(self, path, value, mode="overwrite", **options):
        super().pipe_file(path, value, mode, **options)
        self.look()

    def mv(self, source, target, **options):
        super().mv(source, target, **options)
        self.look()

    def rm_file(self, path):
        super().rm_file(path)
        self.look()

    def look(self) -> None:
        files = {name.rpartition(".")[2]: file.getvalue() for name, file in self.store.items() if "watched" in name}
        shown = files.get("bin"), files.get("idx")
        if shown not in self.seen[-1:]:
            self.seen.append(shown)


@pytest.mark.parametrize("num_tokens", [1, staging.ONE_PUT // 4 + 1])
def test_a_reader_between_the_steps_never_sees_new_tokens_under_the_old_index(num_tokens: int, tmp_path: Path) -> None:
    fsspec.register_implementation("watched", Watched, clobber=True)
    new = [Document(np.zeros(num_tokens, np.int32), [num_tokens], [])]
    old_bin, old_idx = pair(build_ours(tmp_path / "old", OLD, np.int32))
    new_bin, new_idx = pair(build_ours(tmp_path / "new", new, np.int32))
    build_ours("watched://en", OLD, np.int32)
    Watched.seen.clear()
    build_ours("watched://en", new, np.int32)
    assert Watched.seen == [(old_bin, None), (new_bin, None), (new_bin, new_idx)]
    assert old_idx != new_idx


def test_a_disk_shows_the_same_steps(builder, tmp_path: Path, monkeypatch) -> None:
    seen = []
    for name in ("replace", "unlink"):
        really = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *paths, really=really: (really(*paths), seen.append(shown(tmp_path))))
    old_bin, _ = pair(tmp_path / "en")
    builder.finalize(tmp_path / "en.idx")
    new_bin, new_idx = pair(tmp_path / "en")
    assert seen == [(old_bin, None), (new_bin, None), (new_bin, new_idx)]


def shown(folder: Path) -> tuple[bytes | None, ...]:
    paths = (folder / "en.bin", folder / "en.idx")
    return tuple(path.read_bytes() if path.exists() else None for path in paths)


def test_an_index_under_another_name_takes_the_old_one_with_it(builder, tmp_path: Path) -> None:
    builder.finalize(tmp_path / "other.idx")
    assert left_in(tmp_path) == ["en.bin", "other.idx"]


FORKS = """
import gc, os, sys
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.format.indexed_dataset import IndexedDataset

prefix, num_tokens, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
builder = IndexedDatasetBuilder(prefix + ".bin")
builder.add_document([7] * num_tokens, [1] * num_tokens)
builder.add_document([8], [1])                                # lies in every buffer there is
child = os.fork()
if not child:
    if how == "adds":
        try:
            builder.add_item([1])
        except ValueError as error:
            print(error)
    if how == "forgets":
        del builder
        gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
builder.add_document([9], [1])
builder.finalize(prefix + ".idx")
dataset = IndexedDataset(prefix)
assert len(dataset) == num_tokens + 2, len(dataset)
assert dataset.bin_reader.size == dataset.index.num_bytes
assert [sequence.tolist() for sequence in dataset[-3:]] == [[7], [8], [9]]
"""


@pytest.mark.parametrize("how", ["exits", "forgets", "adds"])
@pytest.mark.parametrize("num_tokens", [10, 300_000])
def test_a_forked_child_that_ends_leaves_its_parents_builder_alone(how: str, num_tokens: int, tmp_path: Path) -> None:
    run_fork(f"{tmp_path}/en", num_tokens, how)
    assert left_in(tmp_path) == ["en.bin", "en.idx"]


@pytest.mark.parametrize("how", ["exits", "forgets"])
def test_an_upload_outlives_a_forked_child(s3: Bucket, how: str) -> None:
    run_fork(f"{s3.fresh()}/en", staging.ONE_PUT // 4 + 1, how)


def run_fork(prefix: str, num_tokens: int, how: str) -> None:
    # Python 3.12 and later warn at each fork of a process that has threads.
    quiet = "ignore:This process:DeprecationWarning"
    command = [sys.executable, "-W", quiet, "-c", FORKS, prefix, str(num_tokens), how]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("a fork cannot add to it; build one dataset in each and merge" in done.stdout) == (how == "adds")


def test_bad_arguments_do_not_close_it(builder, tmp_path: Path) -> None:
    for bad in (lambda: builder.add_item(["a"]), lambda: builder.add_document([1], [2])):
        with pytest.raises(FormatError):
            bad()
    builder.add_document([3], [1])
    builder.finalize(tmp_path / "en.idx")
    assert [sequence.tolist() for sequence in IndexedDataset(tmp_path / "en")] == [[9], [3]]
