"""Protocols of readers and writers of stored bytes: all that other modules may rely on.

    RangeReader        read byte ranges of one object                  every reader
    MappedReader       let C read mapped bytes                         local files, disk cache
    CompositeReader    split ranges over other readers                 joined and lazily opened readers
    ConcurrentReader   start a read without a thread                   remote objects whose driver has coroutines
    VersionedReader    compare the stored object with the opened one   remote objects
    BlockReader        fetch whole blocks                              compressed and checksummed objects
    LayeredReader      read through another reader                     caches, codecs, checksums

A capability is a Protocol beside `RangeReader`. Each is queried by one function: `as_block_reader` and `stored_reader`
below, and in `vectored_reads`, for every batch, `as_mapped`, `as_composite` and `as_concurrent`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from concurrent.futures import Future

Range = tuple[int, int]
"""(start, stop) in bytes, half open."""

Bytes = bytes | bytearray | memoryview

Piece = tuple[int, int]
"""(read, place): where a part of a range is found in the results of the reads of `CompositeReader.split`."""


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
    """Reader of byte ranges of one object.

    Readers may be shared by threads, detect a fork, and pickle as their constructor arguments.
    `binidx.testing.check_range_reader` checks an implementation.

    Attributes:
        uri: name of the object, for errors and caches.
        size: bytes of the object.
        identity: version of the object in JSON values: `size`, and `etag`, `generation`, `version` or `mtime`; empty
            if the version is unknown.

    Source: ours; obspec's `GetRanges`, with one method for any number of ranges.
    """

    uri: str
    size: int

    @property
    def identity(self) -> Mapping[str, Any]: ...

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Return the bytes of ranges.

        Args:
            ranges: (start, stop) in bytes, in any order; they may overlap, repeat, or be empty.

        Returns:
            One read-only view of `stop - start` bytes for each range, in the same order.

        Raises:
            ShortReadError: a range leaves [0, size).
            StorageError: the store failed; never a short result, `None`, or an exception as a value.

        Example:
            header, tokens = reader.read([(0, 34), (4096, 8192)])
        """
        ...


@runtime_checkable
class MappedReader(Protocol):
    """Reader whose bytes may be mapped: C then fills a batch in one call, without a Python object for each range.

    `binidx.testing.check_range_reader` checks an implementation.

    Source: ours.
    """

    def is_complete(self) -> bool:
        """Return whether all bytes of the object are mapped, so that no read waits for a store."""
        ...

    def read_into(self, gather: Callable[[Any], int]) -> bool:
        """Let a C function read from the mapped object.

        Args:
            gather: called at most once, with a C mapping (`native.pieces.Mapped.taking`); returns the number of ranges
                that it read, or a negative number if it read none because some bytes are not in memory.

        Returns:
            Whether `gather` read its ranges.

        Raises:
            ObjectChangedError: the file was changed in place.
        """
        ...


@runtime_checkable
class CompositeReader(Protocol):
    """Reader whose bytes come from other readers, so that `read_many` can read all of them at the same time.

    `binidx.testing.check_range_reader` checks an implementation.

    Source: ours.
    """

    def split(
        self, ranges: Sequence[Range]
    ) -> tuple[Sequence[Sequence[Piece]], Sequence[tuple[RangeReader, Sequence[Range]]]]:
        """Translate ranges into ranges of other readers.

        Args:
            ranges: (start, stop) in bytes, half open.

        Returns:
            For each range its pieces in order, as (read, place); and the reads as (reader, ranges). Piece (r, p) is
            range p of read r.

        Raises:
            ShortReadError: a range leaves the object.
        """
        ...

    def component_readers(self) -> Sequence[RangeReader]:
        """Return the other readers, opening none."""
        ...


class PendingRead(Protocol):
    """A started read.

    Attributes:
        outcome: done when all responses have arrived or the read has failed.
    """

    @property
    def outcome(self) -> Future[Any]: ...

    def result(self) -> list[memoryview]:
        """Wait; return the views that `RangeReader.read` returns, or raise its error."""
        ...


@runtime_checkable
class ConcurrentReader(Protocol):
    """Reader that can start a read and return, so that one thread waits for many objects.

    `binidx.testing.check_range_reader` checks an implementation.

    Source: ours.
    """

    def begin(self, ranges: Sequence[Range]) -> AbstractContextManager[PendingRead] | None:
        """Start a read.

        Args:
            ranges: (start, stop) in bytes, half open.

        Returns:
            A context manager; entering it sends the requests, leaving it cancels those without a response. None if
            the driver of the store blocks: then call `read`, in a thread.

        Raises:
            ShortReadError: on entering, a range leaves the object.
            CancelledReadError: on entering, the scope of this thread is cancelled.
        """
        ...


@runtime_checkable
class VersionedReader(Protocol):
    """Reader of a store that may hold another version of the object by now.

    Source: ours.
    """

    def check_unchanged(self) -> None:
        """Compare the stored object with the opened one, if responses of this store carry no version.

        Raises:
            ObjectChangedError: another version is stored.
            ObjectNotFoundError: no object is stored.
        """
        ...


@runtime_checkable
class BlockReader(Protocol):
    """Reader that fetches whole blocks: compressed frames, or blocks with a checksum.

    Attributes:
        block_bytes: plain bytes of the largest block.
        stored_bytes: bytes of the stored object; fewer than `size` if it is compressed.
        codec: "raw" for plain bytes with checksums, else the name of the codec.

    Source: ours.
    """

    @property
    def block_bytes(self) -> int: ...

    stored_bytes: int
    codec: str


@runtime_checkable
class LayeredReader(Protocol):
    """Reader over another reader.

    Attributes:
        reader: the reader below.
    """

    reader: RangeReader


class Writer(Protocol):
    """Destination of the bytes of a new object, from first to last: what `create_object` yields."""

    def write(self, data: Bytes, /) -> int:
        """Append bytes; return how many.

        Raises:
            StorageError: the store failed.
        """
        ...


def as_block_reader(reader: RangeReader) -> BlockReader | None:
    """Return the reader if it is a `BlockReader`, else None."""
    return reader if isinstance(reader, BlockReader) else None


def stored_reader(reader: RangeReader) -> RangeReader:
    """Return the lowest reader of a stack: the one that sends requests to the store."""
    while isinstance(reader, LayeredReader):
        reader = reader.reader
    return reader
