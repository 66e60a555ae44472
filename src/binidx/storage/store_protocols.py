"""Protocols of stores: one class per provider, with all that is known of it; `binidx.testing` checks implementations.

    ReadableStore      head and fetch by coroutines              all drivers with an event loop
    BlockingStore      the same for threads                      other drivers
    ListableStore      lists of objects with their versions      S3, GCS
    SearchableStore    find by a glob pattern                    all over fsspec
    WritableStore      put and delete                            all but web servers
    MultipartStore     uploads that can be continued             S3
    StreamingStore     a large object as one stream              all that write
    ComposingStore     concatenate whole objects                 GCS

A store sends one request for a call; `storage.requests` decides how many, when, and how often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from binidx.forks import cached_property
from binidx.storage.interfaces import Bytes, Range, VersionMark


@dataclass(frozen=True)
class ObjectInfo:
    """One object as its store reported it; reads are pinned to this version.

    Attributes:
        uri: name of the object.
        size: bytes.
        identity: JSON values that identify the content: `size`, and `etag`, `generation`, `version` or `mtime`.
        md5: base64 digest of the content, from stores that report one.
        mark: mark of the version that is not part of the identity, which is persisted.
        remedy: way out if another version is stored, for messages; empty: open the object again.
    """

    uri: str
    size: int
    identity: Mapping[str, Any]
    md5: str | None = None
    mark: VersionMark | None = None
    remedy: str = ""

    @cached_property
    def version(self) -> str | None:
        """ETag, generation, version id or time of the last change; None if the store reports none of them."""
        return next((str(value) for name, value in self.identity.items() if name != "size"), None)

    @cached_property
    def pin(self) -> tuple[str, str]:
        """Response header that alone proves the version, and its value; ("", "") if there is none."""
        for name, header in (("generation", "x-goog-generation"), ("etag", "etag")):
            if name in self.identity:
                return header, str(self.identity[name])
        return "", ""


@dataclass(frozen=True)
class Prices:
    """List prices of requests to a store, its published limit, and its name.

    Attributes:
        store: the name in plans, such as "s3"; "file" for files of this machine, whose reads are no requests.
        dollars_per_read: price of a GET for storage that is read often; transfer is not counted.
        dollars_per_write: price of a PUT or a copy.
        reads_per_second: GETs a second that the store publishes for one partition, before it divides it; 0: unknown.
        limit: what the limit holds for, and how it grows, for messages.
        doubling_seconds: shortest time in which clients may double their rate beyond `reads_per_second`, which then
            holds for a bucket; inf: no such rule.
    """

    store: str = "other"
    dollars_per_read: float = 0.0
    dollars_per_write: float = 0.0
    reads_per_second: float = 0.0
    limit: str = ""
    doubling_seconds: float = math.inf


@dataclass(frozen=True)
class Driver:
    """Package that sends a store's requests, for messages.

    Attributes:
        package, install: name of the package, and the argument of `pip install` that installs it.
        credentials: where users set credentials.
    """

    package: str = ""
    install: str = ""
    credentials: str = "those in storage_options or in its driver's configuration"


@runtime_checkable
class DrivenStore(Protocol):
    """A store whose class names its driver.

    Attributes:
        driver: the package, and hints for messages.
    """

    driver: Driver


@dataclass(frozen=True)
class ListRequest:
    """Request for one page of the listing of a bucket.

    Attributes:
        bucket, prefix: list objects of this bucket whose keys begin with the prefix.
        delimiter: "/" for the objects of one folder; "" for all.
        after: list keys that sort after this one; a store may include the key itself.
        token: begin at this token of the page before, and not at `after`.
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
        """Return the prices of requests.

        Returns:
            The name of the store, and its list prices.
        """

    def pins(self, info: ObjectInfo) -> bool:
        """Return whether an object can only be read as it was opened.

        Args:
            info: the object, as `head` reported it.

        Returns:
            Whether `fetch` gives bytes of exactly this version or an error.
        """

    def get(self, uri: str, most_bytes: int) -> bytes:
        """Read a small object as it is now by one request, which blocks.

        Args:
            uri: name of the object.
            most_bytes: the most that the caller accepts.

        Returns:
            The content; of a larger object its first `most_bytes` + 1 bytes.

        Raises:
            FileNotFoundError: there is no such object.
        """


@runtime_checkable
class ReadableStore(Store, Protocol):
    """A store whose requests are coroutines; they run on the event loop of `storage.threads.io_loop`."""

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        """Return what the store reports of an object now.

        Args:
            uri: name of the object.
            tail_bytes: return so many of its last bytes too, if one request brings both; else none are returned.
            folders: if there is no object, look for a folder of this name, so that the error names it as one.

        Returns:
            Size and version of the object, and its last bytes.

        Raises:
            FileNotFoundError: there is no such object.
            Exception: whatever the driver raises; `storage.requests` retries or translates it.
        """

    async def fetch(self, info: ObjectInfo, where: Range) -> Bytes:
        """Fetch one range by one request.

        Args:
            info: the object, as `head` reported it.
            where: (start, stop) in bytes, half open, inside the object and not empty.

        Returns:
            The `stop - start` bytes.

        Raises:
            ObjectChangedError: the object is not the version of `info` any more.
            ShortReadError: the response is not exactly this range.
            Exception: whatever the driver raises; `storage.requests` retries or translates it.
        """


