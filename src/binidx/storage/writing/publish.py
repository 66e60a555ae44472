"""Atomic writes: an object is staged first and then becomes visible at once, so a reader never sees a part of it.

    local                      <name>.<random>.tmp -> fsync -> rename (or link, if the first writer must win)
    stores that hide uploads   one PUT, or an upload that is completed at the end
    other stores               <name>.<random>.tmp -> the filesystem's own move

A killed process leaves at most a .tmp file or an unfinished upload behind, never an object. A child that is forked
meanwhile leaves its parent's object alone, however it ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from binidx.errors import ConfigError, ObjectNotFoundError, StorageError
from binidx.json_models import MAX_BYTES, JsonFile
from binidx.storage.interfaces import Bytes, Writer
from binidx.storage.requests.metadata import head
from binidx.storage.settings import ReadSettings
from binidx.storage.store_protocols import ObjectInfo, Store
from binidx.storage.stores.driver_errors import hidden_cause, storage_errors
from binidx.storage.stores.local import staging_path, sync_directory
from binidx.storage.stores.registry import local_path, open_store
from binidx.storage.writing.staging import ONE_PUT, StagingFile, StagingUpload, open_writable

ATTEMPTS = 5
Hook = Callable[[], object] | None
Unfinished = TypeVar("Unfinished", bound=StagingFile | StagingUpload)


def create_object(
    uri: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    *,
    before_publish: Hook = None,
    durable: bool = True,
) -> contextlib.AbstractContextManager[Writer]:
    """Write an object that appears whole under its name when the block ends, replacing what was there.

    After an exception in the block nothing appears and nothing is left behind. Local directories are made. Object
    stores take at most 10,000 parts, of 50 MiB: beyond 500 GB pass a default_block_size in storage_options.

    Args:
        before_publish: called when all is written, and on a disk synced, right before the object appears; an exception
            stops that. An object sent in one request is sent after it.
        durable: a local file is synced before it appears. What can be made again, and is proved by a checksum before it
            is used, needs no sync: a file cut by a lost power supply is then made again.

    Raises:
        StorageError: the store refuses; what was there before still is.
    """
    uri = os.fspath(uri)
    path = local_path(uri)
    if path is not None:
        return _written(path, lambda: StagingFile(path, durable=durable), before_publish)
    return _written(uri, lambda: StagingUpload(uri, storage_options or {}), before_publish)


@contextlib.contextmanager
def create_file(path: str, size: int, *, durable: bool = True) -> Iterator[StagingFile]:
    """`create_object` for a local file of `size` bytes: write to it, or fill its `map()`, which begins as zeros.

    The mapping stays valid after the block, also when another file takes the name.

    Raises:
        StorageError: the disk lacks the space, above all; `StagingFile` describes how reliable that is.
    """
    with _whole_or_nothing(path, lambda: StagingFile(path, size, durable), None) as file:
        yield file


def put_if_absent(
    uri: str | os.PathLike[str],
    data: Bytes,
    storage_options: Mapping[str, Any] | None = None,
    *,
    durable: bool = True,
) -> bool:
    """Create a small object unless there is one: of many writers the first wins.

    Returns:
        True: the object holds `data`, written by this process or another. False: it holds something else, which stays.
        If the response to a PUT is lost, its retry finds that the object exists, although it is ours. So an object that
        exists is read back and compared.

    A store that ignores conditional writes lets the last writer win: give equal content to equal names.

    Args:
        durable: as in `create_object`.

    Raises:
        StorageError: the store refuses, or contradicts itself for a second.
    """
    uri = os.fspath(uri)
    if len(data) > ONE_PUT:
        raise ConfigError(f"{uri}: {len(data)} bytes, needed at most {ONE_PUT} to be put in one request")
    path = local_path(uri)
    for attempt in range(ATTEMPTS):
        if _link(path, data, durable) if path is not None else _put(uri, bytes(data), storage_options or {}):
            return True
        standing = read_small(uri, storage_options)
        if standing is not None:
            return standing == data
        # Deleted in between, or two writers that S3 asked to try again (409).
        time.sleep(0.05 * 2**attempt)
    raise StorageError(f"{uri}: the store says that it exists, and that it does not; {ATTEMPTS} attempts")


SMALL = JsonFile(object)


def read_small(uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bytes | None:
    """Return a small object as it is now, by one request; None if there is none.

    Raises:
        FormatError: it is larger than any small object.
    """
    uri = os.fspath(uri)
    path = local_path(uri)
    with storage_errors(uri):
        try:
            if path is not None:
                SMALL.check_size(os.path.getsize(path), uri)
                return Path(path).read_bytes()
            store: Store = open_store(uri, storage_options)
            data = store.get(uri, MAX_BYTES)
            SMALL.check_size(len(data), uri)
            return data
        except FileNotFoundError as error:
            if hidden_cause(error):
                raise
            return None


def delete_object(uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> None:
    """Delete an object; that there is none is no error."""
    uri = os.fspath(uri)
    path = local_path(uri)
    with contextlib.suppress(FileNotFoundError), storage_errors(uri):
        if path is not None:
            os.unlink(path)
        else:
            open_writable(uri, storage_options).delete(uri)


def object_exists(uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> bool:
    """Return whether there is an object now, never from a listing that was cached. A directory is no object."""
    try:
        _head(uri, storage_options, folders=False)
    except ObjectNotFoundError:
        return False
    return True


def object_identity(uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the identity of the content, in JSON values: `size`, and `etag`, `generation` or `mtime`.

    Raises:
        ObjectNotFoundError: there is no such object.
    """
    return dict(_head(uri, storage_options, folders=True).identity)


