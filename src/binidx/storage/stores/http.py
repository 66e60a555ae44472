"""Objects of web servers, and requests sent directly over a driver's HTTP session: a tenth of its CPU.

s3fs spends 590 us of CPU on a request, nearly all of it in botocore; one over a signed URL costs 55 us. The driver
still decides endpoint, region, TLS and credentials (environment, profile, key, token, anonymous, requester pays): it
signs, and its session carries the request. A range that is refused, or that cannot be requested in this way, is
requested again by the driver, so results and errors are the same; the driver then reads this object for four minutes.

`HttpStore` serves http:// and https://, read only, over the session of fsspec's driver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from binidx.errors import redacted, redacted_text
from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.driver_errors import TRANSIENT_STATUSES, HTTPStatusError, driver_text
from binidx.storage.stores.fsspec_store import AsyncFsspecStore, checked_info
from binidx.storage.stores.identity import (
    check_length,
    check_response,
    is_weak,
    size_and_tail,
    wrong_length,
)

logger = logging.getLogger(__name__)
RENEW_SECONDS = 240
"""Drivers renew credentials five minutes and more before they end, so a signature is valid for at least this long. An
object whose requests were refused is requested directly again after the same time."""

OBJECT_STATUSES = {404, 412, 416}
"""Statuses that are about the object, not about the way in which it was requested."""

READ_BUFFER_BYTES = 8 << 20
"""Bytes of a response that aiohttp buffers: as many as the largest request has."""

PLAIN = {"Accept-Encoding": "identity"}
"""Header that requests ranges of the stored bytes, not of bytes that a server compresses on the way."""

MAX_ADDRESSES = 1000
"""Addresses that one store remembers."""


class NotDirectError(Exception):
    """A request cannot be sent without the driver."""


@dataclass(frozen=True)
class Address:
    """Target of a direct request: an aiohttp session, a URL that is sent literally, headers and options."""

    session: Any
    url: Any
    headers: Mapping[str, str] = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)


class DirectStore(AsyncFsspecStore):
    """Store whose driver has an aiohttp session over which requests are sent directly."""

    has_session = True

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(uri, storage_options)
        self._routes: dict[tuple[int, str, str | None], _Route] = {}

    async def address(self, info: ObjectInfo) -> Address:
        """Return the address of this version of an object; raise any exception if no direct request is possible."""
        raise NotImplementedError

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        """Fetch one range, as `fetch`, by a request that the driver sends."""
        raise NotImplementedError

    async def fetch(self, info: ObjectInfo, where: Range) -> bytes:
        route = self.route(info)
        address = await self._address(route, info) if self.direct else None
        if address is None:
            return await self.fetch_by_driver(info, where)
        answer = await get_range(info, address, where)
        if isinstance(answer, int) and answer not in OBJECT_STATUSES:
            newer = await self._address(route, info, refused=address)
            answer = await get_range(info, newer, where) if newer else answer
        if isinstance(answer, bytes):
            return answer
        body = await self.fetch_by_driver(info, where)
        if answer not in OBJECT_STATUSES:
            # A refusal costs ten times the CPU, so it is logged: once, for they come in dozens and again.
            route.leave_to_driver(info.uri, f"status {answer} where the driver has none", logging.INFO)
        return body

    def route(self, info: ObjectInfo) -> _Route:
        """Return the route by which this process requests this version of an object."""
        key = os.getpid(), info.uri, info.version
        found = self._routes.get(key)
        if found is None:
            if len(self._routes) >= MAX_ADDRESSES:
                self._routes.clear()
            found = self._routes[key] = _Route()
        return found

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


async def get_range(info: ObjectInfo, address: Address, where: Range) -> bytes | int:
    """Send one request; return the bytes of a range, or the status of a refusal.

    Raises:
        ObjectChangedError, ShortReadError: see `check_response`.
        HTTPStatusError: a transient status.
        Exception: aiohttp's, for a connection that fails.
    """
    headers = {**address.headers, "Range": f"bytes={where[0]}-{where[1] - 1}"}
    async with address.session.get(address.url, headers=headers, **address.options) as response:
        if response.status in (200, 206):
            return await receive(info, where, response.status, response.headers, response.content.read)
        if response.status in TRANSIENT_STATUSES:
            text = _error_text(await response.text(errors="replace"))
            later = {"retry-after": response.headers.get("Retry-After", "")}
            raise HTTPStatusError(response.status, text or response.reason or "", later)
        return int(response.status)


async def receive(
    info: ObjectInfo,
    where: Range,
    status: int,
    headers: Mapping[str, str],
    read: Callable[[int], Coroutine[Any, Any, bytes]],
) -> bytes:
    """Return the body of a response that is this range of the pinned object.

    Of a response without Content-Length at most one byte too many is read, as its body may never end.

    Args:
        read: returns a piece of the body, of at most so many bytes; all of it for -1.

    Raises:
        ObjectChangedError, ShortReadError: see `check_response`.
    """
    check_response(info, where, status, headers)
    if "content-length" in headers and "content-encoding" not in headers:
        return check_length(info.uri, where, await read(-1))
    body, most = bytearray(), where[1] - where[0]
    while piece := await read(most + 1 - len(body)):
        body += piece
        if len(body) > most:
            raise wrong_length(info.uri, where, f"more than {most}")
    return check_length(info.uri, where, bytes(body))


def _error_text(body: str) -> str:
    """Return `SlowDown: Please reduce your request rate.` of an S3 error, else the beginning of the body."""
    found = [re.search(f"<{name}>(.*?)</{name}>", body, re.DOTALL) for name in ("Code", "Message")]
    return ": ".join(each[1] for each in found if each) or " ".join(body.split())[:100]


def request_options() -> dict[str, Any]:
    """Return aiohttp's options of a direct request.

    A signature does not hold for the target of a redirect. The scheduler notices stalls, so there is no timer for each
    piece of a response, which would be a tenth of the CPU. A response is needed whole, so nothing is gained by pausing
    its connection at each 128 KiB.
    """
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_connect=5)
    return {"allow_redirects": False, "timeout": timeout, "read_bufsize": READ_BUFFER_BYTES}


def literal_url(url: str) -> Any:
    """Return a URL whose quoting is signed, and must not be done again."""
    from yarl import URL

    return URL(url, encoded=True)


def private(owner: Any, name: str) -> Any:
    """Return a private member of a driver. Every caller has a public way for a release that lacks the member.

    Raises:
        AttributeError: the driver lacks it.
    """
    return getattr(owner, name)


AIOHTTP_LIMIT = 100


def unlimited(session: Any) -> Any:
    """Lift the session's limit on connections, as the scheduler bounds requests; return the session.

    aiohttp stops at 100 by default, and neither fsspec nor gcsfs has an option for that. If a release of aiohttp lacks
    the member `_limit`, its limit stays, which is slower.
    """
    if session.connector.limit == AIOHTTP_LIMIT:
        session.connector._limit = 0
    return session


def if_match(info: ObjectInfo) -> dict[str, str]:
    """Return the header that pins a request to a strong ETag; a weak one may not be sent."""
    etag = str(info.identity.get("etag", "W/"))
    return {} if etag.startswith("W/") else {"If-Match": etag}


class HttpStore(DirectStore):
    """Store of a web server. Reads are pinned to a strong ETag, where the server sends one."""

    def pins(self, info: ObjectInfo) -> bool:
        return "etag" in info.identity and not is_weak(info.identity["etag"])

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        if folders and not tail_bytes:
            return await self.look(uri), b""  # fsspec sends a GET where a server refuses HEAD
        method, wanted = ("GET", {"Range": f"bytes=-{tail_bytes}"}) if tail_bytes else ("HEAD", {})
        address = await self._url(uri)
        options = {"allow_redirects": True, **address.options, "headers": {**address.headers, **wanted}}
        async with address.session.request(method, address.url, **options) as response:
            response.raise_for_status()
            length = response.headers.get("Content-Length")
            whole = None if length is None else int(length)
            size, part_bytes = size_and_tail(response.headers.get("Content-Range"), whole)
            tail = await response.read() if part_bytes else b""
        info = checked_info(uri, {"size": size, "ETag": response.headers.get("ETag")})
        return info, tail if len(tail) == part_bytes else b""

    async def address(self, info: ObjectInfo) -> Address:
        found = await self._url(info.uri)
        return replace(found, headers={**found.headers, **if_match(info)})

    async def fetch(self, info: ObjectInfo, where: Range) -> bytes:
        route = self.route(info)
        if route.address is None:
            route.address = await self.address(info)
        answer = await get_range(info, route.address, where)
        if isinstance(answer, bytes):
            return answer
        raise FileNotFoundError(info.uri) if answer == 404 else HTTPStatusError(answer, "refused")

    async def _url(self, uri: str) -> Address:
        fs = self.fs
        # Else a server that takes no connections looks like one that sends nothing.
        timeout = {} if "timeout" in fs.client_kwargs else {"timeout": request_options()["timeout"]}
        options: dict[str, Any] = {**timeout, **fs.kwargs}
        headers = {**options.pop("headers", {}), **PLAIN}
        return Address(unlimited(await fs.set_session()), fs.encode_url(self.path(uri)), headers, options)
