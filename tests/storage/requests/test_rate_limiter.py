"""Requests of a process that wait for the rate of their partition, against a real server with a limit."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers.rated_objects import RatedServer, rated_objects

from binidx.errors import StorageError
from binidx.storage.location import Location
from binidx.storage.requests import rate_limiter, scheduler
from binidx.storage.requests.node_rates import NodeRates, is_throttled, node_rates
from binidx.storage.requests.rate_limiter import FirstLimits, RateLimiter
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.requests.request_rate import RequestRate
from binidx.storage.settings import fleet_size
from binidx.storage.stats import usage, usage_since
from binidx.storage.usage_report import report

DATA = bytes(range(256)) * 4096
RANGES = [(start, start + 10) for start in range(0, 1_000_000, 5_000)]


# Without a server: these come first, as an error in a timer of the limiter lets reads of a server wait for ever.


class Waiting:
    """A read in the line of a limiter."""

    over = False
    limiter: RateLimiter

    def __init__(self, number: int) -> None:
        self.number = number


def run_limiter(limit: float, reads: list[Waiting]) -> list[int]:
    """Admit one request of each read, in the given order, under a limit; return the order in which they were sent."""
    sent: list[int] = []
    rates = NodeRates(None)

    async def run() -> None:
        done = asyncio.Event()

        def send(read: Waiting, place: int) -> None:
            sent.append(read.number)
            if len(sent) == len(reads):
                done.set()

        rates.change("folder", lambda: RequestRate(limit=limit), lambda rate, now, wall: rate.take(now, 1))
        limiter = RateLimiter("folder", FirstLimits(), rates, asyncio.get_running_loop().call_later, send, 128)
        limiter.note_refusal()
        for read in reads:
            read.limiter = limiter
            assert not limiter.admits(read, 0)
        await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    return sent


@pytest.mark.parametrize("num_nodes", [2, 4_001, 100_000])
def test_a_fleet_of_any_size_keeps_its_rates(monkeypatch: pytest.MonkeyPatch, num_nodes: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(8 * num_nodes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    fleet_size.cache_clear()
    assert fleet_size() == (8 * num_nodes, num_nodes)

    try:
        assert FirstLimits.of_fleet(fleet_size()[1], 5_000.0, 1_200.0).new_rate().is_possible()
    finally:
        fleet_size.cache_clear()


def test_a_process_takes_new_tickets_where_others_limited_a_forgotten_rate_anew() -> None:
    async def run() -> None:
        sent, rates = asyncio.Event(), NodeRates(None)
        rates.change("folder", lambda: RequestRate(limit=50.0, issued=1e5, clock=1e5), lambda *_: None)
        own = "folder", FirstLimits(), rates, asyncio.get_running_loop().call_later
        limiter = RateLimiter(*own, lambda read, place: sent.set(), 128)
        limiter.note_refusal()
        read = Waiting(0)
        read.limiter = limiter
        assert not limiter.admits(read, 0)
        rates.forget()
        rates.change("folder", lambda: RequestRate(limit=50.0), lambda *_: None)
        await asyncio.wait_for(sent.wait(), 60)  # ticket 100,000 would be due in half an hour

    asyncio.run(run())


def test_the_oldest_read_goes_first() -> None:
    assert run_limiter(20.0, [Waiting(number) for number in (5, 3, 4, 1, 2)]) == [1, 2, 3, 4, 5]
    assert is_throttled()


def test_slow_start_widens_with_responses_and_time() -> None:
    async def run() -> tuple[int, int]:
        sent: list[int] = []
        own = "folder", FirstLimits(), NodeRates(None), asyncio.get_running_loop().call_later
        limiter = RateLimiter(*own, lambda read, place: sent.append(place), 128)
        read = Waiting(0)
        read.limiter = limiter
        admitted = sum(limiter.admits(read, place) for place in range(100))
        limiter.note_response(1.0)
        at_first = admitted + len(sent)
        while len(sent) + admitted < 100:
            await asyncio.sleep(0.01)
        return admitted, at_first

    assert asyncio.run(run()) == (rate_limiter.FIRST_WINDOW, rate_limiter.FIRST_WINDOW + 2)


def test_slow_start_goes_on_widening_with_time_after_outcomes_were_shared() -> None:
    class Timer:
        def __init__(self, seconds: float, call: Callable[[], None]) -> None:
            self.call = call
            timers.append(self)

        def cancel(self) -> None:
            timers.remove(self)

    timers, sent = list[Timer](), list[int]()
    limiter = RateLimiter("folder", FirstLimits(), NodeRates(None), Timer, lambda read, place: sent.append(place), 128)
    read = Waiting(0)
    read.limiter = limiter
    num_admitted = sum(limiter.admits(read, place) for place in range(400))
    for number in range(rate_limiter.SHARED_COUNT):
        limiter.note_response(float(number))
    window = num_admitted + rate_limiter.SHARED_COUNT
    assert len(sent) == window
    timers.pop().call()
    assert len(sent) == 2 * window
    assert len(timers) == 1, "nothing widens the window further"


# Against a server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RatedServer]:
    path = tmp_path_factory.mktemp("rated") / "data.bin"
    path.write_bytes(DATA)
    with rated_objects(path, delay_ms=1, partitions=("/a/", "/b/")) as server:
        yield server


def open_it(server: RatedServer, key: str = "a/data", **settings: Any) -> RemoteObject:
    options = {"endpoint_url": server.endpoint, "key": "k", "secret": "s", "binidx": {"max_gap": 0, **settings}}
    return RemoteObject(Location.of(f"s3://bucket/{key}", options))


def read(reader: RemoteObject) -> None:
    assert [bytes(view) for view in reader.read(RANGES)] == [DATA[start:stop] for start, stop in RANGES]


def rate_of(reader: RemoteObject, level: int = 0) -> RequestRate:
    found = node_rates().change(
        reader.location.partitions[level], RequestRate, lambda rate, now, wall: RequestRate(**vars(rate))
    )
    assert found is not None
    return found


def test_a_store_that_grants_enough_is_not_limited(server: RatedServer) -> None:
    server.become()
    reader = open_it(server)
    read(reader)
    assert not rate_of(reader).is_limited
    assert reader.stats.refused == 0
    assert server.counts()["/a/"]["granted"] == len(RANGES)


def test_a_read_beyond_the_limit_waits_and_sends_little_more(
    server: RatedServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limiter, "LOG_AFTER_SECONDS", 0.0)
    server.become(rate=100, burst_seconds=0.5)
    reader, before = open_it(server), usage()
    for _ in range(5):
        read(reader)
    counts = server.counts()["/a/"]
    assert rate_of(reader).is_limited
    assert counts["granted"] == 5 * len(RANGES)
    assert counts["refused"] == reader.stats.refused < counts["granted"] / 2
    assert usage_since(before)["throttled_seconds"] > 1
    assert " requests/s of " in report()
    assert "throttled for" in caplog.text


def test_partitions_are_limited_each_by_itself(server: RatedServer) -> None:
    server.become(rate=100, burst_seconds=0.5)
    hot, cold = open_it(server, "a/data"), open_it(server, "b/data")
    read(hot)
    cold.read(RANGES[:10])
    assert rate_of(hot).is_limited
    assert not rate_of(cold).is_limited
    assert not rate_of(hot, 1).is_limited, "one folder does not limit its bucket"


def test_folders_that_share_a_limit_wait_together(server: RatedServer) -> None:
    """The limit of a store is of what it divides, which need not be a folder: 60 folders refuse a few requests each."""
    server.become(rate=100, burst_seconds=0.5)
    readers = [open_it(server, f"c/{number}/data") for number in range(60)]
    counts = []
    with ThreadPoolExecutor(20) as threads:
        for first in range(0, 25, 5):
            list(threads.map(lambda reader, first=first: reader.read(RANGES[first : first + 5]), readers))
            counts.append(server.counts()[""])
    assert rate_of(readers[0], 1).is_limited
    assert counts[-1]["granted"] == 60 * 5 * 5
    assert counts[-1]["refused"] - counts[0]["refused"] < 60 * 5 * 4 / 10, "the first requests find the limit"


def test_a_first_open_outlasts_refusals_for_as_long_as_outages(server: RatedServer) -> None:
    """A store that refuses nine of ten requests exists: it is not given up after the deadline of an unknown one."""
    server.become(random_share=0.95)
    reader = open_it(server, "d/data", deadline_seconds=1, outage_seconds=120)
    assert reader.size == len(DATA)


def test_retry_after_delays_only_the_refused_request(server: RatedServer) -> None:
    server.become(rate=200, burst_seconds=0.2, retry_after=1)
    reader = open_it(server)
    read(reader)
    assert reader.stats.refused > 0


def test_a_store_that_grants_one_now_and_then_outlasts_deadline_and_patience(server: RatedServer) -> None:
    """The read takes longer than either; the store answers within both."""
    server.become(rate=20, burst_seconds=0.2)
    reader = open_it(server, deadline_seconds=5, outage_seconds=5, hedge=False)
    read(reader)
    assert server.counts()["/a/"]["granted"] == len(RANGES)


def test_a_store_that_refuses_everything_is_out(server: RatedServer) -> None:
    server.become(random_share=1.0)
    reader = open_it(server, outage_seconds=1)
    with pytest.raises(StorageError, match="outage_seconds"):
        read(reader)


def test_processes_without_a_shared_file_adapt_alone_and_the_report_says_so(
    server: RatedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.become(rate=100, burst_seconds=0.5)
    monkeypatch.setattr(scheduler, "node_rates", lambda: alone)
    alone = NodeRates(None)
    read(open_it(server))
    assert "(each process by itself)" in report()
