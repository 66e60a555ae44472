"""S3 and servers that speak its protocol, through s3fs: s3://bucket/key, s3a://bucket/key.

Requests go directly to URLs that s3fs' client signs (`http_session`), and through s3fs where that is refused. Around a
PUT botocore spends 2.6 ms of CPU, and over plain HTTP 0.7 ms a megabyte for a SHA-256; around a GET or DELETE 1.7 ms.
Directly it is 0.5 ms to sign, and 0.16 ms a megabyte for a CRC32 that is part of what is signed: the store refuses
bytes that arrive otherwise. Private members of s3fs and botocore are used by `sign` alone, and without them s3fs sends
every request.
"""

from __future__ import annotations

import base64
import binascii
import functools
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit
from xml.etree import ElementTree

from binidx.json_models import MAX_BYTES
from binidx.storage.interfaces import ListRequest, ObjectInfo, Range
from binidx.storage.stores.driver_errors import TRANSIENT_STATUSES, HTTPStatusError, http_status, storage_errors
from binidx.storage.stores.fsspec_store import CONCURRENCY, FsspecWrites, checked_info
from binidx.storage.stores.http_session import (
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
from binidx.storage.stores.identity import is_weak, object_info
from binidx.storage.stores.response_check import ResponseHead, size_and_tail

HTTP_METHODS = {
    "get_object": "GET",
    "head_object": "HEAD",
    "list_objects_v2": "GET",
    "put_object": "PUT",
    "upload_part": "PUT",
    "delete_object": "DELETE",
}
"""Method of S3's client -> of HTTP."""

SPARE = 8
"""Connections of a reading client beyond the requests in flight, for requests that are hedged."""

ANSWER_SECONDS = 30.0
"""For a direct request for a small object, besides what its bytes need on the slowest link; then s3fs sends it."""

SLOWEST = 1_000_000
"""Bytes per second of the slowest link."""


@dataclass(frozen=True)
class Response:
    """Status, headers and body of a direct request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class S3Store(FsspecWrites, DirectStore):
    """Store of S3. Reads are pinned to the ETag; without one, to the size."""

    hides_uploads = True
    min_part, max_part, max_parts = 5 << 20, 5 << 30, 10_000
    # Copied in seconds, well inside the timeouts of clients, and with many in flight faster than one huge part.
    copied_part = 128 << 20

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        from fsspec.config import conf

        # s3fs opens 10 connections by default: 346 requests/s where 64 reach 1,123.
        pool = {"max_pool_connections": reading + SPARE if reading else CONCURRENCY}
        once = {"retries": {"total_max_attempts": 1}} if reading else {}
        # Else botocore signs URLs as in 2006 if an endpoint is given. Express buckets have a signature of their own.
        signature = {"signature_version": "s3v4"} if reading and not ("--x-s3/" in uri or "arn:" in uri) else {}
        config = {**pool, **signature, **once, **users_config(given)}
        # s3fs never forgets a listing: an object that another process wrote would not exist for ever.
        return {"use_listings_cache": False, **endpoint(conf.get("s3", {}), given), **given, "config_kwargs": config}

    @staticmethod
    def prepare(fs: Any) -> None:
        fs.retries = 1  # s3fs' own, around botocore's; this instance is ours alone, as its options are

    @property
    def max_in_flight(self) -> int:
        """Requests in flight at once: the user's setting, else the user's pool of connections, else ours."""
        pool = users_config(self.storage_options).get("max_pool_connections")
        return self.settings.concurrency or pool or super().max_in_flight

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
        self.fs.invalidate_cache()
        try:
            found = await self.direct_or_driver(
                "head_object",
                functools.partial(self._head_directly, uri),
                functools.partial(self.look if folders else self._head_by_driver, uri),
            )
        except FileNotFoundError:
            if not folders:
                raise
            found = await self.look(uri)
        return found, b""

    async def _head_directly(self, uri: str) -> ObjectInfo:
        response = await self._send("head_object", self._object(uri), good=(200, 404))
        if response.status == 404:
            raise FileNotFoundError(uri)
        size, etag, version = map(response.headers.get, ("Content-Length", "ETag", "x-amz-version-id"))
        if size is None or not etag:
            # Without an ETag the time identifies the object, which the driver words in its own way.
            raise NotDirectError("no size or no ETag")
        return object_info(uri, {"size": int(size), "ETag": etag, "VersionId": version})

    async def _head_by_driver(self, uri: str) -> ObjectInfo:
        wanted = self._object(uri)
        if not wanted["Key"]:
            raise FileNotFoundError(uri)
        response = await self.fs._call_s3("head_object", self.fs.kwargs, **wanted)
        return checked_info(uri, {"size": response["ContentLength"], **_versions(response)})

    async def _tail(self, uri: str, tail_bytes: int) -> tuple[ObjectInfo, bytes]:
        wanted = {**self._object(uri), "Range": f"bytes=-{tail_bytes}"}
        response = await self.fs._call_s3("get_object", self.fs.kwargs, **wanted)
        size, part_bytes = size_and_tail(response.get("ContentRange"), response["ContentLength"])
        async with response["Body"] as body:
            tail = await body.read() if part_bytes else b""
        info = checked_info(uri, {"size": size, **_versions(response)})
        return info, tail if len(tail) == part_bytes else b""

    async def address(self, info: ObjectInfo) -> Address:
        found = await self._sign("get_object", self._object(info.uri))
        return replace(found, headers={**found.headers, **if_match(info)})

    async def fetch_by_driver(self, info: ObjectInfo, where: Range) -> bytes:
        condition = {"IfMatch": info.identity["etag"]} if "etag" in info.identity else {}
        wanted = {**self._object(info.uri), **condition, "Range": f"bytes={where[0]}-{where[1] - 1}"}
        response = await self.fs._call_s3("get_object", **wanted)
        head = ResponseHead(response["ResponseMetadata"]["HTTPStatusCode"], response["ResponseMetadata"]["HTTPHeaders"])
        async with response["Body"] as body:
            return await receive(info, where, head, body.read)

    async def list_page(self, request: ListRequest) -> tuple[dict[str, ObjectInfo], str]:
        start = {"ContinuationToken": request.token} if request.token else {"StartAfter": request.after}
        wanted = {"Bucket": request.bucket, "Prefix": request.prefix, "Delimiter": request.delimiter, **start}

        async def directly() -> tuple[dict[str, ObjectInfo], str]:
            # botocore spends 50 ms on a page, most of them on times.
            return parse_page((await self._send("list_objects_v2", wanted)).body)

        async def by_driver() -> tuple[dict[str, ObjectInfo], str]:
            page = await self.fs._call_s3("list_objects_v2", self.fs.kwargs, **wanted)
            found = {each["Key"]: object_info(each["Key"], {"size": each["Size"], **_versions(each)})
                     for each in page.get("Contents", [])}  # fmt: skip
            return found, page.get("NextContinuationToken", "") if page.get("IsTruncated") else ""

        return await self.direct_or_driver("list_objects_v2", directly, by_driver)

    def get(self, uri: str, most_bytes: int) -> bytes:
        async def directly() -> bytes:
            response = await self._send("get_object", self._object(uri), good=(200, 404), seconds=ANSWER_SECONDS)
            if response.status == 404:
                raise FileNotFoundError(uri)
            return response.body

        return bytes(self._directly("get_object", directly, lambda: super(S3Store, self).get(uri, most_bytes)))

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        def by_driver() -> str:
            return super(S3Store, self).put(uri, data, if_absent=if_absent)

        # s3fs knows how to say that a PUT is conditional.
        return by_driver() if if_absent else self.put_directly("put_object", uri, {}, data, by_driver)

    def delete(self, uri: str) -> None:
        bucket, key = self.split(uri)  # the newest version: s3fs leaves others, too

        async def directly() -> None:
            await self._send(
                "delete_object", {"Bucket": bucket, "Key": key}, good=(200, 204, 404), seconds=ANSWER_SECONDS
            )

        self._directly("delete_object", directly, lambda: super(S3Store, self).delete(uri))

    def upload(self, uri: str, token: str = "") -> S3Upload:
        return S3Upload(self, uri, token)

    def put_directly(
        self, method: str, uri: str, part: Mapping[str, Any], data: Sequence[memoryview], by_driver: Callable[[], str]
    ) -> str:
        """Send an object, or a part of an upload, with a CRC32 that is signed; return its ETag."""

        async def directly() -> str:
            bucket, key = self.split(uri)
            wanted, headers = {"Bucket": bucket, "Key": key, **part}, {}
            if await self._sums(bucket):
                wanted["ChecksumCRC32"] = headers["x-amz-checksum-crc32"] = crc32(data)
            seconds = ANSWER_SECONDS + sum(map(len, data)) / SLOWEST
            response = await self._send(method, wanted, headers=headers, data=data, seconds=seconds)
            return response.headers.get("ETag", "")

        return str(self._directly(method, directly, by_driver))

    def _directly(self, kind: str, directly: Any, by_driver: Any) -> Any:
        """`direct_or_driver` for a thread; the driver has retries of its own."""

        async def attempt() -> Any:
            try:
                return True, await self.direct_or_driver(kind, directly, _to_driver)
            except (HTTPStatusError, _ByDriver):
                return False, None

        answered, found = self.run(attempt) if self.direct else (False, None)
        return found if answered else by_driver()

    async def _sums(self, bucket: str) -> bool:
        """Return whether to send checksums; users switch them off for stores that refuse them."""
        await self.fs.set_session()
        config = (await self.fs.get_s3(bucket)).meta.config
        return getattr(config, "request_checksum_calculation", None) != "when_required"

    async def _send(
        self,
        method: str,
        wanted: Mapping[str, Any],
        *,
        good: Collection[int] = (200,),
        headers: Mapping[str, str] | None = None,
        data: Sequence[memoryview] | None = None,
        seconds: float | None = None,
    ) -> Response:
        """Send a request of a method of the client directly.

        Args:
            wanted: the method's parameters, the bucket among them.
            good: statuses of success.
            headers: that follow from the parameters, and are signed with them.
            data: the body in pieces.
            seconds: limit for the request; None: the caller has one.

        Raises:
            NotDirectError: it cannot be sent like this, or the store refuses.
            HTTPStatusError: a transient status.
            Exception: aiohttp's, for a connection that fails.
        """
        address = await self._sign(method, wanted, headers or {}, writes=data is not None)
        options = {**address.options, **request_options(seconds)}
        body = {} if data is None else {"data": _pieces_class()(data)}
        request = address.session.request
        async with request(HTTP_METHODS[method], address.url, headers=address.headers, **body, **options) as response:
            if (response.content_length or 0) > MAX_BYTES and method == "get_object":
                raise NotDirectError(f"{response.content_length} bytes are too many for one body in memory")
            content = await response.read()
        if response.status in TRANSIENT_STATUSES:
            raise HTTPStatusError(response.status, response.reason or "")
        if response.status not in good:
            raise NotDirectError(f"status {response.status}")
        return Response(response.status, response.headers, content)

    async def _sign(
        self, method: str, wanted: Mapping[str, Any], headers: Mapping[str, str] | None = None, writes: bool = False
    ) -> Address:
        try:
            return await sign(self.fs, method, wanted, headers or {}, writes)
        except AttributeError as error:
            raise NotDirectError(f"this release of a driver lacks a member: {error}") from error


class _ByDriver(Exception):
    """The driver must send this request, outside the event loop."""


async def _to_driver() -> Any:
    raise _ByDriver


async def sign(fs: Any, method: str, wanted: Mapping[str, Any], headers: Mapping[str, str], writes: bool) -> Address:
    """Return where a request of a method of S3's client is sent directly; uses private members of s3fs and botocore.

    Args:
        headers: that follow from the parameters, and are signed with them.
        writes: refuse if the user's options add anything to what is written: encryption, class, tags, metadata ...

    Raises:
        NotDirectError: it cannot be sent like this.
        AttributeError: a member is gone.
    """
    await fs.set_session()
    client = await fs.get_s3(wanted["Bucket"])
    arguments = private(fs, "_get_s3_method_kwargs")(getattr(client, method), **wanted)
    if writes and (more := arguments.keys() - wanted.keys() - {"RequestPayer"}):
        raise NotDirectError(f"it is to be written with {', '.join(sorted(more))}")
    if client not in _regional_clients:
        client.meta.events.register_first("before-endpoint-resolution.s3", _use_regional_endpoint)
        _regional_clients.add(client)
    url = await client.generate_presigned_url(method, Params=arguments, ExpiresIn=3600)
    http = private(client, "_endpoint").http_session
    if private(http, "_proxy_config").proxy_url_for(url):
        raise NotDirectError("a proxy stands before it")
    payer = {"x-amz-request-payer": "requester"} if arguments.get("RequestPayer") else {}
    names = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", ["host"])[0].split(";")
    if unknown := set(names) - {"host", *payer, *headers}:
        raise NotDirectError(f"its URL is signed with {', '.join(sorted(unknown))}")
    return Address(
        await private(http, "_get_session")(None), literal_url(url), {**PLAIN, **payer, **headers}, request_options()
    )


_regional_clients: weakref.WeakSet[Any] = weakref.WeakSet()
"""Clients with the handler below: registering it takes a tenth of what signing does."""


def _use_regional_endpoint(context: dict[str, Any], **_: Any) -> None:
    """Botocore would send signed URLs, and only these, to s3.amazonaws.com, for the sake of clients of 2006."""
    if context.get("is_presign_request"):
        context["use_global_endpoint"] = False


@functools.cache
def _pieces_class() -> Any:
    """Return the class of a body that aiohttp sends piece by piece, as it copies what a connection does not take.

    Made once: a class is a cycle, and would keep the bytes of its object until the next collection.
    """
    from aiohttp.payload import Payload

    class Pieces(Payload):
        def __init__(self, data: Sequence[memoryview]) -> None:
            super().__init__(data)
            self._size = sum(map(len, data))

        def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
            raise NotImplementedError

        async def write(self, writer: Any) -> None:
            for piece in self._value:
                await writer.write(piece)

    return Pieces


class S3Upload:
    """A multipart upload: its parts outlive this process until they are completed or aborted."""

    def __init__(self, store: S3Store, uri: str, token: str) -> None:
        self._store, self.uri = store, uri
        bucket, key = store.split(uri)
        self._object = {"Bucket": bucket, "Key": key}
        listed = self._list(token) if token else None
        self._arrived = listed or {}
        self.token = token if listed is not None else str(self._call("create_multipart_upload")["UploadId"])

    def arrived(self) -> Mapping[int, tuple[int, str]]:
        return self._arrived

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        place = {"UploadId": self.token, "PartNumber": part}

        def by_driver() -> str:
            # botocore takes bytes and files, no views; this copy is 1 % of what sending costs.
            return str(self._call("upload_part", **place, Body=b"".join(data))["ETag"])

        return self._store.put_directly("upload_part", self.uri, place, data, by_driver)

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        wanted: dict[str, Any] = {"CopySource": self._store._object(source.uri)}
        wanted.update({"CopySourceIfMatch": source.identity["etag"]} if "etag" in source.identity else {})
        wanted.update({"CopySourceRange": f"bytes={where[0]}-{where[1] - 1}"} if where != (0, source.size) else {})
        with storage_errors(source.uri):
            answer = self._call("upload_part_copy", UploadId=self.token, PartNumber=part, **wanted)
        return str(answer["CopyPartResult"]["ETag"])

    def complete(self, tags: Mapping[int, str]) -> str:
        numbered = [{"PartNumber": part, "ETag": tag} for part, tag in sorted(tags.items())]
        answer = self._call("complete_multipart_upload", UploadId=self.token, MultipartUpload={"Parts": numbered})
        return str(answer.get("ETag", ""))

    def abort(self) -> None:
        self._call("abort_multipart_upload", UploadId=self.token)

    def _call(self, method: str, **arguments: Any) -> Any:
        # A client takes 11 MB: this is the one that reads.
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


def parse_page(text: bytes) -> tuple[dict[str, ObjectInfo], str]:
    """Return the objects of a response to ListObjectsV2, and the token of the next page.

    Raises:
        NotDirectError: an object without an ETag, or another kind of response.
    """
    root = ElementTree.fromstring(text)
    space = root.tag.removesuffix("ListBucketResult")
    encoded = root.findtext(f"{space}EncodingType") == "url"
    found: dict[str, ObjectInfo] = {}
    for each in root.iter(f"{space}Contents"):
        key, size, etag = (each.findtext(space + name) for name in ("Key", "Size", "ETag"))
        if not key or not size or not etag:
            raise NotDirectError("a list without names, sizes or ETags")
        name = unquote_plus(key) if encoded else key
        found[name] = object_info(name, {"size": int(size), "ETag": etag})
    more = root.findtext(f"{space}IsTruncated") == "true"
    return found, root.findtext(f"{space}NextContinuationToken") or "" if more else ""


def crc32(data: Sequence[memoryview]) -> str:
    """Return the CRC32 of a body in pieces, as S3 writes it."""
    found = functools.reduce(lambda crc, piece: binascii.crc32(piece, crc), data, 0)
    return base64.b64encode(found.to_bytes(4, "big")).decode()


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
