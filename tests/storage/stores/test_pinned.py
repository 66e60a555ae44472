"""What was opened is what is read: an object that is replaced under its reader is an error, never a mixture."""

from __future__ import annotations

import pickle
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import Bucket
from servers.http_objects import Server, http_objects

from binidx.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from binidx.storage.cache.memory import ChunkCache, ChunkStore
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.writing.publish import create_object, delete_object

OLD, SAME_SIZE, LARGER, SMALLER = (
    letter * size for letter, size in ((b"o", 300), (b"n", 300), (b"l", 400), (b"s", 99))
)


@pytest.fixture
def web() -> Iterator[Server]:
    with http_objects({"/data": OLD, "/bucket/data": OLD}) as server:
        yield server


Replace = Callable[[bytes | None], None]


@pytest.fixture(params=["file", "memory", "s3", "gs", "http"])
def replaced(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Replace]:
    """A URI that holds OLD, and what puts other bytes there, or nothing."""
    if request.param == "http":
        server: Server = request.getfixturevalue("web")
        return f"{server.endpoint}/data", lambda data: serve(server, data)
    if request.param in ("s3", "gs"):
        bucket = request.getfixturevalue(request.param)
        base = f"{bucket if request.param == 'gs' else bucket.uri}/{uuid.uuid4().hex}"
    else:
        base = f"{request.param}://{tmp_path}"
    uri = f"{base}/data"
    store(uri, OLD)
    return uri, lambda data: store(uri, data)


def store(uri: str, data: bytes | None) -> None:
    time.sleep(0.02)  # a file's time of change is as fine as the kernel's tick
    if data is None:
        delete_object(Location.of(uri))
        return
    with create_object(Location.of(uri)) as writer:
        writer.write(data)


def serve(server: Server, data: bytes | None) -> None:
    server.objects.pop("/data")
    if data is not None:
        server.objects["/data"] = data


def open_bare(uri: str) -> RemoteObject:
    reader = open_object(uri, mmap=False, cache=False)
    assert isinstance(reader, RemoteObject)
    return reader


@pytest.mark.parametrize("new", [SAME_SIZE, LARGER, SMALLER], ids=["same size", "larger", "smaller"])
@pytest.mark.parametrize("read_before", [False, True])
def test_a_replaced_object_is_an_error(replaced: tuple[str, Replace], new: bytes, read_before: bool) -> None:
    uri, replace = replaced
    reader = open_bare(uri)
    if read_before:
        reader.read([(0, 10)])
    twin = pickle.loads(pickle.dumps(reader))
    replace(new)
    for each in (reader, twin):
        with pytest.raises(ObjectChangedError, match=f"^{re.escape(uri)}: changed since it was opened .*, now .*; "):
            each.read([(10, 20), (100, 250)])
    assert bytes(open_bare(uri).read([(10, 20)])[0]) == new[10:20]


def test_an_error_of_change_tells_both_etags(web: Server) -> None:
    reader = open_bare(f"{web.endpoint}/data")
    serve(web, SAME_SIZE)
    old, new = (f'size 300, etag "{digest}' for digest in (reader.identity["etag"][1:], ""))
    with pytest.raises(
        ObjectChangedError, match=rf": changed since it was opened \({old}, now {new}.*\); open it again$"
    ):
        reader.read([(0, 10)])


def test_a_chunk_cache_never_mixes_two_contents(replaced: tuple[str, Replace]) -> None:
    uri, replace = replaced
    reader = ChunkCache(RemoteObject(Location.of(uri)), chunk_bytes=100, store=ChunkStore(100_000))
    reader.read([(0, 10)])
    replace(SAME_SIZE)
    assert bytes(reader.read([(50, 60)])[0]) == OLD[50:60]
    with pytest.raises(ObjectChangedError):
        reader.read([(50, 60), (120, 130)])


def test_a_deleted_object_is_not_found(replaced: tuple[str, Replace]) -> None:
    uri, replace = replaced
    reader = open_bare(uri)
    replace(None)
    with pytest.raises(ObjectNotFoundError, match=f"^{re.escape(uri)}: no such object"):
        reader.read([(0, 10)])


def test_an_object_put_again_with_the_same_bytes_is_the_same_on_s3(s3: Bucket) -> None:
    uri = f"{s3.fresh()}/data"
    store(uri, OLD)
    reader = open_bare(uri)
    store(uri, OLD)
    assert bytes(reader.read([(0, 10)])[0]) == OLD[:10]


@pytest.fixture(params=["http", "s3"])
def bare(request: pytest.FixtureRequest, web: Server) -> Callable[[], RemoteObject]:
    """An object of a server that does as it is told, through either protocol."""
    if request.param == "http":
        return lambda: RemoteObject(Location.of(f"{web.endpoint}/bucket/data"))
    return lambda: RemoteObject(
        Location.of("s3://bucket/data", {"endpoint_url": web.endpoint, "key": "k", "secret": "s"})
    )


def test_the_etag_goes_with_every_request(bare: Callable[[], RemoteObject], web: Server) -> None:
    reader = bare()
    web.conditions.clear()
    reader.read([(0, 10)])
    assert web.conditions == [reader.identity["etag"]]


@pytest.mark.parametrize("new", [SMALLER, b""], ids=["shorter than asked", "ends before it"])
def test_without_an_etag_a_read_that_fails_asks_whether_it_changed(
    bare: Callable[[], RemoteObject], web: Server, new: bytes
) -> None:
    web.etag = None
    reader = bare()
    assert bytes(reader.read([(0, 10)])[0]) == OLD[:10]
    assert web.conditions == [None] * len(web.conditions)
    web.objects["/bucket/data"] = new
    with pytest.raises(ObjectChangedError, match=r"\(size 300.*, now size "):
        reader.read([(0, 10), (90, 110)])


def test_a_weak_etag_is_no_condition(web: Server) -> None:
    web.etag = lambda data: f'W/"{len(data)}"'
    reader = RemoteObject(Location.of(f"{web.endpoint}/data"))
    assert bytes(reader.read([(0, 10)])[0]) == OLD[:10]
    assert web.conditions == [None] * len(web.conditions)


def test_a_short_answer_of_an_unchanged_object_is_still_short(bare: Callable[[], RemoteObject], web: Server) -> None:
    reader = bare()
    web.behaviour = "short"
    with pytest.raises(ShortReadError, match=": 9 bytes for range 0-10, needed 10"):
        reader.read([(0, 10)])


def test_a_store_that_refuses_its_own_etag_is_not_called_changed(bare: Callable[[], RemoteObject], web: Server) -> None:
    reader = bare()
    web.behaviour = "contrary"
    with pytest.raises(StorageError) as caught:
        reader.read([(0, 10)])
    assert not isinstance(caught.value, ObjectChangedError)
