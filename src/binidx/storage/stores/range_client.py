"""HTTP client of byte ranges: GET over kept connections of one origin, for a quarter of the CPU of aiohttp.

    request     a head that was formatted once for an object, and the range: one write
    response    received into one buffer for all connections; a short body is copied out of it, of a long one the rest
                is received in place

It understands only responses in the plainest form: HTTP/1.1, status 200, 206 or 400 and more, no header of interest
twice, a Content-Length, no coding and no cookie. Callers send the request of any other response again by aiohttp, and
after a few in a row all further ones for some minutes, so redirects, chunks, broken heads and connections that cannot
be made end as they do there. Callers check what a response says: `identity`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BUFFER_BYTES = 128 << 10
MAX_HEAD_BYTES = 32 << 10
MAX_ERROR_BYTES = 16 << 10
"""Bytes of the body of an error that are received, for its text."""

CONNECT_SECONDS, KEPT_SECONDS, AVOIDED_SECONDS = 5.0, 12.0, 240.0
"""Longest time until a connection is made; time for which an idle one is kept, as servers close them, some after 20 s;
and time for which an origin is left to aiohttp."""

REUSED_BYTES, MOST_SPARE = 1 << 20, 16
"""Bytes of a body whose memory is used again, and bodies of which memory is kept, until idle connections are closed."""

MOST_ODD = 3
"""Responses in a row that are not plain, after which an origin is left to aiohttp."""

STATUS = re.compile(r"HTTP/1\.1 (200|206|[45][0-9][0-9])(?: ([^\r\n\0]*))?")
FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\r\n\0]*)")
NEEDED = {
    *("content-length", "content-range", "etag", "last-modified", "x-goog-generation", "x-amz-version-id"),
    *("connection", "retry-after", "transfer-encoding", "content-encoding", "set-cookie"),
}
"""Lines of a head, and the fields that matter."""

LENGTH = re.compile("[0-9]{1,18}")
NOT_PLAIN = {"transfer-encoding", "content-encoding", "set-cookie"}
"""Fields that a plain response does not have."""


class ConnectionTimeoutError(ConnectionError):
    """No connection was made in time; of the name of aiohttp's class, as `retries` compares names."""


