"""Tokens stored compressed, or with checksums beside them: written, found by themselves, and never the wrong ones."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conftest import Bucket
from helpers.random_datasets import Document, build_ours, write
from servers.http_objects import Gate, Server, http_objects

from binidx.errors import ConfigError, FormatError, ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.cache.memory import STORE, ChunkCache
from binidx.storage.codecs.checksums import CheckedObject
from binidx.storage.codecs.segments import SegmentedObject
from binidx.storage.location import Location
from binidx.storage.open import SEGMENTS, open_object, read_whole
from binidx.storage.requests.remote_object import find_object, object_exists, object_identity
from binidx.storage.requests.scheduler import scheduler
from binidx.storage.stores.local import LocalFile
from binidx.storage.threads import OPENS
from binidx.storage.writing.publish import delete_object
from binidx.testing import ended_well, forked

RNG = np.random.default_rng(0)
DOCUMENTS = [Document(RNG.zipf(1.3, length).astype(np.uint16), [length], []) for length in (5, 0, 70_000, 1, 40_000)]
TOKENS = np.concatenate([document.tokens for document in DOCUMENTS])


@pytest.fixture(params=["disk", "memory", "s3", "gs"])
def prefix(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        s3: Bucket = request.getfixturevalue("s3")
        return f"{s3.fresh()}/en"
    if request.param == "gs":
        return f"{request.getfixturevalue('gs')}/{uuid.uuid4().hex}/en"
    return f"memory://{uuid.uuid4().hex}/en" if request.param == "memory" else f"{tmp_path}/en"


def build(prefix: str, end: str = "bin", documents: list[Document] = DOCUMENTS, **options: Any) -> str:
    with IndexedDatasetBuilder(f"{prefix}.{end}", np.uint16, **options) as builder:
        write(builder, documents, False)
        builder.finalize(f"{prefix}.idx")
    return prefix


def names(prefix: str) -> list[str]:
    """Which of the objects of a prefix are there."""
    return [end for end in ("bin", "bin.zst", "bin.xxh3", "idx") if object_exists(Location.of(f"{prefix}.{end}"))]


def stored(uri: str) -> bytes:
    return bytes(read_whole(open_object(uri, cache=False, codec="raw")))


def layers(reader: Any) -> list[type]:
    """The classes of a stack, from the top."""
    found = [type(reader)]
    while hasattr(reader, "reader"):
        reader = reader.reader
        found.append(type(reader))
    return found


@pytest.mark.parametrize("how", [{"end": "bin.zst"}, {"end": "bin.zst", "compression_level": 9}, {"checksums": True}])
def test_every_reader_reads_it_with_no_flag(prefix: str, how: dict[str, Any], tmp_path: Path) -> None:
    build(prefix, **how)
    plain = build_ours(tmp_path / "plain", DOCUMENTS, np.uint16)
    assert IndexedDataset.exists(prefix)
    dataset = IndexedDataset(prefix)
    assert all((ours == right).all() for ours, right in zip(dataset[:], IndexedDataset(plain)[:], strict=True))
    assert bytes(read_whole(dataset.bin_reader)) == Path(f"{plain}.bin").read_bytes()
    assert stored(f"{prefix}.idx") == Path(f"{plain}.idx").read_bytes()
    twin = pickle.loads(pickle.dumps(dataset))
    assert (twin[2] == DOCUMENTS[2].tokens).all()
    with IndexedDatasetBuilder(tmp_path / "two.bin", np.uint16) as builder:
        builder.add_index(prefix)
        builder.finalize(tmp_path / "two.idx")
    assert (tmp_path / "two.bin").read_bytes() == Path(f"{plain}.bin").read_bytes()


def test_a_level_makes_other_bytes_and_the_same_level_the_same(tmp_path: Path) -> None:
    sizes = []
    for level in (1, 3, 9):
        one, two = (build(f"{tmp_path}/{name}{level}", "bin.zst", compression_level=level) for name in "ab")
        assert stored(f"{one}.bin.zst") == stored(f"{two}.bin.zst")
        sizes.append(len(stored(f"{one}.bin.zst")))
    assert sizes[0] != sizes[2]
    assert stored(f"{tmp_path}/a3.bin.zst") == stored(f"{build(f'{tmp_path}/c', 'bin.zst')}.bin.zst")


@pytest.mark.skipif(shutil.which("zstd") is None, reason="needs the zstd command")
def test_zstd_restores_the_exact_bin(tmp_path: Path) -> None:
    prefix = build(f"{tmp_path}/en", "bin.zst")
    subprocess.run(["zstd", "-q", "-d", f"{prefix}.bin.zst"], check=True)
    assert stored(f"{prefix}.bin") == TOKENS.tobytes()


def test_a_plain_one_wins_where_both_lie_there(prefix: str) -> None:
    build(prefix, "bin.zst")
    with fsspec.open(f"{prefix}.bin", "wb") as file:
        file.write(bytes(2 * len(TOKENS)))
    assert not IndexedDataset(prefix)[2].any()


@pytest.mark.parametrize("order", [["bin", "bin.zst"], ["bin.zst", "bin"], ["bin", "bin"], ["bin.zst", "bin.zst"]])
def test_a_new_dataset_leaves_nothing_that_could_be_taken_for_it(prefix: str, order: list[str]) -> None:
    """A stale .bin would win over the new .bin.zst, and stale sums would call the new .bin damaged."""
    build(prefix, order[0], checksums=order[0] == "bin")
    build(prefix, order[1], DOCUMENTS[:3])
    assert names(prefix) == [order[1], "idx"]
    assert len(IndexedDataset(prefix)) == 3


def test_a_builder_that_is_not_finalized_leaves_the_old_one_whole(prefix: str) -> None:
    build(prefix, checksums=True)
    for end in ("bin", "bin.zst"):
        with IndexedDatasetBuilder(f"{prefix}.{end}", np.uint16) as builder:
            builder.add_document([1], [1])
    assert names(prefix) == ["bin", "bin.xxh3", "idx"]
    assert (IndexedDataset(prefix)[2] == DOCUMENTS[2].tokens).all()


@pytest.mark.parametrize("how", [{"end": "bin.zst"}, {"end": "bin", "checksums": True}])
def test_a_forked_child_that_closes_its_copy_leaves_its_parents_builder_alone(how: dict[str, Any], tmp_path) -> None:
    """Batches are with threads then, and those are not in the child."""
    tokens = np.tile(TOKENS, 30)
    end = how.pop("end")
    with IndexedDatasetBuilder(f"{tmp_path}/en.{end}", np.uint16, **how) as builder:
        builder.add_document(tokens, [len(tokens)])
        child = forked(builder.close)
        assert ended_well(child)
        builder.add_document(tokens, [len(tokens)])
        builder.finalize(f"{tmp_path}/en.idx")
    assert [(each == tokens).all() for each in IndexedDataset(f"{tmp_path}/en")] == [True, True]


def test_sums_appear_between_the_tokens_and_the_index(tmp_path: Path, monkeypatch) -> None:
    build(f"{tmp_path}/en", checksums=True)
    seen = []
    for name in ("replace", "unlink"):
        really = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *paths, really=really: (really(*paths), seen.append(names(f"{tmp_path}/en")))
        )
    build(f"{tmp_path}/en", "bin", DOCUMENTS[:3], checksums=True)
    assert seen == [["bin", "bin.xxh3"], ["bin"], ["bin"], ["bin", "bin.xxh3"], ["bin", "bin.xxh3", "idx"]]


def test_sums_that_cannot_be_written_leave_the_old_dataset(tmp_path: Path) -> None:
    build(f"{tmp_path}/en")
    (tmp_path / "en.bin.xxh3").mkdir()
    with pytest.raises(OSError, match=r"en.bin.xxh3"):
        build(f"{tmp_path}/en", "bin", DOCUMENTS[:3], checksums=True)
    os.rmdir(tmp_path / "en.bin.xxh3")
    assert names(f"{tmp_path}/en") in (["bin", "idx"], ["bin"])  # the old one, or none; never a mixture
    if IndexedDataset.exists(f"{tmp_path}/en"):
        assert len(IndexedDataset(f"{tmp_path}/en")) == 5


@pytest.mark.parametrize(
    ("end", "options", "message"),
    [
        ("bin", {"compression_level": 3}, r"en.bin: compression_level 3, needed a name that ends in .bin.zst"),
        ("bin.zst", {"checksums": True}, r"en.bin.zst: checksums=True, needed a plain .bin"),
        ("bin.zst", {"compression_level": 77}, r"compression_level \(--compress\): found 77, needs 1 to 22"),
    ],
)
def test_options_that_contradict_the_name_make_no_file(end, options, message, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        IndexedDatasetBuilder(f"{tmp_path}/en.{end}", np.uint16, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_object_replaced_after_pickling_is_refused(tmp_path: Path) -> None:
    prefix = build(f"{tmp_path}/en", "bin.zst")
    pickled = pickle.dumps(IndexedDataset(prefix))
    os.utime(f"{prefix}.bin.zst", (1, 1))
    with pytest.raises(ObjectChangedError, match=r"en.bin: changed since it was pickled \(size .*, now size .*\)"):
        pickle.loads(pickled)[0]


def test_the_layers_are_those_that_are_needed(s3: Bucket, tmp_path: Path, monkeypatch) -> None:
    build(f"{tmp_path}/en", checksums=True)
    far = build(f"{s3.fresh()}/en", checksums=True)
    assert layers(IndexedDataset(f"{tmp_path}/en").bin_reader) == [LocalFile]
    assert layers(IndexedDataset(far).bin_reader)[:2] == [ChunkCache, CheckedObject]
    monkeypatch.setenv("BINIDX_VERIFY", "0")
    assert CheckedObject not in layers(IndexedDataset(far).bin_reader)
    monkeypatch.setenv("BINIDX_VERIFY", "1")
    assert layers(IndexedDataset(f"{tmp_path}/en").bin_reader) == [CheckedObject, LocalFile]
    packed = IndexedDataset(build(f"{tmp_path}/packed", "bin.zst")).bin_reader
    assert layers(packed) == [ChunkCache, SegmentedObject, LocalFile]
    assert isinstance(packed, ChunkCache)
    assert (packed.store, packed.chunk_bytes) == (SEGMENTS, 65536)
    small = open_object(f"{build(f'{s3.fresh()}/en', 'bin.zst')}.bin.zst")
    assert isinstance(small, ChunkCache)
    assert small.store is STORE
    assert layers(open_object(f"{tmp_path}/packed.bin.zst", codec="raw")) == [LocalFile]


def test_checksums_that_are_demanded_must_be_there(prefix: str, monkeypatch) -> None:
    build(prefix)
    options = {"binidx": {"verify": True}}
    with pytest.raises(
        ObjectNotFoundError, match=r"en.bin.xxh3: no such (file|object); BINIDX_VERIFY=1 needs it, binidx conv"
    ):
        IndexedDataset(prefix, storage_options=options)
    build(prefix, "bin.zst")
    assert len(IndexedDataset(prefix, storage_options=options)) == 5


def overwrite(uri: str, change: Any) -> None:
    data = bytearray(stored(uri))
    change(data)
    with fsspec.open(uri, "wb") as file:
        file.write(data)


def flip(data: bytearray) -> None:
    data[len(data) // 2] ^= 1


@pytest.mark.parametrize(("end", "what"), [("bin", "block 6"), ("bin.zst", "segment 1 is damaged")])
def test_a_flipped_bit_is_an_error_that_names_the_place(prefix: str, end: str, what: str) -> None:
    build(prefix, end, checksums=end == "bin")
    overwrite(f"{prefix}.{end}", flip)
    dataset = IndexedDataset(prefix, storage_options={"binidx": {"verify": True}})
    with pytest.raises(FormatError, match=rf"en.{end}: {what}"):
        dataset[:]
    assert (dataset[0] == DOCUMENTS[0].tokens).all()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (DOCUMENTS[:3], r"en.bin.xxh3 is for 220012; "),
        ([*DOCUMENTS[::-1]], r"other blocks differ, too: .*is of other data"),
    ],
)
def test_sums_left_behind_by_another_tool_are_called_stale(
    prefix: str, documents, message: str, tmp_path: Path
) -> None:
    build(prefix, checksums=True)
    other = build(f"{tmp_path}/other", "bin", documents)
    for end in ("bin", "idx"):
        with fsspec.open(f"{prefix}.{end}", "wb") as file:
            file.write(stored(f"{other}.{end}"))
    options = {"binidx": {"verify": True}}
    with pytest.raises(FormatError, match=message):
        IndexedDataset(prefix, storage_options=options)[:]
    assert len(IndexedDataset(prefix, storage_options={"binidx": {"verify": False}})[:]) == len(documents)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    build(f"{tmp_path}/en", checksums=True)
    build(f"{tmp_path}/zst", "bin.zst")
    with http_objects({f"/{path.name}": path.read_bytes() for path in tmp_path.iterdir()}) as server:
        yield server


def asked(server: Server) -> list[tuple[str, str]]:
    return [(method, path[1:].partition(".")[2]) for method, path, _ in server.requests]


def test_a_compressed_one_is_found_and_opened_by_one_request_for_its_end(server: Server) -> None:
    IndexedDataset(f"{server.endpoint}/zst")
    found = asked(server)
    assert [each for each in found if each[1] == "bin.zst"] == [("GET", "bin.zst"), ("HEAD", "bin.zst")]  # as it was?
    assert [where for _, path, where in server.requests if path == "/zst.bin.zst"] == ["bytes=-65536", None]
    before = len(server.requests)
    assert (IndexedDataset(f"{server.endpoint}/zst")[4] == DOCUMENTS[4].tokens).all()
    assert asked(server)[before:].count(("GET", "bin.zst")) == 2
    before = len(server.requests)
    open_object(f"{server.endpoint}/zst.bin.zst")
    assert asked(server)[before:] == [("GET", "bin.zst")]


def test_a_server_that_knows_no_suffix_is_asked_for_the_end_then(server: Server) -> None:
    server.behaviour = "no suffix"
    assert (IndexedDataset(f"{server.endpoint}/zst")[4] == DOCUMENTS[4].tokens).all()
    wheres = [where for _, path, where in server.requests if path == "/zst.bin.zst"]
    size = len(server.objects["/zst.bin.zst"])
    assert wheres[:2] == ["bytes=-65536", f"bytes={max(size - 65536, 0)}-{size - 1}"]


def test_the_sums_of_a_read_come_with_it_and_stay(server: Server) -> None:
    dataset = IndexedDataset(f"{server.endpoint}/en")
    assert asked(server).count(("GET", "bin.xxh3")) == 1  # all of them: 64 KiB are the sums of 128 MiB
    assert (dataset[2] == DOCUMENTS[2].tokens).all()
    assert asked(server).count(("GET", "bin.xxh3")) == 1


def test_a_store_that_refuses_to_tell_is_taken_to_have_none(server: Server) -> None:
    """S3 says 403 of what is not there to whoever may not list."""
    server.statuses = {f"/{name}": 403 for name in ("en.bin.zst", "en.bin.xxh3", "zst.bin")}
    server.objects.pop("/zst.bin", None)
    assert CheckedObject not in layers(IndexedDataset(f"{server.endpoint}/en").bin_reader)
    assert (IndexedDataset(f"{server.endpoint}/en")[2] == DOCUMENTS[2].tokens).all()
    assert (IndexedDataset(f"{server.endpoint}/zst")[2] == DOCUMENTS[2].tokens).all()


@pytest.mark.parametrize("status", [403, 500])
def test_a_start_goes_on_without_checksums_that_cannot_be_looked_up_and_says_so(
    server: Server, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    server.statuses["/en.bin.xxh3"] = status
    dataset = IndexedDataset(f"{server.endpoint}/en", storage_options={"binidx": {"outage_seconds": 0}})
    assert (dataset[2] == DOCUMENTS[2].tokens).all()
    assert CheckedObject not in layers(dataset.bin_reader)
    (warning,) = [record.getMessage() for record in caplog.records]
    uri = re.escape(f"{server.endpoint}/en.bin")
    assert re.match(f"{uri}: read without checksums, as these could not be looked up: {uri}.xxh3: .*{status}", warning)


@pytest.mark.parametrize("status", [403, 500])
def test_required_checksums_that_cannot_be_looked_up_end_the_start(server: Server, status: int) -> None:
    server.statuses["/en.bin.xxh3"] = status
    with pytest.raises(StorageError, match=r"en\.bin\.xxh3: "):
        IndexedDataset(f"{server.endpoint}/en", storage_options={"binidx": {"outage_seconds": 0, "verify": True}})


def test_checksums_that_are_absent_are_not_warned_of(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    del server.objects["/en.bin.xxh3"]
    assert (IndexedDataset(f"{server.endpoint}/en")[2] == DOCUMENTS[2].tokens).all()
    assert not caplog.records


@pytest.mark.parametrize("end", ["bin.xxh3", "bin.zst", "bin"])
def test_a_lookup_has_the_deadline_of_the_settings(server: Server, end: str) -> None:
    """While the server holds its answer: no timer but this one can end the lookup."""
    gate = server.gates[f"/en.{end}"] = Gate()
    location = Location(f"{server.endpoint}/en.{end}", {"binidx": {"deadline_seconds": 3_600, "concurrency": 77}})
    found = OPENS.submit(lambda: find_object(location))
    gate.came.wait()
    deadlines = {read.settings.deadline_seconds for _, read, _, _ in scheduler(77).schedule.in_flight.values()}
    gate.opened.set()
    assert deadlines == {3_600}
    assert (found.result() is not None) == (end != "bin.zst")


def test_what_is_looked_up_is_what_opening_would_see(prefix: str, server: Server) -> None:
    build(prefix, "bin.zst")
    for uri in (f"{prefix}.bin.zst", f"{server.endpoint}/en.bin.xxh3"):
        whole = stored(uri)
        for end_bytes in (0, 100, 1 << 20):
            found = find_object(Location.of(uri), end_bytes=end_bytes)
            assert found is not None
            assert found.info.identity == object_identity(Location.of(uri))
            assert found.end in (b"", whole[-end_bytes:])
            assert bool(found.end) == (end_bytes > 0 and uri.startswith(("s3", "http")))
            assert find_object(Location.of(f"{uri}.not"), end_bytes=end_bytes) is None


def test_nothing_there_names_the_plain_one(prefix: str) -> None:
    build(prefix)
    delete_object(Location.of(f"{prefix}.bin"))
    assert not IndexedDataset.exists(prefix)
    with pytest.raises(ObjectNotFoundError, match=r"en\.bin: no such"):
        IndexedDataset(prefix)
