"""S3 and servers that speak its protocol, through s3fs: s3://bucket/key, s3a://bucket/key.

Ranges and lists are requested directly at URLs that s3fs signs (`direct`), and through s3fs where that is refused;
s3fs sends all other requests. The client that reads has no retries of its own, as `storage.requests` retries.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qs, unquote_plus, urlsplit
from xml.etree import ElementTree

from binidx.errors import SlowCopyError, StorageError, redacted
from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import Driver, ListRequest, ObjectInfo, Prices
from binidx.storage.stores.direct import (
    MAX_UNBOUNDED_BYTES,
    Address,
    DirectStore,
    NotDirectError,
    direct_address,
    if_match,
    read_at_most,
    receive,
)
from binidx.storage.stores.driver_errors import (
    TRANSIENT_STATUSES,
    HTTPStatusError,
    PartsLostError,
    cause_of,
    driver_text,
    http_status,
    storage_errors,
)
from binidx.storage.stores.fsspec_store import CONCURRENCY, FsspecWrites, Result, checked_info, open_filesystem
from binidx.storage.stores.identity import object_info, size_and_tail
from binidx.storage.stores.s3_session import one_origin_session, quick_session, session_options
from binidx.storage.stores.signing import UrlSigner, derive_signer, frozen_credentials, use_regional_endpoint

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
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or storage_options={'anon': True} if it is public",
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
        response = await self._begin_get(self.fs, uri, f"bytes=-{tail_bytes}")
        size, part_bytes = size_and_tail(response.get("ContentRange"), response.get("ContentLength"), tail_bytes)
        async with (body := response["Body"]):
            tail = await read_at_most(body.read, part_bytes) if part_bytes else b""
        return checked_info(uri, {"size": size, **_versions(response)}), tail if len(tail) == part_bytes else b""

    async def _begin_get(self, fs: Any, uri: str, where: str, **condition: str) -> Any:
        """Return s3fs' response to a request for a range, whose body is not read yet."""
        return await fs._call_s3("get_object", fs.req_kw, **self._object(uri), **condition, Range=where)

    def read_start(self, fs: Any, uri: str, num_bytes: int) -> bytes:
        from fsspec.asyn import sync

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
        try:
            address = await sign(self.fs, "get_object", self._object(uri), {"Range": f"bytes=0-{num_bytes - 1}"})
            async with address.session.get(address.url, headers=address.headers, **address.options) as response:
                if response.status in (200, 206):
                    return (await read_at_most(response.content.read, num_bytes))[:num_bytes]
                if response.status == 416:  # it is empty
                    return b""
                is_absent = response.status == 404
        except Exception as error:  # the driver meets it too if it matters
            logger.debug("%s: read by its driver: %s", redacted(uri), driver_text(error))
            return None
        if is_absent:
            raise FileNotFoundError(uri)
        return None

    async def address(self, info: ObjectInfo) -> Address:
        return await sign(self.fs, "get_object", self._object(info.uri), if_match(info))

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


async def sign(fs: Any, method: str, wanted: Mapping[str, str], headers: Mapping[str, str]) -> Address:
    """Return the address of a direct request, a signed URL.

    Args:
        method: method of botocore's client, such as "get_object".
        wanted: parameters of the method.
        headers: further headers of the request; they are not signed.

    Raises:
        NotDirectError: the request cannot be sent without the driver.
    """
    from botocore.utils import get_environ_proxies
    from yarl import URL

    await fs.set_session()
    client = await fs.get_s3(wanted["Bucket"])
    credentials, place = await frozen_credentials(client), (id(fs), wanted["Bucket"])
    signer, signed = _signers.get(place, (None, None))
    is_plain = method == "get_object" and wanted.keys() == {"Bucket", "Key"}
    if is_plain and signer and signed and signer.holds(client, credentials):
        url = URL(signer.make_url(wanted["Key"]), encoded=True)
        return replace(signed, url=url, headers={**signed.headers, **headers})
    model = client.meta.service_model.operation_model(client.meta.method_to_api_mapping[method])
    given = {**fs.s3_additional_kwargs, **fs.req_kw, **wanted}
    arguments = {name: value for name, value in given.items() if name in model.input_shape.members}
    client.meta.events.register_first("before-endpoint-resolution.s3", use_regional_endpoint, unique_id="binidx")
    url = await client.generate_presigned_url(method, Params=arguments, ExpiresIn=3600)
    config = client.meta.config
    proxies = get_environ_proxies(url) if config.proxies is None else config.proxies
    if proxies.get(urlsplit(url).scheme):
        raise NotDirectError("a proxy stands before it")
    payer = {"x-amz-request-payer": "requester"} if arguments.get("RequestPayer") else {}
    names = parse_qs(urlsplit(url).query).get("X-Amz-SignedHeaders", ["host"])[0].split(";")
    if unknown := set(names) - {"host", *payer}:
        raise NotDirectError(f"its URL is signed with {', '.join(sorted(unknown))}")
    address = await direct_address(fs, url, payer, lambda: session_options(fs, config, urlsplit(url).scheme))
    if is_plain and arguments == wanted:
        _signers[place] = derive_signer(client, credentials, url, wanted["Key"]), address
    return replace(address, headers={**address.headers, **headers})


_signers: dict[tuple[int, str], tuple[UrlSigner | None, Address]] = {}
"""(id of a filesystem, which is kept for ever; bucket) -> signer of its URLs, and the address of an object."""


STALL_SECONDS, SLOWEST_BYTES_PER_SECOND = 60.0, 100_000
"""Longest time to send one part of an upload: a constant, plus the time of its bytes at the lowest rate of a link."""

