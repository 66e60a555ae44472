"""Concatenation of pieces of objects into one object, copied by the store itself where it can.

    source and target            method                                  bytes through this process
    one store with multipart     parts that the store copies             pieces under its least part, filled up to that
    one store that composes      whole objects                           none
    disk                         copy_file_range, reflinks if possible   none, or all if the kernel cannot
    any others                   one stream                              all

    pieces     |--- a ---|b|c|------- d -------|        b and c are under the least part
    parts      | copy    |upload | copy | copy |        the upload takes the first bytes of d, to reach it

Source and target are one store if they have the same provider and the same storage options. Copies are pinned: of the
version that was opened, by its ETag or generation, or an error. The object is invisible until it is published.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from typing import Any, Protocol

from binidx.errors import ObjectChangedError, SlowCopyError
from binidx.storage.adapters import InMemory
from binidx.storage.interfaces import Bytes, RangeReader, VersionedReader, Writer
from binidx.storage.location import Location
from binidx.storage.open import codec_named, stream
from binidx.storage.store_protocols import ComposingStore, MultipartStore, ObjectInfo
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import staging_path
from binidx.storage.stores.registry import scheme_of, store_class
from binidx.storage.threads import READS
from binidx.storage.writing.multipart import PartUpload, takes_parts
from binidx.storage.writing.publish import compare_object, create_object, discard_writes
from binidx.storage.writing.staging import StagingFile


@dataclass(frozen=True, eq=False)
class SourcePiece:
    """Bytes [start, stop) of a reader: of a stored object, or of an `InMemory` one."""

    reader: RangeReader
    start: int
    stop: int

    @classmethod
    def of_bytes(cls, uri: str, data: Bytes) -> SourcePiece:
        """Return a piece of bytes in memory; `uri` names it in errors."""
        return cls(InMemory(uri, data), 0, len(data))

    @property
    def num_bytes(self) -> int:
        """Bytes of the piece."""
        return self.stop - self.start

    @property
    def is_stored(self) -> bool:
        """True unless its bytes are in the memory of this process."""
        return not isinstance(self.reader, InMemory)


Part = SourcePiece | list[SourcePiece]
"""A piece that the store copies; or pieces that this process uploads together."""


def plan_concatenation(pieces: Sequence[SourcePiece], least: int, most: int, max_parts: int) -> list[Part]:
    """Return the parts of an upload whose content is that of the pieces, one after the other.

    Args:
        least: bytes of a part, but for the last; raised as far as `max_parts` requires.
        most: bytes copied in one part, at least twice `least`; raised likewise.
        max_parts: parts of one object.
    """
    total = _count_bytes(pieces)
    # Every part but the last has `least` bytes, so there are no more than total // least + 1.
    least = max(least, -(-total // (max_parts - 1)))
    most = max(most, 2 * least)
    parts: list[Part] = []
    small: list[SourcePiece] = []
    for piece in pieces:
        if small:
            middle = min(piece.start + max(least - _count_bytes(small), 0), piece.stop)
            small.append(replace(piece, stop=middle))
            piece = replace(piece, start=middle)
            if _count_bytes(small) >= least:
                parts.append(small)
                small = []
        if piece.is_stored and piece.num_bytes >= least:
            parts += cut_evenly(piece, most)
        elif piece.num_bytes:
            small.append(piece)
    return [*parts, *([small] if small else [])]


def _count_bytes(pieces: Sequence[SourcePiece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def cut_evenly(piece: SourcePiece, most: int) -> list[SourcePiece]:
    """Cut a piece into pieces of up to `most` bytes and nearly equal size, so that the last is not too small.

    Args:
        most: bytes of a piece.
    """
    count = -(-piece.num_bytes // most)
    bounds = [piece.start + piece.num_bytes * number // count for number in range(count + 1)]
    return [SourcePiece(piece.reader, first, stop) for first, stop in itertools.pairwise(bounds)]


IN_FLIGHT = 16
"""Parts that the store copies at once; those that pass through this process have the store's `min_part` bytes."""


