"""Requests on bad days: what passes is asked again, what does not fails at once, and the error tells what was tried."""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import Bucket
from servers.http_objects import http_objects
from servers.latency_proxy import Proxy, latency_proxy

from binidx.errors import CancelledReadError, ObjectNotFoundError, ShortReadError, StorageError
from binidx.format.bin_file import open_bin
from binidx.storage import stats
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.ranges import read_many
from binidx.storage.requests.cancellation import cancellable
from binidx.storage.requests.remote_object import RemoteObject, object_identity
from binidx.storage.stores.direct import DirectStore
from binidx.storage.writing.publish import create_object
from binidx.testing import ended_well, forked

DATA = bytes(range(250)) * 4_000  # 1 MB
RANGES = [(start, start + 1000) for start in range(0, len(DATA), 50_000)]

Open = Callable[..., RemoteObject]


@pytest.fixture(scope="module")
def http_proxy() -> Iterator[Proxy]:
    with http_objects({"/bucket/data": DATA}) as server, latency_proxy(server.endpoint, delay_ms=0) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def s3_proxy(s3: Bucket) -> Iterator[tuple[Proxy, str]]:
    uri = f"{s3.fresh()}/data"
    with create_object(Location.of(uri)) as writer:
        writer.write(DATA)
    with latency_proxy(s3.server.endpoint, delay_ms=0) as proxy:
        yield proxy, uri


@pytest.fixture(scope="module")
def gs_proxy(gs: str) -> Iterator[tuple[Proxy, str]]:
    import os

    uri = f"{gs}/{uuid.uuid4().hex}"
    with create_object(Location.of(uri)) as writer:
        writer.write(DATA)
    with latency_proxy(os.environ["STORAGE_EMULATOR_HOST"], delay_ms=0) as proxy:
        yield proxy, uri


@pytest.fixture(params=["http", "s3", "s3 by s3fs", "gs", "gs by gcsfs"])
def distant(request: pytest.FixtureRequest) -> tuple[Proxy, Open]:
    """A proxy in good weather, and what opens the object behind it, by each way to ask."""
    kind, _, driver = request.param.partition(" by ")
    if kind == "http":
        proxy: Proxy = request.getfixturevalue("http_proxy")
        uri = f"{proxy.endpoint}/bucket/data"
    else:
        proxy, uri = request.getfixturevalue(f"{kind}_proxy")
    proxy.become()
    proxy.reset()

    def open_it(**settings: Any) -> RemoteObject:
        options = {"endpoint_url": proxy.endpoint} if kind != "http" else {}
        return RemoteObject(Location.of(uri, {**options, "binidx": {"fast": not driver, "max_gap": 0, **settings}}))

    return proxy, open_it


def assert_reads(reader: RemoteObject) -> None:
    assert [bytes(view) for view in reader.read(RANGES)] == [DATA[start:stop] for start, stop in RANGES]


@pytest.mark.parametrize(
    "faults",
    [["503", "429"], ["reset", "close"], ["truncate", "reset-late"], ["short", "long"], ["garbage", "oversized"]],
)
def test_what_passes_is_asked_again(distant: tuple[Proxy, Open], faults: list[str]) -> None:
    proxy, open_it = distant
    reader = open_it(hedge=False)
    proxy.become(each=faults)
    proxy.reset()
    assert_reads(reader)
    # aiohttp asks once more by itself where a connection that it had kept was closed.
    assert len(RANGES) <= reader.stats.retries == reader.stats.requests - len(RANGES) <= 2 * len(RANGES)
    assert reader.stats.refused == (2 * len(RANGES) if faults == ["503", "429"] else 0)
    assert proxy.counts().requests == 3 * len(RANGES)


def test_a_404_of_an_object_that_is_still_there_passes_or_is_named_at_the_deadline(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    open_it()  # connects
    proxy.become(faults={"404": 1.0})
    for deadline in (1.0, 10.0, 100.0):  # the later ones are for a slow machine
        with pytest.raises(StorageError) as caught:
            open_it(deadline_seconds=deadline).read([(0, 10)])
        if "no answer came" not in str(caught.value):
            break
    assert "FalseAbsenceError: 404 for a range of an object that a HEAD request finds; deadline_s" in str(caught.value)
    assert not isinstance(caught.value, ObjectNotFoundError)
    proxy.become(each=["404"] * 3)
    assert bytes(open_it().read([(7, 90)])[0]) == DATA[7:90]


def test_retry_after_is_obeyed(distant: tuple[Proxy, Open], request: pytest.FixtureRequest) -> None:
    proxy, open_it = distant
    if "by gcsfs" in request.node.name:
        pytest.skip("gcsfs hides the headers of an error")
    reader = open_it()
    proxy.become(each=["busy"])
    proxy.reset()
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]
    first, second = proxy.log()
    assert second.began - first.began >= 1.0