COPIED_BYTES_PER_SECOND = 1_000_000
"""Lowest rate at which the store itself copies a part, one of a few at once on slow disks."""


class S3Upload:
    """A multipart upload: its parts outlive this process until they are completed or aborted."""

    def __init__(self, store: S3Store, uri: str, token: str) -> None:
        self._store, self._uri = store, uri
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
        with self._loss_reported():
            return self._tag(self._send(fs, sent, STALL_SECONDS + len(body) / SLOWEST_BYTES_PER_SECOND))

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        wanted: dict[str, Any] = {"CopySource": self._store._object(source.uri)}
        wanted.update({"CopySourceIfMatch": source.identity["etag"]} if "etag" in source.identity else {})
        wanted.update({"CopySourceRange": f"bytes={where[0]}-{where[1] - 1}"} if where != (0, source.size) else {})
        seconds = STALL_SECONDS + (where[1] - where[0]) / COPIED_BYTES_PER_SECOND
        seconds = max(seconds, users_config(self._store.storage_options).get("read_timeout") or 0)
        with storage_errors(source.uri), self._loss_reported():
            fs = self._store.copying_fs()
            request = fs._call_s3("upload_part_copy", **self._object, UploadId=self.token, PartNumber=part, **wanted)
            try:
                return self._tag(self._send(fs, request, seconds)["CopyPartResult"])
            except TimeoutError:
                raise SlowCopyError(
                    f"{source.uri}: bytes {where[0]} to {where[1]} were not copied in {seconds:.0f} s; "
                    "a read_timeout in storage_options['config_kwargs'] above that allows more"
                ) from None

    def complete(self, tags: Mapping[int, str]) -> str:
        numbered = [{"PartNumber": part, "ETag": tag} for part, tag in sorted(tags.items())]
        try:
            with self._loss_reported():
                parts = {"Parts": numbered}
                done = self._call("complete_multipart_upload", UploadId=self.token, MultipartUpload=parts)
                return str(done.get("ETag", ""))
        except PartsLostError as error:
            # The response to an earlier request may have been lost.
            present, needed = self._present_tag(), composite_tag([tag for _, tag in sorted(tags.items())])
            if present and present.strip('"') == needed:
                return present
            raise PartsLostError(f"{error} (its ETag would be {needed}, found {present or 'none'})") from error

    def _present_tag(self) -> str:
        """Return the ETag of the object that has the name now; "" if there is none, or none that may be read."""
        try:
            return str(self._call("head_object").get("ETag", ""))
        except (FileNotFoundError, PermissionError):
            return ""

    def _tag(self, answer: Mapping[str, Any]) -> str:
        if "ETag" not in answer:
            raise StorageError(
                f"{self._uri}: the response to a part has no ETag, needed one to publish the object; let the server, "
                "and any proxy before it, send ETag headers, or write to a disk and upload the files with another tool"
            )
        return str(answer["ETag"])

    @contextlib.contextmanager
    def _loss_reported(self) -> Iterator[None]:
        """Raise PartsLostError for a driver's error in the block if this upload does not exist any more."""
        try:
            yield
        except FileNotFoundError as error:
            if getattr(error.__cause__, "response", {}).get("Error", {}).get("Code") != "NoSuchUpload":
                raise
            raise PartsLostError(
                f"{self._uri}: its upload was completed or aborted meanwhile, by another process or by a rule of the "
                "bucket; run it again"
            ) from cause_of(error)

    def abort(self) -> None:
        self._aborted = True
        for sent in list(self._sent):
            sent.cancel()
        self._call("abort_multipart_upload", UploadId=self.token)

    def _send(self, fs: Any, request: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Send a request that `abort` can cancel, and return its response; after `abort`, no request is sent."""
        sent = asyncio.run_coroutine_threadsafe(asyncio.wait_for(request, seconds), fs.loop)
        self._sent.add(sent)
        sent.add_done_callback(self._sent.discard)
        if self._aborted:
            sent.cancel()
        return sent.result()

    def _call(self, method: str, **arguments: Any) -> Any:
        return self._store.fs.call_s3(method, **self._object, **arguments)

    def _list(self, token: str) -> dict[int, tuple[int, str]] | None:
        """Return bytes and tag of each part that has arrived; None if there is no such upload any more."""
        parts: dict[int, tuple[int, str]] = {}
        page: dict[str, Any] = {}
        while True:
            try:
                answer = self._call("list_parts", UploadId=token, **page)
            except OSError as error:
                # 404: completed or aborted since; 400: never an upload of this store
                if isinstance(error, FileNotFoundError) or http_status(error) in (400, 404):
                    return None
                raise
            parts.update({part["PartNumber"]: (part["Size"], part["ETag"]) for part in answer.get("Parts", [])})
            if not answer.get("IsTruncated"):
                return parts
            page = {"PartNumberMarker": answer["NextPartNumberMarker"]}


def composite_tag(tags: Sequence[str]) -> str:
    """Return the ETag that S3 gives an object of parts with these ETags, without quotes; "unknown" if they are no MD5.

    An object that has it consists of these parts; another upload may have brought equal ones. Under SSE-KMS or SSE-C,
    or in an Express bucket, ETags may be no MD5: the object then has another ETag, and nothing is proved.

    Source: the MD5 of the MD5s of the parts, and their number; AWS, Checking object integrity.
    """
    try:
        digests = b"".join(bytes.fromhex(tag.strip('"')) for tag in tags)
    except ValueError:
        return "unknown"
    return f"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(tags)}"


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