def _head(uri: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, *, folders: bool) -> ObjectInfo:
    uri = os.fspath(uri)
    return head(open_store(uri, storage_options), uri, ReadSettings.of(storage_options), folders=folders).info


def join_uri(base: str, *parts: str) -> str:
    """`s3://bucket/a/`, `b`, `c.npy` -> `s3://bucket/a/b/c.npy`; the same for paths."""
    joined = base
    for part in parts:
        joined = joined + ("" if joined.endswith("/") else "/") + part.strip("/")
    return joined


@contextlib.contextmanager
def _written(uri: str, begin: Callable[[], StagingFile | StagingUpload], before_publish: Hook) -> Iterator[Writer]:
    with _whole_or_nothing(uri, begin, before_publish) as unfinished:
        yield _ErrorsNamed(uri, unfinished)


@contextlib.contextmanager
def _whole_or_nothing(uri: str, begin: Callable[[], Unfinished], before_publish: Hook) -> Iterator[Unfinished]:
    pid = os.getpid()
    with storage_errors(uri):
        unfinished = begin()
    try:
        yield unfinished
        with storage_errors(uri):
            unfinished.complete()
        if before_publish is not None:
            before_publish()
        with storage_errors(uri):
            unfinished.publish()
    except BaseException:
        with contextlib.suppress(Exception):
            # A forked child that ends, or forgets its copy, must not take its parent's object along.
            unfinished.abandon() if os.getpid() == pid else unfinished.forget()
        raise


class _ErrorsNamed:
    """Writer whose errors name the object."""

    def __init__(self, uri: str, writer: Any) -> None:
        self.uri, self.writer = uri, writer

    def write(self, data: Bytes, /) -> int:
        with storage_errors(self.uri):
            return int(self.writer.write(data))


def _link(path: str, data: Bytes, durable: bool) -> bool:
    """Write a file, which appears whole, unless the name is taken; return whether it was written."""
    temporary = staging_path(path)
    with _written(path, lambda: StagingFile(temporary, durable=durable), None) as writer:
        writer.write(data)
    try:
        with storage_errors(path):
            return _link_file(temporary, path, durable)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _link_file(source: str, path: str, durable: bool) -> bool:
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError:
        # No hard links here: two writers may both win then, with whole files.
        if os.path.lexists(path):
            return False
        os.replace(source, path)
    if durable:
        sync_directory(path)
    return True


def _put(uri: str, data: bytes, storage_options: Mapping[str, Any]) -> bool:
    with storage_errors(uri):
        try:
            open_writable(uri, storage_options).put(uri, [memoryview(data)], if_absent=True)
        except FileExistsError:
            return False
    return True
