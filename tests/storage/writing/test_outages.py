"""Requests of small objects in an outage: those that outlast it, and those that must not."""

from __future__ import annotations

import threading
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
from binidx.storage.writing.publish import create_object, delete_object, put_if_absent, send_object, write_object
from binidx.storage.writing.staging import ONE_PUT

OBJECT = Location("outages://bucket/object")


class OutageStore(PutOnlyStore):
    """Store whose first requests are answered 503; it loses the responses to the first PUTs if `loses`."""

    num_tries, num_failures, num_aborts, loses, refused_part = 0, 0, 0, False, 0
    is_waiting = threading.Event()
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


class OutageUpload:
    """Upload whose part 1 is refused once part 2 waits, and whose other parts fail in an outage of an hour."""

    token = "upload"

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        if part == OutageStore.refused_part:
            OutageStore.is_waiting.wait()
            raise PermissionError("refused")
        OutageStore.num_tries += 1
        OutageStore.is_waiting.set()
        raise HTTPStatusError(503, "out", {"retry-after": "3600"})

    def abort(self) -> None:
        OutageStore.num_aborts += 1

    arrived = copy = complete = abort


class MultipartOutageStore(OutageStore):
    min_part, max_parts, copied_part = 1 << 20, 10_000, 1 << 30

    def upload(self, uri: str, token: str = "") -> OutageUpload:
        return OutageUpload()


@pytest.fixture(autouse=True)
def store() -> Iterator[type[OutageStore]]:
    OutageStore.num_tries, OutageStore.num_failures, OutageStore.loses, OutageStore.objects = 0, 3, False, {}
    OutageStore.num_aborts, OutageStore.refused_part = 0, 0
    OutageStore.is_waiting.clear()
    with registered_store("outages", OutageStore), registered_store("uploads", MultipartOutageStore):
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


UPLOADED = Location("uploads://bucket/object", {"default_block_size": 1 << 20, "binidx": {"outage_seconds": 60}})
"""An interrupt that waits for the end of the patience sees a second try."""


def test_an_interrupt_ends_a_stream_whose_part_waits_for_the_end_of_an_outage(store: type[OutageStore]) -> None:
    def write() -> None:
        with create_object(UPLOADED) as out:
            out.write(bytes(1 << 20))
            out.write(bytes(1 << 19))
            store.is_waiting.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert (store.num_tries, store.num_aborts) == (1, 1)


def test_a_part_that_is_refused_ends_those_that_wait_for_the_end_of_an_outage(store: type[OutageStore]) -> None:
    store.refused_part = 1
    with pytest.raises(StorageError, match="object: "):
        send_object(UPLOADED, memoryview(bytes(ONE_PUT + 1)))
    assert (store.num_tries, store.num_aborts) == (1, 1)
