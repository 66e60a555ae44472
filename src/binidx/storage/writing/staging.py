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
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from binidx.errors import StorageError
from binidx.storage.interfaces import Bytes
from binidx.storage.store_protocols import MultipartStore, StreamingStore, WritableStore
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import raise_descriptor_limit, staging_path, sync_directory
from binidx.storage.stores.registry import open_store
from binidx.storage.threads import READS
from binidx.storage.writing.multipart import CHUNK_BYTES, PartUpload

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
        """Append data; return its length in bytes."""
        view = memoryview(data)
        if len(self.buffer) + view.nbytes <= BUFFER_BYTES:
            self.buffer += view
        else:
            self._write_out(self.buffer)
            self._write_out(view)
            self.buffer = bytearray()
        return view.nbytes

    def fileno(self) -> int:
        """Return the descriptor of the file, which holds all written bytes now."""
        self._write_out(self.buffer)
        self.buffer = bytearray()
        return self.file.fileno()

    def complete(self) -> None:
        """Write the last bytes, and sync the file if it is durable."""
        self._write_out(self.buffer)
        if self.durable:
            os.fsync(self.file.fileno())
        self.file.close()

    def publish(self) -> None:
        """Give the file its name."""
        os.replace(self.temporary, self.path)
        if self.durable:
            sync_directory(self.path)

    def abandon(self) -> None:
        """Remove the file."""
        try:
            self.file.close()
        finally:
            os.unlink(self.temporary)

    def forget(self) -> None:
        """Close the file, which stays: it is the parent process's."""
        self.file.close()

    def _write_out(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        with storage_errors(self.path):
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


class WriteBuffer:
    """Append-only buffer of bytes. Memory: the bytes written plus at most one chunk; appending copies none of them.

    A bytearray that grows in place left 30 MB of heap fragments behind one upload part of 8 MiB.
    """

    def __init__(self) -> None:
        self._chunks: list[bytearray] = []
        self.size = 0

    def write(self, data: Bytes) -> int:
        """Append data; return its length in bytes."""
        view = memoryview(data).cast("B")
        count = len(view)
        while view:
            place = self.size % CHUNK_BYTES
            if place == 0:
                self._chunks.append(bytearray(CHUNK_BYTES))
            taken = min(CHUNK_BYTES - place, len(view))
            self._chunks[-1][place : place + taken] = view[:taken]
            self.size, view = self.size + taken, view[taken:]
        return count

    @property
    def pieces(self) -> list[memoryview]:
        """The bytes, chunk by chunk."""
        ends = [min(CHUNK_BYTES, self.size - number * CHUNK_BYTES) for number in range(len(self._chunks))]
        return [memoryview(chunk)[:end] for chunk, end in zip(self._chunks, ends, strict=True)]


BLOCK_BYTES = 50 << 20
"""Of a part of a stream, unless storage_options have a default_block_size: 10,000 of them are 500 GB."""


class PartStream:
    """Bytes into a multipart upload.

    Args:
        start: its first bytes, at most one part.
    """

    def __init__(self, store: MultipartStore, uri: str, storage_options: Mapping[str, Any], start: WriteBuffer) -> None:
        self.closed = False
        self._part_bytes = max(store.min_part, int(storage_options.get("default_block_size", BLOCK_BYTES)))
        self._parts, self._buffer = PartUpload(store, uri, "", storage_options), start
        self._thread, self._sent = READS.executor(1), list[Future[str]]()

    def write(self, data: Bytes) -> int:
        """Append data; return its length in bytes."""
        view = memoryview(data).cast("B")
        while view:
            if self._buffer.size >= self._part_bytes:
                self._send()
            taken = self._buffer.write(view[: self._part_bytes - self._buffer.size])
            view = view[taken:]
        return memoryview(data).nbytes

    def close(self) -> None:
        """Send the rest; the object is still invisible."""
        if self._buffer.size or not self._sent:
            self._send()
        self._sent[-1].result()
        self._thread.shutdown()

    def commit(self) -> None:
        """Make the object visible."""
        self._parts.publish({part: each.result() for part, each in enumerate(self._sent, 1)})

    def discard(self) -> None:
        """Delete the parts."""
        self._thread.shutdown(cancel_futures=True)
        self._parts.abandon()

    def _send(self) -> None:
        if self._sent:
            self._sent[-1].result()
        data, self._buffer = self._buffer.pieces, WriteBuffer()
        self._sent.append(self._thread.submit(self._parts.write_pieces, len(self._sent) + 1, data))


class StagingUpload:
    """A new object of a store: in memory while it is small, then streamed under a name, or in an upload, of its own."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any]) -> None:
        self.uri, self.store = uri, open_writable(uri, storage_options)
        self.start, self.temporary = WriteBuffer(), ""
        self.file: Any = None
        # A smaller block size asks for less memory. A store that takes no streams gets the whole object at once.
        self.most: float = min(ONE_PUT, int(storage_options.get("default_block_size", ONE_PUT)))
        if not isinstance(self.store, (MultipartStore, StreamingStore)):
            self.most = math.inf
        # No attribute holds the options: they contain secrets.
        self._open_file: Callable[[], Any] = lambda: self._open_stream(storage_options)

    def write(self, data: Bytes) -> int:
        """Append data; return its length in bytes."""
        with storage_errors(self.uri):
            if self.file is None:
                if self.start.size + memoryview(data).nbytes <= self.most:
                    return self.start.write(data)
                self.file, self.start = self._open_file(), WriteBuffer()
            return int(self.file.write(data))

    def complete(self) -> None:
        """Send the last bytes of a stream."""
        if self.file is not None:
            self.file.close()

    def publish(self) -> None:
        """Make the object visible."""
        if self.file is None:
            self.store.put(self.uri, self.start.pieces)
        elif self.temporary:
            assert isinstance(self.store, StreamingStore)
            self.store.move(self.temporary, self.uri)
        else:
            self.file.commit()
        self.start = WriteBuffer()  # this object is part of a reference cycle

    def _open_stream(self, storage_options: Mapping[str, Any]) -> Any:
        if isinstance(self.store, MultipartStore):
            return PartStream(self.store, self.uri, storage_options, self.start)
        assert isinstance(self.store, StreamingStore)
        self.temporary = "" if self.store.hides_uploads else staging_path(self.uri)
        file = self.store.open_stream(self.temporary or self.uri)
        for piece in self.start.pieces:
            file.write(piece)
        return file

    def abandon(self) -> None:
        """Remove the bytes that were sent."""
        if self.file is None:
            return
        if self.temporary:
            self.file.close()
            self.store.delete(self.temporary)
        else:
            self.forget()
            self.file.discard()

    def forget(self) -> None:
        """Stop; the object stays the parent process's."""
        # Else the file would flush itself once more when it is collected.
        if self.file is not None:
            self.file.closed = True
