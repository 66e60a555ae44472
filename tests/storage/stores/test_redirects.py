"""Redirects: the user's headers and credentials reach the origin of the URL that the user gave, and no other."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from servers.http_objects import Server, http_objects

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import find_object, object_identity, read_small
from binidx.storage.stores.direct import headers_for

DATA = bytes(range(250))
SECRETS = {"x-api-key", "authorization", "cookie"}
with warnings.catch_warnings(action="ignore"):
    AUTH = aiohttp.BasicAuth("me", "5ec4e7")  # aiohttp 4 will have none
GIVEN: dict[str, dict[str, Any]] = {
    "headers": {"headers": {"X-Api-Key": "5ec4e7", "Authorization": "Bearer 5ec4e7", "Cookie": "a=5ec4e7"}},
    "headers of the client": {"client_kwargs": {"headers": {"X-Api-Key": "k", "Authorization": "b", "Cookie": "a=b"}}},
    "options of aiohttp": {
        "headers": {"X-Api-Key": "k"},
        "client_kwargs": {"auth": AUTH, "cookies": {"a": "b"}},
    },
}


@pytest.fixture
def other() -> Iterator[Server]:
    with http_objects({"/data": DATA}) as server:
        yield server


@pytest.fixture
def web(other: Server) -> Iterator[Server]:
    with http_objects({"/data": DATA}) as server:
        server.targets = {"/away": f"{other.endpoint}/data", "/here": "/data", "/round": f"{other.endpoint}/back"}
        other.targets["/back"] = f"{server.endpoint}/data"
        yield server


def use(uri: str, options: dict[str, Any]) -> None:
    """Send every kind of request."""
    found = find_object(Location.of(uri, options), end_bytes=10)
    assert found is not None
    assert found.end == DATA[-10:]
    assert object_identity(Location.of(uri, options))["size"] == len(DATA)
    assert bytes(open_object(uri, storage_options=options, cache=False).read([(7, 90)])[0]) == DATA[7:90]
    assert read_small(Location.of(uri, options)) == DATA
    assert Location(uri, options).store.find(uri, pattern=True) == [uri]


def secrets_seen(server: Server) -> list[set[str]]:
    return [SECRETS & each.keys() for each in server.headers]


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("given", GIVEN)
def test_a_redirect_to_another_origin_drops_the_headers_of_the_user(
    web: Server, other: Server, given: str, fast: bool
) -> None:
    use(f"{web.endpoint}/away", {**GIVEN[given], "binidx": {"fast": fast}})
    assert len(other.headers) >= 6
    assert secrets_seen(other) == [set()] * len(other.headers)
    assert secrets_seen(web) == [SECRETS] * len(web.headers)
    assert all(each["accept-encoding"] == "identity" for each in other.headers)


@pytest.mark.parametrize("given", GIVEN)
def test_a_redirect_to_the_same_origin_keeps_them(web: Server, given: str) -> None:
    use(f"{web.endpoint}/here", GIVEN[given])
    assert secrets_seen(web) == [SECRETS] * len(web.headers)


def test_a_password_in_the_url_stays_on_its_host(web: Server, other: Server) -> None:
    for name in ("away", "here"):
        uri = f"{web.endpoint}/{name}".replace("://", "://me:5ec4e7@")
        assert bytes(open_object(uri, cache=False).read([(7, 90)])[0]) == DATA[7:90]
    assert all(web.authorizations)
    assert not any(other.authorizations)


def test_headers_that_were_dropped_do_not_come_back(web: Server, other: Server) -> None:
    open_object(f"{web.endpoint}/round", storage_options=GIVEN["headers"], cache=False).read([(7, 90)])
    assert secrets_seen(other) == [set()] * len(other.headers)
    assert {frozenset(each) for each in secrets_seen(web)} == {frozenset(SECRETS), frozenset()}


@pytest.mark.parametrize(
    ("target", "kept"),
    [
        ("https://host/b", True),
        ("https://host:443/b", True),
        ("http://host/b", False),
        ("https://host:8443/b", False),
        ("https://host.evil/b", False),
        ("https://user@host/b", True),
    ],
)
def test_an_origin_is_scheme_host_and_port(target: str, kept: bool) -> None:
    from yarl import URL

    headers = {"X-Api-Key": "k", "Range": "bytes=0-1"}
    found = headers_for(URL(target), URL("https://host/a"), headers)
    assert found == (headers if kept else {"Range": "bytes=0-1"})


def test_redirects_without_an_end_are_an_error(web: Server) -> None:
    web.targets["/loop"] = "/loop"
    with pytest.raises(StorageError, match="302"):
        open_object(f"{web.endpoint}/loop")


@pytest.mark.parametrize("fast", [True, False])
def test_s3_with_credentials_follows_no_redirect_to_another_host(other: Server, fast: bool) -> None:
    with http_objects({}) as server:
        server.targets["/b/k"] = f"{other.endpoint}/data"
        keys = {"key": "k", "secret": "s", "token": "5ec4e7"}
        options = {"endpoint_url": server.endpoint, **keys, "binidx": {"fast": fast}}
        for send in (object_identity, read_small):
            with pytest.raises(StorageError, match="redirected to http://127"):
                send(Location.of("s3://b/k", options))
        assert fast or server.headers[0]["x-amz-security-token"] == "5ec4e7"
    assert other.headers == []


def test_a_refused_redirect_of_a_store_that_answered_before_is_final(other: Server) -> None:
    with http_objects({"/b/k": DATA}) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "s"}
        assert object_identity(Location.of("s3://b/k", options))["size"] == len(DATA)
        num_requests = len(server.headers)
        server.targets["/b/k"] = f"{other.endpoint}/data"
        with pytest.raises(StorageError, match="redirected to http://127"):
            object_identity(Location.of("s3://b/k", options))
        assert len(server.headers) == num_requests + 1


def test_gs_follows_no_redirect_to_another_host(other: Server) -> None:
    with http_objects({}) as server:
        server.targets["/download/storage/v1/b/b/o/k"] = f"{other.endpoint}/data"
        server.targets["/storage/v1/b/b/o/k"] = f"{other.endpoint}/data"
        options = {"endpoint_url": server.endpoint, "token": "anon", "session_kwargs": {"headers": {"X-Api-Key": "k"}}}
        with pytest.raises(StorageError, match="redirected to http://127"):
            open_object("gs://b/k", storage_options=options)
        assert server.headers[0]["x-api-key"] == "k"
    assert other.headers == []
