"""oss:// against a server that computes the signatures of what it gets: contract, versions, ranges, uploads, errors."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from servers.oss import KEY, REGION, OssServer, oss_server

import binidx
from binidx.corpus.convert import convert_dataset
from binidx.errors import AccessError, ConfigError, ObjectChangedError, ObjectNotFoundError, UnreachableError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.requests.remote_object import RemoteObject, find_object, read_small
from binidx.storage.store_protocols import Store
from binidx.storage.stores.fsspec_store import list_stored_files
from binidx.storage.stores.oss import OssStore
from binidx.storage.writing.publish import create_object, put_if_absent
from binidx.testing import check_object_store, check_range_reader
from binidx.tools import main

with warnings.catch_warnings(action="ignore"):  # invalid escapes in oss2, where it was not compiled before
    pytest.importorskip("ossfs", reason="needs ossfs; pip install 'binidx[oss]'")
pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")  # oss2's

DATA = bytes(range(250)) * 400
FOLDER = "oss://corpus/a folder+ü%41"


@pytest.fixture
def server() -> Iterator[OssServer]:
    with oss_server() as server, server.in_environment():
        yield server


def put(uri: str, data: bytes, options: dict[str, Any] | None = None) -> Location:
    location = Location.of(uri, options)
    with create_object(location) as out:
        out.write(data)
    return location


@pytest.mark.parametrize("options", [{}, {"region": REGION}], ids=["signature v1", "signature v4"])
def test_it_keeps_the_contract_of_stores(server: OssServer, options: dict[str, Any]) -> None:
    def make(name: str, data: bytes) -> tuple[Store, str]:
        location = put(f"{FOLDER}/{name}", data, options)
        return Location(location.uri, options).store, location.uri

    check_object_store(make)
    assert {status for *_, status in server.requests} <= {200, 204, 206, 404, 409, 412}


def test_its_readers_keep_theirs(server: OssServer) -> None:
    check_range_reader(lambda data: RemoteObject(put(f"{FOLDER}/{len(data)}", data)))


def test_a_range_has_the_bytes_that_were_asked_for_by_one_request_each(server: OssServer) -> None:
    """ossfs 2025.5.0 sends the end of a range as if it were inclusive: one byte too many came."""
    location = put("oss://corpus/en.bin", DATA)
    reader = RemoteObject(location)
    del server.requests[:]
    assert bytes(reader.read([(0, 65_536)])[0]) == DATA[:65_536]
    assert bytes(reader.read([(65_536, len(DATA))])[0]) == DATA[65_536:]
    asked = [where for _, _, where, _ in server.requests]
    assert asked == ["bytes=0-65535", f"bytes=65536-{len(DATA) - 1}"]


def test_the_end_of_an_object_comes_with_the_look_up_also_of_a_smaller_one(server: OssServer) -> None:
    """OSS answers a range that is not inside the object with the whole object and 200."""
    location = put("oss://corpus/en.bin.zst", DATA)
    found = find_object(location, end_bytes=100)
    assert found is not None
    assert (found.info.size, bytes(found.end)) == (len(DATA), DATA[-100:])
    assert found.info.identity == {"size": len(DATA), "etag": server.objects["corpus/en.bin.zst"].etag}
    assert find_object(location + "x", end_bytes=100) is None


@pytest.mark.parametrize("data", [b"", b"x", DATA])
def test_a_small_object_is_read_by_one_request_whatever_its_size(server: OssServer, data: bytes) -> None:
    location = put("oss://corpus/small", data)
    del server.requests[:]
    assert read_small(location) == data
    assert len(server.requests) == 1


def test_an_object_that_is_replaced_is_an_error_and_none_of_its_bytes_are_read(server: OssServer) -> None:
    reader = RemoteObject(put("oss://corpus/en.bin", DATA))
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]
    put("oss://corpus/en.bin", DATA[:10])
    with pytest.raises(ObjectChangedError, match=r"^oss://corpus/en\.bin: changed since it was opened"):
        reader.read([(90_000, 90_010)])


def test_a_dataset_is_written_copied_and_read(server: OssServer) -> None:
    with IndexedDatasetBuilder("oss://corpus/en.bin", np.uint16, checksums=True) as builder:
        for number in range(2_000):
            builder.add_document([number] * 50, [20, 30])
        builder.finalize("oss://corpus/en.idx")
    dataset = IndexedDataset("oss://corpus/en")
    assert [each.tolist() for each in dataset[2:4]] == [[1] * 20, [1] * 30]
    assert (pickle.loads(pickle.dumps(dataset))[3_999] == dataset[3_999]).all()
    convert_dataset("oss://corpus/en", "oss://corpus/copy/en")
    assert bytes(read_whole(open_object("oss://corpus/copy/en.bin"))) == bytes(
        read_whole(open_object("oss://corpus/en.bin"))
    )


def test_datasets_are_merged_by_the_store_and_trained_on(server: OssServer, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("en", "de"):
        with IndexedDatasetBuilder(f"oss://corpus/{name}.bin", np.uint16) as builder:
            for number in range(3_000):
                builder.add_document([number] * 50, [50])
            builder.finalize(f"oss://corpus/{name}.idx")
    assert main(["merge", "oss://corpus/en", "oss://corpus/de", "--to", "oss://corpus/both"]) == 0
    assert "moved by the store, 0 bytes through this process" in capsys.readouterr().out
    both = IndexedDataset("oss://corpus/both")
    assert both[2_999].tolist() + both[3_000].tolist() == [2_999] * 50 + [0] * 50
    blend = {"oss://corpus/en": 0.7, "oss://corpus/de": 0.3}
    train = binidx.load_dataset(blend, sequence_length=64, path_to_cache="oss://corpus/cache")
    again = binidx.load_dataset(blend, sequence_length=64, path_to_cache="oss://corpus/cache")
    assert (train[7]["tokens"] == again[7]["tokens"]).all()
    assert any(name.startswith("corpus/cache/") for name in server.objects)


def test_a_large_object_is_sent_in_parts_and_invisible_until_its_end(server: OssServer) -> None:
    location = Location("oss://corpus/large", {"default_block_size": 200_000})
    with create_object(location) as out:
        for _ in range(10):
            out.write(DATA)
        assert "corpus/large" not in server.objects
    assert bytes(read_whole(open_object("oss://corpus/large"))) == 10 * DATA
    assert server.objects["corpus/large"].etag.endswith('-5"')
    assert not server.uploads


def test_an_interrupted_upload_leaves_no_part(server: OssServer) -> None:
    with pytest.raises(RuntimeError, match="interrupted"):
        put_and_fail(Location("oss://corpus/large", {"default_block_size": 200_000}))
    assert [method for method, *_ in server.requests][-1] == "DELETE"
    assert not server.uploads
    assert not server.objects


def put_and_fail(location: Location) -> None:
    with create_object(location) as out:
        for _ in range(10):
            out.write(DATA)
        raise RuntimeError("interrupted")


def test_a_store_that_is_busy_is_asked_again_also_for_writes(server: OssServer) -> None:
    server.failing = [503]
    assert put_if_absent(Location("oss://corpus/key"), b"first")
    server.failing = [503]
    reader = RemoteObject(Location("oss://corpus/key"))
    server.failing = [500, 503]
    assert bytes(reader.read([(1, 5)])[0]) == b"irst"
    assert not put_if_absent(Location("oss://corpus/key"), b"other")


def test_a_signed_url_is_signed_again_when_it_is_some_minutes_old(server: OssServer) -> None:
    store = OssStore("oss://corpus/key")
    reader = RemoteObject(put("oss://corpus/key", DATA))
    reader.read([(0, 1)])
    route = reader.location.store.route(reader.info)
    before, route.until = route.address, 0.0
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]
    assert route.address is not before
    assert f"OSSAccessKeyId={KEY}&" in store.signed("oss://corpus/key", "GET")


def test_folders_and_patterns_are_listed_over_pages(server: OssServer) -> None:
    for number in range(1_003):
        server.add(f"corpus/text/{number:04}.jsonl", b"{}")
    server.add("corpus/text/deeper/0.jsonl", b"{}")
    store = Location("oss://corpus/text").store
    assert len(store.find("oss://corpus/text", pattern=False)) == 1_004
    assert store.find("oss://corpus/text/100[12].jsonl", pattern=True) == [
        *("oss://corpus/text/1001.jsonl", "oss://corpus/text/1002.jsonl"),
    ]
    assert store.find("oss://corpus/text/*0.jsonl", pattern=True)[-1] == "oss://corpus/text/1000.jsonl"
    assert store.find("oss://corpus/*/*/0.jsonl", pattern=True) == ["oss://corpus/text/deeper/0.jsonl"]
    assert "0001.jsonl" in list_stored_files("oss://corpus/text", {})


def test_credentials_are_those_of_the_options_then_of_the_variables(server: OssServer) -> None:
    put("oss://corpus/key", DATA)
    wrong = {"key": KEY, "secret": "wrong"}
    with pytest.raises(AccessError, match=r"oss://corpus/key: .*OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET"):
        RemoteObject(Location("oss://corpus/key", wrong))
    with pytest.raises(AccessError, match=r"SignatureDoesNotMatch"):
        put("oss://corpus/other", b"x", wrong)
    server.token = "sts-token"
    with pytest.raises(AccessError):
        RemoteObject(Location("oss://corpus/key"))
    for options in ({"token": "sts-token"}, {"token": "sts-token", "region": REGION}):
        given = {**server.options, **options}
        assert bytes(RemoteObject(Location("oss://corpus/key", given)).read([(0, 10)])[0]) == DATA[:10]
        put("oss://corpus/key", DATA, given)


def test_a_token_of_the_variables_does_not_go_with_a_key_of_the_options(
    server: OssServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSS_SESSION_TOKEN", "of-another-key")
    put("oss://corpus/key", DATA, server.options)
    assert RemoteObject(Location("oss://corpus/key", server.options)).size == len(DATA)


def test_a_public_bucket_needs_no_key(server: OssServer, monkeypatch: pytest.MonkeyPatch) -> None:
    put("oss://public/key", DATA)
    monkeypatch.delenv("OSS_ACCESS_KEY_ID")
    assert bytes(RemoteObject(Location("oss://public/key")).read([(3, 9)])[0]) == DATA[3:9]
    put("oss://public/other", DATA)


def test_errors_name_the_object_and_the_way_out(server: OssServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"^oss://corpus/none: no such object"):
        RemoteObject(Location("oss://corpus/none"))
    with pytest.raises(ObjectNotFoundError, match=r"^oss://none: no such bucket"):
        put("oss://none/key", b"x")
    elsewhere = {**server.options, "endpoint": "http://127.0.0.1:1"}
    with pytest.raises(UnreachableError, match=r"^oss://corpus/key: "):
        RemoteObject(Location("oss://corpus/key", {**elsewhere, "binidx": {"deadline_seconds": 5}}))
    monkeypatch.delenv("OSS_ENDPOINT")
    with pytest.raises(ConfigError, match=r"^oss://corpus/key: no endpoint; set OSS_ENDPOINT=https://HOST"):
        assert Location("oss://corpus/key").store
    assert os.environ.get("OSS_ENDPOINT") is None


def test_secrets_stand_in_no_error(server: OssServer) -> None:
    put("oss://corpus/key", DATA)
    reader = RemoteObject(Location("oss://corpus/key"))
    server.failing = [403] * 9
    with pytest.raises(AccessError) as caught:
        reader.read([(0, 10)])
    text = "".join(map(repr, sys.exc_info())) + repr(caught.value) + repr(caught.value.__cause__) + str(reader)
    assert "Signature=" not in text
    assert KEY not in text
