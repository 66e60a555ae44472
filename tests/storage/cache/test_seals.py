"""Seals: a file that one process has checked whole is not checked by the others, until it changes."""

from __future__ import annotations

import gc
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.errors import FormatError
from binidx.index.cache.index_files import IndexFiles, hash_npy
from binidx.index.cache.manifest import StoredArray
from binidx.storage.cache.block_files import CachedContent
from binidx.storage.cache.object_files import TICK_SECONDS, ObjectFiles
from binidx.storage.cache.seals import Seal, find_seal
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.stores import local
from binidx.storage.stores.local import LocalFile

LARGE = local.SMALL_FILE + 1


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as unchanged at once, and seals lie in a directory of the test."""
    monkeypatch.setattr(local, "SETTLED_SECONDS", 0)
    monkeypatch.setenv("BINIDX_INDEX_DIR", str(tmp_path / "node"))


def seals(tmp_path: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in (tmp_path / "node" / "seals").iterdir()}


def seal_of(path: Path, check: str = "check") -> Seal:
    return find_seal(LocalFile(path), Location(str(path)), check)


def write_dataset(prefix: Path) -> None:
    """40,000 sequences: an `.idx` that is too large to be read at once."""
    lengths = np.full(40_000, 2, np.int32)
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_document(np.arange(2 * len(lengths)) % 1000, lengths.tolist())
        builder.finalize(f"{prefix}.idx")


def rewrite(path: Path, offset: int, value: bytes) -> None:
    """Change bytes in place and restore size and mtime."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(value)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_check_is_noted_until_the_file_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    path.write_bytes(bytes(LARGE))
    seal_of(path).write("fine")
    assert seal_of(path).read() == "fine"
    assert seal_of(path, "another check").read() is None
    rewrite(path, 0, b"x")
    assert seal_of(path).read() is None


def test_a_replaced_file_is_not_sealed(tmp_path: Path) -> None:
    path, other = tmp_path / "array.npy", tmp_path / "other.npy"
    for each in (path, other):
        each.write_bytes(bytes(LARGE))
    seal_of(path).write("fine")
    os.replace(other, path)
    assert seal_of(path).read() is None


def test_a_file_that_was_just_written_or_is_small_is_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, small = tmp_path / "large.npy", tmp_path / "small.npy"
    large.write_bytes(bytes(LARGE))
    small.write_bytes(bytes(10))
    assert seal_of(small) == Seal()
    assert seal_of(large) != Seal()
    monkeypatch.setattr(local, "SETTLED_SECONDS", 1e9)
    assert seal_of(large) == Seal()


@pytest.mark.parametrize("text", ["", "fine", "-1", "1.5", "80000 ", "\x00" * 5, "²"])
def test_a_seal_of_an_idx_that_is_no_number_is_none(text: str, tmp_path: Path) -> None:
    write_dataset(tmp_path / "en")
    before = binidx.IndexedDataset(f"{tmp_path}/en").sequence_lengths.tolist()
    written = seals(tmp_path)
    assert "80000" in written.values()
    for path in written:
        path.write_text(text, encoding="utf-8")
    assert binidx.IndexedDataset(f"{tmp_path}/en").sequence_lengths.tolist() == before
    assert "80000" in seals(tmp_path).values()


def test_without_an_index_directory_each_process_checks_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "array.npy"
    path.write_bytes(bytes(LARGE))
    monkeypatch.setenv("BINIDX_INDEX_DIR", "off")
    assert seal_of(path).recall(lambda: "made") == "made"
    assert seal_of(path).read() is None


def test_seals_of_earlier_starts_of_the_machine_are_removed_after_a_day(tmp_path: Path) -> None:
    path = tmp_path / "array.npy"
    path.write_bytes(bytes(LARGE))
    old, recent = (tmp_path / "node" / "seals" / f"{boot}-{'0' * 32}" for boot in ("11111111", "22222222"))
    old.parent.mkdir(parents=True)
    for each in (old, recent):
        each.write_text("fine")
    os.utime(old, (0, 0))
    seal_of(path).write("fine")
    assert not old.exists()
    assert recent.exists()
    assert seal_of(path).read() == "fine"


