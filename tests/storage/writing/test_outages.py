"""Requests of small objects in an outage: those that outlast it, and those that must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from helpers.put_only_store import PutOnlyStore
from helpers.registering import registered_store

from binidx.errors import StorageError
from binidx.index.cache.build_lock import Lease
from binidx.index.cache.index_files import IndexFiles
from binidx.index.cache.lease import LeaseRecord
from binidx.loader.losses import LossRecorder
from binidx.storage.effects import run
from binidx.storage.location import Location
from binidx.storage.requests.remote_object import read_small
from binidx.storage.stores.driver_errors import HTTPStatusError
from binidx.storage.writing.publish import delete_object, put_if_absent, write_object

OBJECT = Location("outages://bucket/object")


class OutageStore(PutOnlyStore):
    """Store whose first requests are answered 503; it loses the responses to the first PUTs if `loses`."""

    num_tries, num_failures, loses = 0, 0, False
    objects: dict[str, bytes]

    def _fail(self) -> None:
        type(self).num_tries += 1
        if self.num_tries <= self.num_failures:
            raise HTTPStatusError(503, "out")

    def get(self, uri: str, most_bytes: int) -> bytes:
        self._fail()
        if uri not in self.objects:
            raise FileNotFoundError(uri)
        return self.objects[uri]

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        if not self.loses:
            self._fail()
        if if_absent and uri in self.objects:
            raise FileExistsError(uri)
        self.objects[uri] = b"".join(data)
        if self.loses:
            self._fail()
        return ""

    def delete(self, uri: str) -> None:
        self._fail()
        if self.objects.pop(uri, None) is None:
            raise FileNotFoundError(uri)


@pytest.fixture(autouse=True)
def store() -> Iterator[type[OutageStore]]:
    OutageStore.num_tries, OutageStore.num_failures, OutageStore.loses, OutageStore.objects = 0, 3, False, {}
    with registered_store("outages", OutageStore):
        yield OutageStore


@pytest.mark.parametrize(
    "act",
    [
        lambda: write_object(OBJECT, [b"new"]),
        lambda: put_if_absent(OBJECT, b"new"),
        lambda: read_small(OBJECT),
        lambda: delete_object(OBJECT),
    ],
    ids=["write", "put if absent", "read", "delete"],
)
def test_a_small_object_outlasts_an_outage_as_a_part_of_an_upload_does(
    store: type[OutageStore], act: Callable[[], object]
) -> None:
    act()
    assert store.num_tries == 4


def test_a_write_whose_responses_are_lost_recognises_its_own_success(store: type[OutageStore]) -> None:
    store.loses, store.num_failures = True, 1
    assert put_if_absent(OBJECT, b"new")
    assert store.objects == {OBJECT.uri: b"new"}
    assert not put_if_absent(OBJECT, b"other")


@pytest.mark.parametrize(
    "act",
    [
        lambda: run(Lease(OBJECT).read()),
        lambda: run(Lease(OBJECT).write(LeaseRecord("we"))),
        lambda: run(Lease(OBJECT).remove()),
        lambda: run(Lease(OBJECT).acquire()),
        lambda: IndexFiles(Location("outages://bucket"), "index").read_manifest(),
        lambda: IndexFiles(Location("outages://bucket"), "index").read_small("orders"),
        lambda: IndexFiles(Location("outages://bucket"), "index").write("orders", b"new"),
    ],
    ids=["read a lease", "renew it", "remove it", "acquire it", "read a manifest", "read an index", "write an index"],
)
def test_a_caller_that_can_do_without_an_object_sends_one_request(
    store: type[OutageStore], act: Callable[[], object]
) -> None:
    with pytest.raises(StorageError, match="503"):
        act()
    assert store.num_tries == 1


def test_losses_are_left_to_the_next_file_at_once(store: type[OutageStore]) -> None:
    class Writer:
        def add(self, *arguments: Any) -> None:
            """Take a task that is never due."""

    recorder = LossRecorder("outages://bucket/losses")
    recorder._background = lambda *arguments, **options: Writer()  # type: ignore[assignment]
    recorder.record(0, [0.5, 0.25])
    with pytest.raises(StorageError, match="503"):
        recorder.close()
    assert store.num_tries == 1
    store.num_failures = 0
    recorder.close()
    assert len(store.objects) == 1
