"""Every store keeps the contract, a new provider is one module and one call, and drivers may lose private members."""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import toy_store
from helpers.registering import registered_store
from servers.http_objects import Server, http_objects

from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage import stats
from binidx.storage.location import Location
from binidx.storage.open import open_object, read_whole
from binidx.storage.requests.remote_object import RemoteObject, read_small
from binidx.storage.store_protocols import Store
from binidx.storage.stores import direct, signing
from binidx.storage.stores import gcs as gcs_store
from binidx.storage.stores.gcs import private
from binidx.storage.writing.publish import create_object, put_if_absent
from binidx.testing import check_object_store, check_range_reader

DATA = bytes(range(250)) * 400


@pytest.fixture
def web() -> Iterator[Server]:
    with http_objects({}) as server:
        yield server


@pytest.fixture
def toy() -> Iterator[str]:
    """The URI of an empty folder of the toy provider."""
    with registered_store("toy", toy_store.ToyStore):
        yield f"toy://{uuid.uuid4().hex}"


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
        objects, name = request.getfixturevalue("web").objects, uri.split("/", 3)[3]
        objects[f"/{name}"] = data
        objects["/"] = objects.get("/", b"") + f'<a href="{name}">{name}</a>'.encode()  # the page that lists a folder
        return
    with create_object(Location.of(uri)) as out:
        out.write(data)


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_a_store_keeps_the_contract(base: tuple[str, dict[str, Any]], request: pytest.FixtureRequest) -> None:
    def make(name: str, data: bytes) -> tuple[Store, str]:
        uri = f"{base[0]}/{name}"
        put(uri, data, request)
        return Location(uri, base[1]).store, uri

    check_object_store(make)


def test_a_dataset_lives_in_a_new_provider(toy: str) -> None:
    with IndexedDatasetBuilder(f"{toy}/en.bin", np.uint16) as builder:
        for number in range(20):
            builder.add_document([number] * 5, [2, 3])
        builder.finalize(f"{toy}/en.idx")
    dataset = IndexedDataset(f"{toy}/en")
    assert [each.tolist() for each in dataset[0:4]] == [[n] * k for n in (0, 1) for k in (2, 3)]
    assert put_if_absent(Location.of(f"{toy}/en.bin"), b"other") is False


def test_readers_and_streams_work_over_a_new_provider(toy: str) -> None:
    def stored(data: bytes) -> RemoteObject:
        uri = f"{toy}/{len(data)}"
        with create_object(Location.of(uri, {"default_block_size": 50_000})) as out:
            for start in range(0, len(data), 7_000):
                out.write(data[start : start + 7_000])
        return RemoteObject(Location.of(uri))

    check_range_reader(stored)


def test_requests_to_a_new_provider_are_counted(toy: str) -> None:
    put_if_absent(Location.of(f"{toy}/data"), DATA)
    before = stats.usage()
    RemoteObject(Location.of(f"{toy}/data")).read([(0, 10)])
    found = stats.usage_since(before)
    assert (found["remote requests"], found["dollars"]) == (1, pytest.approx(0.001))


def round_trip(base: str) -> None:
    """Write, look at, list, read and delete, as each of them may use a private member."""
    uri = f"{base}/{uuid.uuid4().hex}"
    with create_object(Location.of(uri)) as out:
        out.write(DATA)
    assert read_small(Location.of(uri)) == DATA
    reader = open_object(uri, cache=False)
    assert bytes(read_whole(reader)) == DATA
    assert bytes(reader.read([(7, 90)])[0]) == DATA[7:90]
    found = Location(uri).store
    check_object_store(lambda name, data: (found, _stored(f"{uri}-{name}", data)))
    found.delete(uri)
    assert read_small(Location.of(uri)) is None


def _stored(uri: str, data: bytes) -> str:
    with create_object(Location.of(uri)) as out:
        out.write(data)
    return uri


def hide(monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    """Let gcsfs lack a private member for our code; gcsfs itself goes on using it."""

    def without(owner: Any, name: str) -> Any:
        if name == member:
            raise AttributeError(name)
        return private(owner, name)

    monkeypatch.setattr(gcs_store, "private", without)


GCSFS_MEMBERS = sorted(set(re.findall(r'\bprivate\([^"]*"(\w+)"\)', inspect.getsource(gcs_store))))


def test_the_private_members_of_gcsfs_are_known() -> None:
    assert GCSFS_MEMBERS == ["_is_zonal_bucket", "_request", "_set_session"]


@pytest.mark.parametrize(
    "function", [signing.sign, signing.session_options, signing.quick_session, direct.direct_address]
)
def test_direct_requests_need_no_private_member_of_a_driver(function: Any) -> None:
    assert re.findall(r"\w\._\w+", inspect.getsource(function)) == []


@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
@pytest.mark.parametrize("member", GCSFS_MEMBERS)
def test_gcs_goes_on_without_a_private_member(gs: str, member: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, member)
    round_trip(f"{gs}/{uuid.uuid4().hex}")
