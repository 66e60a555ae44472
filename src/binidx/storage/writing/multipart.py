"""New objects written in parts, invisible until they are published; an interrupted one is continued by its token.

    target                   a part is                       token               survives kill -9
    local disk               a slice of NAME.TOKEN.partial   random              every part
    store with multipart     a part of an upload             id of the upload    every part
    other stores             a piece of one stream           -                   nothing: the object begins again

Parts are numbered from 1, all of one size but the last. Slices and parts of an upload may be written in any order,
several at a time, and by another process; writing a part again replaces it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from binidx.errors import StorageError
from binidx.storage.interfaces import Bytes, Range
from binidx.storage.store_protocols import MultipartStore
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import sync_directory
from binidx.storage.stores.registry import local_path, open_store
from binidx.storage.writing.part_upload import PartUpload
from binidx.storage.writing.publish import create_object, delete_object

MAX_PARTS = 10_000
"""Of one object: the limit of S3."""


class MultipartWriter(Protocol):
    """An object that is being written in parts.

    Attributes:
        ordered: parts must be written one after the other.
        token: continues it in another process; "" if that is not possible.
        staged: URI under which the whole can be read before `publish`; None if it cannot.
    """

    ordered: bool
    token: str
    staged: str | None

    def kept(self, part: int, where: Range, digest: str, tag: str) -> bool:
        """Return whether this part, written earlier with this digest and tag, still exists."""

    def write(self, part: int, where: Range, data: Bytes) -> str:
        """Write one part; return the tag that the store gave it."""

    def publish(self, tags: Mapping[int, str]) -> str | None:
        """Make the object visible, made of the parts with these tags."""

    def pause(self) -> None:
        """Stop; parts that can be continued stay, others are removed. Never raises."""

    def abandon(self) -> None:
        """Remove the parts. Never raises, and never touches an object that has the name."""


def part_digest(data: Bytes) -> str:
    """Return the digest of a part: 128 bits of BLAKE2b, about 1 GB/s."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def open_parts(
    uri: str, size: int, token: str = "", storage_options: Mapping[str, Any] | None = None
) -> MultipartWriter:
    """Return a writer of an object of `size` bytes: that of this token if it still exists, else a new one.

    Raises:
        StorageError: the store refuses.
    """
    path = local_path(uri)
    if path is not None:
        return LocalParts(path, size, token)
    store, options = open_store(uri, storage_options), storage_options or {}
    # An upload without parts is refused by S3, so an empty object is streamed.
    if size and isinstance(store, MultipartStore):
        return PartUpload(store, uri, token, options)
    with storage_errors(uri):
        return StreamParts(uri, options)


class LocalParts:
    """Slices of a file beside the target, renamed over the target at the end."""

    ordered = False

    def __init__(self, path: str, size: int, token: str) -> None:
        self.path = path
        # A token is read from a file, and becomes part of a path.
        self.token = token if re.fullmatch("[0-9a-f]+", token) else uuid.uuid4().hex[:8]
        self.staged: str | None = f"{path}.{self.token}.partial"
        with storage_errors(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._file = os.open(self.staged, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                os.ftruncate(self._file, size)  # a hole; slices that were written stay
            except OSError:
                self.pause() if self.token == token else self.abandon()
                raise

    def kept(self, part: int, where: Range, digest: str, tag: str) -> bool:
        start, stop = where
        return part_digest(os.pread(self._file, stop - start, start)) == digest

    def write(self, part: int, where: Range, data: Bytes) -> str:
        view, start = memoryview(data), where[0]
        with storage_errors(self.path):
            while view:
                written = os.pwrite(self._file, view, start)
                view, start = view[written:], start + written
        return ""

    def publish(self, tags: Mapping[int, str]) -> None:
        with storage_errors(self.path):
            os.fsync(self._file)
            self._close()
            os.replace(str(self.staged), self.path)
            sync_directory(self.path)

    def pause(self) -> None:
        with contextlib.suppress(OSError):
            self._close()

    def abandon(self) -> None:
        self.pause()
        with contextlib.suppress(OSError):
            os.unlink(str(self.staged))

    def _close(self) -> None:
        # Reset first: a second close would close another file with the same number.
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class StreamParts:
    """One stream to any other store; parts are written in their order."""

    ordered = True
    token = ""
    staged: str | None = None

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self._open = contextlib.ExitStack()
        self._writer = self._open.enter_context(create_object(uri, storage_options))

    def kept(self, part: int, where: Range, digest: str, tag: str) -> bool:
        return False

    def write(self, part: int, where: Range, data: Bytes) -> str:
        self._writer.write(data)
        return ""

    def publish(self, tags: Mapping[int, str]) -> None:
        self._open.close()

    def pause(self) -> None:
        with contextlib.suppress(Exception), self._open:
            raise StorageError("abandoned")

    def abandon(self) -> None:
        self.pause()


def sweep(uri: str, ending: str) -> None:
    """Remove the staging files `NAME.RANDOM` + ending of killed writers of a local object. Never raises."""
    path = local_path(uri)
    if path is None:
        return
    folder, name = os.path.split(os.path.abspath(path))
    ours = re.compile(re.escape(name) + r"\.[0-9a-f]+" + re.escape(ending))
    with contextlib.suppress(OSError):
        for left in filter(ours.fullmatch, os.listdir(folder)):
            os.unlink(os.path.join(folder, left))


def forget_parts(uri: str, token: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove the parts that an earlier process wrote of `uri`, if they still exist. Never raises."""
    path = local_path(uri)
    with contextlib.suppress(Exception):
        if path is not None:
            delete_object(f"{path}.{re.sub('[^0-9a-f]', '', token)}.partial")
        elif token and isinstance(store := open_store(uri, storage_options), MultipartStore):
            store.upload(uri, token).abort()
