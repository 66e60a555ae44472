"""S3 and servers that speak its protocol, through s3fs: s3://bucket/key, s3a://bucket/key.

Requests are sent directly (`direct`) at URLs that are signed as s3fs signs them (`signing`), and through s3fs where
that is refused or fails; s3fs alone looks for folders, writes objects only if they are absent, and lists the parts of
an upload. The client that reads has no retries of its own, as `storage.requests` retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from fsspec.asyn import sync

from binidx.errors import redacted
from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import Driver, ListRequest, ObjectInfo, Prices
from binidx.storage.stores.direct import (
    MAX_UNBOUNDED_BYTES,
    OBJECT_STATUSES,
    RENEW_SECONDS,
    Address,
    DirectStore,
    check_status,
    if_match,
    is_same_origin,
    read_at_most,
    receive,
    redirect_target,
)
from binidx.storage.stores.driver_errors import (
    TRANSIENT_STATUSES,
    HTTPStatusError,
    driver_text,
    http_status,
)
from binidx.storage.stores.fsspec_store import CONCURRENCY, FsspecWrites, Result, checked_info, open_filesystem
from binidx.storage.stores.identity import object_info, size_and_tail
from binidx.storage.stores.range_client import MAX_ERROR_BYTES
from binidx.storage.stores.s3_upload import SLOWEST_BYTES_PER_SECOND, STALL_SECONDS, S3Upload, body_headers
from binidx.storage.stores.signing import NO_HEADERS, one_origin_session, quick_session, sign

logger = logging.getLogger(__name__)
SPARE = 8
"""Connections of a reading client beyond the requests in flight, for requests that are hedged."""


class S3Store(FsspecWrites, DirectStore):
    """Store of S3. Reads are pinned to the ETag; without one, to version id, size and date."""

    # S3 Standard, us-east-1, November 2026: $0.0004 per 1,000 GET, $0.005 per 1,000 PUT or copy
    # (aws.amazon.com/s3/pricing); other regions cost up to about a half more.
    list_prices = Prices("s3", 0.0004 / 1_000, 0.005 / 1_000, 5_500, "a prefix, which S3 divides in minutes to hours")
    driver = Driver(
        "s3fs",
        "'binidx[s3]'",
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or storage_options={'anon': True} "
        """(--storage-options '{"anon": true}') if it is public""",
    )
    hides_uploads = True
    min_part, max_part, max_parts = 5 << 20, 5 << 30, 10_000
    # Copied in seconds, well inside the timeouts of clients, and with many in flight faster than one huge part.
    copied_part = 128 << 20

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(uri, storage_options)
        pool = users_config(self.storage_options).get("max_pool_connections")
        self.max_in_flight = self.settings.concurrency or pool or self.max_in_flight

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        from fsspec.config import conf

        # s3fs opens 10 connections by default: 346 requests/s where 64 reach 1,123.
        config: dict[str, Any] = {"max_pool_connections": reading + SPARE if reading else CONCURRENCY}
        if reading:
            config["retries"] = {"total_max_attempts": 1}
            if not ("--x-s3/" in uri or "arn:" in uri):
                # Else botocore signs URLs as in 2006 if an endpoint is given. Express buckets sign in their own way.
                config["signature_version"] = "s3v4"
        if not given.get("anon"):
            config["http_session_cls"] = one_origin_session()
        # Over http botocore would hash each body for its signature, a fifth of an upload's CPU; it has a CRC32 as well.
        users = users_config(given)
        signing = {"s3": {"payload_signing_enabled": False, **users.get("s3", {})}}
        # s3fs never forgets a listing: an object that another process wrote would not exist for ever.
        own = {"use_listings_cache": False, **endpoint(conf.get("s3", {}), given)}
        return {**own, **given, "config_kwargs": config | users | signing}

    @staticmethod
    def prepare(fs: Any) -> None:
        fs.retries = 1  # s3fs' own, around botocore's; this instance is ours alone, as its options are
        if fs.session is None:
            fs.session = quick_session(fs.kwargs)

    def object_of(self, uri: str) -> dict[str, str]:
        """Return the parameters that name an object, of one version if the URI has one."""
        bucket, key, version = self.fs.split_path(self.path(uri))
        return {"Bucket": bucket, "Key": key, **({"VersionId": version} if version else {})}

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        if tail_bytes:
            try:
                return await self._tail(uri, tail_bytes)
            except OSError as error:
                if http_status(error) != 416:  # which an empty object answers to any range
                    raise
        wanted = self.object_of(uri)
        answer = await self.request("HEAD", wanted) if wanted["Key"] else None
        if answer and answer.status == 200 and {"ETag", "Content-Length"} <= answer.headers.keys():
            report = {"ETag": answer.headers["ETag"], "VersionId": answer.headers.get("x-amz-version-id")}
            return checked_info(uri, {"size": int(answer.headers["Content-Length"]), **report}), b""
        if folders:
            return await self.look(uri), b""
        if not wanted["Key"] or (answer and answer.status == 404):
            raise FileNotFoundError(uri)
        response = await self.fs._call_s3("head_object", self.fs.kwargs, self.fs.req_kw, **wanted)
        return checked_info(uri, {"size": response["ContentLength"], **_versions(response)}), b""

    async def _tail(self, uri: str, tail_bytes: int) -> tuple[ObjectInfo, bytes]:
        response = await self._begin_get(self.fs, uri, f"bytes=-{tail_bytes}")
        size, part_bytes = size_and_tail(response.get("ContentRange"), response.get("ContentLength"), tail_bytes)
        async with (body := response["Body"]):
            tail = await read_at_most(body.read, part_bytes) if part_bytes else b""
        return checked_info(uri, {"size": size, **_versions(response)}), tail if len(tail) == part_bytes else b""

    async def _begin_get(self, fs: Any, uri: str, where: str, **condition: str) -> Any:
        """Return s3fs' response to a request for a range, whose body is not read yet."""
        return await fs._call_s3("get_object", fs.req_kw, **self.object_of(uri), **condition, Range=where)

    def read_start(self, fs: Any, uri: str, num_bytes: int) -> bytes:
        async def read() -> bytes:
            if self.direct and fs is self.fs and (start := await self._start_directly(uri, num_bytes)) is not None:
                return start
            async with (body := (await self._begin_get(fs, uri, f"bytes=0-{num_bytes - 1}"))["Body"]):
                return (await read_at_most(body.read, num_bytes))[:num_bytes]

        return bytes(sync(fs.loop, read))

    async def _start_directly(self, uri: str, num_bytes: int) -> bytes | None:
        """Return the first bytes of an object, requested without botocore; None: its driver has to, or meets an error.

        Raises:
            FileNotFoundError: there is no such object.
        """
        where = {"Range": f"bytes=0-{num_bytes - 1}"}
        answer = await self.request("GET", self.object_of(uri), where, most_bytes=num_bytes)
        if answer and answer.status == 404:
            raise FileNotFoundError(uri)
        if answer and answer.status in (200, 206):
            return answer.body[:num_bytes]
        return b"" if answer and answer.status == 416 else None  # 416: it is empty

    async def address(self, info: ObjectInfo) -> Address:
        return await sign(self.fs, "get_object", self.object_of(info.uri), if_match(info))

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        condition = {"IfMatch": info.identity["etag"]} if "etag" in info.identity else {}
        response = await self._begin_get(self.fs, info.uri, f"bytes={where[0]}-{where[1] - 1}", **condition)
        status, headers = map(response["ResponseMetadata"].get, ("HTTPStatusCode", "HTTPHeaders"))
        async with (body := response["Body"]):
            return await receive(info, where, status, headers, body.read)

    async def list_page(self, request: ListRequest) -> tuple[dict[str, ObjectInfo], str]:
        start = {"ContinuationToken": request.token} if request.token else {"StartAfter": request.after}
        wanted = {"Bucket": request.bucket, "Prefix": request.prefix, "Delimiter": request.delimiter, **start}
        if self.direct:
            try:
                return await self._list_directly(wanted)
            except Exception as error:  # the driver meets it too if it matters
                logger.debug("%s: listed by its driver: %s", request.bucket, driver_text(error))
        page = await self.fs._call_s3("list_objects_v2", self.fs.kwargs, self.fs.req_kw, **wanted)
        objects = {
            entry["Key"]: object_info(entry["Key"], {"size": entry["Size"], **_versions(entry)})
            for entry in page.get("Contents", [])
        }
        return objects, page.get("NextContinuationToken", "") if page.get("IsTruncated") else ""

    async def _list_directly(self, wanted: Mapping[str, str]) -> tuple[dict[str, ObjectInfo], str]:
        """Request a page without botocore, whose parser takes 0.1 s of CPU for 1,000 objects."""
        address = await sign(self.fs, "list_objects_v2", wanted, {})
        async with address.session.get(address.url, headers=address.headers, **address.options) as response:
            if response.status != 200:
                raise HTTPStatusError(response.status, response.reason or "")
            return parse_page(await read_at_most(response.content.read, MAX_UNBOUNDED_BYTES))

    def send(self, call: Callable[[Any], Result]) -> Result:
        """Return `call(fs)` for the client that reads, as another takes 11 MB.

        After a transient failure, call it once more for a client that retries.
        """
        try:
            return call(self.fs)
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            if http_status(error) not in {None, *TRANSIENT_STATUSES}:
                raise
        return super().send(call)

    def copying_fs(self) -> Any:
        """Return a filesystem without a read timeout: its caller ends requests that take too long."""
        config = {**self.storage_options.get("config_kwargs", {}), "read_timeout": None}
        fs, _ = open_filesystem(self.uri, {**self.storage_options, "config_kwargs": config}, reading=self.max_in_flight)
        self.prepare(fs)
        return fs

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        if not if_absent:
            send = functools.partial(self.request, data=data)
            with contextlib.suppress(HTTPStatusError):
                answer = sync(self.fs.loop, send, "PUT", self.object_of(uri), body_headers(data))
                if answer and answer.status == 200:
                    return str(answer.headers.get("ETag", ""))
        return super().put(uri, data, if_absent=if_absent)

    def delete(self, uri: str) -> None:
        with contextlib.suppress(HTTPStatusError):
            answer = sync(self.fs.loop, self.request, "DELETE", self.object_of(uri))
            if answer and answer.status == 404:
                raise FileNotFoundError(uri)
            if answer and answer.status in (200, 204):
                return
        super().delete(uri)

    async def request(
        self,
        verb: str,
        wanted: Mapping[str, str],
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        most_bytes: int = MAX_ERROR_BYTES,
        data: Sequence[memoryview] = (),
        fields: str = "",
        seconds: float | None = STALL_SECONDS,
    ) -> DirectResponse | None:
        """Send a request without botocore, whose share of the CPU is nine tenths; None: it failed, let the driver try.

        Args:
            wanted: parameters that name the object.
            most_bytes: bytes of the body that are read, at most.
            data: body, with its length in the headers; the driver would copy it.
            fields: further fields of the query, quoted.
            seconds: time for the request, and its body at the lowest rate; None if the caller ends it.

        Raises:
            HTTPStatusError: a transient status, or a redirect to another origin.
        """
        place = id(self.fs), wanted["Bucket"], verb
        more = sum(map(len, data)) / SLOWEST_BYTES_PER_SECOND
        if not self.direct or time.monotonic() < _refused.get(place, 0.0):
            return None
        try:
            address = await sign(self.fs, "get_object", wanted, headers, verb, fields)
            options = {"headers": address.headers, "skip_auto_headers": ["Content-Type"], **address.options}
            request = address.session.request(verb, address.url, data=as_body(data) if data else None, **options)
            async with asyncio.timeout(seconds and seconds + more), request as response:
                body = await read_at_most(response.content.read, most_bytes)
                check_status(response.status, response.reason or "", response.headers, body)
                if (target := redirect_target(response)) and not is_same_origin(target, response.url):
                    raise HTTPStatusError(response.status, f"redirected to {target.origin()}")
                if response.status >= 300 and response.status not in OBJECT_STATUSES:
                    _refused[place] = time.monotonic() + RENEW_SECONDS
                return DirectResponse(response.status, response.headers, body)
        except HTTPStatusError:
            raise
        except Exception as error:  # the driver meets it too if it matters
            logger.debug("%s: left to its driver: %s", redacted(wanted["Key"]), driver_text(error))
            return None

    @property
    def read_timeout(self) -> float:
        """Seconds that the user allows for a response; 0 if the user set none."""
        return float(users_config(self.storage_options).get("read_timeout") or 0)

    def upload(self, uri: str, token: str = "") -> S3Upload:
        return S3Upload(self, uri, token)


