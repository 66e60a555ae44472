"""The log of requests: one line for each, with its object, range, try, status, time and bytes, and without secrets."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from helpers.proxied_store import distant_store
from servers.http_objects import http_objects

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject

DATA = bytes(range(250)) * 40
KEYS = {"key": "k", "secret": "s"}
PRESIGNED = "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=who&X-Amz-Signature=5ec4e7&X-Amz-Security-Token=5ec4e7"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger="binidx.requests")
    return caplog


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log's lines, with `MS` in place of the times."""
    messages = [each.getMessage() for each in caplog.records if each.name == "binidx.requests"]
    return [re.sub(r"\d+\.\d ms", "MS", message) for message in messages]


@pytest.mark.parametrize("fast", [True, False])
def test_each_request_has_a_line(log: pytest.LogCaptureFixture, fast: bool) -> None:
    with http_objects({"/b/k": DATA}) as server:
        options = {"endpoint_url": server.endpoint, **KEYS, "binidx": {"fast": fast, "max_gap": 0}}
        RemoteObject(Location.of("s3://b/k", options)).read([(0, 10), (5000, 5100)])
    opening, *ranges = lines(log)
    assert opening == "s3://b/k: opening, try 1: ok, MS, 0 bytes"
    assert sorted(ranges) == [
        "s3://b/k: range 0-10, try 1: ok, MS, 10 bytes",
        "s3://b/k: range 5000-5100, try 1: ok, MS, 100 bytes",
    ]


@pytest.mark.parametrize("store", ["s3 fast", "gs fast", "http"])
def test_a_retried_request_has_a_line_for_each_try(
    log: pytest.LogCaptureFixture, store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    with distant_store(store, request, tmp_path, delay_ms=0) as far:
        uri = far.put("a.bin", DATA)
        reader = RemoteObject(Location.of(uri, far.options()))
        far.proxy.become(script=["503", "truncate"])
        log.clear()
        assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    *failed, last = lines(log)
    assert failed[0] == f"{uri}: range 7-90, try 1: HTTPStatusError 503, MS, 0 bytes"
    assert re.fullmatch(rf"{re.escape(uri)}: range 7-90, try 2: \w+, MS, 0 bytes", failed[1])
    assert last == f"{uri}: range 7-90, try 3: ok, MS, 83 bytes"


def test_a_final_failure_has_a_line(log: pytest.LogCaptureFixture) -> None:
    with http_objects({"/data": DATA}) as server:
        uri = f"{server.endpoint}/data"
        reader = RemoteObject(Location.of(uri))
        server.behaviour = "forbidden"
        with pytest.raises(StorageError):
            reader.read([(0, 10)])
    assert lines(log)[1] == f"{uri}: range 0-10, try 1: HTTPStatusError 403, MS, 0 bytes"


@pytest.mark.parametrize("behaviour", ["good", "forbidden"])
def test_a_signature_is_never_in_the_log(log: pytest.LogCaptureFixture, behaviour: str) -> None:
    with http_objects({"/data": DATA, "/b/k": DATA}) as server:
        uri = f"{server.endpoint}/data?{PRESIGNED}".replace("://", "://me:5ec4e7@")
        readers = [
            open_object(uri, cache=False),
            RemoteObject(Location.of("s3://b/k", {"endpoint_url": server.endpoint, **KEYS})),
        ]
        server.behaviour = behaviour
        for reader in readers:
            try:
                reader.read([(0, 10)])
            except StorageError:
                assert behaviour == "forbidden"
    assert {line.partition(": ")[0] for line in lines(log)} == {f"{server.endpoint}/data", "s3://b/k"}
    assert "5ec4e7" not in log.text
    assert "X-Amz" not in log.text


def test_nothing_is_logged_unless_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with http_objects({"/data": DATA}) as server:
        RemoteObject(Location.of(f"{server.endpoint}/data")).read([(0, 10)])
    assert lines(caplog) == []
