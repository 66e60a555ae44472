"""Requests sent directly, without a driver: a tenth of its CPU.

s3fs spends 590 us of CPU on a request, nearly all of it in botocore; one over a signed URL costs 55 us. The driver
still decides endpoint, region, TLS and credentials (environment, profile, key, token, anonymous, requester pays), and
signs. Requests for ranges go over `range_client`, and over a session of aiohttp where their responses or the user's
options are unusual. Both are ours, so no private member of a driver is needed. A range that is refused, or that cannot
be requested in this way, is requested again by the driver, so results and errors are the same; the driver then reads
this object for four minutes.

A body is read up to the bytes that were requested, and none is inflated: a gzip of 1 MB may hold 1 GB.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import logging
import os
import re
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from typing import Any

from binidx.errors import redacted, redacted_text
from binidx.forks import cached_property
from binidx.storage.interfaces import Bytes, Range
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.driver_errors import TRANSIENT_STATUSES, HTTPStatusError, driver_text
from binidx.storage.stores.fsspec_store import AsyncFsspecStore
from binidx.storage.stores.identity import check_length, check_response, wrong_length
from binidx.storage.stores.range_client import MAX_ERROR_BYTES, RangeConnections, format_head
from binidx.storage.threads import io_loop

logger = logging.getLogger(__name__)
RENEW_SECONDS = 240
"""Drivers renew credentials five minutes and more before they end, so a signature is valid for at least this long. An
object whose requests were refused is requested directly again after the same time."""

OBJECT_STATUSES = {404, 412, 416}
"""Statuses that are about the object, not about the way in which it was requested."""

PLAIN = {"Accept-Encoding": "identity"}
"""Header that requests ranges of the stored bytes, not of bytes that a server compresses on the way."""

NEUTRAL_HEADERS = {"accept-encoding", "if-match", "range", "user-agent"}
"""Headers that a redirect takes to another origin: they hold nothing of the user."""

REDIRECTS = {301, 302, 303, 307, 308}
MAX_REDIRECTS = 10
MAX_UNBOUNDED_BYTES = 16 << 20
"""Most bytes of a body of which a driver requests no range: a listing, metadata, an error."""

MAX_ADDRESSES = 20_000
"""Addresses that one store remembers, 2 KB each: those of the prefixes of a blend, which share a store."""


class NotDirectError(Exception):
    """A request cannot be sent without the driver."""


@dataclass(frozen=True)
class Address:
    """Target of a direct request: an aiohttp session, a URL that is sent literally, headers and options.

    Attributes:
        redirects: number of redirects that are followed, each to an origin that `redirect_refusal` allows.
        redirect_hosts: origins to which they may lead besides that of the URL; None: any.
        connections: sends requests for ranges, as far as it can; None: the session sends all.
    """

    session: Any
    url: Any
    headers: Mapping[str, str] = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)
    redirects: int = 0
    redirect_hosts: Collection[str] | None = None
    connections: RangeConnections | None = field(default=None, repr=False)

    @cached_property
    def head(self) -> bytes | None:
        """Beginning of a request for a range over `connections`; None: it cannot be sent over these."""
        return format_head(self.url, {**self.session.headers, **self.headers})

    def redirected(self, response: Any) -> Address | None:
        """Return the target of a redirect; to another scheme, host or port without the user's headers and signature.

        Returns:
            None: the response is no redirect, or is not to be followed: `redirects` is the number of those that are.

        Raises:
            HTTPStatusError: it leads to an origin that `redirect_hosts` does not name.
        """
        url = redirect_target(response)
        if url is None or not self.redirects:
            return None
        if refusal := redirect_refusal(response, self.redirect_hosts):
            raise HTTPStatusError(response.status, refusal)
        headers = headers_for(url, response.url, self.headers)
        if not is_same_origin(url, response.url):  # AIStore repeats the query of the request in the Location
            signature = [field for field in response.url.query.items() if field[0].startswith("X-Amz-")]
            kept = [field for field in url.query.items() if field not in signature]
            url = url if len(kept) == len(url.query) else url.with_query(kept)
        return replace(self, url=url, headers=headers, redirects=self.redirects - 1, connections=None)


def redirect_target(response: Any) -> Any:
    """Return the URL to which a response redirects; None if it does not."""
    location = response.headers.get("Location")
    return response.url.join(type(response.url)(location)) if response.status in REDIRECTS and location else None


def redirect_refusal(response: Any, hosts: Collection[str] | None) -> str:
    """Return why a redirect is not followed; "" if it may be, or if the response is none.

    Args:
        hosts: other origins to which requests that read may be redirected; None: any request to any origin.
    """
    target = redirect_target(response)
    if hosts is None or target is None or is_same_origin(target, response.url):
        return ""
    origin = target.origin()
    if response.method not in ("GET", "HEAD"):
        return f"redirected to {origin}, but only reads follow redirects; write to the bucket itself, past its cache"
    if any(is_same_origin(target, type(target)(host)) for host in hosts):
        return ""
    way = f"add it to redirect_hosts, or BINIDX_REDIRECT_HOSTS={origin}"
    return f"redirected to {origin} (need one of redirect_hosts: {', '.join(hosts) or 'none'}); if you trust it, {way}"


def headers_for(target: Any, origin: Any, headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request that a redirect sends from one URL to another.

    Args:
        target, origin: URLs of yarl.
        headers: of the redirected request.
    """
    stays = is_same_origin(target, origin)
    return {name: value for name, value in headers.items() if stays or name.lower() in NEUTRAL_HEADERS}