def test_a_server_that_sends_everything_is_not_listened_to(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    reader = open_it()
    proxy.become(script=["whole"] * 3)
    assert_reads(reader)


def test_opening_is_tried_again_too(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    proxy.become(script=["503", "500"], only="all")
    assert_reads(open_it())


@pytest.mark.parametrize("ask", [open_object, open_bin, object_identity], ids=lambda ask: ask.__name__)
def test_whatever_is_asked_of_a_store_that_never_answers_ends_at_the_deadline(
    distant: tuple[Proxy, Open], ask: Callable[..., object]
) -> None:
    proxy, open_it = distant
    reader = open_it()
    proxy.become(faults={"hang": 1.0}, only="all")
    uri, options = reader.uri if ask is open_bin else f"{reader.uri}.bin.zst", reader.location.options
    hurried = Location.of(uri, {**options, "binidx": {**options["binidx"], "deadline_seconds": 1.0}})
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"opening not done within \d+ s; no answer came"):
        ask(hurried)
    assert time.monotonic() - began < 300, "without its deadline it takes 600"


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_what_stands_still_is_asked_beside(distant: tuple[Proxy, Open], fault: str) -> None:
    proxy, open_it = distant
    reader = open_it(hedge=True)
    for _ in range(3):
        assert_reads(reader)
    proxy.become(script=[fault])
    assert_reads(reader)
    assert reader.stats.hedges >= 1
    assert reader.stats.retries == 0, "which it is after 10 s"


def test_nothing_is_asked_beside_where_nobody_wants_it(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    reader = open_it(hedge=False)
    assert_reads(reader)
    proxy.become(script=["slow"], slow_ms=1200)
    assert_reads(reader)
    assert reader.stats.hedges == 0


def test_a_store_that_is_out_for_ever_is_given_up(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    assert_reads(open_it())  # connects
    proxy.become(faults={"503": 1.0})
    for patience in (1.5, 6.0, 24.0, 96.0):  # the later ones are for a slow machine
        proxy.reset()
        reader = open_it(outage_seconds=patience)
        began = time.monotonic()
        with pytest.raises(StorageError) as caught:
            reader.read([(1000, 2000)])
        if proxy.counts().statuses["503"] >= 4:
            break
    assert time.monotonic() - began > patience - 0.1
    assert re.match(
        rf"{re.escape(reader.uri)}: range 1000-2000 not done within \d+ s; failed \d+ times in \d+\.\d s: "
        rf"\d+\.\d s \w+ 503, .*; outage_seconds of ",
        str(caught.value),
    )
    assert 4 <= proxy.counts().statuses["503"] < 30
    proxy.become()
    assert_reads(reader)


def test_an_outage_is_outlasted_beyond_the_deadline(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    opened = open_it()

    def outlasted(deadline: float) -> bool:
        ours = {**opened.location.options["binidx"], "deadline_seconds": deadline}
        reader = RemoteObject(Location.of(opened.uri, {**opened.location.options, "binidx": ours}), info=opened.info)
        proxy.become(faults={"503": 0.5, "close": 0.5})
        back = threading.Timer(1.5 * deadline, proxy.become)
        back.start()
        try:
            return bytes(reader.read([(0, 10)])[0]) == DATA[:10]
        except StorageError:
            return False
        finally:
            back.join()

    assert any(map(outlasted, (1.0, 10.0, 100.0))), "the later ones are for a slow machine"


def test_a_store_that_refuses_ranges_and_answers_other_requests_is_not_out(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    opened = open_it()

    def outlasted(patience: float) -> bool:
        ours = {**opened.location.options["binidx"], "outage_seconds": patience}
        reader = RemoteObject(Location.of(opened.uri, {**opened.location.options, "binidx": ours}), info=opened.info)
        proxy.become(faults={"503": 1.0})  # of requests with a Range header, so HEAD requests are answered
        end = time.monotonic() + 2 * patience

        def ask_others() -> None:
            while time.monotonic() < end:
                open_it()
            proxy.become()

        others = threading.Thread(target=ask_others)
        others.start()
        try:
            return bytes(reader.read([(0, 10)])[0]) == DATA[:10]
        except StorageError:
            return False
        finally:
            others.join()

    assert any(map(outlasted, (1.0, 10.0, 100.0))), "the later ones are for a slow machine"


def test_a_server_that_never_heeds_ranges_is_given_up_soon(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    reader = open_it()
    proxy.become(faults={"short": 1.0})
    with pytest.raises(
        ShortReadError, match=r": 999 bytes for range 0-1000, .*; range 0-1000 failed 4 times in .* s: "
    ):
        reader.read([(0, 1000)])
    assert proxy.counts().statuses["206"] == 4


@pytest.mark.parametrize("status", ["404", "403"])
def test_what_will_not_pass_fails_at_once(distant: tuple[Proxy, Open], status: str) -> None:
    proxy, open_it = distant
    reader = open_it()
    proxy.become(faults={status: 1.0}, only="all")
    began = time.monotonic()
    with pytest.raises(StorageError) as caught:
        assert_reads(reader)
    assert time.monotonic() - began < 300, "its deadline is at 600"
    if status == "404":
        assert isinstance(caught.value, ObjectNotFoundError)
    else:
        assert str(caught.value).startswith(f"{reader.uri}: access denied")


def test_a_403_is_asked_again_with_a_new_address_once(s3_proxy: tuple[Proxy, str]) -> None:
    proxy, uri = s3_proxy
    proxy.become()
    reader = RemoteObject(Location.of(uri, {"endpoint_url": proxy.endpoint}))
    reader.read([(0, 10)])
    proxy.become(script=["403"])
    assert bytes(reader.read([(0, 10)])[0]) == DATA[:10]
    assert isinstance(reader.location.store, DirectStore)
    assert reader.location.store.route(reader.info).address is not None


def test_the_bound_holds_over_objects_and_threads(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    readers = [open_it(concurrency=7, hedge=False) for _ in range(5)]
    proxy.become(delay_ms=100)
    proxy.reset()
    read_many([(reader, RANGES) for reader in readers])
    times = [(each.began, each.ended) for each in proxy.log() if each.range]
    at_once = [sum(began <= now < (ended or now) for began, ended in times) for now, _ in times]
    assert 2 <= max(at_once) <= 7


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("kind", ["http", "gs", "s3"])
def test_more_than_a_hundred_are_in_flight_where_more_are_wanted(
    kind: str, fast: bool, request: pytest.FixtureRequest
) -> None:
    """Which is where aiohttp stops by itself."""
    proxy, uri = (
        request.getfixturevalue(f"{kind}_proxy") if kind != "http" else (request.getfixturevalue("http_proxy"), "")
    )
    options = {} if kind == "http" else {"endpoint_url": proxy.endpoint}
    uri = uri or f"{proxy.endpoint}/bucket/data"
    settings = {"fast": fast, "concurrency": 120, "max_gap": 0, "hedge": False}
    reader = RemoteObject(Location.of(uri, {**options, "binidx": settings}))
    reader.read([(0, 10)])
    proxy.become(faults={"hang": 1.0})
    proxy.reset()

    def wait() -> None:
        with cancellable(scope), pytest.raises(CancelledReadError):
            reader.read([(start, start + 10) for start in range(0, 120_000, 1000)])

    with cancellable() as scope:
        waiting = threading.Thread(target=wait)
        waiting.start()
        until = time.monotonic() + 300
        while proxy.counts().most_at_once <= 100 and time.monotonic() < until:
            time.sleep(0.02)
        scope.cancel()
        waiting.join()
    assert proxy.counts().most_at_once > 100
    proxy.become()


def test_all_requests_of_a_read_are_counted_once(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    reader = open_it(hedge=False)
    proxy.reset()
    before = stats.usage()
    assert_reads(reader)
    moved, logged = stats.usage_since(before), [each.bytes for each in proxy.log() if each.status == 206]
    counted = moved["remote requests"], moved["remote bytes_moved"]
    assert counted == (len(RANGES), 1000 * len(RANGES)) == (len(logged), sum(logged))
    assert (moved["remote retries"], moved["remote hedges"]) == (0, 0)


def test_a_cancelled_read_ends_at_once_and_leaves_nothing_behind(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    readers = [open_it(concurrency=4) for _ in range(3)]
    proxy.become(faults={"hang": 1.0})
    with cancellable() as scope:
        began = time.monotonic()
        threading.Timer(0.3, scope.cancel).start()
        with pytest.raises(CancelledReadError):
            read_many([(reader, RANGES) for reader in readers])
        assert 0.2 < time.monotonic() - began < 300, "its deadline is at 600"
    proxy.become()
    assert_reads(readers[0])


def test_a_child_is_not_bound_by_what_its_parent_waits_for(distant: tuple[Proxy, Open]) -> None:
    proxy, open_it = distant
    reader = open_it(concurrency=2, hedge=False)
    assert_reads(reader)
    proxy.become(script=["hang"] * 2)
    with cancellable() as scope:

        def wait() -> None:
            with cancellable(scope), pytest.raises(CancelledReadError):
                reader.read([(0, 10), (1000, 1010)])

        waiting = threading.Thread(target=wait)
        waiting.start()
        while proxy.counts().faults["hang"] < 2:
            time.sleep(0.01)
        assert ended_well(forked(lambda: assert_reads(reader)))
        scope.cancel()
        waiting.join()
    assert_reads(reader)
