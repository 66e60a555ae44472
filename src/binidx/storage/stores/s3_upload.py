"""Multipart uploads of S3: their parts outlive the process that sends them.

A request is sent without the driver, at a URL that is signed as the driver signs URLs, and by the driver if that fails:
aiobotocore copies each body and sends it in small pieces, for four times the CPU.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hashlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from xml.sax.saxutils import escape

from fsspec.asyn import sync

from binidx.errors import SlowCopyError, StorageError
from binidx.storage.interfaces import Range
from binidx.storage.store_protocols import ObjectInfo
from binidx.storage.stores.driver_errors import (
    HTTPStatusError,
    PartsLostError,
    cause_of,
    http_status,
    storage_errors,
)
from binidx.storage.stores.signing import CHECKSUM, NO_HEADERS

if TYPE_CHECKING:
    from binidx.storage.stores.s3 import S3Store

try:
    from isal.isal_zlib import crc32  # a twelfth of the time
except ImportError:
    from zlib import crc32

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"

STALL_SECONDS, SLOWEST_BYTES_PER_SECOND = 60.0, 100_000
"""Longest time to send one part of an upload: a constant, plus the time of its bytes at the lowest rate of a link."""

COPIED_BYTES_PER_SECOND = 1_000_000
"""Lowest rate at which the store itself copies a part, one of a few at once on slow disks."""


def body_headers(data: Sequence[memoryview]) -> dict[str, str]:
    """Return the headers of a request with a body: its length, and the checksum that botocore sends, too."""
    checksum = functools.reduce(lambda value, view: crc32(view, value), data, 0).to_bytes(4, "big")
    return {"Content-Length": str(sum(map(len, data))), CHECKSUM: base64.b64encode(checksum).decode()}


def copy_headers(wanted: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a request that copies from another object, from botocore's parameters."""
    source = wanted["CopySource"]
    version = f"?versionId={quote(source['VersionId'])}" if "VersionId" in source else ""
    names = {"CopySourceIfMatch": "x-amz-copy-source-if-match", "CopySourceRange": "x-amz-copy-source-range"}
    headers = {header: str(wanted[name]) for name, header in names.items() if name in wanted}
    return {"x-amz-copy-source": quote(f"{source['Bucket']}/{source['Key']}", safe="/~") + version, **headers}


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
        seconds = max(STALL_SECONDS + (where[1] - where[0]) / COPIED_BYTES_PER_SECOND, self._store.read_timeout)

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
