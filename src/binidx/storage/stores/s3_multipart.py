"""Bytes that are gathered before they are sent: in chunks of one size, so that what grows is never moved.

A multipart upload to S3: parts in any order, unseen until it is published. And a stream into one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from binidx.storage.interfaces import Bytes, Range
from binidx.storage.requests.retries import retried
from binidx.storage.settings import ReadSettings
from binidx.storage.stores import filesystem
from binidx.storage.stores.address import object_key
from binidx.storage.stores.driver_errors import http_status
from binidx.storage.stores.signed import put_small
from binidx.storage.threads import REQUESTS

CHUNK_BYTES = 256 << 10
"""What a connection is given at once. One buffer that grows leaves holes of all sizes: 30 MB behind one of 8 MiB."""


class WriteBuffer:
    """Grows at its end. Memory: its bytes, and a chunk."""

    def __init__(self) -> None:
        self._chunks: list[bytearray] = []
        self.size = 0

    def write(self, data: Bytes) -> int:
        view = memoryview(data).cast("B")
        count = len(view)
        while view:
            place = self.size % CHUNK_BYTES
            if place == 0:
                self._chunks.append(bytearray(CHUNK_BYTES))
            taken = min(CHUNK_BYTES - place, len(view))
            self._chunks[-1][place : place + taken] = view[:taken]
            self.size, view = self.size + taken, view[taken:]
        return count

    @property
    def pieces(self) -> list[memoryview]:
        """All of it, chunk by chunk."""
        ends = [min(CHUNK_BYTES, self.size - number * CHUNK_BYTES) for number in range(len(self._chunks))]
        return [memoryview(chunk)[:end] for chunk, end in zip(self._chunks, ends, strict=True)]


def cut_views(data: Bytes) -> list[memoryview]:
    """The same of bytes that lie together."""
    view = memoryview(data).cast("B")
    return [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]


class S3Parts:
    """A multipart upload, through s3fs: its parts outlive this process until they are completed or aborted."""

    ordered = False
    staged: str | None = None

    def __init__(self, uri: str, token: str, storage_options: Mapping[str, Any]) -> None:
        self.uri, self._options = uri, storage_options
        # A client holds 11 MB: this is the one that reads, and that leaves it to us to try again.
        self._settings = ReadSettings.of(storage_options)
        given = {name: value for name, value in storage_options.items() if name != "default_block_size"}
        reading = filesystem.max_in_flight(uri, given, self._settings)
        self._fs, path = filesystem.open_filesystem(uri, given, reading=reading)
        bucket, key, _ = self._fs.split_path(path)
        self._object = {"Bucket": bucket, "Key": key}
        listed = self._list(token) if token else None
        self._listed = listed or {}
        self.token = token if listed is not None else str(self._call("create_multipart_upload")["UploadId"])

    def kept(self, part: int, where: Range, digest: str, tag: str) -> bool:
        start, stop = where
        return self._listed.get(part) == (stop - start, tag)

    def write(self, part: int, where: Range, data: Bytes | WriteBuffer) -> str:
        place = {"UploadId": self.token, "PartNumber": part}
        with filesystem.storage_errors(self.uri):
            pieces = data.pieces if isinstance(data, WriteBuffer) else cut_views(data)
            if (tag := put_small(self.uri, pieces, self._options, part=place)) is not None:
                return tag
            # botocore takes bytes and files, no views; this copy is 1 % of what sending costs.
            answer = self._call("upload_part", **place, Body=b"".join(pieces))
        return str(answer["ETag"])

    def copy(self, part: int, source: str, where: Range | None, etag: str) -> str:
        """Let the store copy a part out of another object that has this ETag; None: all of it. The tag it gave."""
        path = filesystem.open_filesystem(source, self._options)[1]
        arguments: dict[str, Any] = {"CopySource": object_key(self._fs, path)}
        arguments.update({"CopySourceIfMatch": etag} if etag else {})
        arguments.update({"CopySourceRange": f"bytes={where[0]}-{where[1] - 1}"} if where else {})
        with filesystem.storage_errors(source):
            answer = self._call("upload_part_copy", UploadId=self.token, PartNumber=part, **arguments)
        return str(answer["CopyPartResult"]["ETag"])

    def publish(self, tags: Mapping[int, str]) -> str:
        """The ETag of the whole, where the store says it."""
        numbered = [{"PartNumber": part, "ETag": tag} for part, tag in sorted(tags.items())]
        with filesystem.storage_errors(self.uri):
            answer = self._call("complete_multipart_upload", UploadId=self.token, MultipartUpload={"Parts": numbered})
        return str(answer.get("ETag", ""))

    def pause(self) -> None:
        """Nothing is held here."""

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._call("abort_multipart_upload", UploadId=self.token)

    def _call(self, method: str, **arguments: Any) -> Any:
        ask = functools.partial(self._fs.call_s3, method, **self._object, **arguments)
        return retried(self.uri, ask, deadline_seconds=self._settings.deadline_seconds)

    def _list(self, token: str) -> dict[int, tuple[int, str]] | None:
        """part -> (bytes, tag) of what has arrived; None: there is no such upload any more."""
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


BLOCK_BYTES = 50 << 20
"""Of a part of a stream, where nobody says another default_block_size: 10,000 of them are 500 GB."""

LEAST_BYTES = 5 << 20
"""That S3 takes as a part, but for the last."""


class S3Stream:
    """Bytes into a multipart upload, as the files of s3fs take them. Memory: a part that fills, and one on its way.

    Args:
        begun: its first bytes, not more than a part.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any], begun: WriteBuffer) -> None:
        self.closed = False
        self._block = max(LEAST_BYTES, int(storage_options.get("default_block_size", BLOCK_BYTES)))
        self._parts, self._tags = S3Parts(uri, "", storage_options), dict[int, str]()
        self._held = begun
        self._thread = REQUESTS.executor(1)
        self._sending: Future[str] | None = None

    def write(self, data: Bytes) -> int:
        view = memoryview(data).cast("B")
        while view:
            if self._held.size >= self._block:
                self._send()
            taken = self._held.write(view[: self._block - self._held.size])
            view = view[taken:]
        return memoryview(data).nbytes

    def close(self) -> None:
        """Send the rest; nothing appears."""
        if self._held.size or not self._tags:
            self._send()
        self._wait()
        self._thread.shutdown()

    def commit(self) -> None:
        """Make it appear."""
        self._parts.publish(self._tags)

    def discard(self) -> None:
        """Leave nothing of it."""
        self._thread.shutdown(cancel_futures=True)
        self._parts.abandon()

    def _send(self) -> None:
        self._wait()
        data, self._held = self._held, WriteBuffer()
        self._sending = self._thread.submit(self._parts.write, len(self._tags) + 1, (0, data.size), data)

    def _wait(self) -> None:
        if self._sending is not None:
            self._tags[len(self._tags) + 1] = self._sending.result()
            self._sending = None
