"""Requests without their driver: asked for where and as whom the driver would, with the same bytes and errors."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from conftest import Bucket
from servers.http_objects import http_objects

from binidx.errors import BinidxError
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.direct import Address, DirectStore
from binidx.storage.threads import io_loop
from binidx.storage.writing.publish import create_object

DATA = bytes(range(250)) * 400
ENDPOINT = {"endpoint_url": "http://127.0.0.1:1"}
KEYS = {"key": "k", "secret": "s"}


def address_of(uri: str, options: Mapping[str, Any], **identity: Any) -> Address:
    """No request is made for it."""
    store = Location(uri, options).store
    assert isinstance(store, DirectStore)
    found = store.address(ObjectInfo(uri, 0, identity))
    return asyncio.run_coroutine_threadsafe(found, io_loop()).result()


def query_of(address: Address) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(str(address.url.raw_query_string)).items()}


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing in the environment but the place of two files."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return tmp_path


def test_s3_is_signed_with_the_keys_of_the_options() -> None:
    address = address_of("s3://b/k", {**ENDPOINT, **KEYS, "token": "t"}, etag='"e"')
    assert str(address.url).startswith("http://127.0.0.1:1/b/k?")
    query = query_of(address)
    assert query["X-Amz-Algorithm"] == "AWS4-HMAC-SHA256"
    assert query["X-Amz-Credential"].startswith("k/")
    assert (query["X-Amz-Security-Token"], query["X-Amz-Expires"], query["X-Amz-SignedHeaders"]) == (
        "t",
        "3600",
        "host",
    )
    assert address.headers["If-Match"] == '"e"'


def test_s3_is_signed_with_those_of_the_environment(monkeypatch: pytest.MonkeyPatch, no_credentials: Path) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:2")
    address = address_of("s3://b/k", {"client_kwargs": {"region_name": "eu-west-3"}})
    assert address.url.host_port_subcomponent == "127.0.0.1:2"
    assert query_of(address)["X-Amz-Credential"].split("/")[::2][:2] == ["from-env", "eu-west-3"]


def test_s3_is_signed_with_those_of_a_profile(no_credentials: Path) -> None:
    (no_credentials / "credentials").write_text(
        "[default]\naws_access_key_id = default\naws_secret_access_key = s\n"
        "[mine]\naws_access_key_id = from-profile\naws_secret_access_key = s\n"
    )
    (no_credentials / "config").write_text("[profile mine]\nregion = us-west-2\n")
    address = address_of("s3://bucket/k", {"profile": "mine"})
    assert query_of(address)["X-Amz-Credential"].split("/")[::2][:2] == ["from-profile", "us-west-2"]
    assert address.url.host == "bucket.s3.us-west-2.amazonaws.com"


def test_s3_is_not_signed_for_a_public_bucket(no_credentials: Path) -> None:
    assert str(address_of("s3://b/k", {**ENDPOINT, "anon": True}).url) == "http://127.0.0.1:1/b/k"


def test_the_requester_pays_where_he_says_so() -> None:
    address = address_of("s3://b/k", {**ENDPOINT, **KEYS, "requester_pays": True})
    assert address.headers["x-amz-request-payer"] == "requester"
    assert "x-amz-request-payer" in query_of(address)["X-Amz-SignedHeaders"].split(";")


def test_a_version_is_asked_for_by_its_id() -> None:
    address = address_of("s3://b/k?versionId=v7", {**ENDPOINT, **KEYS})
    assert query_of(address)["versionId"] == "v7"


def test_gs_is_asked_with_the_bearer_of_its_credentials() -> None:
    from google.oauth2.credentials import Credentials

    options = {"token": Credentials(token="t"), "project": "p", "endpoint_url": "http://127.0.0.1:1"}  # type: ignore[no-untyped-call]
    address = address_of("gs://b/a key#x", {**options, "requester_pays": "payer"}, generation="7")
    assert str(address.url) == (
        "http://127.0.0.1:1/download/storage/v1/b/b/o/a%20key%23x?alt=media&generation=7&userProject=payer"
    )
    assert address.headers["authorization"] == "Bearer t"


def test_http_is_asked_with_the_headers_of_the_options() -> None:
    address = address_of("http://h/k", {"headers": {"Authorization": "Basic x"}}, etag='"e"')
    assert address.headers["Authorization"] == "Basic x"
    assert address.headers["If-Match"] == '"e"'


def test_what_an_address_shows_is_no_secret() -> None:
    address = address_of("http://h/k", {"headers": {"Authorization": "Basic hush"}})
    assert "hush" not in repr(address)


@pytest.mark.parametrize("name", ["plain", "a b+c%20d", "päth/ü#?&=.bin", "tilde~!*'()"])
def test_any_name_is_signed_right(s3: Bucket, name: str) -> None:
    uri = f"{s3.fresh()}/{name}"
    with create_object(Location.of(uri)) as writer:
        writer.write(DATA)
    reader = RemoteObject(Location.of(uri))
    assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    assert not by_driver(reader)


@pytest.mark.parametrize("fast", [None, True, False])
def test_the_driver_is_left_out_unless_it_is_asked_for(s3: Bucket, fast: bool | None) -> None:
    uri = s3.fresh()
    with create_object(Location.of(uri)) as writer:
        writer.write(DATA)
    reader = RemoteObject(Location.of(uri, {"binidx": {"fast": fast}}))
    assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    assert by_driver(reader) is (fast is False)


def test_what_cannot_be_asked_for_directly_is_left_to_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="binidx")
    with http_objects({"/b/k": DATA}) as server:
        options = {
            "endpoint_url": "http://store.invalid",
            **KEYS,
            "config_kwargs": {"proxies": {"http": server.endpoint}},
        }
        reader = RemoteObject(Location.of("s3://b/k", options))
        assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    assert by_driver(reader)
    assert "s3://b/k: left to its driver for 240 s: NotDirectError: a proxy stands before it" in caplog.text


def test_an_object_whose_signed_requests_are_refused_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="binidx")
    ranges = [(start, start + 10) for start in range(0, 80_000, 20_000)]
    with http_objects({"/b/k": DATA, "/b/l": DATA}) as server:
        readers = [
            RemoteObject(Location.of(f"s3://b/{each}", {"endpoint_url": server.endpoint, **KEYS})) for each in "kl"
        ]
        server.behaviour = "no signed URLs"
        for reader in readers * 2:
            assert [bytes(view) for view in reader.read(ranges)] == [DATA[start:stop] for start, stop in ranges]
        assert all(map(by_driver, readers))
        route_of(readers[0]).until = 0.0  # as after 240 s
        readers[0].read(ranges)
        assert by_driver(readers[0])
    told = [each.getMessage() for each in caplog.records if each.name == "binidx.storage.stores.direct"]
    assert told == [
        f"s3://b/{each}: left to its driver for 240 s: status 403 where the driver has none" for each in "kl"
    ]


def test_addresses_are_renewed_before_their_credentials_end(s3: Bucket) -> None:
    uri = s3.fresh()
    with create_object(Location.of(uri)) as writer:
        writer.write(DATA)
    reader = RemoteObject(Location.of(uri))
    direct = [read_and_look(reader), read_and_look(reader)]
    assert direct[0] is direct[1]
    assert route_of(reader).until <= time.monotonic() + 240
    route_of(reader).until = 0.0
    assert read_and_look(reader) is not direct[0]


def read_and_look(reader: RemoteObject) -> Address | None:
    """What a read was sent to."""
    assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    assert isinstance(reader.location.store, DirectStore)
    return route_of(reader).address


@pytest.mark.parametrize("behaviour", ["forbidden", "contrary"])
def test_errors_are_the_same_by_either_way(behaviour: str) -> None:
    said = []
    for fast in (True, False):
        with http_objects({"/b/k": DATA}) as server:
            reader = RemoteObject(
                Location.of("s3://b/k", {"endpoint_url": server.endpoint, **KEYS, "binidx": {"fast": fast}})
            )
            server.behaviour = behaviour
            with pytest.raises(BinidxError) as caught:
                reader.read([(0, 10)])
            said.append((type(caught.value), str(caught.value), type(caught.value.__cause__)))
    assert said[0] == said[1]


def by_driver(reader: RemoteObject) -> bool:
    return route_of(reader).address is None


def route_of(reader: RemoteObject) -> Any:
    """How a reader requests its object."""
    assert isinstance(reader.location.store, DirectStore)
    return reader.location.store.route(reader.info)
