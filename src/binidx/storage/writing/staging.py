"""Staging of new objects: under another name, or invisible in the store, until they are published.

begin ── write ... write ── complete ── publish
             any of them fails: abandon, which leaves nothing; in a forked child: forget, which touches nothing

A killed process leaves staging files on disks. Each is locked (flock) while it is written, so a file without a lock has
no writer if its name is of this node. The lock of a writer on another node is visible only on some file systems, so its
file must not have changed for a day, too. The next writer of the same directory removes the files of this node; that of
the same target, those of other nodes.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import mmap as mapping
import os
import re
import tempfile
from concurrent.futures import Future
from functools import partial
from typing import Any

from binidx.errors import StorageError
from binidx.storage.cache.block_files import is_same_file, remove_unlocked, try_lock
from binidx.storage.interfaces import Bytes
from binidx.storage.location import Location
from binidx.storage.requests.scheduler import send_blocking
from binidx.storage.store_protocols import MultipartStore, StreamingStore, WritableStore
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import node_id, raise_descriptor_limit, staging_path, sync_directory
from binidx.storage.threads import READS
from binidx.storage.writing.multipart import PartUpload, cut_views

ONE_PUT = 16 << 20
"""Objects up to this size are buffered in memory and sent in one request."""

STAGING_BUFFER_BYTES = 1 << 20


STAGING_NAME = re.compile(r"(.+?)\.([0-9a-f]{8})[0-9a-f]{24}\.tmp(\.[0-9a-f]{32}\.tmp)?")
"""Name of a staging file; groups: target, node. Twice `.tmp` if a whole file was to be linked to its name."""

FOREIGN_SECONDS = 86400.0
LISTED_EACH = 64
"""Names listed for each file written, on average: a directory of many files is not listed again for each of them."""


class StagingFile:
    """New local file under a temporary name, locked until `publish` renames it over any file at `path`.

    Args:
        size: bytes that the file will have, if known: their blocks are allocated now, so a full disk is an OSError now
            and never a SIGBUS in a mapping later. (Some network filesystems, and those that copy on write, promise
            blocks that they may not have.)
        durable: whether the file is synced before it appears.
    """

    def __init__(self, path: str, size: int = 0, durable: bool = True) -> None:
        self.path, self.size, self.durable = path, size, durable
        # Our own buffer: that of a file object would be written out a second time by each forked child that ends.
        self.buffer = bytearray()
        raise_descriptor_limit()
        self.file = self._open()
        try:
            remove_abandoned(path, os.fstat(self.file.fileno()).st_mtime)
            if size and hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.file.fileno(), 0, size)
            elif size:
                os.ftruncate(self.file.fileno(), size)
        except BaseException:
            self.abandon()
            raise

    def _open(self) -> io.FileIO:
        while True:
            self.temporary = staging_path(self.path)
            try:
                file = open(self.temporary, "x+b", buffering=0)  # noqa: SIM115
            except FileNotFoundError:
                os.makedirs(os.path.dirname(self.path), exist_ok=True)
                file = open(self.temporary, "x+b", buffering=0)  # noqa: SIM115
            # Before it was locked, another process may have removed it.
            locked = try_lock(file.fileno(), fcntl.LOCK_EX) is not False
            if locked and is_same_file(file.fileno(), self.temporary):
                return file
            file.close()

    def map(self) -> mapping.mmap:
        """Return a mapping of all `size` bytes, to be filled in place; it stays valid after `publish`."""
        return mapping.mmap(self.file.fileno(), self.size)

    def write(self, data: Bytes) -> int:
        """Append data; return its length in bytes."""
        view = memoryview(data)
        if len(self.buffer) + view.nbytes <= STAGING_BUFFER_BYTES:
            self.buffer += view
        else:
            self._write_out(self.buffer)
            self._write_out(view)
            self.buffer = bytearray()
        return view.nbytes

    def fileno(self) -> int:
        """Write out the buffered bytes; return the descriptor of the file."""
        self._write_out(self.buffer)
        self.buffer = bytearray()
        return self.file.fileno()

    def complete(self) -> None:
        """Write the last bytes, and sync the file if it is durable."""
        self._write_out(self.buffer)
        if self.durable:
            os.fsync(self.file.fileno())
        # Network file systems report failed writes when a descriptor is closed; this one keeps the lock.
        os.close(os.dup(self.file.fileno()))

    def publish(self) -> None:
        """Rename the file to its final name, and unlock it."""
        os.replace(self.temporary, self.path)
        with contextlib.suppress(OSError):
            fcntl.flock(self.file.fileno(), fcntl.LOCK_UN)  # a mapping would keep it
        self.file.close()
        if self.durable:
            sync_directory(self.path)

    def abandon(self) -> None:
        """Remove the file."""
        try:
            self.file.close()
        finally:
            os.unlink(self.temporary)

    def forget(self) -> None:
        """Close the file without removing it, in a forked child: it belongs to the parent process."""
        self.file.close()

    def _write_out(self, data: Bytes) -> None:
        view = memoryview(data).cast("B")
        with storage_errors(self.path, max(self.size, self.file.tell() + view.nbytes)):
            while view:
                view = view[self.file.write(view) :]


def remove_abandoned(path: str, now: float) -> None:
    """Remove staging files beside a new file whose writer is dead: no process has locked them. Never raises.

    Files of other nodes must also be of the same target, and not have changed for a day.

    Args:
        now: present time by the clock of the file system.
    """
    folder, name = os.path.split(os.path.abspath(path))
    if _unlisted.get(folder, 0) > 0:
        _unlisted[folder] -= 1
        return
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        _unlisted[folder] = len(names) // LISTED_EACH
        for match in filter(None, map(STAGING_NAME.fullmatch, names)):
            left = os.path.join(folder, match[0])
            is_ours = match[2] == node_id()
            if is_ours or (match[1] == name and now - os.stat(left).st_mtime > FOREIGN_SECONDS):
                remove_unlocked(left)


_unlisted: dict[str, int] = {}
"""Directory -> files to be written there before it is listed again."""


def open_writable(location: Location) -> WritableStore:
    """Return the store of an object to write.

    Raises:
        StorageError: it cannot be written to.
    """
    store = location.store
    if not isinstance(store, WritableStore):
        raise StorageError(f"{location}: this store is only read; write to another one")
    return store


def new_buffer(num_bytes: int) -> mapping.mmap:
    """Return a buffer to which `write` appends up to `num_bytes` bytes; `tell` is the number of those written.

    It takes memory for the bytes written only, and none after its end. A bytearray that grows in place left 30 MB of
    heap fragments behind one upload part of 8 MiB.
    """
    return mapping.mmap(-1, max(num_bytes, 1), mapping.MAP_PRIVATE | mapping.MAP_ANONYMOUS)


def written_view(buffer: mapping.mmap) -> memoryview:
    """Return a view of the bytes written to a buffer."""
    return memoryview(buffer)[: buffer.tell()]


UPLOAD_BYTES = 50 << 20
"""Bytes of a part of a stream, unless storage_options have a default_block_size: 10,000 parts are 500 GB."""


class PartStream:
    """Writer of a stream of bytes into a multipart upload.

    Args:
        start: buffer with the first bytes; it is kept if it has the size of a part.
    """

    def __init__(self, location: Location, start: mapping.mmap) -> None:
        self.closed = False
        chosen_bytes = int((location.options or {}).get("default_block_size", UPLOAD_BYTES))
        self._part_bytes = max(location.store.min_part, chosen_bytes)
        self._parts, self._thread, self._sent = PartUpload(location), READS.executor(1), list[Future[str]]()
        # Two buffers in turns: the pages of a new one cost 0.5 ms of CPU a MB, twice as much as sending it.
        is_part = len(start) == self._part_bytes
        self._buffer, self._free = start if is_part else new_buffer(self._part_bytes), new_buffer(self._part_bytes)
        if not is_part:
            self.write(written_view(start))

    def write(self, data: Bytes) -> int:
        """Append data; return its length in bytes."""
        view = memoryview(data).cast("B")
        while view:
            if self._buffer.tell() == self._part_bytes:
                self._send()
            view = view[self._buffer.write(view[: self._part_bytes - self._buffer.tell()]) :]
        return memoryview(data).nbytes

    def close(self) -> None:
        """Send the rest; the object is still invisible."""
        if self._buffer.tell() or not self._sent:
            self._send()
        self._sent[-1].result()
        self._thread.shutdown()

    def commit(self) -> None:
        """Make the object visible."""
        self._parts.publish({part: tag.result() for part, tag in enumerate(self._sent, 1)})
        self._buffer = self._free = new_buffer(0)  # a caller's variable may keep this object

    def discard(self) -> None:
        """Delete the parts."""
        self._parts.stop()  # the part in flight may be one that an outage delays
        self._thread.shutdown(cancel_futures=True)
        self._parts.abandon()

    def _send(self) -> None:
        if self._sent:
            self._sent[-1].result()
        data = written_view(self._buffer)
        self._sent.append(self._thread.submit(self._parts.write, len(self._sent) + 1, (0, len(data)), data))
        self._buffer, self._free = self._free, self._buffer
        self._buffer.seek(0)


class SpoolStream:
    """Writer of a stream of bytes for a store that only takes whole objects: spooled to a nameless local file.

    Memory: none but the page cache; `commit` passes the mapped file to one `put`.
    """

    def __init__(self, location: Location, patient: bool) -> None:
        self.closed, self._location, self._patient = False, location, patient
        self._file = tempfile.TemporaryFile()  # noqa: SIM115
        self.write = self._file.write

    def close(self) -> None:
        """Write the last bytes to the file; the object is still invisible."""
        self._file.flush()

    def commit(self) -> None:
        """Make the object visible."""
        file = self._file
        with file, mapping.mmap(file.fileno(), 0, access=mapping.ACCESS_READ) as content, memoryview(content) as data:
            put = partial(self._location.store.put, self._location.uri, [data])
            send_blocking(self._location, put, patient=self._patient)

    def discard(self) -> None:
        """Delete the file."""
        self._file.close()


class StagingUpload:
    """New object of a store: in memory while it is small, then streamed under a temporary name or into an upload.

    Args:
        patient: whether an object that is sent in one request is sent again as in `send_blocking`.
    """

    def __init__(self, location: Location, patient: bool = True) -> None:
        self.patient = patient
        self.location, self.uri, self.store = location, location.uri, open_writable(location)
        # A smaller block size asks for less memory.
        self.most = min(ONE_PUT, int((location.options or {}).get("default_block_size", ONE_PUT)))
        self.start, self.temporary = new_buffer(self.most), ""
        self.file: Any = None

    def write(self, data: Bytes) -> int:
        """Append data; return its length in bytes."""
        with storage_errors(self.uri):
            if self.file is None:
                if self.start.tell() + memoryview(data).nbytes <= self.most:
                    return self.start.write(data)
                self.file, self.start = self._open_stream(), new_buffer(0)
            return int(self.file.write(data))

    def complete(self) -> None:
        """Send the last bytes of a stream."""
        if self.file is not None:
            self.file.close()

    def publish(self) -> None:
        """Make the object visible."""
        if self.file is None:
            put = partial(self.store.put, self.uri, cut_views(written_view(self.start)))
            send_blocking(self.location, put, patient=self.patient)
        elif self.temporary:
            assert isinstance(self.store, StreamingStore)
            self.store.move(self.temporary, self.uri)
        else:
            self.file.commit()
        self.start = new_buffer(0)  # a caller's variable may keep this object

    def _open_stream(self) -> Any:
        if isinstance(self.store, MultipartStore):
            return PartStream(self.location, self.start)
        file: Any
        if isinstance(self.store, StreamingStore):
            self.temporary = "" if self.store.hides_uploads else staging_path(self.uri)
            file = self.store.open_stream(self.temporary or self.uri)
        else:
            file = SpoolStream(self.location, self.patient)
        file.write(written_view(self.start))
        return file

    def abandon(self) -> None:
        """Remove the bytes that were sent to the store."""
        if self.file is None:
            return
        if self.temporary:
            self.file.close()
            self.store.delete(self.temporary)
        else:
            self.forget()
            self.file.discard()

    def forget(self) -> None:
        """Stop writing without removing anything, in a forked child: the object belongs to the parent process."""
        # Else the file would flush itself once more when it is collected.
        if self.file is not None:
            self.file.closed = True
