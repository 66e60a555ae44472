"""S3 and servers that speak its protocol, through s3fs: s3://bucket/key, s3a://bucket/key.

Ranges and lists are requested directly at URLs that s3fs signs (`http`), and through s3fs where that is refused;
s3fs sends all other requests. The client that reads has no retries of its own, as `storage.requests` retries. Private
members of s3fs and botocore are used by `sign` alone, and without them s3fs sends every request.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit
from xml.etree import ElementTree

from binidx.errors import SlowCopyError
from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import ListRequest, ObjectInfo
from binidx.storage.stores.driver_errors import (
    TRANSIENT_STATUSES,
    HTTPStatusError,
    driver_text,
    http_status,
    storage_errors,
)
from binidx.storage.stores.fsspec_store import CONCURRENCY, FsspecWrites, Result, checked_info, open_filesystem
from binidx.storage.stores.http import (
    PLAIN,
    Address,
    DirectStore,
    NotDirectError,
    if_match,
    literal_url,
    private,
    receive,
    request_options,
)
from binidx.storage.stores.identity import is_weak, object_info, size_and_tail

logger = logging.getLogger(__name__)
SPARE = 8
"""Connections of a reading client beyond the requests in flight, for requests that are hedged."""


class S3Store(FsspecWrites, DirectStore):
    """Store of S3. Reads are pinned to the ETag; without one, to the size."""

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
        # Over http botocore would hash each body for its signature, a fifth of an upload's CPU; it has a CRC32 as well.
        users = users_config(given)
        signing = {"s3": {"payload_signing_enabled": False, **users.get("s3", {})}}
        # s3fs never forgets a listing: an object that another process wrote would not exist for ever.
        own = {"use_listings_cache": False, **endpoint(conf.get("s3", {}), given)}
        return {**own, **given, "config_kwargs": config | users | signing}

    @staticmethod
    def prepare(fs: Any) -> None:
        fs.retries = 1  # s3fs' own, around botocore's; this instance is ours alone, as its options are

    def pins(self, info: ObjectInfo) -> bool:
        return "etag" in info.identity and not is_weak(info.identity["etag"])

    def split(self, uri: str) -> tuple[str, str]:
        bucket, key, _ = self.fs.split_path(self.path(uri))
        return bucket, key

    def _object(self, uri: str) -> dict[str, str]:
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
        if folders:
            return await self.look(uri), b""
        wanted = self._object(uri)
        if not wanted["Key"]:
            raise FileNotFoundError(uri)
        response = await self.fs._call_s3("head_object", self.fs.kwargs, self.fs.req_kw, **wanted)
        return checked_info(uri, {"size": response["ContentLength"], **_versions(response)}), b""

    async def _tail(self, uri: str, tail_bytes: int) -> tuple[ObjectInfo, bytes]:
        wanted = {**self._object(uri), "Range": f"bytes=-{tail_bytes}"}
        response = await self.fs._call_s3("get_object", self.fs.kwargs, self.fs.req_kw, **wanted)
        size, part_bytes = size_and_tail(response.get("ContentRange"), response["ContentLength"])
        async with (body := response["Body"]):
            tail = await body.read() if part_bytes else b""
        info = checked_info(uri, {"size": size, **_versions(response)})
        return info, tail if len(tail) == part_bytes else b""

    async def address(self, info: ObjectInfo) -> Address:
        return await sign(self.fs, "get_object", self._object(info.uri), if_match(info))

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        condition = {"IfMatch": info.identity["etag"]} if "etag" in info.identity else {}
        wanted = {**self._object(info.uri), **condition, "Range": f"bytes={where[0]}-{where[1] - 1}"}
        response = await self.fs._call_s3("get_object", self.fs.req_kw, **wanted)
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
        found = {
            each["Key"]: object_info(each["Key"], {"size": each["Size"], **_versions(each)})
            for each in page.get("Contents", [])
        }
        return found, page.get("NextContinuationToken", "") if page.get("IsTruncated") else ""

    async def _list_directly(self, wanted: Mapping[str, str]) -> tuple[dict[str, ObjectInfo], str]:
        """Request a page without botocore, whose parser takes 0.1 s of CPU for 1,000 objects."""
        address = await sign(self.fs, "list_objects_v2", wanted, {})
        async with address.session.get(address.url, headers=address.headers, **address.options) as response:
            if response.status != 200:
                raise HTTPStatusError(response.status, response.reason or "")
            return parse_page(await response.read())

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
    found = {}
    for each in root.iter(f"{space}Contents"):
        key, size, etag = (each.findtext(space + name) for name in ("Key", "Size", "ETag"))
        if not key or not size or not etag:
            raise ValueError("a list without names, sizes or ETags")
        key = unquote_plus(key) if is_quoted else key
        found[key] = object_info(key, {"size": int(size), "ETag": etag})
    is_cut = root.findtext(f"{space}IsTruncated") == "true"
    return found, root.findtext(f"{space}NextContinuationToken") or "" if is_cut else ""


async def sign(fs: Any, method: str, wanted: Mapping[str, str], headers: Mapping[str, str]) -> Address:
    """Return the address of a direct request, a signed URL; uses private members of s3fs and botocore.

    Args:
        method: method of botocore's client, such as "get_object".
        wanted: parameters of the method.
        headers: further headers of the request; they are not signed.

    Raises:
        NotDirectError: the request cannot be sent without the driver.
        AttributeError: this release of a driver lacks a private member.
    """
    await fs.set_session()
    client = await fs.get_s3(wanted["Bucket"])
    arguments = private(fs, "_get_s3_method_kwargs")(getattr(client, method), fs.req_kw, **wanted)
    client.meta.events.register_first("before-endpoint-resolution.s3", _use_regional_endpoint, unique_id="binidx")
    url = await client.generate_presigned_url(method, Params=arguments, ExpiresIn=3600)
    http = private(client, "_endpoint").http_session
    if private(http, "_proxy_config").proxy_url_for(url):
        raise NotDirectError("a proxy stands before it")
    payer = {"x-amz-request-payer": "requester"} if arguments.get("RequestPayer") else {}
    names = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", ["host"])[0].split(";")
    if unknown := set(names) - {"host", *payer}:
        raise NotDirectError(f"its URL is signed with {', '.join(sorted(unknown))}")
    session = await private(http, "_get_session")(None)
    return Address(session, literal_url(url), {**PLAIN, **payer, **headers}, request_options())


def _use_regional_endpoint(context: dict[str, Any], **_: Any) -> None:
    """Make botocore sign URLs for the region's endpoint; for signed URLs only, it defaults to s3.amazonaws.com."""
    if context.get("is_presign_request"):
        context["use_global_endpoint"] = False


