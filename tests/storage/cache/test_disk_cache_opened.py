"""open_object keeps remote objects in the directory it is told, and only these, and only as what they are."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from servers.http_objects import http_objects

import binidx
from binidx.errors import ConfigError, ObjectChangedError
from binidx.storage.cache.disk_cache import DiskCache
from binidx.storage.cache.memory import ChunkCache
from binidx.storage.interfaces import RangeReader
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.writing.publish import create_object
from binidx.testing import check_range_reader

DATA = random.Random(1).randbytes(100_000)


def test_remote_objects_are_kept_where_a_cache_dir_is_set(s3: Bucket, tmp_path: Path) -> None:
    uri = f"{s3.fresh()}/en.bin"
    with create_object(Location.of(uri)) as out:
        out.write(DATA)
    options = {"binidx": {"cache_dir": str(tmp_path), "cache_bytes": 10**6, "cache_chunk_bytes": 4096}}
    for cache in (None, True, "disk"):
        reader = open_object(uri, storage_options=options, cache=cache)
        assert isinstance(reader, DiskCache)
        assert (reader.limit, reader.content.chunk_bytes) == (10**6, 4096)
        assert bytes(reader.read([(5_000, 90_000)])[0]) == DATA[5_000:90_000]
    assert isinstance(reader.reader, RemoteObject)
    assert reader.reader.stats.bytes_moved == 0
    with create_object(Location.of(uri)) as out:
        out.write(DATA[::-1])
    assert bytes(open_object(uri, storage_options=options).read([(5_000, 90_000)])[0]) == DATA[::-1][5_000:90_000]


def test_the_arrays_of_an_index_are_views_of_the_cache(s3: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    """12 bytes a sequence for each process of a node would be its memory."""
    prefix = f"{s3.fresh()}/en"
    with binidx.IndexedDatasetBuilder(f"{prefix}.bin", np.uint16) as builder:
        builder.add_document(np.zeros(50_000, np.uint16), [1] * 50_000)
        builder.finalize(f"{prefix}.idx")
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        dataset = binidx.IndexedDataset(prefix)
        assert dataset.sequence_lengths.sum() == 50_000
        assert mapped_file(dataset.sequence_lengths.ctypes.data).endswith("00000000.block")
        assert mapped_file(dataset.index.sequence_pointers.ctypes.data + 8 * 49_999).endswith("00000000.block")
    assert pickle.loads(pickle.dumps(dataset))[49_999].tolist() == [0]


def mapped_file(address: int) -> str:
    """What this process has mapped there."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(each, 16) for each in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split()[-1]
    return ""


@pytest.mark.parametrize(
    ("etag", "looks"),
    [(lambda data: f'"{hash(data)}"', 0), (lambda data: f'W/"{hash(data)}"', 1)],
    ids=["strong", "weak"],
)
def test_bytes_of_a_new_object_are_never_kept_under_the_name_of_the_old(tmp_path: Path, etag: Any, looks: int) -> None:
    with http_objects({"/en.bin": DATA}) as server:
        server.etag = etag
        reader = open_object(f"{server.endpoint}/en.bin", storage_options={"binidx": {"cache_dir": str(tmp_path)}})
        before = len(server.requests)
        assert bytes(reader.read([(10, 20)])[0]) == DATA[10:20]
        assert sum(method == "HEAD" or not asked for method, _, asked in server.requests[before:]) == looks
        server.objects["/en.bin"] = DATA[::-1]
        with pytest.raises(ObjectChangedError, match=r"en\.bin: changed since it was opened"):
            reader.read([(70_000, 70_010)])
        server.objects["/en.bin"] = DATA  # the old one is back, with its mark
        assert bytes(reader.read([(70_000, 70_010)])[0]) == DATA[70_000:70_010]


def test_what_must_come_from_the_store_does(s3: Bucket, tmp_path: Path, monkeypatch: Any) -> None:
    uri = f"{s3.fresh()}/en.bin"
    with create_object(Location.of(uri)) as out:
        out.write(DATA)
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path))
    assert isinstance(open_object(uri, cache=False), RemoteObject)
    assert isinstance(open_object(uri, cache="disk"), DiskCache)
    assert isinstance(open_object(uri, cache=True), DiskCache)
    monkeypatch.delenv("BINIDX_CACHE_DIR")
    assert isinstance(open_object(uri, cache="disk"), RemoteObject)
    assert isinstance(open_object(uri, cache=True), ChunkCache)


def test_over_s3_it_keeps_the_contract(s3: Bucket, tmp_path: Path) -> None:
    def make(data: bytes) -> RangeReader:
        uri = f"{s3.fresh()}/{len(data)}"
        with create_object(Location.of(uri)) as out:
            out.write(data)
        return open_object(uri, storage_options={"binidx": {"cache_dir": str(tmp_path)}})

    check_range_reader(make)


def test_local_files_are_not_kept_and_a_uri_is_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BINIDX_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "file").write_bytes(DATA)
    assert not isinstance(open_object(tmp_path / "file"), DiskCache)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("BINIDX_CACHE_DIR", "s3://bucket/cache")
    with create_object(Location.of("memory://disk-cache/file")) as out:
        out.write(DATA)
    with pytest.raises(ConfigError, match="cache_dir: found s3://bucket/cache, needs a directory of this machine"):
        open_object("memory://disk-cache/file")
