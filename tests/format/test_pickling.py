"""A dataset in another process: opened anew from its arguments, and the same one or an error."""

from __future__ import annotations

import multiprocessing
import operator
import os
import pickle
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours
from helpers.reader_stacks import LAYERS, STORES, Shelf

from binidx.corpus.convert import StorageFormat, convert_dataset
from binidx.corpus.merge import merge_virtually
from binidx.errors import ObjectChangedError, ObjectNotFoundError
from binidx.format import indexed_dataset
from binidx.format.idx import CheckedIndex
from binidx.format.indexed_dataset import IndexedDataset
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.writing.publish import create_object, delete_object

FIVE = [Document(np.arange(10, 15), [3, 0, 2], [5, 6, 7]), Document(np.arange(15, 20), [4, 1], [8, 9])]


@pytest.fixture(params=["mapped", "file", "s3"])
def arguments(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Of a dataset that another process can open, in every way there is."""
    prefix = f"{tmp_path}/five"
    if request.param == "s3":
        s3: Bucket = request.getfixturevalue("s3")
        prefix = f"{s3.fresh()}/five"
    build_ours(prefix, FIVE, np.uint16, multimodal=True)
    return {"path_prefix": prefix, "multimodal": True, "mmap": request.param == "mapped"}


def test_a_spawned_process_reads_the_same(arguments) -> None:
    dataset = IndexedDataset(**arguments)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = [pool.apply(operator.getitem, (dataset, number)) for number in (3, -5)]
    assert [(tokens.tolist(), mode) for tokens, mode in found] == [([15, 16, 17, 18], 8), ([10, 11, 12], 5)]


def test_a_pickle_is_small_and_keeps_each_argument(arguments) -> None:
    data = pickle.dumps(IndexedDataset(**arguments))
    assert len(data.replace(arguments["path_prefix"].encode(), b"")) < 650
    again = pickle.loads(data)
    assert again[3][0].tolist() == [15, 16, 17, 18]
    assert again.sequence_modes.tolist() == [5, 6, 7, 8, 9]
    assert again.mmap is arguments["mmap"]
    assert isinstance(pickle.loads(pickle.dumps(again)), IndexedDataset)


def test_unmapped_files_stay_unmapped(tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "five", FIVE, np.uint16)
    for mmap in (False, True):
        again = pickle.loads(pickle.dumps(IndexedDataset(prefix, mmap=mmap)))
        assert isinstance(again.bin_reader, RemoteObject) is not mmap


def test_storage_options_come_along(s3: Bucket, monkeypatch) -> None:
    prefix = build_ours(f"{s3.fresh()}/five", FIVE, np.uint16)
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    again = pickle.loads(pickle.dumps(IndexedDataset(prefix, storage_options=options)))
    assert again.storage_options == options
    assert again[3].tolist() == [15, 16, 17, 18]


@pytest.mark.parametrize("lengths", [[3, 0, 2], [2, 1, 2], [5, 9]])
def test_one_that_was_replaced_since_is_refused(arguments, lengths: list[int]) -> None:
    """Its samples would be drawn by the old index: other tokens, without an error where the sizes happen to fit."""
    data = pickle.dumps(IndexedDataset(**arguments))
    other = Document(np.arange(sum(lengths)), lengths, [0] * len(lengths))
    build_ours(arguments["path_prefix"], [other, FIVE[1]], np.uint16, multimodal=True)
    again = pickle.loads(data)
    for use in (lambda: again[3], lambda: len(again), lambda: again.bin_reader, lambda: again.identity):
        with pytest.raises(ObjectChangedError, match=r"five\.(idx|bin): changed since it was pickled \(.*, now .*\); "):
            use()
    assert pickle.dumps(again) == data


@pytest.mark.parametrize("end", ["idx", "bin"])
def test_the_half_that_changed_is_named(end: str) -> None:
    prefix = build_ours(f"memory://{uuid.uuid4().hex}/five", FIVE, np.uint16, multimodal=True)
    data = pickle.dumps(IndexedDataset(prefix))
    with create_object(Location.of(f"{prefix}.bin")) as writer:  # as large as before, and no better
        writer.write(np.arange(20, 30, dtype=np.uint16).tobytes())
    if end == "idx":
        build_ours(prefix, FIVE, np.uint16)  # without modes: a shorter .idx
    with pytest.raises(ObjectChangedError, match=rf"five\.{end}: changed since it was pickled .*\(size .*, now size "):
        pickle.loads(data)[3]


def replace_under_old_times(path: Path, data: bytes) -> None:
    """By another file of the same size and mtime, as `cp -p` or `rsync -t` of other data may."""
    was, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(data)
    os.utime(other, ns=(was.st_atime_ns, was.st_mtime_ns))
    other.replace(path)
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (was.st_size, was.st_mtime_ns)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("end", ["idx", "bin"])
@pytest.mark.parametrize("form", ["pair", "compressed", "virtual"])
def test_a_local_file_replaced_under_its_old_times_is_refused_in_another_process(
    form: str, end: str, mmap: bool, tmp_path: Path
) -> None:
    prefix = build_ours(tmp_path / "five", FIVE, np.uint16)
    if form == "compressed":
        convert_dataset(prefix, prefix := f"{tmp_path}/packed", way=StorageFormat("zstd"))
        end = end.replace("bin", "bin.zst")
    path = Path(f"{prefix}.{end}")
    if form == "virtual":
        merge_virtually([build_ours(tmp_path / "other", FIVE, np.uint16), prefix], prefix := f"{tmp_path}/merged")
    data = pickle.dumps(IndexedDataset(prefix, mmap=mmap))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(operator.getitem, (pickle.loads(data), -2)).tolist() == [15, 16, 17, 18]
        replace_under_old_times(path, path.read_bytes())
        needed = rf"{path}: was rewritten under its old size and mtime \(found inode .*, need inode .*; start again"
        with pytest.raises(ObjectChangedError, match=needed):
            pool.apply(operator.getitem, (pickle.loads(data), -2))


@pytest.mark.parametrize("end", ["idx", "bin"])
def test_so_it_is_where_the_index_is_read_by_ranges(end: str, tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "five", FIVE, np.uint16)
    checked = CheckedIndex(5, "", False, None)
    dataset = IndexedDataset(prefix, checked=checked)
    assert dataset[3].tolist() == [15, 16, 17, 18]
    data, path = pickle.dumps(dataset), Path(f"{prefix}.{end}")
    replace_under_old_times(path, path.read_bytes())
    with pytest.raises(ObjectChangedError, match=rf"five\.{end}: was rewritten"):
        _ = pickle.loads(data)[3]


def test_modes_are_returned_if_they_are_asked_for_however_the_index_is_read(tmp_path: Path) -> None:
    prefix = build_ours(tmp_path / "five", FIVE, np.uint16, multimodal=True)
    for checked in (None, CheckedIndex(5, "", False, None)):
        dataset = IndexedDataset(prefix, checked=checked)
        assert dataset[3].tolist() == [15, 16, 17, 18]
        assert dataset.get(3, offset=1).tolist() == [16, 17, 18]
        tokens, mode = IndexedDataset(prefix, multimodal=True, checked=checked)[3]
        assert (tokens.tolist(), int(mode)) == ([15, 16, 17, 18], 8)


def test_another_mode_of_a_local_file_is_no_change_for_another_process(tmp_path: Path) -> None:
    """Neither before it is pickled nor after; what is written after that is one."""
    dataset = IndexedDataset(build_ours(tmp_path / "five", FIVE, np.uint16))
    for end, mode in (("idx", 0o600), ("bin", 0o640), ("bin", 0o600)):
        Path(f"{tmp_path}/five.{end}").chmod(mode)
        assert pickle.loads(pickle.dumps(dataset))[3].tolist() == [15, 16, 17, 18]
    data = pickle.dumps(dataset)
    Path(f"{tmp_path}/five.bin").chmod(0o644)
    assert pickle.loads(data)[3].tolist() == [15, 16, 17, 18]
    data, path = pickle.dumps(dataset), Path(f"{tmp_path}/five.bin")
    replace_under_old_times(path, bytes(path.stat().st_size))
    with pytest.raises(ObjectChangedError, match=r"five\.bin: was rewritten"):
        _ = pickle.loads(data)[3]


@pytest.mark.parametrize("attribute", ["index", "bin_reader", "dtype"])
def test_threads_open_an_unpickled_dataset_once(arguments, attribute: str, monkeypatch) -> None:
    again, opened, arrived = pickle.loads(pickle.dumps(IndexedDataset(**arguments))), [], threading.Barrier(4)
    real = indexed_dataset.open_pair
    monkeypatch.setattr(indexed_dataset, "open_pair", lambda *given, **named: opened.append(1) or real(*given, **named))

    def use(_: int) -> list[int]:
        arrived.wait()
        getattr(again, attribute)
        return again[3][0].tolist()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(use, range(4))) == [[15, 16, 17, 18]] * 4
    assert opened == [1]


@pytest.mark.parametrize("store", STORES)
def test_no_reader_looks_at_its_object_while_it_is_unpickled(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shelf, data = Shelf(STORES[store], request, tmp_path), bytes(range(250)) * 2000
    for name, layer in LAYERS.items():
        lower = layer.stored(data)
        reader = layer.wrap(shelf.open(lower), lower, tmp_path / "cache")
        pickled = pickle.dumps(reader)
        if shelf.web is not None:
            del shelf.web.objects[f"/{len(lower)}"]
        else:
            delete_object(Location.of(reader.uri))
        twin = pickle.loads(pickled)
        assert (twin.uri, twin.size) == (reader.uri, reader.size), name
        with pytest.raises(ObjectNotFoundError):
            twin.read([(0, 10)])
