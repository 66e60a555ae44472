"""Staging of new objects: under another name, or invisible in the store, until they are published.

begin ── write ... write ── complete ── publish
             any of them fails: abandon, which leaves nothing; in a forked child: forget, which touches nothing
"""

from __future__ import annotations

import contextlib
import io
import math
import mmap as mapping
import os
from collections.abc import Mapping
from typing import Any

from binidx.errors import StorageError
from binidx.storage.interfaces import Bytes
from binidx.storage.store_protocols import MultipartStore, StreamingStore, WritableStore
from binidx.storage.stores.local import raise_descriptor_limit, staging_path, sync_directory
from binidx.storage.stores.registry import open_store
from binidx.storage.writing.part_upload import PartStream, WriteBuffer

ONE_PUT = 16 << 20
"""Objects up to this size are buffered in memory and sent in one request."""

BUFFER_BYTES = 1 << 20


class StagingFile:
    """New local file under another name; publishing replaces a file that has the name.

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
        raise_descriptor_limit()
        self.file = self._open()
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


def open_writable(uri: str, storage_options: Mapping[str, Any] | None) -> WritableStore:
    """Return the store of a URI.

    Raises:
        StorageError: it cannot be written to.
    """
    store = open_store(uri, storage_options)
    if not isinstance(store, WritableStore):
        raise StorageError(f"{uri}: this store is only read; write to another one")
    return store


class StagingUpload:
    """A new object of a store: in memory while it is small, then streamed under a name, or in an upload, of its own."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self.uri, self.options = uri, storage_options
        self.store = open_writable(uri, storage_options)
        self.start = WriteBuffer()
        self.file: Any = None
        self.temporary = ""
        # A smaller block size asks for less memory. A store that takes no streams gets the whole object at once.
        self.most: float = min(ONE_PUT, int(storage_options.get("default_block_size", ONE_PUT)))
        if not isinstance(self.store, (MultipartStore, StreamingStore)):
            self.most = math.inf

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
            self.store.put(self.uri, self.start.pieces)
        elif self.temporary:
            assert isinstance(self.store, StreamingStore)
            self.store.move(self.temporary, self.uri)
        else:
            self.file.commit()

    def _stream(self, begun: WriteBuffer) -> Any:
        if isinstance(self.store, MultipartStore):
            return PartStream(self.store, self.uri, self.options, begun)
        assert isinstance(self.store, StreamingStore)
        self.temporary = "" if self.store.hides_uploads else staging_path(self.uri)
        file = self.store.open_stream(self.temporary or self.uri)
        for piece in begun.pieces:
            file.write(piece)
        return file

    def abandon(self) -> None:
        if self.file is None:
            return
        if self.temporary:
            self.file.close()
            self.store.delete(self.temporary)
        else:
            self.forget()
            self.file.discard()

    def forget(self) -> None:
        # Else the file would flush itself once more when it is collected.
        if self.file is not None:
            self.file.closed = True
