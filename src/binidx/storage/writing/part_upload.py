"""Multipart uploads with retries: parts in any order, or a stream of bytes that is cut into parts.

PartUpload      parts of known ranges; another process can continue it by its token
PartStream      bytes as they come. Memory: one part that fills, and one that is sent
WriteBuffer     append-only buffer of bytes, made of fixed-size chunks
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from binidx.storage.interfaces import Bytes, Range
from binidx.storage.requests.retries import retried
from binidx.storage.settings import ReadSettings
from binidx.storage.store_protocols import MultipartStore, ObjectInfo
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.threads import READS

CHUNK_BYTES = 256 << 10
"""Of a write buffer, and of one write to a connection. A buffer that grows in place left 30 MB of heap fragments behind
one upload part of 8 MiB."""

Result = TypeVar("Result")


class WriteBuffer:
    """Append-only buffer of bytes. Memory: the bytes written plus at most one chunk; appending copies none of them."""

    def __init__(self) -> None:
        self._chunks: list[bytearray] = []
        self.size = 0

    def write(self, data: Bytes) -> int:
        """Append data; return its length in bytes."""
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
        """The bytes, chunk by chunk."""
        ends = [min(CHUNK_BYTES, self.size - number * CHUNK_BYTES) for number in range(len(self._chunks))]
        return [memoryview(chunk)[:end] for chunk, end in zip(self._chunks, ends, strict=True)]


def cut_views(data: Bytes) -> list[memoryview]:
    """Cut contiguous bytes into views of chunks."""
    view = memoryview(data).cast("B")
    return [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]


class PartUpload:
    """A `MultipartWriter` over a store's multipart upload: each request is retried, and its errors name the object.

    Args:
        token: continue this upload if it still exists.
    """

    ordered = False
    staged: str | None = None

    def __init__(self, store: MultipartStore, uri: str, token: str, storage_options: Mapping[str, Any]) -> None:
        self.uri, self._settings = uri, ReadSettings.of(storage_options)
        self._upload = self._retried(lambda: store.upload(uri, token))
        self.token = self._upload.token

    def kept(self, part: int, where: Range, digest: str, tag: str) -> bool:
        return self._upload.arrived().get(part) == (where[1] - where[0], tag)

    def write(self, part: int, where: Range, data: Bytes) -> str:
        with storage_errors(self.uri):
            return self.write_pieces(part, cut_views(data))

    def write_pieces(self, part: int, data: Sequence[memoryview]) -> str:
        """Upload one part, given in pieces, and return its tag."""
        return self._retried(lambda: self._upload.write(part, data))

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        """Let the store copy one part out of another object of this version, and return its tag."""
        return self._retried(lambda: self._upload.copy(part, source, where))

    def publish(self, tags: Mapping[int, str]) -> str:
        return self._retried(lambda: self._upload.complete(tags))

    def pause(self) -> None:
        """Nothing to do: the parts are in the store."""

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._retried(self._upload.abort)

    def _retried(self, request: Callable[[], Result]) -> Result:
        with storage_errors(self.uri):
            return retried(self.uri, request, deadline_seconds=self._settings.deadline_seconds)


BLOCK_BYTES = 50 << 20
"""Of a part of a stream, unless storage_options have a default_block_size: 10,000 of them are 500 GB."""


class PartStream:
    """Bytes into a multipart upload.

    Args:
        begun: its first bytes, at most one part.
    """

    def __init__(self, store: MultipartStore, uri: str, storage_options: Mapping[str, Any], begun: WriteBuffer) -> None:
        self.closed = False
        self._part_bytes = max(store.min_part, int(storage_options.get("default_block_size", BLOCK_BYTES)))
        self._parts, self._tags = PartUpload(store, uri, "", storage_options), dict[int, str]()
        self._buffer = begun
        self._thread = READS.executor(1)
        self._sending: Future[str] | None = None

    def write(self, data: Bytes) -> int:
        view = memoryview(data).cast("B")
        while view:
            if self._buffer.size >= self._part_bytes:
                self._send()
            taken = self._buffer.write(view[: self._part_bytes - self._buffer.size])
            view = view[taken:]
        return memoryview(data).nbytes

    def close(self) -> None:
        """Send the rest; the object is still invisible."""
        if self._buffer.size or not self._tags:
            self._send()
        self._wait()
        self._thread.shutdown()

    def commit(self) -> None:
        """Make the object visible."""
        self._parts.publish(self._tags)

    def discard(self) -> None:
        """Delete the parts."""
        self._thread.shutdown(cancel_futures=True)
        self._parts.abandon()

    def _send(self) -> None:
        self._wait()
        data, self._buffer = self._buffer, WriteBuffer()
        self._sending = self._thread.submit(self._parts.write_pieces, len(self._tags) + 1, data.pieces)

    def _wait(self) -> None:
        if self._sending is not None:
            self._tags[len(self._tags) + 1] = self._sending.result()
            self._sending = None
