"""A response takes no more memory than what was requested, whatever the server sends."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers.http_objects import Server, bomb, http_objects

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import find_object, read_small

DATA = bytes(range(250)) * 40
LIMIT = 48 << 20
"""Buffers of a connection included; a bomb has 256 MiB."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    bomb()
    metadata = {"name": "k", "bucket": "b", "size": str(len(DATA)), "updated": "2026-11-20T03:53:17.000Z"}
    paths = ["/b/k", "/download/storage/v1/b/b/o/k", "/account/b/k"]
    objects = {**dict.fromkeys(paths, DATA), "/storage/v1/b/b/o/k": json.dumps(metadata).encode()}
    with http_objects(objects) as found:
        found.modified = lambda _: "Fri, 20 Nov 2026 03:53:17 GMT"
        yield found


def place(server: Server, kind: str) -> tuple[str, dict[str, Any]]:
    """The URI of DATA on the server, and the options to reach it by one protocol."""
    if kind == "abfs":
        pytest.importorskip("adlfs")
        account = f"AccountName=account;AccountKey=aaaa;BlobEndpoint={server.endpoint}/account;"
        return "abfs://b/k", {"connection_string": f"DefaultEndpointsProtocol=http;{account}"}
    keys = {"s3": {"key": "k", "secret": "s"}, "gs": {"token": "anon"}}
    options = {} if kind == "http" else {"endpoint_url": server.endpoint, **keys[kind]}
    return (f"{server.endpoint}/b/k" if kind == "http" else f"{kind}://b/k"), options


def read_range(uri: str, options: dict[str, Any]) -> bytes:
    return bytes(open_object(uri, storage_options=options, cache=False).read([(10, 2000)])[0])


def read_tail(uri: str, options: dict[str, Any]) -> bytes:
    found = find_object(Location.of(uri, options), end_bytes=1000)
    return found.end if found else b""


def read_sidecar(uri: str, options: dict[str, Any]) -> bytes:
    return read_small(Location.of(uri, options)) or b""


@pytest.mark.parametrize("behaviour", ["inflated", "endless"])
@pytest.mark.parametrize("use", [read_range, read_tail])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["http", "s3", "gs", "abfs"])
def test_a_response_is_bounded_by_what_was_requested(
    server: Server, kind: str, fast: bool, use: Callable[..., bytes], behaviour: str
) -> None:
    assert peak_of(server, kind, fast, use, behaviour) < LIMIT


@pytest.mark.parametrize("kind", ["http", "s3", "gs", "abfs"])
def test_a_sidecar_is_not_inflated(server: Server, kind: str) -> None:
    assert peak_of(server, kind, True, read_sidecar, "inflated") < LIMIT


def peak_of(server: Server, kind: str, fast: bool, use: Callable[..., bytes], behaviour: str) -> int:
    uri, options = place(server, kind)
    options["binidx"] = {"fast": fast, "deadline_seconds": 60}
    server.behaviour = "good"
    wanted = {read_range: DATA[10:2000], read_tail: DATA[-1000:], read_sidecar: DATA}[use]
    assert use(uri, options) in (wanted, b"")
    server.behaviour = behaviour
    tracemalloc.start()
    try:
        with contextlib.suppress(StorageError):
            use(uri, options)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
