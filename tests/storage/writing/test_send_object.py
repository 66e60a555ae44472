"""Objects sent from memory: whole, and known by the store's own answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers.build_race import CarelessFileSystem

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.requests.remote_object import object_exists, object_identity
from binidx.storage.writing import publish
from binidx.storage.writing.publish import put_if_absent, send_object
from binidx.storage.writing.staging import ONE_PUT


def some_bytes(count: int) -> memoryview:
    return memoryview(np.random.default_rng(count).integers(0, 256, count, np.uint8).data)


@pytest.mark.parametrize("size", [0, 1, 1000, ONE_PUT, ONE_PUT + 1, 2 * ONE_PUT + 5])
def test_the_answer_to_a_put_identifies_what_stands_there(s3: Any, size: int) -> None:
    uri, data = f"{s3.fresh()}/object", some_bytes(size)
    identity = send_object(Location.of(uri), data)
    assert identity == object_identity(Location.of(uri))
    assert fsspec.open(uri).open().read() == data
    assert send_object(Location.of(uri), some_bytes(size + 1)) == object_identity(Location.of(uri)) != identity


@pytest.mark.parametrize("size", [0, 1000, 300_000])
def test_what_has_our_md5_on_gcs_is_known_as_ours(gs: str, size: int) -> None:
    uri, data = f"{gs}/sent/{size}", some_bytes(size)
    identity = send_object(Location.of(uri), data)
    assert identity == object_identity(Location.of(uri))
    assert "generation" in identity


def test_another_writers_object_on_gcs_is_not_taken_for_ours(gs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, look = f"{gs}/sent/raced", publish.find_object

    def look_later(location: Location) -> Any:
        fsspec.filesystem("gs").pipe_file(location.uri, bytes(some_bytes(12)))
        return look(location)

    monkeypatch.setattr(publish, "find_object", look_later)
    assert send_object(Location.of(uri), some_bytes(10)) is None
    assert read_whole(open_object(uri, cache=False)) == some_bytes(12)


def test_a_store_that_says_nothing_of_what_it_took_gives_no_identity() -> None:
    assert send_object(Location.of("memory://sent/object"), some_bytes(ONE_PUT + 5)) is None
    assert fsspec.filesystem("memory").cat("/sent/object") == some_bytes(ONE_PUT + 5)


@pytest.mark.parametrize("size", [10, ONE_PUT + 1])
def test_directories_are_made_where_a_store_has_them(size: int, tmp_path: Path) -> None:
    assert CarelessFileSystem.protocol == "careless"
    send_object(Location.of(f"careless://{tmp_path}/a/b/object"), some_bytes(size))
    assert (tmp_path / "a/b/object").read_bytes() == some_bytes(size)
    assert put_if_absent(Location.of(f"careless://{tmp_path}/c/object"), b"first")


@pytest.mark.parametrize("size", [10, ONE_PUT + 1])
def test_a_missing_bucket_is_an_error_that_names_it(s3: Any, size: int) -> None:
    with pytest.raises(StorageError, match=r"^s3://no-such-bucket-of-ours: no such bucket; correct the name"):
        send_object(Location.of("s3://no-such-bucket-of-ours/object"), some_bytes(size))


def test_a_part_that_cannot_be_sent_leaves_neither_object_nor_upload(s3: Any) -> None:
    uri = f"{s3.fresh()}/object"
    fs, path = fsspec.url_to_fs(uri)
    bucket, key = path.split("/", 1)
    with pytest.raises(StorageError, match="TypeError"):
        send_object(Location.of(uri), [some_bytes(10)] * (ONE_PUT + 1))  # type: ignore[arg-type]
    assert not object_exists(Location.of(uri))
    assert not fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads")
