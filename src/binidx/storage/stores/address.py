"""Where and as whom an object is asked for without its driver: what `direct` sends, and `signed`.

s3://        a URL that its client signs (SigV4), good for an hour, renewed after four minutes
gs://        the media URL and the bearer header of its credentials, renewed as often
http(s)://   the URL itself
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from binidx.storage.stores import filesystem
from binidx.storage.stores.pinned import PinnedObject

RENEW_SECONDS = 240
"""Drivers renew credentials five minutes and more before they end: what is signed now is good for so long at least.
What was left to the driver is tried again as late."""


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


AddressOf = Callable[[Any, PinnedObject], Awaitable[Address]]


async def _address_on_s3(fs: Any, opened: PinnedObject) -> Address:
    asked = object_key(fs, opened.path)
    address = await signed(fs, asked["Bucket"], "get_object", asked)
    return replace(address, headers={**address.headers, **_condition(opened)})


def object_key(fs: Any, path: str) -> dict[str, str]:
    """What names an object of a bucket, of one version if the path says which."""
    bucket, key, version = fs.split_path(path)
    return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}


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
    if client not in _told_of_regions:
        client.meta.events.register_first(f"{RESOLVES}.s3", _in_its_region)
        _told_of_regions.add(client)
    url = await client.generate_presigned_url(method, Params=wanted, ExpiresIn=3600)
    http = client._endpoint.http_session
    if http._proxy_config.proxy_url_for(url):
        raise NotDirectError("a proxy stands before it")
    payer = {"x-amz-request-payer": "requester"} if wanted.get("RequestPayer") else {}
    names = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", ["host"])[0].split(";")
    if unknown := set(names) - {"host", *payer, *(sent or {})}:
        raise NotDirectError(f"its URL is signed with {', '.join(sorted(unknown))}")
    return Address(await http._get_session(None), _literal(url), {**PLAIN, **payer, **(sent or {})}, stay())


_told_of_regions: weakref.WeakSet[Any] = weakref.WeakSet()
"""Clients: to be told takes a tenth of what signing does."""


def _in_its_region(context: dict[str, Any], **_: Any) -> None:
    """Botocore would send signed URLs, and only these, to s3.amazonaws.com, for the sake of clients of 2006."""
    if context.get("is_presign_request"):
        context["use_global_endpoint"] = False


RESOLVES = "before-endpoint-resolution"
"""The event of a client of botocore that comes before it decides where a request goes."""


async def _address_on_gcs(fs: Any, opened: PinnedObject) -> Address:
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


async def address_on_http(fs: Any, opened: PinnedObject) -> Address:
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


def _condition(opened: PinnedObject) -> dict[str, str]:
    etag = opened.identity.get("etag", "W/")
    return {} if etag.startswith("W/") else {"If-Match": etag}


def _literal(url: str) -> Any:
    """A URL whose quoting is signed, and not to be done again."""
    from yarl import URL

    return URL(url, encoded=True)


ADDRESSES: dict[str, AddressOf] = {
    "S3FileSystem": _address_on_s3,
    "GCSFileSystem": _address_on_gcs,
    "HTTPFileSystem": address_on_http,
}
"""class of the filesystem, or a base of it -> where its objects are asked for without it"""


def address_of(fs: Any) -> AddressOf | None:
    """What finds the addresses of a filesystem, if it is of a class that has one."""
    return filesystem.of_its_class(fs, ADDRESSES)
