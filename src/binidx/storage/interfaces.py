"""Protocols of readers and writers of stored bytes; those of stores are in `store_protocols`.

    RangeReader        read byte ranges of one object                  every reader
    MappedReader       let C read mapped bytes                         local files, disk cache
    CompositeReader    split ranges over other readers                 joined and lazily opened readers
    ConcurrentReader   start a read without a thread                   remote objects whose driver has coroutines
    VersionedReader    compare the stored object with the opened one   remote objects
    BlockReader        fetch whole blocks                              compressed and checksummed objects
    LayeredReader      read through another reader                     caches, codecs, checksums
    MarkedReader       tell the mark to which reads are pinned         local files, remote objects

A capability is a Protocol beside `RangeReader`. It is queried by functions of `ranges`: `as_capability`,
and its short forms `as_block_reader` and `as_composite`; `stored_reader` and `version_marks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from concurrent.futures import Future

Range = tuple[int, int]
"""(start, stop) in bytes, half open."""

Bytes = bytes | bytearray | memoryview
"""Bytes to be written."""

Piece = tuple[int, int]
"""(read, place): the piece is range number `place` of read number `read`, of the reads of `CompositeReader.split`."""


class FileVersion(NamedTuple):
    """Marks of a local file that a write changes even if it restores size and mtime. They mean nothing elsewhere.

    Attributes:
        node: name that processes share which see the same files: `stores.local.node_view`.
        inode, ctime: of the file; another file of this name has another inode.
        owner: mode, user, group and number of links: chmod, chown and ln change these, and the ctime with them.
    """

    node: str
    inode: int
    ctime: float
    owner: tuple[int, ...]

    def __str__(self) -> str:
        return f"inode {self.inode}, ctime {self.ctime}"


VersionMark = FileVersion | int
"""Marks of a local file; of a remote object that has neither a strong ETag nor a generation, the second of its last
change since the epoch. They are compared while a reader or its pickle lives, and never recorded."""


@runtime_checkable
class RangeReader(Protocol):
    """Reader of byte ranges of one object.

    Readers may be shared by threads, detect a fork, and pickle as their constructor arguments. Unpickling does not look
    at the object: an error there would leave the parent of a spawned process waiting for ever.
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


@runtime_checkable
class MappedReader(Protocol):
    """Reader whose bytes may be mapped: C then fills a batch in one call, without a Python object for each range.

    `binidx.testing.check_range_reader` checks an implementation.

    Source: ours.
    """

    def is_complete(self) -> bool:
        """Return whether no read waits for a store.

        Returns:
            True if all bytes of the object are mapped.
        """

    def read_into(self, gather: Callable[[Any], int]) -> bool:
        """Let a C function read from the mapped object.

        Args:
            gather: called at most once, with a C mapping (`native.arguments.Mapped.taking`); returns the number of
                ranges that it read, or a negative number if it read none because some bytes are not in memory.

        Returns:
            Whether `gather` read its ranges.

        Raises:
            ObjectChangedError: the file was changed in place.
        """


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

    def component_readers(self) -> Sequence[RangeReader]:
        """Return the other readers.

        Returns:
            Those that are open, in order; none is opened for this.
        """


@dataclass(frozen=True)
class PendingRead:
    """A started read.

    Attributes:
        outcome: done when all responses have arrived or the read has failed.
        result: waits for the read; returns the views, or raises the StorageError, of `RangeReader.read`.
    """

    outcome: Future[Any]
    result: Callable[[], list[memoryview]]


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


@runtime_checkable
class VersionedReader(Protocol):
    """Reader of a stored object that may have been replaced since it was opened.

    Source: ours.
    """

    def check_unchanged(self) -> None:
        """Compare the stored object with the opened one, if responses of this store carry no version.

        Raises:
            ObjectChangedError: another version is stored.
            ObjectNotFoundError: no object is stored.
        """


@runtime_checkable
class SealableReader(Protocol):
    """Reader of a file of this node, of which a process can note for the others that it was checked.

    Source: ours.
    """

    def version_key(self) -> str | None:
        """Return a text that only this content of this file has; None if a change of it would not show."""


@runtime_checkable
class BlockReader(Protocol):
    """Reader that fetches whole blocks: compressed frames, or blocks with a checksum.

    Attributes:
        block_bytes: plain bytes of the largest block.
        num_blocks: number of blocks.
        stored_bytes: bytes of the stored object; fewer than `size` if it is compressed.
        codec: "raw" for plain bytes with checksums, else the name of the codec.

    Source: ours.
    """

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    stored_bytes: int
    codec: str

    def digest(self) -> str:
        """Return a digest of the object's checksums, or of its seek table.

        Returns:
            Hexadecimal digits, equal for copies of the stored object. Few bytes are read: not every change is seen.

        Raises:
            StorageError: the checksums cannot be read.
        """


@runtime_checkable
class LayeredReader(Protocol):
    """Reader over another reader.

    Attributes:
        reader: the reader below.
    """

    reader: RangeReader


@runtime_checkable
class MarkedReader(Protocol):
    """Reader whose object has marks of its version that its identity does not record.

    Attributes:
        mark: mark of the object when it was opened; None if its identity is all that pins it.
    """

    @property
    def mark(self) -> VersionMark | None: ...


class Writer(Protocol):
    """Destination of the bytes of a new object, from first to last; `create_object` yields one."""

    def write(self, data: Bytes, /) -> int:
        """Append bytes.

        Args:
            data: any number of bytes.

        Returns:
            Their number: all of them are always taken.

        Raises:
            StorageError: the store failed.
        """