def is_same_origin(one: Any, other: Any) -> bool:
    """Return whether two URLs have the same scheme, host and port."""
    return (one.scheme, one.host, one.port) == (other.scheme, other.host, other.port)


class DirectStore(AsyncFsspecStore):
    """Store whose driver has an aiohttp session over which requests are sent directly."""

    has_session = True

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(uri, storage_options)
        self._routes = defaultdict[tuple[int, str, str | None], _Route](_Route)

    def pins(self, info: ObjectInfo) -> bool:
        return bool(if_match(info))

    async def address(self, info: ObjectInfo) -> Address:
        """Return the aiohttp session, URL, headers and options with which GET requests are sent without the driver.

        The URL or the headers carry any credentials. They pin the version of the object where the store supports that.

        Args:
            info: object and version to read, as the store reported them.

        Raises:
            Exception: of any class, if the object cannot be requested without the driver; `fetch` then uses the driver.
        """
        raise NotImplementedError

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        """Fetch one range, as `fetch`, by a request that the driver sends."""
        raise NotImplementedError

    async def fetch(self, info: ObjectInfo, where: Range) -> Bytes:
        route = self.route(info)
        address = route.address
        if time.monotonic() >= route.until:
            address = await self._address(route, info) if self.direct else None
        if address is None:
            return await self.fetch_by_driver(info, where)
        answer = await get_range(info, address, where)
        if isinstance(answer, int) and answer not in OBJECT_STATUSES:
            newer = await self._address(route, info, refused=address)
            answer = await get_range(info, newer, where) if newer else answer
        if not isinstance(answer, int):
            return answer
        body = await self.fetch_by_driver(info, where)
        if answer not in OBJECT_STATUSES:
            # A refusal costs ten times the CPU, so it is logged: once, for they come in dozens and again.
            route.leave_to_driver(info.uri, f"status {answer} where the driver has none", logging.INFO)
        return body

    def route(self, info: ObjectInfo) -> _Route:
        """Return the route by which this process requests this version of an object."""
        route = self._routes[os.getpid(), info.uri, info.version]
        if len(self._routes) > MAX_ADDRESSES:
            self._routes.clear()
        return route

    async def _address(self, route: _Route, info: ObjectInfo, refused: Address | None = None) -> Address | None:
        """Return the address of an object, a new one if it is old or was refused; None: the driver sends for now."""

        def is_valid() -> bool:
            return time.monotonic() < route.until and (refused is None or route.address is not refused)

        if is_valid():
            return route.address
        async with route.lock:
            if not is_valid():  # another request may have renewed it meanwhile
                try:
                    route.address, route.until = await self.address(info), time.monotonic() + RENEW_SECONDS
                except Exception as error:  # the driver meets it too if it matters, and words it in its own way
                    route.leave_to_driver(info.uri, driver_text(error))
            return route.address


class _Route:
    """Way to request one object up to the time `until`: at `address`, or by the driver if that is None."""

    def __init__(self) -> None:
        self.address: Address | None = None
        self.until = 0.0
        self.lock = asyncio.Lock()
        self.logged = False

    def leave_to_driver(self, uri: str, reason: str, level: int = logging.DEBUG) -> None:
        """Leave the object to the driver for some minutes; log it once at `level`."""
        self.address, self.until = None, time.monotonic() + RENEW_SECONDS
        level = logging.DEBUG if self.logged else level
        logger.log(level, "%s: left to its driver for %d s: %s", redacted(uri), RENEW_SECONDS, redacted_text(reason))
        self.logged |= level == logging.INFO


