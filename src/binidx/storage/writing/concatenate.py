"""Concatenation of pieces of objects into one object, copied by the store itself where it can.

    source and target            method                                  bytes through this process
    one store with multipart     parts that the store copies             pieces under its least part, filled up to that
    one store that composes      whole objects                           none
    disk                         copy_file_range, reflinks if possible   none
    any others                   one stream                              all

    pieces     |--- a ---|b|c|------- d -------|        b and c are under the least part
    parts      | copy    |upload | copy | copy |        the upload takes the first bytes of d, to reach it

Source and target are one store if they have the same provider and the same storage options. Copies are pinned: of the
version that was opened, by its ETag or generation, or an error. The object is invisible until it is published.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from binidx.errors import ObjectChangedError
from binidx.storage.interfaces import Bytes, RangeReader, VersionedReader
from binidx.storage.open import ROUND_BYTES
from binidx.storage.ranges import cut
from binidx.storage.store_protocols import ComposingStore, MultipartStore, ObjectInfo
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import staging_path
from binidx.storage.stores.registry import Provider, local_path, open_store, protocols, provider_of
from binidx.storage.threads import READS
from binidx.storage.writing.part_upload import PartUpload
from binidx.storage.writing.publish import create_object
from binidx.storage.writing.staging import StagingFile


@dataclass(frozen=True, eq=False)
class SourcePiece:
    """Bytes [start, stop) of a stored object; or `data` itself, if there is no reader."""

    reader: RangeReader | None
    start: int = 0
    stop: int = 0
    data: bytes = b""

    @property
    def whole(self) -> bool:
        """True if it is all of an object."""
        return self.reader is not None and (self.start, self.stop) == (0, self.reader.size)


@dataclass(frozen=True, eq=False)
class Copied:
    """A part that the store copies."""

    reader: RangeReader
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return (self.start, self.stop) == (0, self.reader.size)


@dataclass(frozen=True, eq=False)
class Uploaded:
    """A part that this process uploads."""

    pieces: list[SourcePiece]


Part = Copied | Uploaded


def piece_bytes(part: SourcePiece | Part) -> int:
    """Return the bytes of a piece or a part."""
    if isinstance(part, Uploaded):
        return sum(map(piece_bytes, part.pieces))
    return len(part.data) if isinstance(part, SourcePiece) and part.reader is None else part.stop - part.start


def plan_concatenation(pieces: Sequence[SourcePiece], least: int, most: int, max_parts: int) -> list[Part]:
    """Return parts that are the pieces, one after the other.

    Args:
        least: bytes of a part, but for the last; raised as far as `max_parts` requires.
        most: bytes copied in one part, at least twice `least`; raised likewise.
        max_parts: parts of one object.
    """
    total = sum(map(piece_bytes, pieces))
    # Every part but the last has `least` bytes, so there are no more than total // least + 1.
    least = max(least, -(-total // (max_parts - 1)))
    most = max(most, 2 * least)
    parts: list[Part] = []
    small: list[SourcePiece] = []
    for piece in pieces:
        head = min(piece_bytes(piece), max(least - sum(map(piece_bytes, small)), 0)) if small else 0
        taken, rest = split_piece(piece, head)
        small += [taken] if head else []
        if sum(map(piece_bytes, small)) >= least:
            parts.append(Uploaded(small))
            small = []
        if rest.reader is not None and piece_bytes(rest) >= least:
            parts += cut_evenly(rest, most)
        elif piece_bytes(rest):
            small.append(rest)
    return [*parts, *([Uploaded(small)] if small else [])]


def split_piece(piece: SourcePiece, head: int) -> tuple[SourcePiece, SourcePiece]:
    """Return the first `head` bytes of a piece, and the rest."""
    if piece.reader is None:
        return SourcePiece(None, data=piece.data[:head]), SourcePiece(None, data=piece.data[head:])
    middle = piece.start + head
    return SourcePiece(piece.reader, piece.start, middle), SourcePiece(piece.reader, middle, piece.stop)


def cut_evenly(piece: SourcePiece, most: int) -> list[Copied]:
    """Return parts of up to `most` bytes, none much smaller than the others: the last must not be too small."""
    assert piece.reader is not None
    size = piece_bytes(piece)
    count = -(-size // most)
    bounds = [piece.start + size * number // count for number in range(count + 1)]
    return [Copied(piece.reader, first, stop) for first, stop in itertools.pairwise(bounds)]


class FileJoin:
    """A `Join` into a file beside the target, copied by the kernel."""

    how = "copy_file_range"

    def __init__(self, uri: str, pieces: Sequence[SourcePiece]) -> None:
        self._pieces, self.moved_bytes = pieces, 0
        path = local_path(uri)
        assert path is not None
        self._file: StagingFile | None = StagingFile(path)

    def fill(self, advance: Callable[[int], object]) -> None:
        assert self._file is not None
        with storage_errors(self._file.path):
            for piece in self._pieces:
                if piece.reader is None:
                    self._file.file.write(piece.data)
                    self.moved_bytes += len(piece.data)
                    advance(len(piece.data))
                else:
                    self._copy(piece, advance)
            self._file.complete()

    def publish(self, make_way: Callable[[], object]) -> None:
        make_way()
        assert self._file is not None
        self._file.publish()
        self._file = None

    def abandon(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.abandon()
        self._file = None

    def _copy(self, piece: SourcePiece, advance: Callable[[int], object]) -> None:
        assert piece.reader is not None
        assert self._file is not None
        path = local_path(piece.reader.uri)
        with open(str(path), "rb", buffering=0) as source:
            at, copy = piece.start, copy_in_kernel
            while at < piece.stop:
                want = min(piece.stop - at, 1 << 30)
                copied = copy(source.fileno(), self._file.file.fileno(), want, at)
                if copied < 0:
                    copy, self.how = copy_through, "stream"
                    continue
                if not copied:
                    raise ObjectChangedError(f"{path}: ends at byte {at}, needed {piece.stop}; it changed meanwhile")
                self.moved_bytes += copied if copy is copy_through else 0
                at += copied
                advance(copied)


def copy_in_kernel(source: int, target: int, count: int, offset: int) -> int:
    """Return the bytes copied from `offset` to the target's position; 0 at the end, -1 if the kernel cannot copy."""
    if not hasattr(os, "copy_file_range"):
        return -1
    try:
        return os.copy_file_range(source, target, count, offset_src=offset)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise


