"""The client of plain ranges: what it sends, which responses it takes, and what becomes of its connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientPayloadError, ServerDisconnectedError
from servers.http_objects import http_objects
from yarl import URL

from binidx.storage.location import Location
from binidx.storage.requests.remote_object import RemoteObject
from binidx.storage.stores import range_client
from binidx.storage.stores.direct import DirectStore
from binidx.storage.stores.range_client import RangeConnections, format_head, parse_head
from binidx.storage.threads import io_loop

BODY = bytes(range(250)) * 2000
HEAD = b'HTTP/1.1 206 Partial Content\r\nContent-Length: %d\r\nETag: "x"\r\n'
GOOD = HEAD % 100 + b"\r\n" + BODY[:100]

Step = Sequence[bytes | None]
"""Pieces of a response, sent one after the other; None ends the connection."""


@pytest.mark.parametrize(
    ("head", "headers"),
    [
        ("HTTP/1.1 206 OK\r\nCONTENT-length:7 \r\nX: y", {"content-length": "7"}),
        ("HTTP/1.1 206\r\nContent-Length: 7\r\nVary: a\r\nVary: b", {"content-length": "7"}),
        ("HTTP/1.1 503 Slow Down\r\nTransfer-Encoding: chunked", {"transfer-encoding": "chunked"}),
    ],
)
def test_a_plain_head_is_understood(head: str, headers: dict[str, str]) -> None:
    parsed = parse_head(head)
    assert parsed is not None
    assert parsed[2] == headers


@pytest.mark.parametrize(
    "head",
    [
        "",
        "HTTP/1.0 206 OK\r\nContent-Length: 7",
        "HTTP/1.1 2o6 OK\r\nContent-Length: 7",
        "HTTP/1.1 100 Continue",
        "HTTP/1.1 204 None\r\nContent-Length: 0",
        "HTTP/1.1 302 Found\r\nContent-Length: 7\r\nLocation: /x",
        "HTTP/1.1 206 OK",
        "HTTP/1.1 206 OK\r\nContent-Length: 7\r\nContent-Length: 7",
        "HTTP/1.1 206 OK\r\nContent-Length: +7",
        "HTTP/1.1 206 OK\r\nContent-Length: 7\r\nTransfer-Encoding: chunked",
        "HTTP/1.1 206 OK\r\nContent-Length: 7\r\nTransfer-Encoding : chunked",
        "HTTP/1.1 206 OK\r\nContent-Length: 7\r\nContent-Encoding: gzip",
        "HTTP/1.1 206 OK\r\nContent-Length: 7\r\nSet-Cookie: a=b",
        "HTTP/1.1 206 OK\r\nContent-Length: 7\r\nX: y\r\n folded: z",
        "HTTP/1.1 206 OK\r\nContent-Length: 7\nX: y",
        "HTTP/1.1 206 OK\nContent-Length: 7",
        "HTTP/1.1 503 No\r\nContent-Length: 7\r\nno field",
    ],
)
def test_any_other_head_is_left_to_aiohttp(head: str) -> None:
    assert parse_head(head) is None


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("http://h/a%20b?c=%2F", "h"),
        ("http://h:80/a%20b?c=%2F", "h"),
        ("http://h:81/a%20b?c=%2F", "h:81"),
        ("https://[::1]:81/a%20b?c=%2F", "[::1]:81"),
    ],
)
def test_a_request_is_sent_literally(url: str, host: str) -> None:
    head = format_head(URL(url, encoded=True), {"If-Match": '"x"', "User-Agent": "me"})
    fields = f'host: {host}\r\naccept: */*\r\nuser-agent: me\r\nif-match: "x"\r\nrange: bytes='
    assert head == f"GET /a%20b?c=%2F HTTP/1.1\r\n{fields}".encode()


@pytest.mark.parametrize("text", ["a\r\nb: c", "a\nb", "ä", "\0"])
def test_nothing_slips_into_a_request(text: str) -> None:
    assert format_head(URL("http://h/k"), {"X-Key": text}) is None


def test_a_path_that_is_not_quoted_is_left_to_aiohttp() -> None:
    assert format_head(URL("http://h/a b", encoded=True), {}) is None


def with_server(script: Sequence[Step], use: Callable[[RangeConnections], Coroutine[Any, Any, Any]]) -> tuple[Any, int]:
    """Return the result of `use` with connections to a server that answers so, and how many connections it had."""
    steps, connections = iter(script), 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            ends = False
            while not ends:
                await reader.readuntil(b"\r\n\r\n")
                for piece in (step := next(steps, [None])):
                    writer.write(piece or b"")
                    await writer.drain()
                    await asyncio.sleep(0)
                ends = step[-1] is None
        writer.close()

    async def run() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            pool = RangeConnections("127.0.0.1", server.sockets[0].getsockname()[1], None)
            try:
                return await use(pool)
            finally:
                pool.close()
                while len(asyncio.all_tasks()) > 1:
                    await asyncio.sleep(0)

    return asyncio.run(run()), connections


async def get_100(pool: RangeConnections) -> bytes | None:
    response = await pool.get(b"GET / HTTP/1.1\r\nrange: bytes=", 0, 100)
    return None if response is None else bytes(response.body)


async def get_twice(pool: RangeConnections) -> list[bytes | None]:
    first = await get_100(pool)
    await asyncio.sleep(0.05)  # a connection that ends has ended; if not, the outcome is the same
    return [first, await get_100(pool)]


def test_a_connection_is_kept() -> None:
    assert with_server([[GOOD], [GOOD]], get_twice) == ([BODY[:100]] * 2, 1)


def test_memory_of_a_body_is_used_again_once_no_view_of_it_is_left() -> None:
    size = range_client.REUSED_BYTES

    async def use(pool: RangeConnections) -> None:
        await get_100(pool)
        first, second = pool.take_memory(size), pool.take_memory(size)
        first[:3], part = b"abc", np.frombuffer(first.toreadonly()[1:], np.uint8)
        del first
        third = pool.take_memory(size)
        third[:3] = second[:3] = b"xyz"
        assert bytes(part[:2]) == b"bc"
        address = part.ctypes.data - 1
        del part
        assert np.frombuffer(pool.take_memory(size), np.uint8).ctypes.data == address

    with_server([[GOOD]], use)


@pytest.mark.parametrize(
    "first",
    [
        [GOOD, None],
        [GOOD + b"more"],
        [HEAD % 100 + b"Connection: close\r\n\r\n" + BODY[:100]],
    ],
)
def test_a_connection_that_ends_or_says_too_much_is_replaced(first: Step) -> None:
    assert with_server([first, [GOOD]], get_twice) == ([BODY[:100]] * 2, 2)


def test_a_kept_connection_that_is_closed_on_a_request_is_tried_again() -> None:
    assert with_server([[GOOD], [None], [GOOD]], get_twice) == ([BODY[:100]] * 2, 2)


@pytest.mark.parametrize("num_pieces", [1, 2, 100])
def test_a_response_comes_in_any_pieces(num_pieces: int) -> None:
    whole = HEAD % len(BODY) + b"\r\n" + BODY
    cuts = [0, 1, 17, 60, *(70 + (len(whole) - 70) * part // num_pieces for part in range(num_pieces + 1))]
    pieces = [whole[start:stop] for start, stop in pairwise(cuts)]

    async def get_all(pool: RangeConnections) -> bytes:
        response = await pool.get(b"GET / HTTP/1.1\r\nrange: bytes=", 0, len(BODY))
        assert response is not None
        return bytes(response.body)

    assert with_server([pieces], get_all) == (BODY, 1)


@pytest.mark.parametrize("end", [0, 10, 60])
def test_a_response_that_is_cut_off_is_an_error(end: int) -> None:
    error = ClientPayloadError if end else ServerDisconnectedError
    with pytest.raises(error):
        with_server([[GOOD[:end], None]], get_100)


def test_errors_keep_their_connection_where_they_say_how_long_they_are() -> None:
    error = b"HTTP/1.1 503 Slow Down\r\nRetry-After: 1\r\nContent-Length: 5\r\n\r\nlater"

    async def get(pool: RangeConnections) -> list[Any]:
        return [await pool.get(b"GET / HTTP/1.1\r\nrange: bytes=", 0, 100), await get_100(pool)]

    (refused, body), connections = with_server([[error[:-2], error[-2:]], [GOOD]], get)
    assert (refused.status, refused.reason, refused.headers["retry-after"]) == (503, "Slow Down", "1")
    assert (bytes(refused.body), body, connections) == (b"later", BODY[:100], 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\nX: " + b"x" * range_client.MAX_HEAD_BYTES,
    ],
)
def test_what_is_not_plain_again_and_again_is_left_to_aiohttp_for_some_minutes(answer: bytes) -> None:
    async def get(pool: RangeConnections) -> list[bytes | None]:
        return [await get_100(pool) for _ in range(2 * range_client.MOST_ODD)]

    responses, num_connections = with_server([[answer]] * range_client.MOST_ODD, get)
    assert set(responses) == {None}
    assert num_connections == range_client.MOST_ODD


def test_one_response_that_is_not_plain_changes_nothing_for_the_next_one() -> None:
    odd = b"HTTP/1.1 206 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert with_server([[odd], [GOOD]], get_twice) == ([None, BODY[:100]], 2)


def test_a_body_that_is_longer_than_its_range_is_not_awaited() -> None:
    async def get(pool: RangeConnections) -> Any:
        return await pool.get(b"GET / HTTP/1.1\r\nrange: bytes=", 0, 100)

    response, _ = with_server([[HEAD % (1 << 40) + b"\r\n" + BODY[:50]]], get)
    assert response.headers["content-length"] == str(1 << 40)
    assert len(response.body) <= 50


def test_a_cancelled_request_closes_its_connection() -> None:
    async def get(pool: RangeConnections) -> Any:
        waiting = asyncio.ensure_future(get_100(pool))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return await get_100(pool)

    assert with_server([[GOOD[:60]], [GOOD]], get) == (BODY[:100], 2)


def test_where_nothing_listens_it_is_left_to_aiohttp() -> None:
    assert asyncio.run(get_100(RangeConnections("127.0.0.1", 1, None))) is None


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_ranges_go_over_plain_connections(kind: str) -> None:
    with http_objects({"/b/k": BODY}) as server:
        options = {"endpoint_url": server.endpoint, "key": "k", "secret": "s"} if kind == "s3" else {}
        uri = "s3://b/k" if kind == "s3" else f"{server.endpoint}/b/k"
        reader = RemoteObject(Location.of(uri, options))
        assert bytes(reader.read([(7, 90)])[0]) == BODY[7:90]
        assert isinstance(reader.location.store, DirectStore)
        address = reader.location.store.route(reader.info).address
        assert address is not None
        assert address.connections is not None
        assert len(address.connections.idle) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"client_kwargs": {"trust_env": True}},
        {"client_kwargs": {"max_line_size": 100}},
        {"timeout": 3},
        {"proxy": "http://127.0.0.1:1"},
    ],
)
def test_options_of_aiohttp_are_honoured_by_it(options: dict[str, Any]) -> None:
    with http_objects({"/k": BODY}) as server:
        store: Any = Location.of(f"{server.endpoint}/k", options).store
        address = asyncio.run_coroutine_threadsafe(store._url(store.uri), io_loop()).result()
    assert address.connections is None