@runtime_checkable
class BlockingStore(Store, Protocol):
    """A store that can only be used by threads which wait for it."""

    def head_now(self, uri: str) -> ObjectInfo:
        """Return what the store reports of an object now.

        Args:
            uri: name of the object.

        Returns:
            Size and version of the object.

        Raises:
            Exception: see `ReadableStore.head`.
        """

    def fetch_now(self, info: ObjectInfo, ranges: Sequence[Range]) -> list[bytes]:
        """Fetch ranges.

        Args:
            info: the object, as `head_now` reported it.
            ranges: (start, stop) in bytes, half open, sorted and disjoint.

        Returns:
            The bytes of each range.

        Raises:
            Exception: see `ReadableStore.fetch`.
        """


@runtime_checkable
class ListableStore(Store, Protocol):
    """A store that lists objects with their versions, a page at a time."""

    def split(self, uri: str) -> tuple[str, str]:
        """Split the name of an object.

        Args:
            uri: name of the object.

        Returns:
            Its bucket and its key.
        """

    async def list_page(self, request: ListRequest) -> tuple[dict[str, ObjectInfo], str]:
        """List one page of objects.

        Args:
            request: bucket, keys and page.

        Returns:
            The objects by their keys (`uri` is the key, too), and the token of the next page ("" after the last one).
        """


@runtime_checkable
class SearchableStore(Protocol):
    """A store that finds objects by a glob pattern."""

    def find(self, uri: str, *, pattern: bool) -> list[str]:
        """Find objects by one listing, which blocks.

        Args:
            uri: a glob pattern, or a folder.
            pattern: whether it is a pattern.

        Returns:
            The URIs of all objects that match, or that are below the folder.
        """


@runtime_checkable
class WritableStore(Store, Protocol):
    """A store that takes objects, each with one call. All methods block."""

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        """Write an object, which appears whole.

        Args:
            uri: name of the object.
            data: the content in pieces.
            if_absent: fail if there is an object of this name.

        Returns:
            The ETag that the store answered with; "" if it answered with none.

        Raises:
            FileExistsError: `if_absent`, and there is one.
        """

    def delete(self, uri: str) -> None:
        """Delete an object.

        Args:
            uri: name of the object.

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
        """List the parts that the store has now, those of earlier processes included.

        Returns:
            Number of the part, from 1 on -> its bytes and tag.
        """

    def write(self, part: int, data: Sequence[memoryview]) -> str:
        """Upload one part.

        Args:
            part: its number, from 1 on.
            data: its content in pieces.

        Returns:
            The tag of the part, for `complete`.
        """

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        """Let the store copy one part out of another object.

        Args:
            part: its number, from 1 on.
            source: the other object; another version of it is an error.
            where: (start, stop) in bytes of the other object, half open.

        Returns:
            The tag of the part, for `complete`.

        Raises:
            SlowCopyError: the part may still arrive later; the message names the option that allows more time.
        """

    def complete(self, tags: Mapping[int, str]) -> str:
        """Make the object visible.

        Args:
            tags: number of the part -> its tag, of all parts.

        Returns:
            The ETag of the object; "" if the store sends none.
        """

    def abort(self) -> None:
        """End the requests in flight, and delete the parts."""


@runtime_checkable
class MultipartStore(WritableStore, Protocol):
    """A store with uploads that can be continued.

    Attributes:
        min_part: least bytes of a part; only the last one may be smaller.
        max_parts: parts of one object.
        copied_part: bytes that the store copies in one request, where `max_parts` of them suffice.
    """

    min_part: int
    max_parts: int
    copied_part: int

    def upload(self, uri: str, token: str = "") -> MultipartUpload:
        """Begin an upload, or continue one.

        Args:
            uri: name of the object.
            token: of the upload to continue.

        Returns:
            The upload of this token if it still exists, else a new one.
        """


@runtime_checkable
class StreamingStore(WritableStore, Protocol):
    """A store that takes a large object as one stream.

    Attributes:
        hides_uploads: whether an unfinished stream is invisible; if not, write it under another name and `move` it.
    """

    hides_uploads: bool

    def open_stream(self, uri: str) -> Any:
        """Open a file object of the driver, to write an object.

        Args:
            uri: name of the object.

        Returns:
            A file object: `write`, `close`, then `commit` or `discard` where uploads are hidden.
        """

    def move(self, source: str, target: str) -> None:
        """Rename one object.

        Args:
            source: present URI.
            target: new URI; an object of this name is replaced.
        """


@runtime_checkable
class ComposingStore(WritableStore, Protocol):
    """A store that concatenates whole objects of one bucket by itself.

    Attributes:
        max_composed: objects in one call.
    """

    max_composed: int

    def compose(self, uri: str, sources: Sequence[ObjectInfo]) -> ObjectInfo:
        """Concatenate whole objects.

        Args:
            uri: name of the new object.
            sources: objects of the same bucket, in order; another version of one is an error.

        Returns:
            The new object.
        """