async def get_range(info: ObjectInfo, address: Address, where: Range) -> Bytes | int:
    """Send one request; return the bytes of a range, or the status of a refusal.

    Args:
        where: (start, stop) in bytes.

    Raises:
        ObjectChangedError, ShortReadError: see `check_response`.
        HTTPStatusError: a transient status.
        Exception: aiohttp's, for a connection that fails.
    """
    if address.connections and address.head and (answer := await address.connections.get(address.head, *where)):
        status, reason, headers, body = answer
        if status in (200, 206):
            check_response(info, where, status, headers)
            return check_length(info.uri, where, body)
        check_status(status, reason, headers, body)
        return status
    headers = {**address.headers, "Range": f"bytes={where[0]}-{where[1] - 1}"}
    async with address.session.get(address.url, headers=headers, **address.options) as response:
        if response.status in (200, 206):
            return await receive(info, where, response.status, response.headers, response.content.read)
        if response.status in TRANSIENT_STATUSES:
            body = await response.content.read(MAX_ERROR_BYTES)
            check_status(response.status, response.reason or "", response.headers, body)
        target = address.redirected(response)
    return await get_range(info, target, where) if target else int(response.status)


def check_status(status: int, reason: str, headers: Mapping[str, str], body: Bytes) -> None:
    """Raise HTTPStatusError if the status of a response is a transient one.

    Args:
        body: the beginning of the body, for the message.
    """
    if status in TRANSIENT_STATUSES:
        later = {"retry-after": headers.get("retry-after", "")}
        text = bytes(body).decode(errors="replace")
        fields = [re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL) for name in ("Code", "Message")]  # of S3
        text = ": ".join(field[1] for field in fields if field) or " ".join(text.split())[:100]
        raise HTTPStatusError(status, text or reason, later)


async def receive(
    info: ObjectInfo,
    where: Range,
    status: int,
    headers: Mapping[str, str],
    read: Callable[[int], Coroutine[Any, Any, bytes]],
) -> bytes:
    """Return the body of a response that is this range of the pinned object.

    At most one byte too many is read, as a body may never end.

    Args:
        read: returns a piece of the body, of at most so many bytes.

    Raises:
        ObjectChangedError, ShortReadError: see `check_response`.
    """
    check_response(info, where, status, headers)
    most = where[1] - where[0]
    body = await read_at_most(read, most)
    if len(body) > most:
        raise wrong_length(info.uri, where, f"more than {most}")
    return check_length(info.uri, where, body)


async def read_at_most(read: Callable[[int], Coroutine[Any, Any, bytes]], most: int) -> bytes:
    """Return a body; of one with more than `most` bytes, its first `most` + 1.

    Args:
        read: returns a piece of the body, of at most so many bytes.
    """
    body = bytearray()
    while len(body) <= most and (piece := await read(most + 1 - len(body))):
        body += piece
    return bytes(body)


def request_options() -> dict[str, Any]:
    """Return aiohttp's options of a direct request.

    A signature does not hold for the target of a redirect. The scheduler notices stalls, so there is no timer for each
    piece of a response, which would be a tenth of the CPU.
    """
    from aiohttp import ClientTimeout

    return {"allow_redirects": False, "timeout": ClientTimeout(total=None, sock_connect=5)}


async def new_session(**options: Any) -> Any:
    """Return an aiohttp session; it has no limit on connections, as the scheduler bounds requests."""
    from aiohttp import ClientSession, TCPConnector

    return ClientSession(**{"connector": TCPConnector(limit=0), **options})


@dataclass(frozen=True)
class SessionOptions:
    """Options of a session for direct requests beside a driver.

    Attributes:
        options: of aiohttp.
        tls: returns the TLS context of the session; None: the user set options that plain connections do not have.
    """

    options: Mapping[str, Any]
    tls: Callable[[], ssl.SSLContext] | None


async def direct_address(
    fs: Any, url: str, headers: Mapping[str, str], session_options: Callable[[], SessionOptions]
) -> Address:
    """Return the address of direct requests beside a driver, over this process's session for them.

    Args:
        fs: filesystem of the driver.
        url: URL whose quoting may be signed, so that it is not done again.
        session_options: returns the options of a new session.
    """
    from yarl import URL

    key, target = (os.getpid(), id(fs)), URL(url, encoded=True)
    if key not in _sessions:
        made = session_options()
        _sessions[key] = await new_session(**made.options), made.tls
    session, tls = _sessions[key]
    connections = plain_connections(fs, session, target, tls)
    return Address(session, target, {**PLAIN, **headers}, request_options(), connections=connections)