class PlainResponse(NamedTuple):
    """Response whose form is as described above. An error may have a part of its body only, for its text."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes | memoryview


def parse_head(text: str) -> tuple[int, str, dict[str, str]] | None:
    """Return status, reason and `NEEDED` headers of a response, names in lower case; None: it is not plain.

    Args:
        text: the head without its last, empty line.

    Example:
        >>> parse_head("HTTP/1.1 206 OK\\r\\nContent-Length: 7")
        (206, 'OK', {'content-length': '7'})
    """
    first, *lines = text.split("\r\n")
    status, fields = STATUS.fullmatch(first), [field for field in map(_parse_field, lines) if field != UNNEEDED]
    headers = dict(fields)
    if status is None or len(headers) < len(fields) or "" in headers:
        return None
    is_plain = LENGTH.fullmatch(headers.get("content-length", "")) and NOT_PLAIN.isdisjoint(headers)
    return (int(status[1]), status[2] or "", headers) if is_plain or status[1] >= "400" else None


UNNEEDED = ("-", "")


@functools.lru_cache(128)
def _parse_field(line: str) -> tuple[str, str]:
    """Return name and value of a field; `UNNEEDED`, or ("", "") for a malformed one. Most lines repeat."""
    match = FIELD.fullmatch(line)
    if match is None:
        return "", ""
    name = match[1].lower()
    return (name, match[2].rstrip(" \t")) if name in NEEDED else UNNEEDED


def format_head(url: Any, headers: Mapping[str, str]) -> bytes | None:
    """Return the beginning of a request, up to the numbers of its range; None: it cannot be sent literally.

    Args:
        url: yarl's, whose path is sent as it is.
        headers: of the request; none of them twice.
    """
    from aiohttp.http import SERVER_SOFTWARE

    host = f"[{url.raw_host}]" if ":" in url.raw_host else url.raw_host
    origin = host if url.is_default_port() else f"{host}:{url.port}"
    defaults = {"host": origin, "accept": "*/*", "user-agent": SERVER_SOFTWARE}
    fields = defaults | {name.lower(): value for name, value in headers.items()}
    lines = [f"GET {url.raw_path_qs} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    is_plain = re.fullmatch("[!-~]+", url.raw_path_qs) and all(re.fullmatch("[ -~]+", line) for line in lines)
    return "\r\n".join([*lines, "range: bytes="]).encode() if is_plain else None


class RangeConnections:
    """Connections to one origin, as many as requests are in flight. All methods are called on one event loop.

    Args:
        host, port: of the origin.
        tls: of https; None for http.
    """

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        self._host, self._port, self._tls = host, port, tls
        self.idle: deque[_Connection] = deque()
        # All responses are received here; each piece is taken out before the next one is received.
        self.buffer = bytearray(BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self._num_odd, self._avoided_until = 0, 0.0
        self._spare: list[NDArray[np.uint8]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def get(self, head: bytes, start: int, stop: int) -> PlainResponse | None:
        """Send a request for bytes start to stop; None: send it by aiohttp, as its response was not plain.

        Raises:
            ConnectionTimeoutError: no connection was made in time.
            ServerDisconnectedError: aiohttp's; the server closed the connection before it responded.
            ClientPayloadError: aiohttp's; the response was cut off.
        """
        if time.monotonic() < self._avoided_until:
            return None
        request = b"%b%d-%d\r\n\r\n" % (head, start, stop - 1)
        if self.idle:
            with contextlib.suppress(_ClosedError):  # the server closed it when it was idle
                return await self.idle.pop().send(request, stop - start)
        try:
            connection = await self._connect()
        except ConnectionTimeoutError:
            raise
        except OSError:
            return None  # aiohttp meets it, too, and words it
        try:
            return await connection.send(request, stop - start)
        except _ClosedError as error:
            from aiohttp import ServerDisconnectedError

            raise ServerDisconnectedError from error

    def note_form(self, *, is_plain: bool) -> None:
        """Count a response; leave the requests of some minutes to aiohttp if a few in a row were not plain."""
        self._num_odd = 0 if is_plain else self._num_odd + 1
        if self._num_odd >= MOST_ODD:
            self._avoid()

    def _avoid(self) -> None:
        self._num_odd, self._avoided_until = 0, time.monotonic() + AVOIDED_SECONDS

    async def _connect(self) -> _Connection:
        # No `happy_eyeballs_delay`: a connection that is made while its task is cancelled would leak.
        loop, create = asyncio.get_running_loop(), functools.partial(_Connection, self)
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                return (await loop.create_connection(create, self._host, self._port, ssl=self._tls))[1]
        except TimeoutError as error:
            self._avoid()  # aiohttp tries the addresses of a host side by side
            raise ConnectionTimeoutError(
                f"no connection to {self._host}:{self._port} in {CONNECT_SECONDS} s"
            ) from error

    def take_memory(self, num_bytes: int) -> memoryview:
        """Return memory for a body: a large one gets that of an earlier one of which no view is left.

        Pages of new memory cost 0.3 s of CPU for each GiB that is received, as much as receiving it.
        """
        if num_bytes < REUSED_BYTES:
            return memoryview(bytearray(num_bytes))
        spare = [place for place, memory in enumerate(self._spare) if len(memory) == num_bytes]
        memory = self._spare.pop(spare[-1]) if spare else np.empty(num_bytes, np.uint8)
        lent = memory.view()  # lives as long as a view of the body does
        weakref.finalize(lent, self._take_back, memory).atexit = False
        return lent.data

    def _take_back(self, memory: NDArray[np.uint8]) -> None:
        if len(self._spare) < MOST_SPARE and self._timer:  # which clears them
            self._spare.append(memory)

    def keep(self, connection: _Connection) -> None:
        """Take back a connection whose response has ended."""
        self.idle.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEPT_SECONDS, self._close_old)

    def _close_old(self) -> None:
        seconds = 0.0
        self._spare.clear()
        while self.idle and (seconds := self.idle[0].used_at + KEPT_SECONDS - time.monotonic()) <= 0:
            self.idle.popleft().transport.close()
        again = asyncio.get_running_loop().call_later
        self._timer = again(seconds, self._close_old) if self.idle else None

    def close(self) -> None:
        """Close the idle connections."""
        while self.idle:
            self.idle.pop().transport.abort()


class _ClosedError(Exception):
    """A connection was closed before the first byte of a response came."""


class _Connection(asyncio.BufferedProtocol):
    """Connection with at most one request in flight."""

    transport: asyncio.Transport

    def __init__(self, pool: RangeConnections) -> None:
        self._pool = pool
        self._waiter: asyncio.Future[PlainResponse | None] | None = None
        self._most = 0  # bytes of the body, if it is the range
        self._begun = b""  # of a head that has not ended
        self._response: PlainResponse | None = None  # whose body has not ended
        self._rest = pool.view  # where the next bytes are received
        self.used_at = 0.0

    async def send(self, request: bytes, num_bytes: int) -> PlainResponse | None:
        """Return the response to a request; None: it is not plain."""
        self._waiter = asyncio.get_running_loop().create_future()
        self._most, self._begun = num_bytes, b""
        self.transport.write(request)
        try:
            return await self._waiter
        except BaseException:
            self.transport.abort()
            raise

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._response is not None:
            self._rest = self._rest[nbytes:]
            if not self._rest:
                self._end(self._response, is_whole=True)
        elif self._waiter is None:
            self.transport.abort()  # nothing was requested
        elif self._begun:
            received = self._begun + self._rest[:nbytes]
            self._begin(received, memoryview(received), len(received))
        else:
            self._begin(self._pool.buffer, self._rest, nbytes)

    def _begin(self, received: bytes | bytearray, view: memoryview, have: int) -> None:
        """Take the beginning of a response: the first `have` bytes of `received`, of which `view` is a view."""
        end = received.find(b"\r\n\r\n", 0, min(have, MAX_HEAD_BYTES))
        if end < 0:
            self._begun = bytes(view[:have])
            return self._end(None) if have >= MAX_HEAD_BYTES else None
        head = parse_head(str(view[:end], "latin-1"))
        if head is None:
            return self._end(None)
        status, reason, headers = head
        begin, came = end + 4, have - end - 4
        most = self._most if status < 400 else MAX_ERROR_BYTES
        length = headers.get("content-length", "") if status < 400 or NOT_PLAIN.isdisjoint(headers) else ""
        num_bytes = int(length) if status < 400 or LENGTH.fullmatch(length) else most + 1
        if num_bytes > most or came >= num_bytes:  # not awaited if it is too long, or may never end
            body = bytes(view[begin : begin + min(came, num_bytes, most)])
            return self._end(PlainResponse(status, reason, headers, body), is_whole=came == num_bytes <= most)
        target = self._pool.take_memory(num_bytes)
        target[:came] = view[begin:have]
        self._response, self._rest = PlainResponse(status, reason, headers, target), target[came:]
        return None

    def _end(self, response: PlainResponse | None, *, is_whole: bool = False) -> None:
        """Return a response to its waiter, and the connection to its pool if it can have another request."""
        waiter, self._waiter, self._response, self._rest = self._waiter, None, None, self._pool.view
        self._pool.note_form(is_plain=response is not None)
        if waiter is None or waiter.done():
            self.transport.abort()
            return
        if is_whole and response and "close" not in response.headers.get("connection", "").lower():
            self.used_at = time.monotonic()
            self._pool.keep(self)
        else:
            self.transport.abort()
        waiter.set_result(response)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiter is None:
            with contextlib.suppress(ValueError):
                self._pool.idle.remove(self)
        elif not self._waiter.done():
            from aiohttp import ClientPayloadError

            is_cut = self._begun or self._response is not None
            error = ClientPayloadError(f"response cut off: {exc or 'closed'}") if is_cut else _ClosedError()
            error.__cause__ = exc
            self._waiter.set_exception(error)
