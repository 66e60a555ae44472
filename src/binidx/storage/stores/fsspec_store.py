"""Stores of any fsspec filesystem, and the base classes of the providers that have a driver of their own.

fsspec's exceptions become ours in `driver_errors`. Generic drivers return bytes without the response that carried them,
so only their length is checked. Local files and objects in memory are looked at again after each read, which costs no
round trip; what other drivers read is not pinned to a version.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import distributions
from typing import Any, TypeVar

from binidx.errors import ConfigError, ObjectNotFoundError, StorageError, redacted
from binidx.storage.interfaces import Bytes, FileVersion, Range
from binidx.storage.settings import ReadSettings, drivers_own
from binidx.storage.store_protocols import ObjectInfo, Prices
from binidx.storage.stores.driver_errors import DriverFaultError, cause_of, http_status, storage_errors
from binidx.storage.stores.identity import (
    TIMES,
    changed,
    check_length,
    check_unchanged,
    is_rewritten,
    object_info,
    second_of,
)
from binidx.storage.stores.local import FILE_PRICES, node_view
from binidx.storage.stores.registry import local_path, scheme_of, store_class

CONCURRENCY, DIRECT_CONCURRENCY = 64, 128
"""Requests in flight at once, over all threads and objects of a process, through a driver and directly: at 30 ms to the
first byte 64 are 2,100 requests/s, 128 are 4,200, which one core still carries."""

MAX_GAP, DIRECT_MAX_GAP = 64 << 10, 8 << 10
"""Largest gap within a request: the bytes that a connection of 100 MB/s moves in the CPU time of another request, which
is 0.6 ms in s3fs and 0.06 ms directly."""

CHECKED_AFTERWARDS = {"LocalFileSystem", "MemoryFileSystem"}
"""Filesystems, or bases of them, where looking at an object costs no round trip."""

Result = TypeVar("Result")


def open_fsspec_store(uri: str, storage_options: Mapping[str, Any] | None = None) -> FsspecStore:
    """Return the store of a URI whose provider has no class of its own."""
    fs, _ = open_filesystem(uri, storage_options or {})
    return (WritableAsyncStore if type(fs).async_impl else BlockingFsspecStore)(uri, storage_options)


class FsspecStore:
    """Base of the stores over fsspec: options and clients.

    Args:
        uri: URI of an object in the store; fsspec takes some options from it.
        storage_options: fsspec's own, and ours under the key "binidx".

    A client is made on first use in each process (and in each thread, if the filesystem is not asynchronous), so one
    made before a fork is never used after it: an inherited boto3 client returned wrong bytes without an error. Pickles
    as its arguments.
    """

    list_prices = Prices()
    has_session = False
    """True if the driver has an HTTP session over which requests may be sent directly."""

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.uri = uri
        self.storage_options: Mapping[str, Any] = dict(storage_options or {})
        self._given = uri, self.storage_options
        self.settings = ReadSettings.of(storage_options)
        self.direct = self.has_session and self.settings.fast is not False
        concurrency, gap = (DIRECT_CONCURRENCY, DIRECT_MAX_GAP) if self.direct else (CONCURRENCY, MAX_GAP)
        self.max_in_flight = self.settings.concurrency or concurrency
        self.max_gap = gap if self.settings.max_gap is None else self.settings.max_gap
        self._clients: dict[tuple[int, int], Any] = {}
        # By the version that a reader opened: another reader of this store may have opened a later one.
        self._marks: dict[tuple[Any, ...], FileVersion | None] = {}

    def prices(self) -> Prices:
        return self.list_prices

    def pins(self, info: ObjectInfo) -> bool:
        return False

    @staticmethod
    def default_options(uri: str, given: Mapping[str, Any], reading: int) -> dict[str, Any]:
        """Return the driver's options: the `given` ones, and defaults of binidx for options that are not given.

        Args:
            given: with our own under the key "binidx".
            reading: requests in flight at once of a client that only reads; 0 for other clients.
        """
        return dict(given)

    @staticmethod
    def prepare(fs: Any) -> None:
        """Configure a new filesystem used for reads, before its first request; does nothing unless overridden."""

    @property
    def fs(self) -> Any:
        """Filesystem of this process (and thread) for reading."""
        # fsspec gives all threads of a process the same asynchronous filesystem, and each its own of the others.
        pid, thread = os.getpid(), threading.get_ident()
        client = self._clients.get((pid, 0)) or self._clients.get((pid, thread))
        if client is None:
            # How much a file of the driver buffers is irrelevant to reading, and would make another client.
            options = {name: value for name, value in self.storage_options.items() if name != "default_block_size"}
            fs, _ = open_filesystem(self.uri, options, reading=self.max_in_flight)
            self.prepare(fs)
            client = self._clients.setdefault((pid, 0 if type(fs).async_impl else thread), fs)
        return client

    def path(self, uri: str) -> str:
        """Return the path of an object in the filesystem."""
        return str(self.fs._strip_protocol(uri))

    def find(self, uri: str, *, pattern: bool) -> list[str]:
        """Return the URIs of all objects that match a glob pattern, or that are below a folder; one listing."""
        fs, path = open_filesystem(uri, self._given[1])
        with storage_errors(uri):
            paths = fs.glob(path) if pattern else fs.find(path)
        return [name if "://" in name else f"{scheme_of(uri)}://{name}" for name in paths]

    def send(self, call: Callable[[Any], Result]) -> Result:
        """Return `call(fs)` for a filesystem whose driver retries."""
        return call(open_filesystem(self.uri, self.storage_options)[0])

    def get(self, uri: str, most_bytes: int) -> bytes:
        try:
            return bytes(self.send(lambda fs: self.read_start(fs, uri, most_bytes + 1)))
        except Exception as error:
            if http_status(error) == 416:
                return b""
            raise

    def read_start(self, fs: Any, uri: str, num_bytes: int) -> bytes:
        """Return the first bytes of an object, as many as it has up to `num_bytes`, by one request."""
        return bytes(fs.cat_file(self.path(uri), start=0, end=num_bytes))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._given

    def __repr__(self) -> str:
        # Without the options: they hold secrets.
        return f"{type(self).__name__}({redacted(self.uri)})"


class FsspecWrites(FsspecStore):
    """Mixin for stores whose driver can write; the driver retries by itself."""

    hides_uploads = False

    def put(self, uri: str, data: Sequence[memoryview], *, if_absent: bool = False) -> str:
        path, body, options = self.path(uri), b"".join(data), {"mode": "create"} if if_absent else {}

        def write(fs: Any) -> Any:
            return self.write_making_directory(fs, path, lambda: fs.pipe_file(path, body, **options))

        try:
            answer = self.send(write)
        except Exception as error:
            # Only AWS's wording makes s3fs raise FileExistsError; another server's 412 comes as an OSError.
            if if_absent and http_status(error) in (409, 412):
                raise FileExistsError(uri) from error
            raise
        return str(answer.get("ETag", "")) if isinstance(answer, Mapping) else ""

    def split(self, uri: str) -> tuple[str, str]:
        """Split the name of an object in a bucket, whose driver has `split_path`, into bucket and key."""
        bucket, key, _ = self.fs.split_path(self.path(uri))
        return bucket, key

    def delete(self, uri: str) -> None:
        path = self.path(uri)
        self.send(lambda fs: fs.rm_file(path))

    def open_stream(self, uri: str) -> Any:
        """Open a file of the driver for a large object: `write`, `close`, then `commit` if uploads are hidden."""
        fs, path = open_filesystem(uri, self.storage_options)
        options = {"autocommit": False} if self.hides_uploads else {}
        return self.write_making_directory(fs, path, lambda: fs.open(path, "wb", **options))

    def move(self, source: str, target: str) -> None:
        """Rename one object; copy it where a filesystem has only the `mv` of fsspec, which takes [ * ? as a pattern."""
        from fsspec import AbstractFileSystem

        fs, path = open_filesystem(target, self.storage_options)
        old = open_filesystem(source, self.storage_options)[1]
        if getattr(fs.mv, "__func__", None) is AbstractFileSystem.mv:
            fs.cp_file(old, path)
            fs.rm_file(old)
        else:
            fs.mv(old, path)

    def write_making_directory(self, fs: Any, path: str, write: Callable[[], Result]) -> Result:
        """Return `write()`; if it fails for a missing directory, make the directory of `path` and write again."""
        try:
            return write()
        except FileNotFoundError:
            if self.hides_uploads:
                raise  # the bucket is missing
            fs.makedirs(fs._parent(path), exist_ok=True)
            return write()


class BlockingFsspecStore(FsspecWrites):
    """Store of a filesystem without coroutines."""

    @property
    def _checked_afterwards(self) -> bool:
        return not CHECKED_AFTERWARDS.isdisjoint(kind.__name__ for kind in type(self.fs).__mro__)

    def pins(self, info: ObjectInfo) -> bool:
        return self._checked_afterwards

    def head_now(self, uri: str) -> ObjectInfo:
        self.fs.invalidate_cache()
        report = self.fs.info(self.path(uri))
        info = checked_info(uri, report)
        return replace(info, mark=file_version_from_info(report) or info.mark)

    def fetch_now(self, info: ObjectInfo, ranges: Sequence[Range]) -> list[bytes]:
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        fs, path = self.fs, self.path(info.uri)
        # Without on_error exceptions would come back in the list as if they were data.
        answers = fs.cat_ranges([path] * len(ranges), starts, stops, on_error="raise")
        if self._checked_afterwards:
            report = fs.info(path)
            check_unchanged(info, object_info(info.uri, report))
            version, opened = file_version_from_info(report), (info.uri, info.mark, *sorted(info.identity.items()))
            if is_rewritten(self._marks.get(opened, info.mark), version):
                raise changed(info, {"inode": report.get("ino"), "ctime": report.get("created")})
            self._marks[opened] = version
        return [check_answer(fs, info.uri, *answer) for answer in zip(ranges, answers, strict=True)]


class FileStore(BlockingFsspecStore):
    """Store of the files of this machine, read by ranges."""

    list_prices = FILE_PRICES


class AsyncFsspecStore(FsspecStore):
    """Store of an asynchronous filesystem, for reading."""

    async def head(self, uri: str, *, tail_bytes: int = 0, folders: bool = False) -> tuple[ObjectInfo, bytes]:
        try:
            return await self.report(uri), b""
        except FileNotFoundError:
            if not folders:
                raise
            return await self.look(uri), b""

    async def report(self, uri: str) -> ObjectInfo:
        """Return what the store reports of an object by one request."""
        return await self.look(uri)

    async def look(self, uri: str) -> ObjectInfo:
        """Return the driver's report of an object; if there is none, most drivers look for a folder of this name."""
        self.fs.invalidate_cache()
        return checked_info(uri, await self.fs._info(self.path(uri)))

    async def fetch(self, info: ObjectInfo, where: Range) -> Bytes:
        start, stop = where
        body: bytes = await self.fs._cat_file(self.path(info.uri), start=start, end=stop)
        return check_answer(self.fs, info.uri, where, body)


class WritableAsyncStore(FsspecWrites, AsyncFsspecStore):
    """Store of an asynchronous filesystem without a class of its own."""


def check_answer(fs: Any, uri: str, where: Range, body: bytes) -> bytes:
    """Return the bytes that a driver of fsspec returned for a range if they are as many as the range has.

    Args:
        fs: filesystem of the driver.
        where: (start, stop) in bytes.

    Raises:
        DriverFaultError: there is one byte too many or too few: the driver takes the end of a range for another byte.
        ShortReadError: there are more or fewer.
    """
    if abs(len(body) - (need := where[1] - where[0])) == 1:
        release = next((each.version for each in distributions(name=type(fs).__module__.partition(".")[0])), "unknown")
        found = f"found {len(body):,} bytes for range {where[0]}-{where[1]}, need {need:,}"
        driver = f"its driver, {type(fs).__module__}.{type(fs).__name__} {release}, takes another end for a range"
        raise DriverFaultError(f"{uri}: {driver} ({found}); install another release of the driver")
    return check_length(uri, where, body)


def file_version_from_info(info: Mapping[str, Any]) -> FileVersion | None:
    """Return the version of a local file from fsspec's `info`; None for objects elsewhere."""
    if "ino" not in info:
        return None
    owner = tuple(info[name] for name in ("mode", "uid", "gid", "nlink"))
    return FileVersion(node_view(), info["ino"], info["created"], owner)


def checked_info(uri: str, info: Mapping[str, Any]) -> ObjectInfo:
    """Return fsspec's `info` of an object as an `ObjectInfo`.

    Raises:
        ObjectNotFoundError: it is a directory.
        StorageError: it has no size.
    """
    if info.get("type") == "directory":
        raise ObjectNotFoundError(f"{uri}: found a directory, needed an object")
    if info.get("size") is None:
        raise StorageError(f"{uri}: the store does not report its size; needed a server that sends Content-Length")
    return object_info(uri, info)


@dataclass(frozen=True)
class StoredFile:
    """File or object of a folder: its size, and the time of its last change in seconds since 1970."""

    num_bytes: int
    changed_at: float


def list_stored_files(uri: str, storage_options: Mapping[str, Any]) -> dict[str, StoredFile]:
    """Return the files of a folder, local or in a store, by their names; without a known time a file counts as new.

    Raises:
        StorageError: there is no such folder, or the store refuses.
    """
    fs, path = open_filesystem(uri, storage_options)
    with storage_errors(uri):
        entries = [entry for entry in fs.ls(path, detail=True) if entry["type"] == "file"]
    times = [next((second_of(entry[key]) for key in TIMES if entry.get(key)), None) for entry in entries]
    return {
        entry["name"].rpartition("/")[2]: StoredFile(int(entry["size"]), math.inf if time is None else time)
        for entry, time in zip(entries, times, strict=True)
    }


def open_filesystem(uri: str, storage_options: Mapping[str, Any], *, reading: int = 0) -> tuple[Any, str]:
    """Return the fsspec filesystem of this process for a URI, and the path there. No request is sent.

    fsspec makes one instance for equal options and process, and a new one after a fork.

    Args:
        reading: requests in flight at once, if the caller only reads and retries by itself; 0 for all other uses.

    Raises:
        MissingDriverError: the filesystem's package is not installed.
        ConfigError: no such protocol, or a URI that fsspec cannot parse.
        AccessError: the given profile does not exist.
        StorageError: the driver refuses the options.
    """
    with storage_errors(uri):
        import fsspec

        if (local := local_path(uri)) is not None:
            return fsspec.filesystem("file"), os.path.abspath(local)
        try:
            options = driver_options(uri, storage_options, reading=reading)
            kind = fsspec.get_filesystem_class(scheme_of(uri))
            # Not by `url_to_fs`, which takes :: in the name of an object for a chain of filesystems.
            fs, path = kind(**{**kind._get_kwargs_from_urls(uri), **options}), kind._strip_protocol(uri)
        except ValueError as error:
            raise ConfigError(f"{uri}: {error}; needed a path or a protocol that fsspec knows") from cause_of(error)
    _opened.setdefault(id(fs), fs)
    return fs, str(path)


# All filesystems that this process or its parents opened, for ever; in one process fsspec's own cache holds them as
# long. After a fork fsspec drops those of the parent, and collecting one closes its connections, which in a forked
# child removes the *parent's* sockets from the epoll that they share: the parent then never sees the next response.
_opened: dict[int, Any] = {}


def driver_options(uri: str, storage_options: Mapping[str, Any], *, reading: int = 0) -> dict[str, Any]:
    """Return the options of a filesystem: the user's, else binidx's defaults.

    Args:
        reading: as in `open_filesystem`.
    """
    kind = store_class(scheme_of(uri))  # a function, or a class that is not built on fsspec, has no defaults
    known = kind if isinstance(kind, type) and issubclass(kind, FsspecStore) else FsspecStore
    return drivers_own(known.default_options(uri, storage_options, reading))
