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
from typing import Any

from binidx.storage.address import RENEW_SECONDS, Address, AddressOf
from binidx.storage.cause import text
from binidx.storage.pending import Fetch
from binidx.storage.pinned import Opened
from binidx.storage.ranges import Range
from binidx.storage.retries import PASSING, HTTPStatusError, complete, wrong_length, wrong_place

log = logging.getLogger(__name__)

OF_THE_OBJECT = {404, 412, 416}
"""Statuses that tell of the object, not of who asks and how."""


class DirectRequests:
    """The requests of one object, in one process. What is refused is left to `driver`, and told by it.

    Args:
        fs, opened: what its class has an `address` for.
        driver: asks the filesystem itself.
    """

    def __init__(self, fs: Any, opened: Opened, address: AddressOf, driver: Fetch) -> None:
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
        answer = await ask(self._opened.uri, address, start, stop)
        if isinstance(answer, int) and answer not in OF_THE_OBJECT and (newer := await self._renewed(address)):
            answer = await ask(self._opened.uri, newer, start, stop)
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
                    self._leave_it(text(error))
            return self._address

    def _leave_it(self, reason: str, *, refused: bool = False) -> None:
        self._by_driver_until, self._address = time.monotonic() + RENEW_SECONDS, None
        # Refusals cost whoever reads ten times the CPU, so they are told: once, for they come in dozens and again.
        level = logging.INFO if refused and not self._told else logging.DEBUG
        self._told = self._told or refused
        log.log(level, "%s: left to its driver for %d s: %s", self._opened.uri, RENEW_SECONDS, reason)


async def ask(uri: str, address: Address, start: int, stop: int) -> bytes | int:
    """The bytes of a range, or the status of a refusal.

    Raises:
        ShortReadError: an answer of another length or place; its body is not waited for.
        HTTPStatusError: a status that passes.
        Exception: aiohttp's, for a connection that fails.
    """
    headers = {**address.headers, "Range": f"bytes={start}-{stop - 1}"}
    async with address.session.get(address.url, headers=headers, **address.options) as response:
        if response.status in (200, 206):
            _check_head(uri, (start, stop), response)
            return complete(uri, (start, stop), await _body(uri, (start, stop), response))
        if response.status in PASSING:
            raise HTTPStatusError(response.status, _said(await response.text(errors="replace")) or response.reason)
        return int(response.status)


def _check_head(uri: str, where: Range, response: Any) -> None:
    """Before its body is waited for: a server that does not heed ranges sends all of the object."""
    start, stop = where
    whole = response.status == 200 and start > 0
    length = response.content_length
    asked = f"bytes {start}-{stop - 1}/"
    place = response.headers.get("Content-Range", asked)
    if whole or length not in (None, stop - start):
        response.close()
        raise wrong_length(uri, where, "all" if length is None else length)
    if not place.startswith(asked):
        response.close()
        raise wrong_place(uri, where, place)


async def _body(uri: str, where: Range, response: Any) -> bytes:
    """Of an answer that does not say how long it is, no more than a byte too many: it may never end."""
    if response.content_length is not None and "Content-Encoding" not in response.headers:
        whole: bytes = await response.read()
        return whole
    body, most = bytearray(), where[1] - where[0]
    while piece := await response.content.read(most + 1 - len(body)):
        body += piece
        if len(body) > most:
            response.close()
            raise wrong_length(uri, where, f"more than {most}")
    return bytes(body)


def _said(body: str) -> str:
    """`SlowDown: Please reduce your request rate.` of an error of S3, else the beginning of what was sent."""
    found = [re.search(f"<{name}>(.*?)</{name}>", body, re.DOTALL) for name in ("Code", "Message")]
    return ": ".join(each[1] for each in found if each) or " ".join(body.split())[:100]
