"""New objects written in parts, invisible until they are published; an interrupted one is continued by its token.

    target                   a part is                       token               survives kill -9
    local disk               a slice of NAME.TOKEN.partial   random              every part
    store with multipart     a part of an upload             id of the upload    every part

Other stores take one stream, which begins again. Parts are numbered from 1, all of one size but the last. They may be
written in any order, several at a time, and by another process; writing a part again replaces it.

While a process has an upload open, it holds the node lock of the object, with the token and its pid as the message. The
next upload of the object from this node finds there the token of a killed process, and aborts that upload unless it
continues it. Uploads of living processes, whose pid is logged, and of other nodes stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import TypeVar

import xxhash

from binidx.errors import redacted
from binidx.forks import cached_property
from binidx.storage.cache.block_files import lock_path
from binidx.storage.cache.node_lock import acquire_node_lock
from binidx.storage.interfaces import Bytes, Range
from binidx.storage.location import Location
from binidx.storage.requests.cancellation import Scope, cancellable
from binidx.storage.requests.scheduler import retried
from binidx.storage.store_protocols import MultipartStore, MultipartUpload, ObjectInfo
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import sync_directory

logger = logging.getLogger(__name__)

BUFFER_CHUNK_BYTES = 1 << 20
"""Bytes of one write to a connection."""

Result = TypeVar("Result")


def part_digest(data: Bytes) -> str:
    """Return the digest of a part: 128 bits of XXH3, about 20 GB/s. BLAKE2b took most of the CPU time of a copy."""
    return xxhash.xxh3_128_hexdigest(data)


def cut_views(data: Bytes) -> list[memoryview]:
    """Split contiguous bytes into views of `BUFFER_CHUNK_BYTES` each, without a copy; the last one may be shorter."""
    view = memoryview(data).cast("B")
    return [view[start : start + BUFFER_CHUNK_BYTES] for start in range(0, len(view), BUFFER_CHUNK_BYTES)]


class PartUpload:
    """Multipart upload of a store: each request is retried, also through an outage, and its errors name the object.

    Args:
        token: continue this upload if it still exists.

    Attributes:
        token: continues this upload in another process.
        staged: None: parts of an upload cannot be read before `publish`.
    """

    staged = None

    def __init__(self, location: Location, token: str = "") -> None:
        self._location, self._scope = location, Scope()
        with contextlib.ExitStack() as stack:
            lock = stack.enter_context(acquire_node_lock(lock_path(location), wait=False))
            other, _, pid = lock.message.decode(errors="replace").partition(" ")
            if not lock.first:
                held = "%s: process %s of this node is uploading it, too (upload %s); the object published last stays"
                logger.warning(held, redacted(location.uri), pid or "?", other or "?")
            elif other not in ("", token):
                discard_parts(location, other)
            self._upload: MultipartUpload = self._retried(
                lambda: location.store.upload(location.uri, token), opening=True
            )
            self._locked = stack.pop_all()
        self.token = self._upload.token
        lock.leave_message(f"{self.token} {os.getpid()}".encode())

    def has_part(self, part: int, where: Range, digest: str, tag: str) -> bool:
        """Return whether an earlier part still exists.

        Args:
            part: its number, from 1 on.
            where: (start, stop) in bytes of the object.
            digest, tag: `part_digest` of its bytes, and what `write` returned.
        """
        return self._earlier.get(part) == (where[1] - where[0], tag)

    @cached_property
    def _earlier(self) -> Mapping[int, tuple[int, str]]:
        return self._retried(self._upload.arrived)

    def find_part(self, part: int, where: Range) -> str | None:
        """Return the tag of a part if the store has it by now, as long as the range `where`; else None.

        Args:
            part: its number, from 1 on.
            where: (start, stop) in bytes of the object.
        """
        size, tag = self._retried(self._upload.arrived).get(part, (0, ""))
        return tag if size == where[1] - where[0] else None

    def write(self, part: int, where: Range, data: Bytes) -> str:
        """Write one part, whose number counts from 1; return the tag that the store gave it."""
        return self._retried(lambda: self._upload.write(part, cut_views(data)))

    def copy(self, part: int, source: ObjectInfo, where: Range) -> str:
        """Let the store copy one part out of another object of this version; return its tag.

        Args:
            part: its number, from 1 on.
            source: the other object, of the version to copy.
            where: (start, stop) in bytes of the other object.

        Raises:
            SlowCopyError: the part may still arrive. That is not retried here: it would double the store's work.
        """
        return self._retried(lambda: self._upload.copy(part, source, where))

    def publish(self, tags: Mapping[int, str]) -> str:
        """Make the object visible, made of the parts with these tags; return its ETag."""
        tag = self._retried(lambda: self._upload.complete(tags))
        self._locked.close()
        return tag

    def pause(self) -> None:
        """Stop; the parts stay in the store."""
        self._locked.close()

    def stop(self) -> None:
        """Send no request of this upload again, so that an interrupt need not wait for the end of an outage."""
        self._scope.cancel()

    def abandon(self) -> None:
        """Stop, and remove the parts. Never raises, and never touches an object that has the name.

        Parts in flight may arrive later, so threads that send some are waited for first, after `stop`. What stays is
        removed by the next upload of the object.
        """
        self.stop()
        with self._locked, contextlib.suppress(Exception):
            self._upload.abort()

    def _retried(self, request: Callable[[], Result], *, opening: bool = False) -> Result:
        with storage_errors(self._location.uri), cancellable(self._scope):
            return retried(self._location, request, opening=opening)


class LocalParts:
    """Slices of a file beside the target, renamed over the target at the end; methods as in `PartUpload`.

    Attributes:
        token: continues this file in another process.
        staged: path under which the whole object can be read before `publish`.
    """

    def __init__(self, path: str, size: int, token: str) -> None:
        self.path = path
        # A token is read from a file, and becomes part of a path.
        self.token = token if re.fullmatch("[0-9a-f]+", token) else uuid.uuid4().hex[:8]
        self.staged = f"{path}.{self.token}.partial"
        # The kernel lets one thread at a time write to a file; waiting ones would spin on their cores.
        self._writing = threading.Lock()
        with storage_errors(path, size):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            self._file = os.fdopen(os.open(self.staged, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
            try:
                self._file.truncate(size)  # a hole; slices that were written stay
            except OSError:
                self.pause() if self.token == token else self.abandon()
                raise

    def has_part(self, part: int, where: Range, digest: str, tag: str) -> bool:
        start, stop = where
        return part_digest(os.pread(self._file.fileno(), stop - start, start)) == digest

    def write(self, part: int, where: Range, data: Bytes) -> str:
        view, start = memoryview(data), where[0]
        with self._writing, storage_errors(self.path, os.fstat(self._file.fileno()).st_size):
            while view:
                written = os.pwrite(self._file.fileno(), view, start)
                view, start = view[written:], start + written
        return ""

    def publish(self, tags: Mapping[int, str]) -> None:
        with storage_errors(self.path):
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self.staged, self.path)
            sync_directory(self.path)

    def pause(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def abandon(self) -> None:
        self.pause()
        with contextlib.suppress(OSError):
            os.unlink(self.staged)


MultipartWriter = PartUpload | LocalParts
"""An object that is being written in parts."""


def open_parts(location: Location, size: int, token: str = "") -> MultipartWriter | None:
    """Return a writer of an object of `size` bytes: the one that `token` continues if it still exists, else a new one.

    Args:
        size: bytes of the object.
        token: of the writer to continue; "": a new one.

    Returns:
        The writer; None if the store takes no parts, or for an empty remote object: S3 refuses uploads without parts.

    Raises:
        StorageError: the store refuses.
    """
    if (path := location.local_path) is not None:
        return LocalParts(path, size, token)
    return PartUpload(location, token) if takes_parts(location, size) else None


def takes_parts(location: Location, size: int) -> bool:
    """Return whether an object of `size` bytes can be written in parts: see `open_parts`."""
    return location.local_path is not None or (size > 0 and isinstance(location.store, MultipartStore))


def discard_parts(location: Location, token: str, *, every: bool = False) -> None:
    """Remove the parts of an object that an earlier process wrote, if they still exist. Never raises.

    Args:
        token: id of their upload, or of their local file: `PartUpload.token`, `LocalParts.token`.
        every: also those of all other local files `NAME.TOKEN.partial`; no process may be writing one.
    """
    with contextlib.suppress(Exception):
        if (path := location.local_path) is not None:
            folder, name = os.path.split(os.path.abspath(path))
            wanted = "[0-9a-f]+" if every else re.sub("[^0-9a-f]", "", token)
            for left in filter(re.compile(rf"{re.escape(name)}\.{wanted}\.partial").fullmatch, os.listdir(folder)):
                os.unlink(os.path.join(folder, left))
        elif token and isinstance(location.store, MultipartStore):
            location.store.upload(location.uri, token).abort()
