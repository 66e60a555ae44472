"""Atomic writes: an object is staged first and then becomes visible at once, so a reader never sees a part of it.

    local                      <name>.<random>.tmp -> fsync -> rename (or link, if the first writer must win)
    stores that hide uploads   one PUT, or an upload that is completed at the end
    other stores               <name>.<random>.tmp -> the filesystem's own move

A killed process leaves at most a .tmp file or an unfinished upload behind, never an object. A child that is forked
meanwhile leaves its parent's object alone, however it ends.

A killed job may have published some of its objects, even all. The same job then compares those with what it would
write (`compare_object`): equal objects stay untouched; at the first difference the object belongs to another job, and
the job stops. The object is read once, in 8 MiB of memory.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from binidx.errors import ConfigError, ObjectExistsError, StorageError
from binidx.storage.interfaces import Bytes, Writer
from binidx.storage.location import Location
from binidx.storage.open import open_object
from binidx.storage.ranges import cut
from binidx.storage.requests.remote_object import find_object, object_exists, read_small
from binidx.storage.requests.scheduler import send_blocking
from binidx.storage.store_protocols import MultipartStore
from binidx.storage.stores.driver_errors import storage_errors
from binidx.storage.stores.local import sync_directory
from binidx.storage.threads import map_in_flight
from binidx.storage.writing.multipart import PartUpload, cut_views
from binidx.storage.writing.staging import ONE_PUT, StagingFile, StagingUpload, open_writable

ATTEMPTS = 5
PARTS_IN_FLIGHT = 8
Hook = Callable[[], object] | None
Pieces = Iterable[Bytes]
Staged = TypeVar("Staged", bound=StagingFile | StagingUpload)


def create_object(
    location: Location, *, before_publish: Hook = None, durable: bool = True, patient: bool = True
) -> contextlib.AbstractContextManager[Writer]:
    """Write an object that appears whole under its name when the `with` block ends, replacing an existing one.

    After an exception in the block nothing appears and nothing is left behind. Local directories are made. Object
    stores take at most 10,000 parts, of 50 MiB: beyond 500 GB pass a default_block_size in storage_options.

    Args:
        before_publish: called when all is written, and on a disk synced, right before the object appears; an exception
            keeps it from appearing. An object that is sent in one request is sent after this call.
        durable: whether a local file is synced before it appears. A file that can be made again, and whose checksum is
            compared before use, needs no sync: if a power failure cuts it, it is made again.
        patient: whether an object that is sent in one request outlasts outages, as parts of larger ones do; False: for
            callers with deadlines of their own.

    Raises:
        StorageError: the store refuses; an object that was there stays.
    """
    if (path := location.local_path) is not None:
        return _stage(path, lambda: StagingFile(path, durable=durable), before_publish)
    return _stage(location.uri, lambda: StagingUpload(location, patient), before_publish)


def write_object(
    location: Location, pieces: Pieces, *, before_publish: Hook = None, durable: bool = True, patient: bool = True
) -> None:
    """Do `create_object` and write the given pieces, one after the other.

    Args:
        before_publish, durable, patient: as in `create_object`.
    """
    with create_object(location, before_publish=before_publish, durable=durable, patient=patient) as out:
        for piece in pieces:
            out.write(piece)


def create_file(path: str, size: int, *, durable: bool = True) -> contextlib.AbstractContextManager[StagingFile]:
    """Do `create_object` for a local file of `size` bytes: write to it, or fill its `map()`, which begins as zeros.

    The mapping stays valid after the block, also when another file takes the name.

    Args:
        durable: as in `create_object`.

    Raises:
        StorageError: the file cannot be made, above all if the disk lacks space; `StagingFile` names exceptions.
    """
    return _stage(path, lambda: StagingFile(path, size, durable), None, size)


def discard_writes(writes: contextlib.ExitStack) -> None:
    """End the writes of a stack as after an exception, so that nothing is published; no effect on a closed stack."""
    with contextlib.suppress(_Abandoned), writes:
        raise _Abandoned


class _Abandoned(Exception):
    """Raised inside an unfinished write to remove it."""


def put_if_absent(location: Location, data: Bytes, *, durable: bool = True, patient: bool = True) -> bool:
    """Create a small object if none exists; of several writers, the first one wins.

    An existing object is read back and compared with `data`: if the response to a PUT is lost, its retry fails because
    the first request has already created the object.

    In a store that ignores conditional writes, the last writer wins; there, write only equal content under one name.

    Args:
        durable, patient: as in `create_object`.

    Returns:
        True if the object now holds `data`, written by this process or another one. False if it holds other content,
        which is not overwritten.

    Raises:
        StorageError: the store refuses the request, or rejects `ATTEMPTS` writes although no object can be read back.
    """
    if len(data) > ONE_PUT:
        raise ConfigError(f"{location}: {len(data)} bytes, needed at most {ONE_PUT} to be put in one request")
    path = location.local_path
    for attempt in range(ATTEMPTS):
        if _link(path, data, durable) if path is not None else _put(location, bytes(data), patient):
            return True
        existing = read_small(location, patient=patient)
        if existing is not None:
            return existing == data
        # Deleted in between, or two writers that S3 asked to try again (409).
        time.sleep(0.05 * 2**attempt)
    raise StorageError(f"{location}: the store says that it exists, and that it does not; {ATTEMPTS} attempts")


def delete_object(location: Location, *, patient: bool = True) -> None:
    """Delete an object; no error if there is none.

    Args:
        patient: as in `create_object`.
    """
    path = location.local_path
    with contextlib.suppress(FileNotFoundError), storage_errors(location.uri):
        if path is not None:
            os.unlink(path)
        else:
            store = open_writable(location)
            send_blocking(location, lambda: store.delete(location.uri), patient=patient)


def send_object(location: Location, data: memoryview) -> dict[str, Any] | None:
    """Write a remote object, which appears whole, replacing an existing one.

    One that fits into one request is sent once: an index, without which a start can do.

    Returns:
        Its identity, as `object_identity` returns it: from the store's response to this very request, since a later
        HEAD request may find another writer's object; or of an object with the MD5 of these bytes. None if the store
        reports neither.

    Raises:
        StorageError: the store refuses; an object that was there stays.
    """
    store = location.store
    if not isinstance(store, MultipartStore):
        write_object(location, (data[start:stop] for start, stop in cut((0, len(data)), ONE_PUT)))
        return _identified_by_digest(location, data)
    if len(data) <= ONE_PUT:
        with storage_errors(location.uri):
            tag = store.put(location.uri, cut_views(data))
    else:
        tag = _send_parts(location, store.max_parts, data)
    return {"size": len(data), "etag": tag} if tag else None


def _identified_by_digest(location: Location, data: memoryview) -> dict[str, Any] | None:
    """Return the identity of an object if the store reports an MD5, and it is that of the data."""
    try:
        found = find_object(location)
    except StorageError:
        return None  # the object is there; only its identity is unknown
    if found is None or found.info.md5 is None:
        return None
    digest = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
    return dict(found.info.identity) if found.info.md5 == digest else None


def _send_parts(location: Location, max_parts: int, data: memoryview) -> str:
    ranges = cut((0, len(data)), max(ONE_PUT, -(-len(data) // max_parts)))
    parts = PartUpload(location)

    def write(part: int) -> str:
        start, stop = ranges[part - 1]
        return parts.write(part, (start, stop), data[start:stop])

    try:
        sending = map_in_flight(write, range(1, len(ranges) + 1), PARTS_IN_FLIGHT, parts.stop)
        with contextlib.closing(sending) as tags:
            return parts.publish(dict(enumerate(tags, 1)))
    except BaseException:
        parts.abandon()
        raise


@contextlib.contextmanager
def _stage(uri: str, begin: Callable[[], Staged], before_publish: Hook, size: int = 0) -> Iterator[Staged]:
    pid = os.getpid()
    with storage_errors(uri, size):
        staged = begin()
    try:
        yield staged
        with storage_errors(uri):
            staged.complete()
        if before_publish is not None:
            before_publish()
        with storage_errors(uri):
            staged.publish()
    except BaseException:
        with contextlib.suppress(Exception):
            # A forked child that ends, or forgets its copy, must not take its parent's object along.
            staged.abandon() if os.getpid() == pid else staged.forget()
        raise


def _link(path: str, data: Bytes, durable: bool) -> bool:
    """Write a file, which appears whole, unless the name is taken; return whether it was written."""
    with storage_errors(path):
        file = StagingFile(path, durable=durable)
        try:
            file.write(data)
            file.complete()
            return _link_file(file, path)
        finally:
            with contextlib.suppress(OSError):
                file.abandon()


def _link_file(file: StagingFile, path: str) -> bool:
    try:
        os.link(file.temporary, path)
    except FileExistsError:
        return False
    except OSError:
        # No hard links here: two writers may both win then, with whole files.
        if os.path.lexists(path):
            return False
        file.publish()
    if file.durable:
        sync_directory(path)
    return True


def _put(location: Location, data: bytes, patient: bool) -> bool:
    store = open_writable(location)

    def put() -> bool:
        try:
            store.put(location.uri, [memoryview(data)], if_absent=True)
        except FileExistsError:  # perhaps by this one, whose response was lost
            return False
        return True

    with storage_errors(location.uri):
        return send_blocking(location, put, patient=patient)


COMPARED_BYTES = 8 << 20
"""Bytes that are compared at once."""


class ComparingWriter:
    """Writer that compares the bytes with an existing object instead of writing them.

    Args:
        refusal: message of the error if the object differs.
        codec: "raw" to compare the stored bytes; None: plain bytes of a `.bin.zst`.
    """

    def __init__(self, location: Location, refusal: str, *, codec: str | None = None) -> None:
        name = location.uri.rsplit("/", 1)[-1]
        self._refusal = f"{refusal} ({name} differs from what this job writes, from byte {{:,}} on)"
        self._reader = open_object(location, mmap=False, cache=False, codec=codec)
        self._held, self._at = bytearray(), 0

    def write(self, data: Bytes, /) -> int:
        """Compare the next bytes, now or with later ones.

        Raises:
            ObjectExistsError: the object has other bytes.
        """
        self._held += data
        if len(self._held) >= COMPARED_BYTES:
            self._compare()
        return memoryview(data).nbytes

    def finish(self) -> None:
        """Compare the last bytes; raise ObjectExistsError if the object has other bytes, or more."""
        self._compare()
        if self._at != self._reader.size:
            raise ObjectExistsError(self._refusal.format(self._at))

    def _compare(self) -> None:
        stop = self._at + len(self._held)
        if stop > self._reader.size or self._held != self._reader.read([(self._at, stop)])[0]:
            raise ObjectExistsError(self._refusal.format(self._at))
        self._held, self._at = bytearray(), stop


@contextlib.contextmanager
def compare_object(
    location: Location, refusal: str, *, codec: str | None = None, before_publish: Hook = None
) -> Iterator[Writer]:
    """Do `create_object` for an object that exists: the written bytes are only compared with it.

    Args:
        refusal, codec: as in `ComparingWriter`.
        before_publish: called when all bytes were equal.

    Raises:
        ObjectExistsError: the object has other bytes.
    """
    writer = ComparingWriter(location, refusal, codec=codec)
    yield writer
    writer.finish()
    if before_publish is not None:
        before_publish()


def create_or_compare(location: Location, refusal: str, *, overwrite: bool) -> AbstractContextManager[Writer]:
    """Do `create_object`, or `compare_object` for an existing object unless `overwrite`.

    Args:
        refusal: message of the error if an existing object differs.

    Raises:
        ObjectExistsError: the object exists and has other bytes.
    """
    if overwrite or not object_exists(location):
        return create_object(location)
    return compare_object(location, refusal, codec="raw")
