"""Every store keeps the contract, a new provider is one module and one row, and drivers may lose private members."""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Bucket
from helpers import toy_store
from servers.http_objects import Server, http_objects

from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage import stats
from binidx.storage.open import open_object, read_whole
from binidx.storage.requests.remote_object import RemoteObject, read_small
from binidx.storage.store_protocols import Store
from binidx.storage.stores import gcs as gcs_store
from binidx.storage.stores import registry
from binidx.storage.stores import s3 as s3_store
from binidx.storage.stores.http import private
from binidx.storage.stores.registry import open_store
from binidx.storage.writing.publish import create_object, put_if_absent
from binidx.testing import check_object_store, check_range_reader

DATA = bytes(range(250)) * 400


@pytest.fixture
def web() -> Iterator[Server]:
    with http_objects({}) as server:
        yield server


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty folder of the toy provider, which has a row for this test."""
    monkeypatch.setitem(registry.PROVIDERS, "toy", toy_store.PROVIDER)
    return f"toy://{uuid.uuid4().hex}"


KINDS = ["file", "memory", "s3", "s3 fast", "gs", "gs fast", "http", "toy"]


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The URI of an empty folder, and how it is read."""
    kind, _, fast = request.param.partition(" ")
    options = {"binidx": {"fast": bool(fast)}}
    if kind in ("s3", "gs"):
        bucket = request.getfixturevalue(kind)
        return (bucket.fresh() if kind == "s3" else f"{bucket}/{uuid.uuid4().hex}"), options
    if kind in ("http", "toy"):
        found = request.getfixturevalue("web" if kind == "http" else "toy")
        return found.endpoint if kind == "http" else found, {}
    return f"{kind}://{tmp_path}", {}


def put(uri: str, data: bytes, request: pytest.FixtureRequest) -> None:
    if uri.startswith("http:"):
        request.getfixturevalue("web").objects["/" + uri.split("/", 3)[3]] = data
        return
    with create_object(uri) as out:
        out.write(data)


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_a_store_keeps_the_contract(base: tuple[str, dict[str, Any]], request: pytest.FixtureRequest) -> None:
    def make(name: str, data: bytes) -> tuple[Store, str]:
        uri = f"{base[0]}/{name}"
        put(uri, data, request)
        return open_store(uri, base[1]), uri

    check_object_store(make)


def test_a_dataset_lives_in_a_new_provider(toy: str) -> None:
    with IndexedDatasetBuilder(f"{toy}/en.bin", np.uint16) as builder:
        for number in range(20):
            builder.add_document([number] * 5, [2, 3])
        builder.finalize(f"{toy}/en.idx")
    dataset = IndexedDataset(f"{toy}/en")
    assert [each.tolist() for each in dataset[0:4]] == [[n] * k for n in (0, 1) for k in (2, 3)]
    assert put_if_absent(f"{toy}/en.bin", b"other") is False


def test_readers_and_streams_work_over_a_new_provider(toy: str) -> None:
    def stored(data: bytes) -> RemoteObject:
        uri = f"{toy}/{len(data)}"
        with create_object(uri, {"default_block_size": 50_000}) as out:
            for start in range(0, len(data), 7_000):
                out.write(data[start : start + 7_000])
        return RemoteObject(uri)

    check_range_reader(stored)


def test_requests_to_a_new_provider_are_counted(toy: str) -> None:
    put_if_absent(f"{toy}/data", DATA)
    before = stats.usage()
    RemoteObject(f"{toy}/data").read([(0, 10)])
    found = stats.since(before)
    assert (found["other requests"], found["dollars"]) == (1, pytest.approx(0.001))


def round_trip(base: str) -> None:
    """Write, look at, list, read and delete, as each of them may use a private member."""
    uri = f"{base}/{uuid.uuid4().hex}"
    with create_object(uri) as out:
        out.write(DATA)
    assert read_small(uri) == DATA
    reader = open_object(uri, cache=False)
    assert bytes(read_whole(reader)) == DATA
    assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    found = registry.open_store(uri)
    check_object_store(lambda name, data: (found, _stored(f"{uri}-{name}", data)))
    found.delete(uri)
    assert read_small(uri) is None


def _stored(uri: str, data: bytes) -> str:
    with create_object(uri) as out:
        out.write(data)
    return uri


def hide(monkeypatch: pytest.MonkeyPatch, module: Any, member: str) -> None:
    """Let a driver lack a private member for our code; the driver itself goes on using it."""

    def without(owner: Any, name: str) -> Any:
        if name == member:
            raise AttributeError(name)
        return private(owner, name)

    monkeypatch.setattr(module, "private", without)


def private_members(module: Any) -> list[str]:
    """Names of all private members that a module uses."""
    return sorted(set(re.findall(r'\bprivate\([^"]*"(\w+)"\)', inspect.getsource(module))))


def test_the_private_members_are_known() -> None:
    assert private_members(s3_store) == ["_endpoint", "_get_s3_method_kwargs", "_get_session", "_proxy_config"]
    assert private_members(gcs_store) == ["_get_headers", "_get_params", "_is_zonal_bucket", "_request", "_set_session"]


@pytest.mark.parametrize("member", private_members(s3_store))
def test_s3_goes_on_without_a_private_member(s3: Bucket, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, s3_store, member)
    round_trip(s3.fresh())


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
@pytest.mark.parametrize("member", private_members(gcs_store))
def test_gcs_goes_on_without_a_private_member(gs: str, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, gcs_store, member)
    round_trip(f"{gs}/{uuid.uuid4().hex}")