def test_an_idx_is_checked_once_on_a_node(tmp_path: Path) -> None:
    write_dataset(tmp_path / "en")
    assert binidx.IndexedDataset(tmp_path / "en").index.num_tokens == 80_000
    [noted] = [path for path, text in seals(tmp_path).items() if text == "80000"]
    noted.write_text("79999")  # a number that only the seal has
    with pytest.raises(FormatError):  # the .bin is longer
        binidx.IndexedDataset(tmp_path / "en")


def test_an_idx_that_changes_under_its_size_and_time_is_checked_again(tmp_path: Path) -> None:
    write_dataset(tmp_path / "en")
    binidx.IndexedDataset(tmp_path / "en")
    rewrite(tmp_path / "en.idx", 34 + 4 * 5, (7).to_bytes(4, "little"))
    with pytest.raises(FormatError, match="sequence 6 starts at byte 24, needed 34"):
        binidx.IndexedDataset(tmp_path / "en")


def test_the_digest_of_an_idx_is_made_once_on_a_node(tmp_path: Path) -> None:
    write_dataset(tmp_path / "en")
    digest = binidx.IndexedDataset(tmp_path / "en").identity["index_digest"]
    [noted] = [path for path, text in seals(tmp_path).items() if text == digest]
    noted.write_text("of the seal")
    assert binidx.IndexedDataset(tmp_path / "en").identity["index_digest"] == "of the seal"


def test_an_array_is_hashed_once_on_a_node_and_again_when_it_changes(tmp_path: Path) -> None:
    array = np.arange(100_000, dtype=np.int64)
    files = IndexFiles(Location.of(tmp_path), "index")
    path = tmp_path / "index-a.npy"
    np.save(path, array)
    stored = StoredArray("<i8", array.shape, path.stat().st_size, hash_npy(array))
    for _ in range(2):
        np.testing.assert_array_equal(files.read_array("a", stored), array)
    assert [*seals(tmp_path).values()] == [stored.xxh3_64]
    rewrite(path, 4096, b"x")
    with pytest.raises(FormatError, match="XXH3"):
        files.read_array("a", stored)


def last_byte(uri: str) -> bytes:
    """Return the last byte of a remote `.idx`, read through the disk cache by an object that no other reader has."""
    gc.collect()
    return bytes(read_whole(open_object(f"{uri}.idx", cache="disk"))[-1:])


def test_the_chunks_of_a_cached_file_are_compared_once_on_a_node_and_again_when_it_changes(
    tmp_path: Path, s3: Any
) -> None:
    write_dataset(tmp_path / "en")
    uri = f"{s3.fresh()}/en"
    convert_dataset(tmp_path / "en", uri)
    last_byte(uri)
    time.sleep(2 * TICK_SECONDS)
    right = last_byte(uri)
    assert "good" in seals(tmp_path).values()
    [block] = (tmp_path / "node" / "objects").rglob("*.block")
    rewrite(block, block.stat().st_size - 1, b"x")  # its mtime is as it was: only its chunks would show it
    assert last_byte(uri) == b"x"
    os.utime(block)
    assert last_byte(uri) == right


def test_a_block_that_was_just_written_is_not_sealed(tmp_path: Path, s3: Any) -> None:
    write_dataset(tmp_path / "en")
    uri = f"{s3.fresh()}/en"
    convert_dataset(tmp_path / "en", uri)
    last_byte(uri)
    shutil.rmtree(tmp_path / "node" / "seals", ignore_errors=True)  # of a slow machine
    [block] = (tmp_path / "node" / "objects").rglob("*.block")
    os.utime(block, (2e9, 2e9))  # not older than a tick, whenever this runs
    last_byte(uri)
    assert not (tmp_path / "node" / "seals").exists()


def test_a_block_marked_as_used_keeps_its_seal(tmp_path: Path) -> None:
    files = ObjectFiles(str(tmp_path), CachedContent("object", 1, {}))
    files.prepare_to_write()
    block = Path(files.block_path(0))
    block.write_bytes(b"x")
    os.utime(block, (1, 1))
    files.touch(0)
    assert block.stat().st_mtime == 1
    assert block.stat().st_atime > 1
