"""S3 and servers that speak its protocol, through s3fs: s3://bucket/key, s3a://bucket/key.

Requests are sent directly (`direct`) at URLs that are signed as s3fs signs them (`signing`), and through s3fs where
that is refused or fails; s3fs alone looks for folders, writes objects only if they are absent, and lists the parts of
an upload. The client that reads has no retries of its own, as `storage.requests` retries. The parts of an upload are
sent directly, too: aiobotocore copies each body and sends it in small pieces, for four times the CPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from fsspec.asyn import sync

from binidx.errors import SlowCopyError, StorageError, redacted
from binidx.storage.interfaces import Range
from binidx.storage.settings import ReadSettings
from binidx.storage.store_protocols import Driver, ListRequest, ObjectInfo, Prices
from binidx.storage.stores.direct import (
    MAX_REDIRECTS,
    MAX_UNBOUNDED_BYTES,
    OBJECT_STATUSES,
    RENEW_SECONDS,
    Address,
    DirectStore,
    check_status,
    if_match,
    read_at_most,
    receive,
    redirect_refusal,
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
from binidx.storage.stores.range_client import MAX_ERROR_BYTES
from binidx.storage.stores.s3_requests import (
    DirectResponse,
    as_body,
    body_headers,
    composite_tag,
    copy_headers,
    parse_page,
    versions_of,
)
from binidx.storage.stores.signing import NO_HEADERS, one_origin_session, quick_session, sign

logger = logging.getLogger(__name__)
SPARE = 8
"""Connections of a reading client beyond the requests in flight, for requests that are hedged."""

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"

STALL_SECONDS, SLOWEST_BYTES_PER_SECOND = 60.0, 100_000
"""Longest time to send one part of an upload: a constant, plus the time of its bytes at the lowest rate of a link."""


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
    min_part, max_parts = 5 << 20, 10_000
    # Copied in seconds, well inside the timeouts of clients, and with many in flight faster than one huge part.
    copied_part = 128 << 20
    # Longest time to copy a part: a constant, plus the time of its bytes, one of a few at once on slow disks.
    copy_seconds, copied_bytes_per_second = STALL_SECONDS, 1_000_000

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
            config["http_session_cls"] = one_origin_session((*ReadSettings.of(given).redirect_hosts,))
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
        bucket, key, version = self.fs.split_path(uri)
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
        return checked_info(uri, {"size": response["ContentLength"], **versions_of(response)}), b""

    async def _tail(self, uri: str, tail_bytes: int) -> tuple[ObjectInfo, bytes]:
        response = await self._begin_get(self.fs, uri, f"bytes=-{tail_bytes}")
        size, part_bytes = size_and_tail(response.get("ContentRange"), response.get("ContentLength"), tail_bytes)
        async with (body := response["Body"]):
            tail = await read_at_most(body.read, part_bytes) if part_bytes else b""
        return checked_info(uri, {"size": size, **versions_of(response)}), tail if len(tail) == part_bytes else b""

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
        return await self._sign(self.object_of(info.uri), if_match(info))

    async def _sign(self, wanted: Mapping[str, str], headers: Mapping[str, str], *verb: str) -> Address:
        """Return the address of an object, which follows redirects if the user names origins for them."""
        address, hosts = await sign(self.fs, "get_object", wanted, headers, *verb), self.settings.redirect_hosts
        return replace(address, redirects=MAX_REDIRECTS, redirect_hosts=hosts) if hosts else address

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
            entry["Key"]: object_info(entry["Key"], {"size": entry["Size"], **versions_of(entry)})
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
            HTTPStatusError: a transient status, or a redirect to an origin that the user does not name.
        """
        place = id(self.fs), wanted["Bucket"], verb
        more = sum(map(len, data)) / SLOWEST_BYTES_PER_SECOND
        if not self.direct or time.monotonic() < _refused.get(place, 0.0):
            return None
        try:
            target: Address | None = await self._sign(wanted, headers, verb, fields)
            async with asyncio.timeout(seconds and seconds + more):
                while target:
                    options = {"headers": target.headers, "skip_auto_headers": ["Content-Type"], **target.options}
                    content = as_body(data) if data else None
                    async with target.session.request(verb, target.url, data=content, **options) as response:
                        body = await read_at_most(response.content.read, most_bytes)
                    check_status(response.status, response.reason or "", response.headers, body)
                    target = target.redirected(response)
            if refusal := redirect_refusal(response, ()):
                raise HTTPStatusError(response.status, refusal)
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