def copy_through(source: int, target: int, count: int, offset: int) -> int:
    """`copy_in_kernel`, by this process."""
    view = memoryview(os.pread(source, min(count, 8 << 20), offset))
    total = len(view)
    while view:
        view = view[os.write(target, view) :]
    return total


Options = Mapping[str, Any] | None
IN_FLIGHT = 16
"""Parts that the store copies at once; those that pass through this process have the store's `min_part` bytes."""


class Join(Protocol):
    """An object that is being made of pieces.

    Attributes:
        moved_bytes: bytes that passed through this process.
        how: "server", "copy_file_range" or "stream".
    """

    moved_bytes: int
    how: str

    def fill(self, advance: Callable[[int], object]) -> None:
        """Copy all pieces into the invisible object; call `advance` with the bytes done."""

    def publish(self, make_way: Callable[[], object]) -> None:
        """Finish the copy, call `make_way`, and make the object visible."""

    def abandon(self) -> None:
        """Remove all that was copied. Never raises; does nothing after `publish`."""


def open_join(
    uri: str, pieces: Sequence[SourcePiece], source_options: Options = None, target_options: Options = None
) -> Join:
    """Begin a new object that will be the pieces, one after the other.

    Args:
        pieces: their readers were opened with `source_options`.

    Raises:
        StorageError: the store refuses.
    """
    here, options = _provider_of(uri), target_options or {}
    same = all(_provider_of(piece.reader.uri) == here for piece in pieces if piece.reader is not None)
    with storage_errors(uri):
        if same and local_path(uri) is not None:
            return FileJoin(uri, pieces)
        if same and here is not None and dict(source_options or {}) == dict(options):
            store = open_store(uri, options)
            if isinstance(store, MultipartStore):
                plan = plan_concatenation(pieces, store.min_part, store.copied_part, store.max_parts)
                if any(isinstance(part, Copied) for part in plan):
                    return _CopiedParts(store, uri, plan, options)
            if isinstance(store, ComposingStore) and _composable(uri, pieces):
                return _Composed(store, uri, pieces)
        return _Streamed(uri, pieces, target_options)


