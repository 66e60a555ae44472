"""Stores without ETags: reads are pinned to the date of the object, for the life of a reader."""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.proxied_store import TRANSPORTS
from servers.gcs import Store
from servers.http_objects import Server, http_objects, served_by_thread

from binidx.errors import ObjectChangedError
from binidx.format.indexed_dataset import IndexedDataset
from binidx.format.indexed_dataset_builder import IndexedDatasetBuilder
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.requests.remote_object import RemoteObject, find_object, warn_of_versions
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.identity import check_response, object_info, second_of

OLD, NEW = b"1" * 300, b"2" * 300
DATE, SECOND = "Fri, 20 Nov 2026 03:53:17 GMT", 1795146797
SETTING = "set BINIDX_CHECK_DATES=0 if replicas of the store send different dates for one object"


@pytest.fixture
def web() -> Iterator[Server]:
    with http_objects({"/b/k": OLD}) as server:
        server.etag = None
        yield server


Place = tuple[str, dict[str, Any], Callable[[bytes], object]]


@pytest.fixture(params=TRANSPORTS)
def place(request: pytest.FixtureRequest, web: Server) -> Iterator[Place]:
    """An object that holds OLD, the options to reach it, and what puts other bytes there."""
    kind, _, fast = request.param.partition(" ")
    ours = {"binidx": {"fast": bool(fast)}}
    with contextlib.ExitStack() as stack:
        if kind == "gs":
            store = stack.enter_context(unversioned_gcs())
            options = {"endpoint_url": f"http://127.0.0.1:{store.server_port}", "token": "anon", **ours}
            store.put("b/k", OLD, None)
            yield "gs://b/k", options, lambda data: store.put("b/k", data, None)
        elif kind == "s3":
            keys = {"endpoint_url": web.endpoint, "key": "k", "secret": "s"}
            yield "s3://b/k", {**keys, **ours}, lambda data: web.objects.update({"/b/k": data})
        else:
            yield f"{web.endpoint}/b/k", ours, lambda data: web.objects.update({"/b/k": data})


@contextlib.contextmanager
def unversioned_gcs() -> Iterator[Store]:
    with Store() as store:
        store.versioned = False
        with served_by_thread(store):
            yield store


