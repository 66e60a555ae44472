"""Bad weather: each fault is what it says, falls by seed and by request, and is in the log."""

from __future__ import annotations

import http.client
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from servers.faults import EXTRA_BYTES, FAULTS, Weather
from servers.http_objects import Server, http_objects
from servers.latency_proxy import Proxy, latency_proxy
from servers.messages import Request

DATA = bytes(range(250)) * 400  # 100 kB
RANGES = [(start, start + 1000) for start in range(0, len(DATA), 1000)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with http_objects({"/data": DATA, "/storage/v1/b/b/o/data": DATA}) as server:
        yield server


@pytest.fixture(scope="module")
def started(server: Server) -> Iterator[Proxy]:
    with latency_proxy(server.endpoint, delay_ms=0) as proxy:
        yield proxy


@pytest.fixture
def proxy(started: Proxy) -> Proxy:
    started.become()
    started.reset()
    return started


def get(proxy: Proxy, start: int, stop: int, path: str = "/data", seconds: float = 300) -> tuple[int, bytes]:
    """Status and body; raises what http.client raises."""
    connection = http.client.HTTPConnection(str(urlsplit(proxy.endpoint).netloc), timeout=seconds)
    try:
        connection.request("GET", path, headers={"Range": f"bytes={start}-{stop - 1}"})
        with connection.getresponse() as answer:
            return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("status", ["429", "500", "503"])
def test_an_error_has_a_body_like_the_stores(proxy: Proxy, status: str) -> None:
    proxy.become(script=[status] * 2)
    found, body = get(proxy, 0, 10)
    assert (found, body[:5]) == (int(status), b"<?xml")
    found, body = get(proxy, 0, 10, "/storage/v1/b/b/o/data")
    assert (found, body[:10]) == (int(status), b'{"error": ')
    assert get(proxy, 0, 10) == (206, DATA[:10])
    assert proxy.counts().statuses == {status: 2, "206": 1}


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("reset", ConnectionResetError),
        ("close", http.client.RemoteDisconnected),
        ("hang", TimeoutError),
        ("reset-late", ConnectionResetError),
        ("truncate", http.client.IncompleteRead),
        ("stall", TimeoutError),
    ],
)
def test_a_connection_ends_or_stands_still_and_the_next_is_good(
    proxy: Proxy, fault: str, error: type[Exception]
) -> None:
    proxy.become(each=[fault])
    with pytest.raises(error) as caught:
        get(proxy, 500, 1500, seconds=2 if error is TimeoutError else 300)
    if isinstance(caught.value, http.client.IncompleteRead):
        assert caught.value.partial == DATA[500:1000]
    assert get(proxy, 500, 1500) == (206, DATA[500:1500])
    half = 500 if fault in ("reset-late", "truncate", "stall") else 0
    first, second = proxy.log()
    assert (first.fault, first.bytes, first.range) == (fault, half, "bytes=500-1499")
    assert (second.fault, second.bytes, second.time, second.status) == (None, 1000, 1, 206)
    assert proxy.counts().bytes == half + 1000


def test_a_body_is_short_long_whole_or_wrong_and_whole_in_itself(proxy: Proxy) -> None:
    proxy.become(script=["short", "long", "whole", "wrong"])
    assert get(proxy, 500, 1500) == (206, DATA[500:1499])
    assert get(proxy, 500, 1500) == (206, DATA[500:1500] + bytes(EXTRA_BYTES))
    assert get(proxy, 500, 1500) == (200, bytes(500) + DATA[500:1500] + bytes(len(DATA) - 1500))
    status, body = get(proxy, 500, 1500)
    assert (status, len(body)) == (206, 1000)
    assert sum((one ^ other).bit_count() for one, other in zip(body, DATA[500:1500], strict=True)) == 1


def test_slow_is_late_and_good(proxy: Proxy) -> None:
    proxy.become(each=["slow"], slow_ms=200)
    began = time.monotonic()
    assert get(proxy, 0, 10) == (206, DATA[:10])
    assert time.monotonic() - began >= 0.2