class Join(Protocol):
    """An object that is being concatenated from pieces.

    Attributes:
        moved_bytes: bytes that passed through this process.
        how: "server", "copy_file_range", "stream", or "compared" if the object existed.
    """

    moved_bytes: int
    how: str

    def fill(self, advance: Callable[[int], object]) -> None:
        """Copy all pieces into the invisible object; call `advance` with the bytes done."""

    def publish(self, before_publish: Callable[[], object]) -> None:
        """Finish the copy, call `before_publish`, and make the object visible."""

    def abandon(self) -> None:
        """Remove all that was copied. Never raises; does nothing after `publish`."""


def open_join(
    location: Location,
    pieces: Sequence[SourcePiece],
    source_options: Mapping[str, Any] | None = None,
    codec: str = "raw",
    refusal: str = "",
) -> Join:
    """Begin a new object that will be the pieces, one after the other.

    Args:
        pieces: their readers were opened with `source_options`.
        codec: name of the codec with which this process encodes the bytes of the pieces.
        refusal: the object exists: compare it with the pieces, and raise ObjectExistsError with this message if it
            differs.

    Raises:
        StorageError: the store refuses.
    """
    if refusal:
        return _Streamed(functools.partial(compare_object, location, refusal, codec=codec), pieces, "compared")
    uri = location.uri
    kinds = {store_class(scheme_of(name)) for name in (uri, *(piece.reader.uri for piece in pieces if piece.is_stored))}
    same = codec == "raw" and len(kinds) == 1
    local = location.local_path is not None
    with storage_errors(uri):
        if same and not local and dict(source_options or {}) == dict(location.options or {}):
            store = location.store
            if isinstance(store, MultipartStore):
                plan = plan_concatenation(pieces, store.min_part, store.copied_part, store.max_parts)
                if any(isinstance(part, SourcePiece) for part in plan):
                    return _CopiedParts(location, plan)
            # Whole objects of one bucket: ranges, and objects of other buckets, are not composed.
            buckets = {uri.split("/")[2], *(piece.reader.uri.split("/")[2] for piece in pieces if piece.is_stored)}
            whole = all(piece.is_stored and (piece.start, piece.stop) == (0, piece.reader.size) for piece in pieces)
            if isinstance(store, ComposingStore) and len(buckets) == 1 and pieces and whole:
                return _Composed(store, uri, pieces)
        create = functools.partial(create_object, location)
        return _Streamed(create, pieces, "copy_file_range" if same and local else "stream", codec)


def choose_form(location: Location, size: int, codec: str, num_pieces: int) -> str:
    """Return the form in which one process can write an object that is continued after an interruption.

    Returns:
        "slices": parts of one upload; "pieces": objects that the store, or the kernel, concatenates; "whole": neither,
        or a single piece.
    """
    in_parts = takes_parts(location, size)
    if codec == "raw" and in_parts:
        return "slices"
    if codec == "raw":
        joins = isinstance(location.store, ComposingStore)
    else:  # ranges of the pieces, which no store composes
        joins = in_parts and codec_named(codec).joining is not None
    return "pieces" if joins and num_pieces > 1 else "whole"


class _CopiedParts:
    """A multipart upload whose parts the store copies; one that is not copied in time is tried `copy_tries` times."""

    how, copy_tries = "server", 5

    def __init__(self, location: Location, plan: Sequence[Part]) -> None:
        self._plan, self._tags, self.moved_bytes, self._published = plan, dict[int, str](), 0, False
        self._upload = PartUpload(location)

    def fill(self, advance: Callable[[int], object]) -> None:
        with READS.executor(IN_FLIGHT) as threads:
            sent = {threads.submit(self._send, number): number for number in range(1, len(self._plan) + 1)}
            try:
                for done in as_completed(sent):
                    part = self._plan[sent[done] - 1]
                    self._tags[sent[done]] = done.result()
                    advance(_count_bytes(part if isinstance(part, list) else [part]))
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._upload.abandon()  # ends the copies in flight, which may take minutes
                raise

    def publish(self, before_publish: Callable[[], object]) -> None:
        before_publish()
        self._upload.publish(self._tags)
        self._published = True

    def abandon(self) -> None:
        if not self._published:
            self._upload.abandon()

    def _send(self, number: int) -> str:
        part = self._plan[number - 1]
        if isinstance(part, SourcePiece):
            return self._copy(number, part)
        data = b"".join(bytes(view) for piece in part for view in stream(piece.reader, piece.stop, start=piece.start))
        self.moved_bytes += len(data)
        return self._upload.write(number, (0, len(data)), data)

    def _copy(self, number: int, piece: SourcePiece) -> str:
        where, tries = (piece.start, piece.stop), 1
        while True:
            try:
                return self._upload.copy(number, _info(piece.reader), where)
            except SlowCopyError as error:
                if tries == self.copy_tries:
                    raise SlowCopyError(f"{error} ({tries} tries)") from error
            if (arrived := self._upload.find_part(number, where)) is not None:
                return arrived
            tries += 1


