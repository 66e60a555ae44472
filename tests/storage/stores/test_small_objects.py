"""Small objects and parts on S3: the store has the bytes that were sent, in few requests, whatever fails."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest
from helpers.proxied_store import Distant, distant_store

from binidx.errors import AccessError, ObjectNotFoundError
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import find_object, object_exists, object_identity, read_small
from binidx.storage.stores.fsspec_store import open_filesystem
from binidx.storage.writing.multipart import BUFFER_CHUNK_BYTES
from binidx.storage.writing.publish import create_object, delete_object
from binidx.storage.writing.staging import new_buffer, written_view

DATA = random.Random(0).randbytes(3 * BUFFER_CHUNK_BYTES + 1)


def put(far: Distant, name: str, data: bytes, step: int = 100_000, **options: object) -> str:
    uri = f"{far.base}/{name}"
    with create_object(Location.of(uri, {**far.options(), **options})) as out:
        for start in range(0, len(data), step):
            out.write(data[start : start + step])
    return uri


@pytest.mark.parametrize("size", [0, 1, BUFFER_CHUNK_BYTES, BUFFER_CHUNK_BYTES + 1, len(DATA)])
def test_what_was_put_is_read_in_one_request_each(request: pytest.FixtureRequest, tmp_path: Path, size: int) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        uri = put(far, "a", DATA[:size])
        assert read_small(Location.of(uri, far.options())) == DATA[:size]
        assert read_small(Location.of(f"{far.base}/none", far.options())) is None
        log = far.proxy.log()
    assert [(each.method, each.status) for each in log] == [("PUT", 200), ("GET", 206 if size else 416), ("GET", 404)]


def test_a_look_and_a_deletion_are_one_request_each(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        uri, options = put(far, "a", DATA[:1000]), far.options()
        far.proxy.reset()
        found = object_identity(Location.of(uri, options))
        assert object_exists(Location.of(uri, options))
        delete_object(Location.of(uri, options))
        assert not object_exists(Location.of(uri, options))
        assert find_object(Location.of(uri, options)) is None
        delete_object(Location.of(uri, options))
        log = [(each.method, each.status) for each in far.proxy.log()]
        assert found["size"] == 1000
        uri = put(far, "a", DATA[:1000])
        by_driver = object_identity(Location.of(uri, {**options, "binidx": {"fast": False}}))
    assert found == by_driver
    assert log == [("HEAD", 200)] * 2 + [("DELETE", 204)] + [("HEAD", 404)] * 2 + [("DELETE", 204)]


def test_a_folder_is_told_of_to_who_wants_to_open_it(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        put(far, "folder/a", DATA[:10])
        uri, options = f"{far.base}/folder", far.options()
        assert not object_exists(Location.of(uri, options))
        with pytest.raises(ObjectNotFoundError, match="found a directory, needed an object"):
            object_identity(Location.of(uri, options))


@pytest.mark.parametrize("fault", ["503", "500", "reset", "close"])
def test_a_look_and_a_deletion_that_fail_are_made_again(
    request: pytest.FixtureRequest, tmp_path: Path, fault: str
) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        uri, options = put(far, "a", DATA[:1000]), far.options()
        far.proxy.become(script=[fault], only="all")
        assert object_identity(Location.of(uri, options))["size"] == 1000
        far.proxy.become(script=[fault], only="all")
        delete_object(Location.of(uri, options))
        assert far.proxy.counts().faults[fault] == 2
        deletions = [each.method for each in far.proxy.log()].count("DELETE")
        assert deletions >= 2  # the store may have done what it did not answer
        assert not object_exists(Location.of(uri, options))


@pytest.mark.parametrize("fault", ["503", "500", "reset", "close", "reset-late", "truncate"])
def test_a_request_that_fails_is_sent_again(request: pytest.FixtureRequest, tmp_path: Path, fault: str) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0, script=[fault], only="all") as far:
        uri = put(far, "a", DATA)
        far.proxy.become(script=[fault])
        assert read_small(Location.of(uri, far.options())) == DATA


def test_an_object_has_the_metadata_that_was_asked_for(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        wanted = {"s3_additional_kwargs": {"Metadata": {"mine": "yes"}, "ContentType": "text/plain"}}
        small, large = (
            put(far, "a", DATA, **wanted),
            put(far, "b", bytes(6 << 20), default_block_size=5 << 20, **wanted),
        )
        for uri in (small, large):
            fs, path = open_filesystem(uri, far.options())
            bucket, key, _ = fs.split_path(path)
            head = fs.call_s3("head_object", Bucket=bucket, Key=key)
            assert (head["Metadata"].get("mine"), head["ContentType"]) == ("yes", "text/plain")


def test_who_asks_pays_where_he_says_so(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        uri = put(far, "a", DATA, requester_pays=True)
        assert read_small(Location.of(uri, {**far.options(), "requester_pays": True})) == DATA
        assert [each.status for each in far.proxy.log()] == [200, 206]


def test_an_error_is_the_drivers(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        with pytest.raises(AccessError):
            put(far, "a", DATA, secret="wrong")
        with pytest.raises(AccessError):
            read_small(Location.of(f"{far.base}/a", {**far.options(), "secret": "wrong"}))


@pytest.mark.parametrize("fault", [None, "503", "truncate"])
@pytest.mark.parametrize("size", [11 << 20, 10 << 20])
def test_a_stream_is_whole_or_not_there(
    request: pytest.FixtureRequest, tmp_path: Path, size: int, fault: str | None
) -> None:
    data = random.Random(1).randbytes(size)
    each = [] if fault is None else [None, None, fault]  # of a part that is on its way
    with distant_store("s3 fast", request, tmp_path, delay_ms=0, script=each, only="all") as far:
        uri, options = f"{far.base}/a", {**far.options(), "default_block_size": 5 << 20}
        with create_object(
            Location.of(uri, options), before_publish=lambda: read_small(Location.of(uri, options)) is None or 1 / 0
        ) as out:
            for start in range(0, size, 999_999):
                out.write(memoryview(data)[start : start + 999_999])
        fs, path = open_filesystem(uri, far.options())
        assert fs.cat_file(path) == data
        sent = [each for each in far.proxy.log() if each.method == "PUT" and each.status == 200]
    assert len(sent) == -(-size // (5 << 20))


def test_a_stream_that_is_broken_off_leaves_nothing(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    with distant_store("s3 fast", request, tmp_path, delay_ms=0) as far:
        uri, options = f"{far.base}/a", {**far.options(), "default_block_size": 5 << 20}
        with contextlib.suppress(KeyError), create_object(Location.of(uri, options)) as out:
            out.write(bytes(11 << 20))
            raise KeyError
        assert read_small(Location.of(uri, options)) is None
        fs, path = open_filesystem(uri, far.options())
        bucket, key, _ = fs.split_path(path)
        assert not fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads")


def test_what_is_held_is_what_was_written() -> None:
    rng, held, written = random.Random(2), new_buffer(6 * BUFFER_CHUNK_BYTES), b""
    while len(written) < 4 * BUFFER_CHUNK_BYTES:
        data = rng.randbytes(rng.choice([0, 1, 1000, BUFFER_CHUNK_BYTES, BUFFER_CHUNK_BYTES + 3]))
        assert held.write(data) == len(data)
        written += data
    assert written_view(held) == written
    assert held.tell() == len(written)
