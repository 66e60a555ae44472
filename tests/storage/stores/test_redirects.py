"""Redirects: the user's headers and credentials reach the origin of the URL that the user gave, and no other."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from servers.http_objects import Server, http_objects

from binidx.errors import ConfigError, ObjectChangedError, StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import find_object, object_identity, read_small
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.direct import MAX_REDIRECTS, headers_for
from binidx.storage.writing.publish import write_object

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
    with pytest.raises(StorageError, match="307"):
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


@pytest.fixture(params=[True, False])
def cache(other: Server, request: pytest.FixtureRequest) -> Iterator[tuple[Server, dict[str, Any]]]:
    """Server that answers as AIStore's proxy, which sends to a target with the query of the request, and options."""
    with http_objects({}) as server:
        server.targets = {"/b/k": f"{other.endpoint}/data?{{query}}&pid=p8080", "/b/new": f"{other.endpoint}/new"}
        keys = {"endpoint_url": server.endpoint, "key": "k", "secret": "s", "token": "5ec4e7"}
        yield server, {**keys, "binidx": {"fast": request.param, "redirect_hosts": [other.endpoint]}}


def use_s3(options: dict[str, Any]) -> None:
    found = find_object(Location.of("s3://b/k", options), end_bytes=10)
    assert found is not None
    assert found.end == DATA[-10:]
    assert object_identity(Location.of("s3://b/k", options))["size"] == len(DATA)
    assert read_small(Location.of("s3://b/k", options)) == DATA
    reader = open_object("s3://b/k", storage_options=options, cache=False)
    assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]


def test_s3_follows_a_redirect_to_a_named_origin_without_credentials(
    cache: tuple[Server, dict[str, Any]], other: Server
) -> None:
    server, options = cache
    use_s3(options)
    assert len(other.requests) >= 4
    assert {path for _, path, _ in other.requests} == {"/data"}
    assert other.requests[-1] == ("GET", "/data", "bytes=7-89")
    assert other.conditions[-1] == server.conditions[-1] == f'"{hashlib.md5(DATA).hexdigest()}"'
    assert ("X-Amz-Signature=" in server.urls[-1]) == options["binidx"]["fast"]
    for url, headers in zip(other.urls, other.headers, strict=True):
        assert url.endswith("pid=p8080")
        assert "X-Amz-" not in url
        assert not [name for name in headers if name.startswith("x-amz-") or name in SECRETS]
        assert "5ec4e7" not in f"{url}{headers}"


def test_an_object_that_changes_behind_a_redirect_is_an_error(
    cache: tuple[Server, dict[str, Any]], other: Server
) -> None:
    reader = open_object("s3://b/k", storage_options=cache[1], cache=False)
    other.objects["/data"] = DATA[::-1]
    with pytest.raises(ObjectChangedError):
        reader.read([(7, 90)])


def test_a_redirect_to_an_origin_that_is_not_named_says_which_and_the_option(
    cache: tuple[Server, dict[str, Any]], other: Server
) -> None:
    _, options = cache
    options["binidx"]["redirect_hosts"] = ["http://127.0.0.1:1"]
    message = rf"redirected to {other.endpoint} \(need one of redirect_hosts: http://127.0.0.1:1\); .*"
    for send in (object_identity, read_small, lambda where: find_object(where, end_bytes=10)):
        with pytest.raises(StorageError, match=f"{message}BINIDX_REDIRECT_HOSTS={other.endpoint}"):
            send(Location.of("s3://b/k", options))
    assert other.headers == []


def test_redirects_between_named_origins_without_an_end_are_an_error(
    cache: tuple[Server, dict[str, Any]], other: Server
) -> None:
    server, options = cache
    other.targets["/data"] = f"{server.endpoint}/b/k"
    options["binidx"]["redirect_hosts"] = [other.endpoint, server.endpoint]
    for send in (object_identity, read_small):
        with pytest.raises(StorageError):
            send(Location.of("s3://b/k", options))
    assert len(other.requests) <= 4 * MAX_REDIRECTS


def test_a_write_is_redirected_nowhere(cache: tuple[Server, dict[str, Any]], other: Server) -> None:
    with pytest.raises(StorageError, match=f"redirected to {other.endpoint}, but only reads follow redirects"):
        write_object(Location.of("s3://b/new", cache[1]), [memoryview(DATA)], durable=False)
    assert other.requests == []


@pytest.mark.parametrize("host", ["10.0.0.7:51080", "s3://b", "http://a/path", "http://me:pw@a"])
def test_redirect_hosts_are_origins(host: str) -> None:
    hosts: Any
    for hosts in (host, [host]):
        with pytest.raises(ConfigError, match=r"redirect_hosts: found .* needs a list of origins: ") as raised:
            ReadSettings.of({"binidx": {"redirect_hosts": hosts}})
        assert "pw" not in str(raised.value)
    for hosts in ("http://a:1", 5, [5], {"http://a:1": 1}):  # settings that were not parsed
        needed = r"redirect_hosts: found .*, needs a list of origins: \['http://10.0.0.7:51081'\]"
        with pytest.raises(ConfigError, match=needed):
            ReadSettings(redirect_hosts=hosts)
    assert ReadSettings.of({"binidx": {"redirect_hosts": "http://a:1, https://b"}}).redirect_hosts == (
        "http://a:1",
        "https://b",
    )


def test_gs_follows_no_redirect_to_another_host(other: Server) -> None:
    with http_objects({}) as server:
        server.targets["/download/storage/v1/b/b/o/k"] = f"{other.endpoint}/data"
        server.targets["/storage/v1/b/b/o/k"] = f"{other.endpoint}/data"
        options = {"endpoint_url": server.endpoint, "token": "anon", "session_kwargs": {"headers": {"X-Api-Key": "k"}}}
        with pytest.raises(StorageError, match="redirected to http://127"):
            open_object("gs://b/k", storage_options=options)
        assert server.headers[0]["x-api-key"] == "k"
    assert other.headers == []