def parse_page(text: bytes) -> tuple[dict[str, ObjectInfo], str]:
    """Return the objects of a response to ListObjectsV2 by key, and the token of the next page, or "".

    Raises:
        ValueError: an object without a name, size or ETag.
        ElementTree.ParseError: it is no XML.
    """
    root = ElementTree.fromstring(text)
    space = root.tag.removesuffix("ListBucketResult")
    is_quoted = root.findtext(f"{space}EncodingType") == "url"
    objects = {}
    for entry in root.iter(f"{space}Contents"):
        key, size, etag = (entry.findtext(space + name) for name in ("Key", "Size", "ETag"))
        if not key or not size or not etag:
            raise ValueError("a list without names, sizes or ETags")
        key = unquote_plus(key) if is_quoted else key
        num_bytes = int(size)
        objects[key] = ObjectInfo(key, num_bytes, {"size": num_bytes, "etag": etag})  # `object_info` takes 5 us
    is_cut = root.findtext(f"{space}IsTruncated") == "true"
    return objects, root.findtext(f"{space}NextContinuationToken") or "" if is_cut else ""


_refused: dict[tuple[int, str, str], float] = {}
"""(id of a filesystem, bucket, verb) -> time up to which such requests are left to the driver, as one was refused."""


class DirectResponse(NamedTuple):
    """Response to a request that was sent without the driver; of the body at most as much as was requested."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def text_of(self, root: str, name: str) -> str:
        """Return a text of a successful response in XML; "" if it is an error, or has none of this name.

        Args:
            root, name: tags without their namespace.
        """
        with contextlib.suppress(ElementTree.ParseError):
            document = ElementTree.fromstring(self.body)
            if self.status == 200 and document.tag.endswith(root):
                return document.findtext(f"{document.tag.removesuffix(root)}{name}") or ""
        return ""


async def as_body(data: Sequence[memoryview]) -> AsyncIterator[memoryview]:
    """Yield copies of the pieces of a body, each of which is sent before the next one is copied.

    The transport may still hold the last piece when a request has failed, and the memory of `data` is used again.
    """
    for view in data:
        yield memoryview(bytes(view))


def users_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options of botocore: those given here replace those of fsspec's configuration key by key."""
    from fsspec.config import conf

    return {**conf.get("s3", {}).get("config_kwargs", {}), **given.get("config_kwargs", {})}


def endpoint(*options: Mapping[str, Any]) -> dict[str, str]:
    """Return the endpoint of the environment as an option, unless the options name one.

    botocore would find it by itself, but only once: fsspec shares clients whose options are equal, and goes on using
    the endpoint that was in the environment when the first one was made.
    """
    named = any(given.get("endpoint_url") or given.get("client_kwargs", {}).get("endpoint_url") for given in options)
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {} if named or ignored or not url else {"endpoint_url": url}


def _versions(response: Mapping[str, Any]) -> dict[str, Any]:
    return {name: response.get(name) for name in ("ETag", "LastModified", "VersionId")}
