"""A new object written in parts, unseen until it is published: what an interrupted upload can be continued with.

    where        a part is              continued with      still there after kill -9
    local disk   a slice of NAME.TOKEN.partial   the token           every part
    s3://        a part of a multipart upload    the upload's id     every part
    the rest     a piece of one stream           -                   nothing: that object begins again

Parts are numbered from 1, all of one size but the last. Local and S3 parts may be written in any order, several at a
time, and by a successor: the same part written twice is the same part.
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
from binidx.storage.interfaces import Bytes, MultipartStore, Range
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import sync_directory
from binidx.storage.stores.registry import local_path, open_store
from binidx.storage.writing.part_upload import PartUpload
from binidx.storage.writing.publish import create_object, delete_object

MAX_PARTS = 10_000


"""Of one S3 upload."""


class MultipartWriter(Protocol):
    """An object on its way.

    Attributes:
        ordered: parts must be written one after the other.
        token: what the next process continues with; "" where nothing can be continued.
        staged: URI under which the whole can be read before `publish`; None where it cannot.
    """

    ordered: bool
    token: str
    staged: str | None

    def kept(self, part: int, where: Range, digest: str, tag: str) -> bool:
        """Whether this part, written earlier with this digest and tag, is still there."""

    def write(self, part: int, where: Range, data: Bytes) -> str:
        """Write one part; the tag the store gave it."""

    def publish(self, tags: Mapping[int, str]) -> str | None:
        """Make the object visible, whole, with the tag of each part."""

    def pause(self) -> None:
        """Stop here: what can be continued stays, the rest goes. Never raises."""

    def abandon(self) -> None:
        """Remove what was written. Never raises, and never touches what stands under the name."""


def part_digest(data: Bytes) -> str:
    """What identifies the bytes of a part: 128 bits of BLAKE2b, about 1 GB/s."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def open_parts(
    uri: str, size: int, token: str = "", storage_options: Mapping[str, Any] | None = None
) -> MultipartWriter:
    """An object of `size` bytes to be written under `uri`: the one of this token if it is still there, else a new one.

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
    """Slices of a file beside the target, renamed over it at the end."""

    ordered = False

    def __init__(self, path: str, size: int, token: str) -> None:
        self.path = path
        # A token comes out of a file, and is about to become part of a path.
        self.token = token if re.fullmatch("[0-9a-f]+", token) else uuid.uuid4().hex[:8]
        self.staged: str | None = f"{path}.{self.token}.partial"
        with storage_errors(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._file = os.open(self.staged, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                os.ftruncate(self._file, size)  # a hole; what was written stays
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
        # Forgotten first: a second close would take the number's next owner.
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


class StreamParts:
    """One stream to any other store, that shows nothing before its end."""

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
    """Remove what killed writers of a local object left beside it, `NAME.RANDOM` and this ending; never raises."""
    path = local_path(uri)
    if path is None:
        return
    folder, name = os.path.split(os.path.abspath(path))
    ours = re.compile(re.escape(name) + r"\.[0-9a-f]+" + re.escape(ending))
    with contextlib.suppress(OSError):
        for left in filter(ours.fullmatch, os.listdir(folder)):
            os.unlink(os.path.join(folder, left))


def forget_parts(uri: str, token: str, storage_options: Mapping[str, Any] | None = None) -> None:
    """Remove what an earlier process left on its way to `uri`, if it is still there; a failure is left for later."""
    path = local_path(uri)
    with contextlib.suppress(Exception):
        if path is not None:
            delete_object(f"{path}.{re.sub('[^0-9a-f]', '', token)}.partial")
        elif isinstance(store := open_store(uri, storage_options), MultipartStore):
            store.upload(uri, token).abort()