def with_setting(options: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {**options, "binidx": {**options["binidx"], **settings}}


@pytest.mark.parametrize("tail", [False, True])
def test_an_object_replaced_by_one_of_equal_size_is_an_error(place: Place, tail: bool) -> None:
    uri, options, put = place
    found = find_object(Location.of(uri, options), end_bytes=10) if tail else None
    reader = open_object(uri, storage_options=options, cache=False, found=found)
    assert bytes(reader.read([(0, 4)])[0]) == OLD[:4]
    twin = pickle.loads(pickle.dumps(reader))  # as in a worker: pinned to what its parent opened
    put(NEW)
    for each in (reader, twin, reader):
        with pytest.raises(
            ObjectChangedError, match=rf"^{uri}: changed since it was opened \(Last-Modified .*{SETTING}$"
        ):
            each.read([(0, 4)])
    with pytest.raises(ObjectChangedError):
        reader.check_unchanged()  # type: ignore[attr-defined]
    assert bytes(open_object(uri, storage_options=options, cache=False).read([(0, 4)])[0]) == NEW[:4]


def test_a_dataset_pickled_for_a_worker_is_pinned_to_its_date(web: Server, tmp_path: Path) -> None:
    """A dataset pickles as its arguments, and is opened anew."""
    for token in (1, 2):
        with IndexedDatasetBuilder(str(tmp_path / "en.bin"), np.uint16) as builder:
            builder.add_document([token] * 300, [300])
            builder.finalize(str(tmp_path / "en.idx"))
        web.objects.update({f"/en.{end}": (tmp_path / f"en.{end}").read_bytes() for end in ("bin", "idx")})
        if token == 1:
            pickled, trusting = (
                pickle.dumps(IndexedDataset(f"{web.endpoint}/en", storage_options={"binidx": {"check_dates": check}}))
                for check in (True, False)
            )
            assert pickle.loads(pickled).get(0, 0, 2).tolist() == [1, 1]
    twice = pickle.dumps(pickle.loads(pickled))
    for each in (pickled, twice):
        with pytest.raises(ObjectChangedError, match=r"en.bin: .* in the process that pickled it"):
            pickle.loads(each).get(0, 0, 2)
    assert pickle.loads(trusting).get(0, 0, 2).tolist() == [2, 2]


def test_the_check_can_be_switched_off(place: Place) -> None:
    uri, options, put = place
    reader = open_object(uri, storage_options=with_setting(options, check_dates=False), cache=False)
    put(NEW)
    assert bytes(pickle.loads(pickle.dumps(reader)).read([(0, 4)])[0]) == NEW[:4]


def test_a_recorded_identity_has_no_date_of_a_web_server(web: Server) -> None:
    """Caches are named by identities."""
    assert RemoteObject(Location.of(f"{web.endpoint}/b/k")).identity == {"size": 300}
    web.etag = lambda _: '"a"'
    assert RemoteObject(Location.of(f"{web.endpoint}/b/k")).identity == {"size": 300, "etag": '"a"'}


def test_where_an_etag_is_sent_dates_are_not_compared(web: Server) -> None:
    for etag in ('"a"', 'W/"a"'):
        web.etag = lambda _, etag=etag: etag  # type: ignore[misc]
        reader = RemoteObject(Location.of(f"{web.endpoint}/b/k"))
        web.objects["/b/k"] = NEW
        assert bytes(reader.read([(0, 4)])[0]) == NEW[:4]
        reader.check_unchanged()
        web.objects["/b/k"] = OLD


def test_only_a_date_that_both_responses_have_is_compared(web: Server) -> None:
    date, web.modified = web.modified, None
    undated = RemoteObject(Location.of(f"{web.endpoint}/b/k"))
    web.modified = date
    dated = RemoteObject(Location.of(f"{web.endpoint}/b/k"))
    web.objects["/b/k"] = NEW
    assert bytes(undated.read([(0, 4)])[0]) == NEW[:4]
    web.modified = None
    assert bytes(dated.read([(0, 4)])[0]) == NEW[:4]


def test_a_store_that_sends_nothing_is_named_once(web: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="binidx")
    uri = f"{web.endpoint}/b/k"
    RemoteObject(Location.of(uri))
    assert caplog.messages == []
    web.modified = None
    for name in ("k", "l", "m"):
        web.objects[f"/b/{name}"] = OLD
        RemoteObject(Location.of(f"{web.endpoint}/b/{name}".replace("://", "://me:5ec4e7@")))
    [message] = caplog.messages
    assert message.startswith(f"{web.endpoint}: sends no ETag, version or Last-Modified; ")
    warn_of_versions.cache_clear()


@pytest.mark.parametrize("identity", [{"size": 300}, {"size": 300, "version": "v"}, {"size": 300, "etag": 'W/"a"'}])
def test_a_date_is_compared_where_no_etag_is(identity: dict[str, Any]) -> None:
    headers = {"content-range": "bytes 0-9/300", "x-amz-version-id": "v", "last-modified": DATE}
    check_response(ObjectInfo("s3://b/k", 300, identity, mark=SECOND), (0, 10), 206, headers)
    with pytest.raises(ObjectChangedError, match=f"now Last-Modified {DATE}"):
        check_response(ObjectInfo("s3://b/k", 300, identity, mark=SECOND - 1), (0, 10), 206, headers)


@pytest.mark.parametrize(
    "date",
    [DATE, "2026-11-20T03:53:17.999Z", "2026-11-20 03:53:17+00:00", "Friday, 20-Nov-26 03:53:17 GMT", SECOND + 0.9],
)
def test_a_date_means_the_same_in_every_form(date: str | float) -> None:
    assert second_of(date) == SECOND
    assert object_info("s3://b/k", {"size": 1, "LastModified": date}).mark == SECOND
    assert object_info("s3://b/k", {"size": 1, "LastModified": date, "ETag": '"a"'}).mark is None


@pytest.mark.parametrize("date", [None, "", "yesterday", "9999999", json.dumps({}), float("inf")])
def test_what_is_no_date_is_none(date: Any) -> None:
    assert second_of(date) is None