class S3Upload:
    """A multipart upload: its parts outlive this process until they are completed or aborted."""

    def __init__(self, store: S3Store, uri: str, token: str) -> None:
        self._store, self._uri = store, uri
        bucket, key = store.split(uri)
        self._object = {"Bucket": bucket, "Key": key}
        self._sent, self._aborted = set[Future[Any]](), False
        exists = bool(token) and self._list(token) is not None
        self.token = token if exists else self._create()

    def _create(self) -> str:
        answer = self._request("POST", fields="uploads=")
        token = answer and answer.text_of("InitiateMultipartUploadResult", "UploadId")
        return token or str(self._call("create_multipart_upload")["UploadId"])

    def arrived(self) -> Mapping[int, tuple[int, str]]:
        return self._list(self.token) or {}

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        fs, headers = self._store.fs, body_headers(data)

        async def send() -> Mapping[str, str]:
            sent = self._store.request("PUT", self._object, headers, data=data, fields=self._part(part))
            if (answer := await sent) and answer.status == 200:
                return answer.headers
            body = b"".join(data)  # botocore takes bytes and files, no views
            request = fs._call_s3("upload_part", **self._object, UploadId=self.token, PartNumber=part, Body=body)
            # botocore's timeout begins when the whole body is sent.
            return await asyncio.wait_for(request, STALL_SECONDS + len(body) / SLOWEST_BYTES_PER_SECOND)

        with self._loss_reported():
            return self._tag(self._send(fs, send()))

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        wanted: dict[str, Any] = {"CopySource": self._store.object_of(source.uri)}
        wanted.update({"CopySourceIfMatch": source.identity["etag"]} if "etag" in source.identity else {})
        wanted.update({"CopySourceRange": f"bytes={where[0]}-{where[1] - 1}"} if where != (0, source.size) else {})
        seconds = self._store.copy_seconds + (where[1] - where[0]) / self._store.copied_bytes_per_second
        seconds = max(seconds, self._store.read_timeout)

        async def send() -> Mapping[str, str]:
            headers = copy_headers(wanted)
            sent = self._store.request("PUT", self._object, headers, fields=self._part(part), seconds=None)
            if (answer := await sent) and (tag := answer.text_of("CopyPartResult", "ETag")):
                return {"ETag": tag}
            fs = self._store.copying_fs()
            request = fs._call_s3("upload_part_copy", **self._object, UploadId=self.token, PartNumber=part, **wanted)
            return (await request)["CopyPartResult"]  # type: ignore[no-any-return]

        with storage_errors(source.uri), self._loss_reported():
            try:
                return self._tag(self._send(self._store.fs, asyncio.wait_for(send(), seconds)))
            except TimeoutError:
                raise SlowCopyError(
                    f"{source.uri}: bytes {where[0]} to {where[1]} were not copied in {seconds:.0f} s; "
                    "a read_timeout in storage_options['config_kwargs'] above that allows more"
                ) from None

    def complete(self, tags: Mapping[int, str]) -> str:
        tagged = "".join(
            f"<Part><PartNumber>{part}</PartNumber><ETag>{escape(tag)}</ETag></Part>"
            for part, tag in sorted(tags.items())
        )
        body = f'<CompleteMultipartUpload xmlns="{NAMESPACE}">{tagged}</CompleteMultipartUpload>'.encode()
        answer = self._request("POST", {"Content-Length": str(len(body))}, [memoryview(body)], self._upload)
        if answer and (tag := answer.text_of("CompleteMultipartUploadResult", "ETag")):
            return str(tag)
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

    @property
    def _upload(self) -> str:
        """Field of a query that names this upload."""
        return f"uploadId={quote(self.token, safe='~')}"

    def _part(self, part: int) -> str:
        return f"partNumber={part}&{self._upload}"

    def _request(
        self, verb: str, headers: Mapping[str, str] = NO_HEADERS, data: Sequence[memoryview] = (), fields: str = ""
    ) -> Any:
        """Send a request without the driver, and return its response; None: the driver has to send it."""
        send = functools.partial(self._store.request, data=data, fields=fields)
        with contextlib.suppress(HTTPStatusError):
            return sync(self._store.fs.loop, send, verb, self._object, headers)
        return None

    def _send(self, fs: Any, request: Coroutine[Any, Any, Any]) -> Any:
        """Send a request that `abort` can cancel, and return its response; after `abort`, no request is sent."""
        sent = asyncio.run_coroutine_threadsafe(request, fs.loop)
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


_refused: dict[tuple[int, str, str], float] = {}
"""(id of a filesystem, bucket, verb) -> time up to which such requests are left to the driver, as one was refused."""


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