def plain_connections(
    fs: Any, session: Any, url: Any, tls: Callable[[], ssl.SSLContext] | None
) -> RangeConnections | None:
    """Return this process's connections for plain ranges to the origin of a URL; None: aiohttp sends all requests.

    Args:
        session: aiohttp's.
        tls: as in `SessionOptions`.
    """
    if tls is None or session.trust_env or session.auth or session.trace_configs or len(session.cookie_jar):
        return None
    key = os.getpid(), id(fs), url.scheme, url.raw_host, url.port
    if key not in _connections:
        _connections[key] = RangeConnections(url.raw_host, url.port, tls() if url.scheme == "https" else None)
    return _connections[key]


default_tls = functools.cache(ssl.create_default_context)
"""Return the TLS context that aiohttp uses unless it is given one: of the certificates of the system."""

PLAIN_OPTIONS = {"auto_decompress", "headers", "response_class"}
"""Options of a session that plain connections honour."""

_sessions: dict[tuple[int, int], tuple[Any, Callable[[], ssl.SSLContext] | None]] = {}
"""(process, id of a filesystem) -> session, and its TLS. Kept for ever, as the filesystems: see `fsspec_store`."""

_connections: dict[tuple[int, int, str, str, int], RangeConnections] = {}
"""(process, id of a filesystem, origin) -> connections; kept as long."""


@atexit.register
def _close_sessions() -> None:
    async def close() -> None:
        for key, connections in _connections.items():
            if key[0] == os.getpid():
                connections.close()
        for (pid, _), (session, _) in _sessions.items():
            if pid == os.getpid():
                await session.close()

    if any(key[0] == os.getpid() for key in [*_sessions, *_connections]):
        wait([asyncio.run_coroutine_threadsafe(close(), io_loop())], CLOSING_SECONDS)


CLOSING_SECONDS = 1.0
"""Longest time that the end of the interpreter waits for connections to close."""


def if_match(info: ObjectInfo) -> dict[str, str]:
    """Return the header that pins a request to a strong ETag; a weak one may not be sent."""
    etag = str(info.identity.get("etag", "W/"))
    return {} if etag.startswith("W/") else {"If-Match": etag}


@functools.cache
def bounded_session(redirect_hosts: tuple[str, ...] | None) -> dict[str, Any]:
    """Return options of an aiohttp session whose responses, which a driver reads, are bounded and not inflated.

    Args:
        redirect_hosts: other origins to which a redirect is followed, else it is an error; None: any.
    """
    from aiohttp import ClientResponse, ClientResponseError

    class BoundedResponse(ClientResponse):
        """Response of whose body at most one byte more than the requested range is read, which callers notice."""

        async def start(self, connection: Any) -> ClientResponse:
            await super().start(connection)
            if refusal := redirect_refusal(self, redirect_hosts):
                raise self._refusal(refusal)
            return self

        async def read(self) -> bytes:
            if self._body is None:
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
                most = int(wanted[2]) + 1 - int(wanted[1]) if wanted and self.ok else MAX_UNBOUNDED_BYTES
                try:
                    self._body = await read_at_most(self.content.read, most)
                finally:
                    if self._body is None or len(self._body) > most:
                        self.close()
                if len(self._body) > most and not wanted:
                    raise self._refusal(f"more than {most} bytes where no range was requested")
            return self._body

        def _refusal(self, text: str) -> ClientResponseError:
            return ClientResponseError(self.request_info, self.history, status=self.status, message=text)

    return {"auto_decompress": False, "response_class": BoundedResponse}


@functools.cache
def redirect_guard() -> Any:
    """Return the configuration of an aiohttp session whose redirects take `NEUTRAL_HEADERS` alone to another origin.

    It costs 40 us a request, so sessions of direct requests go without it.
    """
    from aiohttp import TraceConfig

    async def drop_headers(session: Any, context: Any, hop: Any) -> None:
        if target := redirect_target(hop.response):
            kept = headers_for(target, hop.response.url, hop.headers)
            hop.headers.clear()
            hop.headers.update(kept)

    guard = TraceConfig()
    guard.on_request_redirect.append(drop_headers)
    guard.freeze()
    return guard
