"""The proxy that benches believe: what passes it is unchanged, late by as much as asked, and counted to the byte."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest
from conftest import Bucket
from helpers.proxied_store import counts_in_flight
from servers.http_objects import Server, http_objects
from servers.latency_proxy import latency_proxy
from servers.processes import wait_until_gone

DATA = bytes(range(250)) * 20_000  # 5 MB


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with http_objects({"/data": DATA, "/empty": b""}) as server:
        yield server


def get(endpoint: str, path: str, first: int, last: int) -> bytes:
    connection = HTTPConnection(str(urlsplit(endpoint).netloc))
    connection.request("GET", path, headers={"Range": f"bytes={first}-{last}"})
    with connection.getresponse() as answer:
        body = answer.read()
    connection.close()
    return body


def test_bytes_pass_unchanged_and_are_counted_exactly(server: Server) -> None:
    with latency_proxy(server.endpoint, delay_ms=0) as proxy:
        assert get(proxy.endpoint, "/data", 0, len(DATA) - 1) == DATA
        assert get(proxy.endpoint, "/data", 7, 16) == DATA[7:17]
        assert get(proxy.endpoint, "/missing", 0, 1) == b""
        before = proxy.counts()
        assert (before.requests, before.bytes, before.connections) == (3, len(DATA) + 10, 3)
        get(proxy.endpoint, "/data", 0, 99)
        moved = proxy.counts() - before
        assert (moved.requests, moved.bytes) == (1, 100)
        proxy.reset()
        assert proxy.counts().requests == proxy.counts().bytes == 0


def test_one_connection_carries_many_requests(server: Server) -> None:
    with latency_proxy(server.endpoint, delay_ms=0) as proxy:
        connection = HTTPConnection(str(urlsplit(proxy.endpoint).netloc))
        for method, path in [("HEAD", "/data"), ("GET", "/empty"), ("GET", "/missing"), ("GET", "/data")] * 3:
            connection.request(method, path)
            with connection.getresponse() as answer:
                assert answer.read() == (DATA if (method, path) == ("GET", "/data") else b"")
        connection.close()
        counts = proxy.counts()
    assert (counts.requests, counts.connections, counts.bytes) == (12, 1, 3 * len(DATA))


def test_every_answer_is_late_and_connections_do_not_wait_for_each_other(server: Server) -> None:
    with latency_proxy(server.endpoint, delay_ms=100) as proxy, ThreadPoolExecutor(20) as pool:
        began = time.monotonic()
        get(proxy.endpoint, "/data", 0, 9)
        assert time.monotonic() - began >= 0.1

        def get_twenty() -> None:
            list(pool.map(lambda _: get(proxy.endpoint, "/data", 0, 9), range(20)))

        assert counts_in_flight(proxy, 11, get_twenty).most_at_once > 10


def test_a_connection_carries_no_more_than_its_bandwidth(server: Server) -> None:
    with latency_proxy(server.endpoint, delay_ms=0, megabytes_per_second=20) as proxy:
        began = time.monotonic()
        get(proxy.endpoint, "/data", 0, len(DATA) - 1)
        assert time.monotonic() - began >= 0.25


def test_s3_clients_read_and_write_through_it(s3: Bucket) -> None:
    """With Expect: 100-continue, chunked uploads and signed Host headers."""
    with latency_proxy(s3.server.endpoint, delay_ms=5) as proxy, proxy.in_environment():
        client = boto3.client("s3")
        bucket, _, key = s3.fresh().removeprefix("s3://").partition("/")
        client.put_object(Bucket=bucket, Key=key, Body=DATA)
        before = proxy.counts()
        with client.get_object(Bucket=bucket, Key=key)["Body"] as body:
            assert body.read() == DATA
        client.close()
        moved = proxy.counts() - before
    assert (moved.requests, moved.bytes) == (1, len(DATA))


def test_chunked_answers_pass_and_their_framing_is_counted() -> None:
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: 1\r\n\r\n"
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        latency_proxy(f"http://127.0.0.1:{listening.getsockname()[1]}", delay_ms=0) as proxy,
        contextlib.closing(HTTPConnection(str(urlsplit(proxy.endpoint).netloc))) as connection,
    ):
        connection.request("GET", "/")
        server, _ = listening.accept()
        with server:
            server.recv(1000)
            server.sendall(answer + body)
            with connection.getresponse() as found:
                assert found.read() == b"hello world"
            counts = proxy.counts()
    assert (counts.requests, counts.bytes, counts.head_bytes) == (1, len(body), len(answer))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_it_ends_with_the_process_that_started_it(server: Server) -> None:
    code = f"""
import os, signal
from servers.latency_proxy import latency_proxy
with latency_proxy({server.endpoint!r}) as proxy:
    print(proxy.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    tests = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tests, check=False)
    wait_until_gone(int(ended.stdout))
