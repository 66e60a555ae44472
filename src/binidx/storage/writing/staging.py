"""Objects on their way: what is written lies elsewhere, or in the store unseen, until it is published.

begin ── write ... write ── complete ── publish
             any of them fails: abandon, which leaves nothing; in a forked child: forget, which touches nothing
"""

from __future__ import annotations

import contextlib
import io
import mmap as mapping
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from binidx.storage.interfaces import Bytes
from binidx.storage.stores import filesystem
from binidx.storage.stores.local import keep_room, with_room
from binidx.storage.stores.s3_multipart import S3Stream, WriteBuffer
from binidx.storage.stores.signed import put_small

ONE_PUT = 16 << 20
"""Objects up to this size are held in memory and sent in one request."""

# Their multipart uploads show nothing before they are completed; other filesystems may show a file that grows.
HOLDS_BACK = ("s3", "s3a", "gs", "gcs")
BUFFER_BYTES = 1 << 20


class StagingFile:
    """A file on its way: under another name until it is published, which replaces what was there.

    Args:
        size: bytes that it will have, where they are known: their blocks are there before the first is written, so a
            full disk is an OSError now and never a SIGBUS in a mapping later. (Some network filesystems, and those that
            copy on write, promise blocks that they may not have.)
        durable: synced before it appears.
    """

    def __init__(self, path: str, size: int = 0, durable: bool = True) -> None:
        self.path, self.temporary, self.size, self.durable = path, staging_path(path), size, durable
        # Our own buffer: that of a file object would be written out a second time by each forked child that ends.
        self.buffer = bytearray()
        self.file = with_room(self._open)
        keep_room(self.file.fileno())
        try:
            self._reserve()
        except BaseException:
            self.abandon()
            raise

    def _open(self) -> io.FileIO:
        with contextlib.suppress(FileNotFoundError):
            return open(self.temporary, "x+b", buffering=0)
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        return open(self.temporary, "x+b", buffering=0)

    def _reserve(self) -> None:
        if self.size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.file.fileno(), 0, self.size)
        elif self.size:
            os.ftruncate(self.file.fileno(), self.size)

    def map(self) -> mapping.mmap:
        """All of its `size` bytes, to be filled in place; they stay mapped when it is published."""
        return mapping.mmap(self.file.fileno(), self.size)

    def write(self, data: Bytes) -> int:
        view = memoryview(data)
        if len(self.buffer) + view.nbytes <= BUFFER_BYTES:
            self.buffer += view
        else:
            self._write_out(memoryview(self.buffer))
            self._write_out(view.cast("B"))
            self.buffer = bytearray()
        return view.nbytes

    def complete(self) -> None:
        self._write_out(memoryview(self.buffer))
        if self.durable:
            os.fsync(self.file.fileno())
        self.file.close()

    def publish(self) -> None:
        os.replace(self.temporary, self.path)
        if self.durable:
            sync_directory(self.path)

    def abandon(self) -> None:
        try:
            self.file.close()
        finally:
            os.unlink(self.temporary)

    def forget(self) -> None:
        self.file.close()

    def _write_out(self, view: memoryview) -> None:
        while view:
            view = view[self.file.write(view) :]


class StagingUpload:
    """An object on its way to a filesystem: in memory while it is small, then streamed."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self.uri, self.options = uri, storage_options
        self.fs, self.path = filesystem.open_filesystem(uri, storage_options)
        self.holds_back = filesystem.protocols(uri)[0] in HOLDS_BACK
        self.temporary = self.path if self.holds_back else staging_path(self.path)
        self.start = WriteBuffer()
        self.file: Any = None
        # Who asks for smaller blocks wants less memory held.
        self.most = min(ONE_PUT, int(storage_options.get("default_block_size", ONE_PUT)))

    def write(self, data: Bytes) -> int:
        if self.file is not None:
            return int(self.file.write(data))
        size = memoryview(data).nbytes
        if self.start.size + size <= self.most:
            return self.start.write(data)
        self.file, self.start = self._stream(self.start), WriteBuffer()
        return int(self.file.write(data))

    def complete(self) -> None:
        if self.file is not None:
            self.file.close()

    def publish(self) -> None:
        if self.file is None:
            self._put()
        elif self.holds_back:
            self.file.commit()
        else:
            filesystem.move(self.fs, self.temporary, self.path)

    def _stream(self, begun: WriteBuffer) -> Any:
        if filesystem.protocols(self.uri) in (["s3"], ["s3a"]):
            return S3Stream(self.uri, self.options, begun)
        options = {"autocommit": False} if self.holds_back else {}
        file = in_directory(self.fs, self.path, lambda: self.fs.open(self.temporary, "wb", **options))
        for piece in begun.pieces:
            file.write(piece)
        return file

    def _put(self) -> None:
        pieces = self.start.pieces
        if put_small(self.uri, pieces, self.options) is None:
            in_directory(self.fs, self.path, lambda: self.fs.pipe_file(self.path, b"".join(pieces)))

    def abandon(self) -> None:
        if self.file is None:
            return
        if self.holds_back:
            self.forget()
            self.file.discard()
        else:
            self.file.close()
            self.fs.rm_file(self.temporary)

    def forget(self) -> None:
        # Else the file would flush itself once more when it is collected.
        if self.file is not None:
            self.file.closed = True


def in_directory(fs: Any, path: str, write: Callable[[], Any]) -> Any:
    """What `write` returns, after its directory was made where a filesystem has directories and misses it."""
    try:
        return write()
    except FileNotFoundError:
        protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
        if not set(HOLDS_BACK).isdisjoint(protocols):
            raise  # what is missing is the bucket
        fs.makedirs(fs._parent(path), exist_ok=True)
        return write()


def staging_path(path: str) -> str:
    """A name that nobody else has, in the same directory."""
    return f"{path}.{uuid.uuid4().hex}.tmp"


def sync_directory(path: str) -> None:
    """Make the name as durable as the bytes, where directories can be synced."""
    with contextlib.suppress(OSError):
        descriptor = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
