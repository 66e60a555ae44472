"""Locations: a URI with its options, as the user wrote it, resolved once."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from helpers.put_only_store import PutOnlyStore
from helpers.registering import registered_store

from binidx.errors import ConfigError, ObjectNotFoundError
from binidx.storage import effects
from binidx.storage.location import ENDPOINT_VARIABLES, Location

SECRET = {"key": "5ec4e7", "binidx": {"deadline_seconds": 7}}


def test_a_location_keeps_the_text_and_the_options_of_the_user(tmp_path: Path) -> None:
    assert (Location.of("s3://b/en", SECRET).uri, Location.of("s3://b/en", SECRET).options) == ("s3://b/en", SECRET)
    assert Location.of(tmp_path / "en").uri == str(tmp_path / "en")
    location = Location.of("./en", SECRET)
    assert Location.of(location) is location
    assert f"{location}.idx" == "./en.idx"


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("en", "en"),
        ("file:///data/en", "/data/en"),
        ("local:///data/en", "/data/en"),
        ("/data/a::b", "/data/a::b"),
        ("s3://bucket/en", None),
        ("simplecache::s3://bucket/en", None),
    ],
)
def test_a_location_has_a_path_if_it_is_on_this_machine(uri: str, path: str | None) -> None:
    assert Location(uri).local_path == path
    assert (Location(uri).place == "file://") is (path is not None)


def test_a_uri_that_lacks_a_slash_or_the_colon_is_no_folder_of_this_machine() -> None:
    en = "s3://corpus/en"
    for uri, right in (("s3:/corpus/en", en), ("s3//corpus/en", en), ("gs:/me:5ec4e7@b/en", "gs://b/en")):
        with pytest.raises(ConfigError, match=re.escape(f"needs ://; did you mean {right}?")) as caught:
            Location.of(uri)
        assert "5ec4e7" not in str(caught.value)
    for path in ("./s3:/corpus/en", "/data/s3:/corpus/en", "C:/data/en", "file:/data/en", "s3/en", "data//en"):
        assert Location.of(path).uri == path


def test_what_no_file_can_be_named_is_an_error_when_the_path_is_used() -> None:
    location = Location("a\0b")
    with pytest.raises(ObjectNotFoundError, match="not a file name"):
        location.local_path  # noqa: B018


def test_objects_beside_and_below_have_the_same_options() -> None:
    folder = Location("s3://bucket/cache/", SECRET)
    assert (folder / "a.npy").uri == "s3://bucket/cache/a.npy"
    assert (Location("s3://bucket/en", SECRET) + ".bin" + ".zst").uri == "s3://bucket/en.bin.zst"
    assert (folder / "a.npy").options is (folder + "x").options is SECRET
    assert folder.settings.deadline_seconds == 7


def test_locations_are_equal_by_uri_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location("s3://b/k", SECRET) == Location("s3://b/k", dict(SECRET)) != Location("s3://b/k")
    assert len({Location("s3://b/k", SECRET), Location("s3://b/k", dict(SECRET)), Location("s3://b/k")}) == 2
    assert Location("en").absolute == Location(f"file://{tmp_path}/en").absolute == f"{tmp_path}/en"
    assert Location("s3://b/../k").absolute == "s3://b/../k"


def test_the_store_is_opened_once_and_does_not_come_along_in_a_pickle() -> None:
    location = Location("memory://bucket/key", SECRET)
    assert location.store is location.store
    again = pickle.loads(pickle.dumps(location))
    assert again == location
    assert "store" not in vars(again)


def test_locations_in_one_place_share_a_store_whichever_opens_it() -> None:
    location = Location("memory://bucket/key", SECRET)
    idx = location + ".idx"
    assert "store" not in vars(location)
    assert idx.store is location.store is (idx + ".json").store is location.beside("memory://bucket/other").store
    for uri in ("memory://bucket2/key", "memory://bucket/key?versionId=1", "memory://bucket/a::b"):
        assert location.beside(uri).store is not location.store
    assert pickle.loads(pickle.dumps(idx)).store is not location.store


def test_nothing_shown_of_a_location_has_its_secrets() -> None:
    location = Location("https://user:5ec4e7@host/en?X-Amz-Signature=5ec4e7", SECRET)
    assert repr(location) == "Location(https://host/en)"
    with pytest.raises(ObjectNotFoundError) as caught:
        raise ObjectNotFoundError(f"{location}: no such object")
    assert "5ec4e7" not in str(caught.value)


def test_a_partition_is_a_folder_on_its_server_or_a_bucket_where_a_limit_holds_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ENDPOINT_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert Location("s3://b/en/000.bin").partitions == ("s3://b/en", "s3://b/*")
    assert Location("s3://b/en/000.bin", {"endpoint_url": "http://h:1"}).partitions == (
        "s3://b/en http://h:1",
        "s3://b/* http://h:1",
    )
    assert Location("gs://b/en/000.bin").partitions == ("gs://b",)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://h:2")
    assert Location("s3://b/en/000.bin").partitions[0] == "s3://b/en http://h:2"


def test_listed_objects_share_the_store_of_their_folder() -> None:
    class Listed(PutOnlyStore):
        def find(self, uri: str, *, pattern: bool) -> list[str]:
            return [f"{uri}b", f"{uri}a"]

    with registered_store("listed", Listed):
        folder = Location("listed://bucket/folder")
        first, second = effects.ListObjects(folder).perform()
        assert (first.uri, second.name) == ("listed://bucket/folder/a", "b")
        assert first.store is second.store is folder.store