STALL_SECONDS, SLOWEST_BYTES_PER_SECOND = 60.0, 100_000
"""Longest time to send one part of an upload: a constant, plus the time of its bytes at the lowest rate of a link."""

COPIED_BYTES_PER_SECOND = 1_000_000
"""Lowest rate at which the store itself copies a part, one of a few at once on slow disks."""


class S3Upload:
    """A multipart upload: its parts outlive this process until they are completed or aborted."""

    def __init__(self, store: S3Store, uri: str, token: str) -> None:
        self._store = store
        bucket, key = store.split(uri)
        self._object = {"Bucket": bucket, "Key": key}
        self._sent, self._aborted = set[Future[Any]](), False
        exists = bool(token) and self._list(token) is not None
        self.token = token if exists else str(self._call("create_multipart_upload")["UploadId"])

    def arrived(self) -> Mapping[int, tuple[int, str]]:
        return self._list(self.token) or {}

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        # botocore takes bytes and files, no views; this copy is 1 % of what sending costs.
        fs, body = self._store.fs, b"".join(data)
        sent = fs._call_s3("upload_part", **self._object, UploadId=self.token, PartNumber=part, Body=body)
        # botocore's timeout begins when the whole body is sent.
        limited = asyncio.wait_for(sent, STALL_SECONDS + len(body) / SLOWEST_BYTES_PER_SECOND)
        return str(self._begin(fs, limited).result()["ETag"])

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        wanted: dict[str, Any] = {"CopySource": self._store._object(source.uri)}
        wanted.update({"CopySourceIfMatch": source.identity["etag"]} if "etag" in source.identity else {})
        wanted.update({"CopySourceRange": f"bytes={where[0]}-{where[1] - 1}"} if where != (0, source.size) else {})
        seconds = STALL_SECONDS + (where[1] - where[0]) / COPIED_BYTES_PER_SECOND
        seconds = max(seconds, users_config(self._store.storage_options).get("read_timeout") or 0)
        with storage_errors(source.uri):
            fs = self._store.copying_fs()
            request = fs._call_s3("upload_part_copy", **self._object, UploadId=self.token, PartNumber=part, **wanted)
            sent = self._begin(fs, request)
            if wait([sent], seconds).done:
                return str(sent.result()["CopyPartResult"]["ETag"])
        sent.cancel()
        raise SlowCopyError(
            f"{source.uri}: bytes {where[0]} to {where[1]} were not copied in {seconds:.0f} s; "
            "a read_timeout in storage_options['config_kwargs'] above that allows more"
        )

    def complete(self, tags: Mapping[int, str]) -> str:
        numbered = [{"PartNumber": part, "ETag": tag} for part, tag in sorted(tags.items())]
        answer = self._call("complete_multipart_upload", UploadId=self.token, MultipartUpload={"Parts": numbered})
        return str(answer.get("ETag", ""))

    def abort(self) -> None:
        self._aborted = True
        for sent in list(self._sent):
            sent.cancel()
        self._call("abort_multipart_upload", UploadId=self.token)

    def _begin(self, fs: Any, request: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Send a request that `abort` can cancel; after `abort`, no request is sent."""
        sent = asyncio.run_coroutine_threadsafe(request, fs.loop)
        self._sent.add(sent)
        sent.add_done_callback(self._sent.discard)
        if self._aborted:
            sent.cancel()
        return sent

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._store.fs.call_s3(method, **self._object, **arguments)

    def _list(self, token: str) -> dict[int, tuple[int, str]] | None:
        """Return bytes and tag of each part that has arrived; None if there is no such upload any more."""
        found: dict[int, tuple[int, str]] = {}
        page: dict[str, Any] = {}
        while True:
            try:
                answer = self._call("list_parts", UploadId=token, **page)
            except OSError as error:
                # 404: completed or aborted since; 400: never an upload of this store
                if isinstance(error, FileNotFoundError) or http_status(error) in (400, 404):
                    return None
                raise
            found.update({part["PartNumber"]: (part["Size"], part["ETag"]) for part in answer.get("Parts", [])})
            if not answer.get("IsTruncated"):
                return found
            page = {"PartNumberMarker": answer["NextPartNumberMarker"]}


def users_config(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options of botocore: those given here replace those of fsspec's configuration key by key."""
    from fsspec.config import conf

    return {**conf.get("s3", {}).get("config_kwargs", {}), **given.get("config_kwargs", {})}


def endpoint(*options: Mapping[str, Any]) -> dict[str, str]:
    """Return the endpoint of the environment as an option, unless the options name one.

    botocore would find it by itself, but only once: fsspec shares clients whose options are equal, and goes on using
    the endpoint that was in the environment when the first one was made.
    """
    named = any(each.get("endpoint_url") or each.get("client_kwargs", {}).get("endpoint_url") for each in options)
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true"
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {} if named or ignored or not found else {"endpoint_url": found}


def _versions(response: Mapping[str, Any]) -> dict[str, Any]:
    return {name: response.get(name) for name in ("ETag", "LastModified", "VersionId")}
