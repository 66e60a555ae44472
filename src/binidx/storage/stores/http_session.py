"""Requests sent directly over a driver's HTTP session: its connections and credentials, a tenth of its CPU.

s3fs spends 590 us of CPU on a request, nearly all of it in botocore; one over a signed URL costs 55 us. The driver
still decides endpoint, region, TLS and credentials (environment, profile, key, token, anonymous, requester pays): it
signs, and its session carries the request. A request that is refused, or that cannot be sent in this way, is sent again
by the driver, so results and errors are the same; after a refusal the driver sends all of its kind for four minutes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from binidx.storage.interfaces import ObjectInfo, Range
from binidx.storage.stores.driver_errors import TRANSIENT_STATUSES, HTTPStatusError, driver_text
from binidx.storage.stores.fsspec_store import AsyncFsspecStore
from binidx.storage.stores.response_check import ResponseHead, check_length, check_response, wrong_length

logger = logging.getLogger(__name__)
RENEW_SECONDS = 240
"""Drivers renew credentials five minutes and more before they end, so a signature is valid for at least this long. A
refused kind of request is tried again after the same time."""

CONCURRENCY = 128
"""Requests in flight at once: at 30 ms to the first byte 64 are 2,100 requests/s, 128 are 4,200, which one core still
carries."""

MAX_GAP = 8 << 10
"""Bytes that pass in the CPU time of a request, 0.06 ms, at 100 MB/s for each connection."""

OBJECT_STATUSES = {404, 412, 416}
"""Statuses that are about the object, not about the way in which it was requested."""

READ_BUFFER_BYTES = 8 << 20
"""Bytes of a response before they are taken: the largest request."""

PLAIN = {"Accept-Encoding": "identity"}
"""Ranges of the stored bytes, not of what a server compresses on the way."""

Result = TypeVar("Result")


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

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(uri, storage_options)
        self._addresses: dict[tuple[int, str, str | None], _Slot] = {}

    @property
    def direct(self) -> bool:
        return self.settings.fast is not False

    @property
    def max_in_flight(self) -> int:
        return self.settings.concurrency or (CONCURRENCY if self.direct else super().max_in_flight)

    @property
    def max_gap(self) -> int:
        return MAX_GAP if self.direct and self.settings.max_gap is None else super().max_gap

    async def address(self, info: ObjectInfo) -> Address:
        """Return where this version of an object is requested; raise any exception if that is not possible."""
        raise NotImplementedError

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        """`fetch`, sent by the driver."""
        raise NotImplementedError

    async def fetch(self, info: ObjectInfo, where: Range) -> bytes:
        slot = self._slot(info) if self.direct else None
        address = await self._current(slot, info) if slot else None
        if slot is None or address is None:
            return await self.fetch_by_driver(info, where)
        answer = await get_range(info, address, where)
        if isinstance(answer, int) and answer not in OBJECT_STATUSES:
            newer = await self._renewed(slot, info, address)
            answer = await get_range(info, newer, where) if newer else answer
        if isinstance(answer, bytes):
            return answer
        body = await self.fetch_by_driver(info, where)
        if answer not in OBJECT_STATUSES:
            # A refusal costs ten times the CPU, so it is logged: once, for they come in dozens and again.
            level = logging.DEBUG if slot.logged else logging.INFO
            slot.logged, slot.address = True, None
            self.leave_to_driver(info.uri, f"status {answer} where the driver has none", level)
        return body

    async def direct_or_driver(
        self,
        kind: str,
        direct: Callable[[], Coroutine[Any, Any, Result]],
        driver: Callable[[], Coroutine[Any, Any, Result]],
    ) -> Result:
        """Send a request directly; by the driver if that is switched off, fails, or was refused in the last minutes.

        Args:
            kind: of the request; refusals are remembered for each.

        Raises:
            FileNotFoundError, HTTPStatusError: of the direct request: it is answered, or to be retried.
            Exception: of the driver.
        """
        if self.direct and not self.refused(kind):
            try:
                return await direct()
            except NotDirectError as error:
                self.leave_to_driver(kind, str(error))
            except (FileNotFoundError, HTTPStatusError):
                raise
            except Exception as error:  # the driver meets it too if it matters, and words it in its own way
                logger.debug("%s: %s is sent by its driver: %s", self.uri, kind, driver_text(error))
        return await driver()

    def refused(self, kind: str) -> bool:
        """Return whether requests of a kind, or for an object, are left to the driver for now."""
        return time.monotonic() < REFUSED_UNTIL.get((id(self.fs), kind), 0.0)

    def leave_to_driver(self, kind: str, reason: str, level: int = logging.DEBUG) -> None:
        """Leave requests of a kind, or for an object, to the driver for some minutes."""
        REFUSED_UNTIL[id(self.fs), kind] = time.monotonic() + RENEW_SECONDS
        logger.log(level, "%s: left to its driver for %d s: %s", kind, RENEW_SECONDS, reason)

    def _slot(self, info: ObjectInfo) -> _Slot:
        key = os.getpid(), info.uri, info.version
        found = self._addresses.get(key)
        if found is None:
            if len(self._addresses) >= MAX_ADDRESSES:
                self._addresses.clear()
            found = self._addresses[key] = _Slot()
        return found

    async def _current(self, slot: _Slot, info: ObjectInfo) -> Address | None:
        if slot.address is not None and time.monotonic() < slot.found_at + RENEW_SECONDS:
            return slot.address
        return await self._renewed(slot, info, slot.address)

    async def _renewed(self, slot: _Slot, info: ObjectInfo, old: Address | None) -> Address | None:
        """Return a new address, unless another request has found one meanwhile; None: the driver sends for now."""
        async with slot.lock:
            if slot.address is old and not self.refused(info.uri):
                try:
                    slot.address = await self.address(info)
                    slot.found_at = time.monotonic()
                except Exception as error:  # the driver meets it too if it matters, and words it in its own way
                    slot.address = None
                    self.leave_to_driver(info.uri, driver_text(error))
            return slot.address


MAX_ADDRESSES = 1000
"""Addresses that one store remembers."""

REFUSED_UNTIL: dict[tuple[int, str], float] = {}
"""id of a filesystem, which is kept for ever, and a kind of request or a URI -> when that is sent directly again."""


class _Slot:
    """The address of one object, and the lock of the request that renews it."""

    def __init__(self) -> None:
        self.address: Address | None = None
        self.found_at = 0.0
        self.lock = asyncio.Lock()
        self.logged = False


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
            head = ResponseHead(response.status, response.headers)
            return await receive(info, where, head, response.content.read)
        if response.status in TRANSIENT_STATUSES:
            text = _error_text(await response.text(errors="replace"))
            raise HTTPStatusError(response.status, text or response.reason or "")
        return int(response.status)


async def receive(
    info: ObjectInfo, where: Range, head: ResponseHead, read: Callable[[int], Coroutine[Any, Any, bytes]]
) -> bytes:
    """Return the body of a response that is this range of the pinned object.

    Of a response without Content-Length at most one byte too many is read: it may never end.

    Args:
        read: returns a piece of the body, of at most so many bytes; all of it for -1.

    Raises:
        ObjectChangedError, ShortReadError: see `check_response`.
    """
    check_response(info, where, head)
    if "content-length" in head.headers and "content-encoding" not in head.headers:
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


def request_options(seconds: float | None = None) -> dict[str, Any]:
    """Return aiohttp's options of a direct request.

    A signature does not hold for the target of a redirect. The scheduler notices stalls, so there is no timer for each
    piece of a response, which would be a tenth of the CPU. A response is wanted whole, so nothing is gained by pausing
    its connection at each 128 KiB.

    Args:
        seconds: limit for the whole request; None: the scheduler has one.
    """
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=seconds, sock_connect=5)
    return {"allow_redirects": False, "timeout": timeout, "read_bufsize": READ_BUFFER_BYTES}


def literal_url(url: str) -> Any:
    """Return a URL whose quoting is signed, and must not be done again."""
    from yarl import URL

    return URL(url, encoded=True)


def private(owner: Any, name: str) -> Any:
    """Return a private member of a driver. Every caller has a public way for a release that lacks it.

    Raises:
        AttributeError: it does.
    """
    return getattr(owner, name)


AIOHTTP_LIMIT = 100


def unlimited(session: Any) -> Any:
    """Lift the session's limit on connections, as the scheduler bounds requests; return the session.

    aiohttp stops at 100 by default, and neither fsspec nor gcsfs has an option for it. Where aiohttp has no such member
    its limit stays, which is slower.
    """
    if session.connector.limit == AIOHTTP_LIMIT:
        session.connector._limit = 0
    return session


def if_match(info: ObjectInfo) -> dict[str, str]:
    """Return the header that pins a request to a strong ETag; a weak one may not be sent."""
    etag = str(info.identity.get("etag", "W/"))
    return {} if etag.startswith("W/") else {"If-Match": etag}
