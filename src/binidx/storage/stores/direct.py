"""Ranges asked straight of a driver's HTTP session: its connections, certificates and credentials, a tenth of its CPU.

s3fs spends 590 us of CPU on a request, nearly all of it in botocore, where one over a signed URL costs 55 us. All that
tells where and as whom to ask (environment, profile, key, token, anonymous, requester pays, endpoint, region, TLS)
stays the driver's: it signs, and its session carries the request. What is refused, or cannot be asked for in this way,
the driver asks for again, so answers and errors are the same.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any

from binidx.storage.interfaces import Range
from binidx.storage.requests.retries import PASSING, Fetch, HTTPStatusError
from binidx.storage.stores.address import RENEW_SECONDS, Address, AddressOf
from binidx.storage.stores.driver_errors import driver_text
from binidx.storage.stores.pinned import PinnedObject
from binidx.storage.stores.response_check import ResponseHead, check_length, check_response, wrong_length

log = logging.getLogger(__name__)
OF_THE_OBJECT = {404, 412, 416}
"""Statuses that tell of the object, not of who asks and how."""


class DirectRequests:
    """The requests of one object, in one process. What is refused is left to `driver`, and told by it.

    Args:
        fs, opened: what its class has an `address` for.
        driver: asks the filesystem itself.
    """

    def __init__(self, fs: Any, opened: PinnedObject, address: AddressOf, driver: Fetch) -> None:
        self._fs, self._opened, self._driver = fs, opened, driver
        self._address_of = address
        self._address: Address | None = None
        self._found_at = 0.0
        self._finding = asyncio.Lock()
        self._by_driver_until = 0.0
        self._told = False

    async def fetch(self, start: int, stop: int) -> bytes:
        if (address := await self._current()) is None:
            return await self._driver(start, stop)
        answer = await ask(self._opened, address, start, stop)
        if isinstance(answer, int) and answer not in OF_THE_OBJECT and (newer := await self._renewed(address)):
            answer = await ask(self._opened, newer, start, stop)
        if isinstance(answer, bytes):
            return answer
        found = await self._driver(start, stop)
        if answer not in OF_THE_OBJECT:
            self._leave_it(f"status {answer} where the driver has none", refused=True)
        return found

    @property
    def by_driver(self) -> bool:
        """Whether its requests are left to the driver, for now."""
        return time.monotonic() < self._by_driver_until

    async def _current(self) -> Address | None:
        if self._address is not None and time.monotonic() < self._found_at + RENEW_SECONDS:
            return self._address
        return await self._renewed(self._address)

    async def _renewed(self, old: Address | None) -> Address | None:
        """A new address, unless another request has got one meanwhile."""
        async with self._finding:
            if self._address is old and not self.by_driver:
                try:
                    self._address = await self._address_of(self._fs, self._opened)
                    self._found_at = time.monotonic()
                except Exception as error:
                    # Whatever it is, the driver meets it too if it matters, and tells it in its own words.
                    self._leave_it(driver_text(error))
            return self._address

    def _leave_it(self, reason: str, *, refused: bool = False) -> None:
        self._by_driver_until, self._address = time.monotonic() + RENEW_SECONDS, None
        # Refusals cost whoever reads ten times the CPU, so they are told: once, for they come in dozens and again.
        level = logging.INFO if refused and not self._told else logging.DEBUG
        self._told = self._told or refused
        log.log(level, "%s: left to its driver for %d s: %s", self._opened.uri, RENEW_SECONDS, reason)


async def ask(opened: PinnedObject, address: Address, start: int, stop: int) -> bytes | int:
    """The bytes of a range, or the status of a refusal.

    Raises:
        ObjectChangedError, ShortReadError: see `check_response`.
        HTTPStatusError: a status that passes.
        Exception: aiohttp's, for a connection that fails.
    """
    headers = {**address.headers, "Range": f"bytes={start}-{stop - 1}"}
    async with address.session.get(address.url, headers=headers, **address.options) as response:
        if response.status in (200, 206):
            head = ResponseHead(response.status, response.headers)
            return await receive(opened, (start, stop), head, response.content.read)
        if response.status in PASSING:
            raise HTTPStatusError(response.status, _said(await response.text(errors="replace")) or response.reason)
        return int(response.status)


async def receive(
    opened: PinnedObject, where: Range, head: ResponseHead, read: Callable[[int], Coroutine[Any, Any, bytes]]
) -> bytes:
    """The body of a response that is this range of the pinned object.

    Of a response that does not say how long it is, no more is read than a byte too many: it may never end.

    Args:
        read: a piece of the body, of so many bytes at most; all of it for -1.

    Raises:
        ObjectChangedError, ShortReadError: see `check_response`.
    """
    check_response(opened, where, head)
    if "content-length" in head.headers and "content-encoding" not in head.headers:
        return check_length(opened.uri, where, await read(-1))
    body, most = bytearray(), where[1] - where[0]
    while piece := await read(most + 1 - len(body)):
        body += piece
        if len(body) > most:
            raise wrong_length(opened.uri, where, f"more than {most}")
    return check_length(opened.uri, where, bytes(body))


def _said(body: str) -> str:
    """`SlowDown: Please reduce your request rate.` of an error of S3, else the beginning of what was sent."""
    found = [re.search(f"<{name}>(.*?)</{name}>", body, re.DOTALL) for name in ("Code", "Message")]
    return ": ".join(each[1] for each in found if each) or " ".join(body.split())[:100]