class _Composed:
    """An object that the store composes, in rounds through temporary objects if there are too many for one call."""

    how = "server"

    def __init__(self, store: ComposingStore, uri: str, pieces: Sequence[SourcePiece]) -> None:
        self._store, self._uri, self._pieces = store, uri, pieces
        self._temporary, self._last, self.moved_bytes = list[str](), list[ObjectInfo](), 0

    def fill(self, advance: Callable[[int], object]) -> None:
        objects, most = [_info(piece.reader) for piece in self._pieces], self._store.max_composed
        while len(objects) > most:
            groups = [objects[start : start + most] for start in range(0, len(objects), most)]
            objects = [self._compose(staging_path(self._uri), group) for group in groups]
        self._last = objects
        advance(sum(piece.num_bytes for piece in self._pieces))

    def publish(self, before_publish: Callable[[], object]) -> None:
        before_publish()
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


CreateObject = Callable[..., contextlib.AbstractContextManager[Writer]]
"""Function that begins to write an object, as `create_object`."""


class _Streamed:
    """A `Join` whose bytes pass through this process; between local files the kernel copies them where possible."""

    def __init__(self, create: CreateObject, pieces: Sequence[SourcePiece], how: str, codec: str = "raw") -> None:
        self._pieces, self.moved_bytes, self.how = pieces, 0, how
        self._before_publish: Callable[[], object] = lambda: None
        self._open = contextlib.ExitStack()
        stored = self._open.enter_context(create(before_publish=lambda: self._before_publish()))
        self._writer = self._open.enter_context(codec_named(codec).create(stored, None))

    def fill(self, advance: Callable[[int], object]) -> None:
        for piece in self._pieces:
            at = self._copy_in_kernel(piece, advance) if piece.is_stored else piece.start
            for view in stream(piece.reader, piece.stop, start=at):
                self._writer.write(view)
                self.moved_bytes += len(view)
                advance(len(view))

    def publish(self, before_publish: Callable[[], object]) -> None:
        self._before_publish = before_publish
        self._open.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            discard_writes(self._open)

    def _copy_in_kernel(self, piece: SourcePiece, advance: Callable[[int], object]) -> int:
        """Copy as much of a piece as the kernel can; return the byte at which the rest begins."""
        path, at = str(Location(piece.reader.uri).local_path), piece.start
        if self.how != "copy_file_range":
            return at
        assert isinstance(self._writer, StagingFile)
        with storage_errors(self._writer.path), open(path, "rb", buffering=0) as source:
            target = self._writer.fileno()
            while at < piece.stop:
                copied = copy_in_kernel(source.fileno(), target, min(piece.stop - at, 1 << 30), at)
                if copied < 0:
                    self.how = "stream"
                    break
                if not copied:
                    raise ObjectChangedError(f"{path}: ends at byte {at}, needed {piece.stop}; it changed meanwhile")
                at += copied
                advance(copied)
        return at


def copy_in_kernel(source: int, target: int, count: int, offset: int) -> int:
    """Copy up to `count` bytes of a file, from `offset` on, to the position of another; return the number copied.

    The number is 0 at the end of the source, and -1 if the kernel cannot copy.

    Args:
        source, target: file descriptors.
    """
    if not hasattr(os, "copy_file_range"):
        return -1
    try:
        return os.copy_file_range(source, target, count, offset_src=offset)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
            return -1
        raise


def _info(reader: RangeReader) -> ObjectInfo:
    """Return the version of an object that a reader is pinned to."""
    identity = reader.identity if isinstance(reader, VersionedReader) else {}
    return ObjectInfo(reader.uri, reader.size, identity)
