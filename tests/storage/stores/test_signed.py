"""HEAD requests and deletions on S3: identities, absent and busy stores, versions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import Bucket
from fsspec.asyn import sync
from helpers.proxied_store import distant_store
from servers.http_objects import Server, http_objects

from binidx.errors import AccessError
from binidx.storage.adapters import InMemory
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.requests.remote_object import find_object, object_exists, object_identity
from binidx.storage.stores.fsspec_store import open_filesystem
from binidx.storage.stores.s3 import S3Store
from binidx.storage.stores.s3_requests import body_headers
from binidx.storage.writing.concatenate import SourcePiece, open_join
from binidx.storage.writing.publish import create_object, delete_object, write_object

KEYS = {"key": "k", "secret": "s"}


def options_of(server: Server, fast: bool) -> dict[str, Any]:
    return {"endpoint_url": server.endpoint, **KEYS, "binidx": {"fast": fast}}


@pytest.mark.parametrize("etag", [None, lambda _: "", lambda _: 'W/"1"', lambda _: "bare"])
def test_what_identifies_an_object_is_the_same_by_either_way(etag: Callable[[bytes], str] | None) -> None:
    with http_objects({"/b/k": bytes(10)}) as server:
        server.etag = etag
        either = [options_of(server, fast) for fast in (True, False)]
        found = [find_object(Location.of("s3://b/k", options)) for options in either]
        told = [object_identity(Location.of("s3://b/k", options)) for options in either]
    told += [each.info.identity for each in found if each]
    assert told == [told[0]] * 4
    assert len(told[0]) == 2


def test_where_listing_is_forbidden_what_is_not_there_is_asked_for_once() -> None:
    with http_objects({}) as server:
        server.behaviour, options = "forbidden", options_of(server, True)
        with pytest.raises(AccessError):
            object_exists(Location.of("s3://b/k", options))
        before = len(server.requests)
        assert find_object(Location.of("s3://b/k", options)) is None
        assert find_object(Location.of("s3://b/l", options)) is None
        assert len(server.requests) - before == 2


def test_a_store_that_says_404_to_a_deletion_has_no_such_object(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0, faults={"404": 1.0}, only="all") as far:
        delete_object(Location.of(f"{far.base}/a", far.options()))
        assert [each.method for each in far.proxy.log()] == ["DELETE"]


def test_a_version_is_looked_at_by_either_way(s3: Bucket) -> None:
    base, aware, versions = s3.server.make_bucket("versions"), {"version_aware": True}, []
    fs, _ = open_filesystem(base, aware)
    fs.call_s3("put_bucket_versioning", Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    for size in (10, 20):
        with create_object(Location.of(f"{base}/a", aware)) as out:
            out.write(bytes(size))
        versions.append(object_identity(Location.of(f"{base}/a", aware))["version"])
    for fast in (True, False):
        options = {**aware, "binidx": {"fast": fast}}
        for size, version in zip((10, 20), versions, strict=True):
            uri = f"{base}/a?versionId={version}"
            found = [find_object(Location.of(uri, options), end_bytes=end_bytes) for end_bytes in (0, 5)]
            assert [each and each.info.size for each in found] == [size, size]
            assert object_identity(Location.of(uri, options))["size"] == size


def test_objects_and_parts_are_written_copied_and_deleted_without_the_driver(
    s3: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    base, options = s3.server.make_bucket("undriven"), {"default_block_size": 5 << 20}
    small, large, joined = (Location.of(f"{base}/ä {name}+", options) for name in ("small", "large", "joined"))
    blocks = [bytes([number]) * (6 << 20) for number in range(2)]
    with caplog.at_level("DEBUG", logger="s3fs"):
        write_object(small, [])
        assert object_identity(small)["size"] == 0
        write_object(small, [b"few"])
        write_object(large, blocks)
        reader = open_object(large)
        pieces = [SourcePiece(reader, 1, reader.size), SourcePiece(InMemory("", b"end"), 0, 3)]
        join = open_join(joined, pieces, options)
        join.fill(lambda _: None)
        join.publish(lambda: None)
        assert bytes(read_whole(open_object(joined))) == (b"".join(blocks) + b"end")[1:]
        assert object_identity(small)["size"] == 3
        for location in (small, large, joined):
            delete_object(location)
            assert not object_exists(location)
    assert join.how == "server"
    assert [record.message for record in caplog.records if record.message.startswith("CALL: ")] == []


def test_a_store_refuses_a_part_that_changed_on_the_way(s3: Bucket) -> None:
    store = S3Store(f"{s3.server.make_bucket('changed')}/a")
    fields, headers = f"partNumber=1&uploadId={store.upload(store.uri).token}", body_headers([memoryview(b"sent")])
    statuses = []
    for data in (b"sent", b"seNt"):
        send = partial(store.request, data=[memoryview(data)], fields=fields)
        answer = sync(store.fs.loop, send, "PUT", store.object_of(store.uri), headers)
        statuses.append(answer and answer.status)
    assert statuses == [200, 400]
