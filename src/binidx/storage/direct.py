"""Ranges asked straight of a driver's HTTP session: its connections, certificates and credentials, a tenth of its CPU.

    s3://        a URL that its client signs (SigV4), good for an hour, renewed after four minutes
    gs://        the media URL and the bearer header of its credentials, renewed as often
    http(s)://   the URL itself

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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from binidx.storage import filesystem
from binidx.storage.pending import Fetch
from binidx.storage.pinned import Opened
from binidx.storage.ranges import Range
from binidx.storage.retries import PASSING, complete, wrong_length, wrong_place

log = logging.getLogger(__name__)

RENEW_SECONDS = 240
"""Drivers renew credentials five minutes and more before they end: what is signed now is good for so long at least.
What was left to the driver is tried again as late."""

OF_THE_OBJECT = {404, 412, 416}
"""Statuses that tell of the object, not of who asks and how."""


@dataclass(frozen=True)
class Address:
    """Where and how an object is asked for: an aiohttp session, a URL that is sent as it is, headers and options."""

    session: Any
    url: Any
    headers: Mapping[str, str] = field(repr=False)
    options: Mapping[str, Any] = field(repr=False)


PLAIN = {"Accept-Encoding": "identity"}
"""Ranges of the bytes as they are, not of what a server makes of them on the way."""


def stay() -> dict[str, Any]:
    """Options of a request: a signature does not hold elsewhere, and the scheduler sees what stalls without a timer for
    each piece of an answer, which would be a tenth of the CPU. All of an answer is wanted, so nothing is gained by
    holding its connection back at each 128 KiB."""
    from aiohttp import ClientTimeout

    return {
        "allow_redirects": False,
        "timeout": ClientTimeout(total=None, sock_connect=5),
        "read_bufsize": MOST_HELD,
    }


MOST_HELD = 8 << 20
"""Bytes of an answer before they are taken: as large as a request is at most."""


class NotDirectError(Exception):
    """This object cannot be asked for without its driver."""


class HTTPStatusError(OSError):
    """A status that is no answer."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status} {said}")
        self.status = status


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
                    self._leave_it(filesystem.text(error))
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


AddressOf = Callable[[Any, Opened], Awaitable[Address]]


async def _address_on_s3(fs: Any, opened: Opened) -> Address:
    bucket, key, version = fs.split_path(opened.path)
    asked = {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}
    address = await signed(fs, bucket, "get_object", asked)
    return replace(address, headers={**address.headers, **_condition(opened)})


async def get_signed(fs: Any, bucket: str, method: str, asked: Mapping[str, Any]) -> bytes:
    """The body of an answer of S3 to a question of one of its client's methods.

    Raises:
        NotDirectError: it is to be asked by the driver, whose error is the one to tell.
    """
    try:
        address = await signed(fs, bucket, method, asked)
        async with address.session.get(address.url, headers=address.headers, **address.options) as response:
            if response.status != 200:
                raise NotDirectError(f"status {response.status}")
            body: bytes = await response.read()
            return body
    except Exception as error:
        raise error if isinstance(error, NotDirectError) else NotDirectError(filesystem.text(error)) from error


async def signed(
    fs: Any, bucket: str, method: str, asked: Mapping[str, Any], sent: Mapping[str, str] | None = None
) -> Address:
    """Where a question of S3's client is asked without it.

    Args:
        sent: headers that come of what is asked, and are signed with it.

    Raises:
        NotDirectError: it cannot be asked like this.
    """
    await fs.set_session()
    client = await fs.get_s3(bucket)
    wanted = fs._get_s3_method_kwargs(getattr(client, method), **asked)
    client.meta.events.register_first(f"{RESOLVES}.s3", _in_its_region, unique_id="binidx-region")
    url = await client.generate_presigned_url(method, Params=wanted, ExpiresIn=3600)
    http = client._endpoint.http_session
    if http._proxy_config.proxy_url_for(url):
        raise NotDirectError("a proxy stands before it")
    payer = {"x-amz-request-payer": "requester"} if wanted.get("RequestPayer") else {}
    names = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", ["host"])[0].split(";")
    if unknown := set(names) - {"host", *payer, *(sent or {})}:
        raise NotDirectError(f"its URL is signed with {', '.join(sorted(unknown))}")
    return Address(await http._get_session(None), _literal(url), {**PLAIN, **payer, **(sent or {})}, stay())


def _in_its_region(context: dict[str, Any], **_: Any) -> None:
    """Botocore would send signed URLs, and only these, to s3.amazonaws.com, for the sake of clients of 2006."""
    if context.get("is_presign_request"):
        context["use_global_endpoint"] = False


RESOLVES = "before-endpoint-resolution"
"""The event of a client of botocore that comes before it decides where a request goes."""


async def _address_on_gcs(fs: Any, opened: Opened) -> Address:
    session = unlimited(await fs._set_session())
    bucket = fs.split_path(opened.path)[0]
    if hasattr(fs, "_is_zonal_bucket") and await fs._is_zonal_bucket(bucket):
        raise NotDirectError("a zonal bucket speaks gRPC")
    # A token may have to be fetched, which blocks.
    headers = await asyncio.get_running_loop().run_in_executor(None, fs._get_headers, None)
    url = fs.url(opened.path, generation=opened.identity.get("generation"))
    if payer := fs._get_params({}).get("userProject"):
        url += f"&userProject={payer}"
    return Address(session, _literal(url), {**PLAIN, **headers}, stay())


async def _address_on_http(fs: Any, opened: Opened) -> Address:
    options = dict(fs.kwargs)
    headers = {**PLAIN, **options.pop("headers", {}), **_condition(opened)}
    return Address(unlimited(await fs.set_session()), fs.encode_url(opened.path), headers, options)


def unlimited(session: Any) -> Any:
    """The session, with as many connections as requests are in flight, which is bounded elsewhere.

    aiohttp stops at 100 where nobody says otherwise, and neither fsspec nor gcsfs has an option that would.
    """
    if getattr(session.connector, "limit", 0) == AIOHTTPS_LIMIT:
        session.connector._limit = 0
    return session


AIOHTTPS_LIMIT = 100


def _condition(opened: Opened) -> dict[str, str]:
    etag = opened.identity.get("etag", "W/")
    return {} if etag.startswith("W/") else {"If-Match": etag}


def _literal(url: str) -> Any:
    """A URL whose quoting is signed, and not to be done again."""
    from yarl import URL

    return URL(url, encoded=True)


def _said(body: str) -> str:
    """`SlowDown: Please reduce your request rate.` of an error of S3, else the beginning of what was sent."""
    found = [re.search(f"<{name}>(.*?)</{name}>", body, re.DOTALL) for name in ("Code", "Message")]
    return ": ".join(each[1] for each in found if each) or " ".join(body.split())[:100]


ADDRESSES: dict[str, AddressOf] = {
    "S3FileSystem": _address_on_s3,
    "GCSFileSystem": _address_on_gcs,
    "HTTPFileSystem": _address_on_http,
}
"""class of the filesystem, or a base of it -> where its objects are asked for without it"""