class _CopiedParts:
    """A multipart upload whose parts the store copies."""

    how = "server"

    def __init__(self, store: MultipartStore, uri: str, plan: Sequence[Part], options: Mapping[str, Any]) -> None:
        self._plan, self.moved_bytes = plan, 0
        self._parts: PartUpload | None = PartUpload(store, uri, "", options)
        self._tags: dict[int, str] = {}

    def fill(self, advance: Callable[[int], object]) -> None:
        with READS.executor(IN_FLIGHT) as threads:
            jobs = iter(enumerate(self._plan, 1))
            pending: dict[Future[str], tuple[int, Part]] = {}
            try:
                while True:
                    while len(pending) < IN_FLIGHT and (job := next(jobs, None)):
                        pending[threads.submit(self._bring, *job)] = job
                    if not pending:
                        return
                    for done in wait(pending, return_when=FIRST_COMPLETED).done:
                        number, part = pending.pop(done)
                        self._tags[number] = done.result()
                        advance(piece_bytes(part))
            finally:
                for each in pending:
                    each.cancel()

    def publish(self, make_way: Callable[[], object]) -> None:
        assert self._parts is not None
        make_way()
        self._parts.publish(self._tags)
        self._parts = None

    def abandon(self) -> None:
        if self._parts is not None:
            self._parts.abandon()
        self._parts = None

    def _bring(self, number: int, part: Part) -> str:
        assert self._parts is not None
        if isinstance(part, Copied):
            return self._parts.copy(number, _info(part.reader), (part.start, part.stop))
        data = b"".join(bytes(view) for piece in part.pieces for view in read_piece(piece))
        self.moved_bytes += len(data)
        return self._parts.write(number, (0, len(data)), data)


class _Composed:
    """An object that the store composes, in rounds through temporary objects if there are too many for one call."""

    how = "server"

    def __init__(self, store: ComposingStore, uri: str, pieces: Sequence[SourcePiece]) -> None:
        self._store, self._uri, self._pieces = store, uri, pieces
        self._temporary: list[str] = []
        self._last: list[ObjectInfo] = []
        self.moved_bytes = 0

    def fill(self, advance: Callable[[int], object]) -> None:
        objects, most = [_info(piece.reader) for piece in self._pieces], self._store.max_composed
        while len(objects) > most:
            groups = [objects[start : start + most] for start in range(0, len(objects), most)]
            objects = [self._compose(staging_path(self._uri), group) for group in groups]
        self._last = objects
        advance(sum(map(piece_bytes, self._pieces)))

    def publish(self, make_way: Callable[[], object]) -> None:
        make_way()
        self._compose(self._uri, self._last)
        self.abandon()

    def abandon(self) -> None:
        for uri in self._temporary:
            with contextlib.suppress(Exception):
                self._store.delete(uri)
        self._temporary = []

    def _compose(self, uri: str, objects: Sequence[ObjectInfo]) -> ObjectInfo:
        if uri != self._uri:
            self._temporary.append(uri)
        with storage_errors(self._uri):
            return self._store.compose(uri, objects)


class _Streamed:
    """One stream through this process."""

    how = "stream"

    def __init__(self, uri: str, pieces: Sequence[SourcePiece], options: Options) -> None:
        self._pieces, self.moved_bytes = pieces, 0
        self._make_way: Callable[[], object] = lambda: None
        self._open = contextlib.ExitStack()
        self._writer = self._open.enter_context(create_object(uri, options, before_publish=lambda: self._make_way()))

    def fill(self, advance: Callable[[int], object]) -> None:
        for piece in self._pieces:
            for view in read_piece(piece):
                self._writer.write(view)
                self.moved_bytes += len(view)
                advance(len(view))

    def publish(self, make_way: Callable[[], object]) -> None:
        self._make_way = make_way
        self._open.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception), self._open:
            raise _Abandoned


class _Abandoned(Exception):
    """Raised in an unfinished write so that it leaves nothing."""


def read_piece(piece: SourcePiece) -> Iterator[Bytes]:
    """Yield the bytes of a piece in views of up to 8 MiB."""
    if piece.reader is None:
        yield piece.data
        return
    for around in cut((piece.start, piece.stop), ROUND_BYTES):
        yield from piece.reader.read(cut(around, 8 << 20))


def _provider_of(uri: str) -> Provider | None:
    """Return the row of the store of a URI; None for a chain."""
    schemes = protocols(uri) or ["file"]
    return provider_of(schemes[0]) if len(schemes) == 1 else None


def _composable(uri: str, pieces: Sequence[SourcePiece]) -> bool:
    """Return whether these are whole objects of one bucket: ranges, and objects of other buckets, are not composed."""
    buckets = {each.reader.uri.split("/")[2] for each in pieces if each.reader is not None} | {uri.split("/")[2]}
    return len(buckets) == 1 and bool(pieces) and all(piece.whole for piece in pieces)


def _info(reader: RangeReader | None) -> ObjectInfo:
    """Return the version of an object that a reader is pinned to."""
    assert reader is not None
    identity = reader.identity if isinstance(reader, VersionedReader) else {}
    return ObjectInfo(reader.uri, reader.size, identity)