def test_only_range_requests_meet_faults_unless_told(proxy: Proxy) -> None:
    connection = http.client.HTTPConnection(str(urlsplit(proxy.endpoint).netloc), timeout=300)
    for only, status in (("ranges", 200), ("all", 503)):
        proxy.become(faults={"503": 1.0}, only=only)
        connection.request("HEAD", "/data")
        with connection.getresponse() as answer:
            assert (answer.status, answer.read()) == (status, b"")
    connection.close()


def test_a_place_has_a_weather_of_its_own(proxy: Proxy) -> None:
    proxy.become(faults={"503": 1.0}, places={"~good~": {"faults": {}}, "~late~": {"each": ["slow"], "slow_ms": 300}})
    found = [get(proxy, 0, 10, path)[0] for path in ("/data", "/~good~", "/data", "/~late~", "/~late~")]
    assert found == [503, 404, 503, 404, 503]
    _, _, _, late, _ = proxy.log()
    assert late.ended is not None
    assert late.ended - late.began >= 0.3


def test_the_same_seed_gives_a_range_the_same_faults_in_any_order(proxy: Proxy) -> None:
    def faults(seed: int, threads: int) -> Counter[tuple[str, int, str | None]]:
        proxy.become(seed=seed, faults={"503": 0.2, "short": 0.1, "slow": 0.05}, slow_ms=1)
        proxy.reset()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda each: get(proxy, *each), RANGES * 3))
        return Counter((each.range, each.time, each.fault) for each in proxy.log())

    one = faults(1, threads=1)
    assert one == faults(1, threads=8) != faults(2, threads=8)
    met = Counter(fault for _, _, fault in one)
    assert met.keys() == {None, "503", "short", "slow"}
    assert 30 < met["503"] < 90
    assert proxy.counts().faults.keys() == {"503", "short", "slow"}


def test_lateness_has_the_median_and_the_tail_asked_for() -> None:
    weather = Weather(delay_ms=30, spread=0.5)
    late = sorted(weather.luck(Request("GET", "/", str(each), 0), 0).lateness for each in range(5000))
    assert statistics.median(late) == pytest.approx(0.030, rel=0.05)
    assert late[4950] == pytest.approx(0.030 * 3.2, rel=0.15)
    assert {Weather().luck(Request("GET", "/", str(each), 0), 0).lateness for each in range(9)} == {0.03}


def test_all_connections_together_carry_no_more_than_the_link(proxy: Proxy) -> None:
    proxy.become(total_megabytes_per_second=1)
    with ThreadPoolExecutor(4) as pool:
        began = time.monotonic()
        bodies = list(pool.map(lambda each: get(proxy, *each)[1], [(0, len(DATA))] * 4))
    assert bodies == [DATA] * 4
    assert time.monotonic() - began >= 0.4


@pytest.mark.parametrize(
    "weather", [{"faults": {"rain": 0.1}}, {"each": ["rain"]}, {"only": "x"}, {"faults": {"503": 2}}]
)
def test_weather_that_cannot_be_is_refused(weather: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="weather: found"):
        Weather(**weather)  # type: ignore[arg-type]


def test_every_fault_is_described() -> None:
    from servers import faults

    described = (faults.__doc__ or "").split("No I/O here")[0].split()
    assert {name for name in FAULTS if not name.isdigit()} <= {*described}


def test_no_more_requests_than_the_rate_are_answered(proxy: Proxy) -> None:
    proxy.become(granted_per_second=1e-9)
    assert get(proxy, 0, 10)[0] == 503
    proxy.become(granted_per_second=5)
    began = time.monotonic()
    statuses = [get(proxy, 0, 10)[0]]
    while 206 not in statuses:
        statuses.append(get(proxy, 0, 10)[0])
    assert statuses.count(206) <= 5 + 5 * (time.monotonic() - began)
    assert {*statuses} <= {206, 503}
