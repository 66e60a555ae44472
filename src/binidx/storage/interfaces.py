"""Interfaces of stores and readers: everything that other layers may rely on.

A store sends one request at a time and blocks nowhere (`ReadableStore`), or blocks its thread (`BlockingStore`);
`storage.requests` decides how many requests are sent, when, and how often. Objects are named by their URI everywhere,
so an error can always name them. Writing is optional and comes in pieces: a store implements the protocols of what it
can do, and callers test for them with `isinstance`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

Range = tuple[int, int]
"""(start, stop) in bytes, half open."""


Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ObjectInfo:
    """One object as its store reported it. Reads are pinned to it.

    Attributes:
        uri: name of the object.
        size: bytes.
        identity: JSON values that identify the content: `size`, and `etag`, `generation`, `version` or `mtime`.
        md5: base64 digest of the content, from stores that report one.
    """

    uri: str
    size: int
    identity: Mapping[str, Any]
    md5: str | None = None

    @functools.cached_property
    def version(self) -> str | None:
        """ETag, generation, version id or time of the last change; None if the store reports none of them."""
        return next((str(value) for name, value in self.identity.items() if name != "size"), None)


@dataclass(frozen=True)
class Prices:
    """Under which name requests to a store are counted, and their list price.

    Attributes:
        store: the name in counters and reports, such as "s3".
        dollars_per_read: of a GET for storage that is read often; transfer is not counted.
        dollars_per_write: of a PUT or a copy.
    """

    store: str = "other"
    dollars_per_read: float = 0.0
    dollars_per_write: float = 0.0


@dataclass(frozen=True)
class ListRequest:
    """One page of the objects of a bucket.

    Attributes:
        bucket, prefix: objects of this bucket whose keys begin with the prefix.
        delimiter: "/" for those of one folder; "" for all.
        after: keys that sort after this one.
        token: continue here instead, as the page before said.
    """

    bucket: str
    prefix: str
    delimiter: str
    after: str
    token: str = ""


class Store(Protocol):
    """Base of all stores: limits, prices, and small objects.

    Attributes:
        max_in_flight: requests in flight at once, over all threads and objects of a process.
        max_gap: bytes that are cheaper to fetch and discard than a second request.
    """

    max_in_flight: int
    max_gap: int

    def prices(self) -> Prices:
        """Return the name of the store in counters, and its list prices."""

    def pins(self, info: ObjectInfo) -> bool:
        """Return whether `fetch` gives bytes of exactly this version or an error."""

    def get(self, uri: str, most_bytes: int) -> bytes:
        """Return a small object as it is now by one request, which blocks; of a larger one `most_bytes` + 1 bytes.

        Raises:
            FileNotFoundError: there is no such object.
        """


@runtime_checkable
class ReadableStore(Store, Protocol):
    """A store whose requests are coroutines; they run on the event loop of `storage.threads.io_loop`."""

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        """Return what the store reports of an object now.

        Args:
            tail_bytes: return so many of its last bytes too, if one request brings both; else none are returned.
            folders: if there is no object, look for a folder of this name, and report that.

        Raises:
            FileNotFoundError: there is no such object.
            Exception: whatever the driver raises; `storage.requests` retries or translates it.
        """

    async def fetch(self, info: ObjectInfo, where: Range) -> bytes:
        """Return the bytes of one range by one request.

        Raises:
            ObjectChangedError: the object is not the version of `info` any more.
            ShortReadError: the response is not exactly this range.
            Exception: whatever the driver raises; `storage.requests` retries or translates it.
        """


@runtime_checkable
class BlockingStore(Store, Protocol):
    """A store that can only be used by threads which wait for it."""

    def head_now(self, uri: str) -> ObjectInfo:
        """Return what the store reports of an object now; raises as `ReadableStore.head`."""

    def fetch_now(self, info: ObjectInfo, ranges: Sequence[Range]) -> list[bytes]:
        """Return the bytes of the ranges; raises as `ReadableStore.fetch`."""


@runtime_checkable
class ListableStore(Store, Protocol):
    """A store that lists objects with their versions, a page at a time."""

    def split(self, uri: str) -> tuple[str, str]:
        """Return bucket and key of a URI."""

    async def list_page(self, request: ListRequest) -> tuple[dict[str, ObjectInfo], str]:
        """Return one page of objects by their keys, and the token of the next page ("" if this is the last one).

        The `uri` of each `ObjectInfo` is the key.
        """


@runtime_checkable
class SearchableStore(Protocol):
    """A store that finds objects by a glob pattern."""

    def find(self, uri: str, *, pattern: bool) -> list[str]:
        """Return the URIs of all objects that match a glob pattern, or that are below a folder; blocks."""


@runtime_checkable
class WritableStore(Store, Protocol):
    """A store that takes objects, each with one call. All methods block."""

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        """Write an object, which appears whole.

        Args:
            data: the content in pieces.
            if_absent: fail if there is an object of this name.

        Returns:
            The ETag that the store answered with; "" if it answered with none.

        Raises:
            FileExistsError: `if_absent`, and there is one.
        """

    def delete(self, uri: str) -> None:
        """Delete an object.

        Raises:
            FileNotFoundError: there is no such object (a store may also ignore that).
        """


class MultipartUpload(Protocol):
    """An object that is uploaded in parts, in any order, several at a time; it is invisible until `complete`.

    Attributes:
        token: continues this upload in another process.
    """

    token: str

    def arrived(self) -> Mapping[int, tuple[int, str]]:
        """Return bytes and tag of each part that an earlier process uploaded; parts are numbered from 1."""

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        """Upload one part, given in pieces, and return its tag."""

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        """Let the store copy one part out of another object of this version, and return its tag."""

    def complete(self, tags: Mapping[int, str]) -> str:
        """Make the object visible, made of these parts, and return its ETag ("" if the store sends none)."""

    def abort(self) -> None:
        """Delete the parts."""


@runtime_checkable
class MultipartStore(WritableStore, Protocol):
    """A store with uploads that can be continued.

    Attributes:
        min_part, max_part: bytes of a part; only the last one may be smaller.
        max_parts: parts of one object.
        copied_part: bytes that the store copies in one request, where `max_parts` of them suffice.
    """

    min_part: int
    max_part: int
    max_parts: int
    copied_part: int

    def upload(self, uri: str, token: str = "") -> MultipartUpload:
        """Continue the upload of this token if it still exists, else begin one."""


@runtime_checkable
class StreamingStore(WritableStore, Protocol):
    """A store that takes a large object as one stream.

    Attributes:
        hides_uploads: whether an unfinished stream is invisible; if not, write it under another name and `move` it.
    """

    hides_uploads: bool

    def open_stream(self, uri: str) -> Any:
        """Open a file of the driver: `write`, `close`, then `commit` or `discard` where uploads are hidden."""

    def move(self, source: str, target: str) -> None:
        """Rename one object."""


@runtime_checkable
class ComposingStore(WritableStore, Protocol):
    """A store that concatenates whole objects of one bucket by itself.

    Attributes:
        max_composed: objects in one call.
    """

    max_composed: int

    def compose(self, uri: str, sources: Sequence[ObjectInfo]) -> ObjectInfo:
        """Make `uri` the concatenation of whole objects, each of exactly this version."""


@runtime_checkable
class RangeReader(Protocol):
    """The bytes of one object.

    `read` returns one view per range, in order and of exactly `stop - start` bytes, or raises: never a short answer,
    `None`, or an exception as a value. A range outside [0, size) is a `ShortReadError`; an empty range inside it is an
    empty view. Readers may be used from several threads, notice a fork, and pickle as their constructor arguments.
    `binidx.testing.check_range_reader` is the contract.
    """

    uri: str
    size: int

    def read(self, ranges: Sequence[Range]) -> list[memoryview]: ...


@runtime_checkable
class VersionedReader(RangeReader, Protocol):
    """A reader that identifies the content of its object: see `ObjectInfo.identity`."""

    identity: Mapping[str, Any]


class Writer(Protocol):
    """An object that is being written; `create_object` gives one."""

    def write(self, data: Bytes, /) -> int:
        """Append data; return its length in bytes."""
