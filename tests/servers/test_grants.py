"""Grants of a store with a limit, and the server that refuses the rest."""

from __future__ import annotations

import contextlib
import http.client
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from servers.grants import Bucket, Grants
from servers.rated_objects import rated_objects


def test_a_bucket_grants_its_rate_and_a_burst() -> None:
    bucket = Bucket(10.0, burst_seconds=2.0)
    granted = [bucket.grants(number / 100) for number in range(1000)]
    assert granted[:20] == [True] * 20
    assert sum(granted) == bucket.granted == pytest.approx(20 + 10 * 9.99, abs=2)
    assert bucket.granted + bucket.refused == 1000


def test_a_ramp_doubles_with_demand_and_only_then() -> None:
    busy, idle = (Bucket(100.0, doubling_seconds=10.0) for _ in range(2))
    for number in range(20_000):
        busy.grants(number / 1000)
    for number in range(200):
        idle.grants(number / 10)
    assert busy.rate == pytest.approx(400, rel=0.1)
    assert idle.rate == 100


def test_each_partition_has_its_own_bucket() -> None:
    grants = Grants(1.0, partitions=("/a/", "/b/"))
    assert [grants.of(path).grants(0.0) for path in ("x/a/1", "x/a/2", "x/b/1", "x/c/1", "x/d/1")] == [
        *(True, False),
        *(True, True, False),
    ]


def test_the_server_refuses_what_is_not_granted_and_counts_both(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(range(200)))
    with (
        contextlib.ExitStack() as stack,
        rated_objects(tmp_path / "data", rate=1e-9, burst_seconds=3e9, delay_ms=1, retry_after=2) as server,
    ):
        connection = stack.enter_context(
            contextlib.closing(http.client.HTTPConnection(urlsplit(server.endpoint).netloc))
        )
        statuses = []
        for _ in range(5):
            connection.request("GET", "/bucket/data", headers={"Range": "bytes=10-19"})
            response = connection.getresponse()
            statuses.append((response.status, response.headers["Retry-After"], len(response.read())))
        assert statuses == [*[(206, None, 10)] * 3, *[(503, "2", 87)] * 2]
        assert server.counts() == {"": {"granted": 3, "refused": 2, "rate": 1e-9}}
        connection.request("HEAD", "/bucket/data")
        assert connection.getresponse().headers["Content-Length"] == "200"
        server.become(rate=1e9)
        assert server.counts() == {}
