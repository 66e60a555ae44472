"""Objects where they lie: a file through mmap, and anything fsspec opens by few concurrent range requests.

Both are RangeReaders; `open_object` picks one by the URI. A new backend is a class and a row in OPENERS.
"""

from __future__ import annotations

import mmap as mapping
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from binidx.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from binidx.storage import filesystem
from binidx.storage.chunk_cache import STORE, ChunkCache
from binidx.storage.ranges import Range, RangeReader, assemble, check_ranges, coalesce
from binidx.storage.stats import ObjectStats

# A request of s3fs costs 0.6 ms of CPU; a connection carries 64 KiB in that time. Up to there a gap is cheaper.
MAX_GAP = 64 << 10
# At 25 ms to the first byte and 100 MB/s a connection is 77 % busy with 8 MiB parts, 29 % with 1 MiB.
MAX_REQUEST = 8 << 20
# Whoever asks for more than this at once reads in order and does not want all of it in memory first.
MAX_READ_AHEAD = 1 << 30


class LocalFile:
    """A file of this machine, mapped once; reads are views of the map and copy nothing.

    Args:
        path: of an existing file; an empty one is fine.

    Raises:
        ObjectNotFoundError: there is no such file.
        ObjectChangedError: on read, the file has become shorter than it was. A view taken before that is beyond help:
            touching its lost pages kills the process with SIGBUS, as with every mmap.

    Pickles as its path. A replaced file (a new inode under the name) goes on being read as it was.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.uri = os.fspath(path)
        self.stats = ObjectStats()
        try:
            with open(self.uri, "rb") as file:
                found = os.fstat(file.fileno())
                self.size = found.st_size
                # An empty file cannot be mapped.
                self._map = mapping.mmap(file.fileno(), self.size, access=mapping.ACCESS_READ) if self.size else None
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ObjectNotFoundError(f"{self.uri}: no such file") from error
        except OSError as error:
            raise StorageError(f"{self.uri}: {error.strerror}; needed a readable file") from error
        self.identity: dict[str, Any] = {"size": self.size, "mtime": found.st_mtime}
        self._view = memoryview(self._map or b"")
        if self._map is not None:
            # Random reads through the kernel's read-ahead fetched 125 bytes from a cold disk for each byte asked.
            self._map.madvise(mapping.MADV_RANDOM)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        self._check_unshrunk()
        self._read_ahead(ranges)
        views = [self._view[start:stop] for start, stop in ranges]
        count = sum(map(len, views))
        self.stats.add(requests=len(views), bytes_asked=count, bytes_moved=count)
        return views

    def _check_unshrunk(self) -> None:
        # mmap.size() is an fstat of the descriptor the map holds: 0.3 us against a SIGBUS.
        if self._map is not None and (found := self._map.size()) < self.size:
            raise ObjectChangedError(f"{self.uri}: has {found} bytes, had {self.size} when it was opened")

    def _read_ahead(self, ranges: Sequence[Range]) -> None:
        """Ask the disk for all of the ranges before the first is touched: 670 MB/s from a cold disk instead of 62."""
        if self._map is None:
            return
        for start, stop in ranges:
            first = start - start % mapping.PAGESIZE
            advice = mapping.MADV_WILLNEED if stop - start <= MAX_READ_AHEAD else mapping.MADV_NORMAL
            if start < stop:
                self._map.madvise(advice, first, stop - first)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self.uri,)

    def __repr__(self) -> str:
        return f"LocalFile({self.uri!r})"


class FsspecObject:
    """An object of any fsspec filesystem: one read is one `cat_ranges` of coalesced requests.

    Args:
        uri: with a protocol; chains such as simplecache::s3://bucket/key work.
        storage_options: fsspec's own.

    Raises:
        MissingDriverError, ObjectNotFoundError, StorageError: see `filesystem.open_filesystem` and `object_info`.
        ShortReadError: on read, an answer is not as long as its range: s3fs and gcsfs hand on a 206 that is too short
            and a 200 with the whole object without a word.

    The size and `identity` (ETag, generation or time) are those at opening. Clients are made on first use in each
    process and thread, so one made before a fork is never used after it: an inherited boto3 client returned wrong bytes
    without an error. Pickles without its clients, and needs no request when it is unpickled.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.uri = uri
        self.storage_options = dict(storage_options or {})
        self.stats = ObjectStats()
        # (process, thread) -> filesystem and path. fsspec hands threads the same instance where its class allows that.
        self._clients: dict[tuple[int, int], tuple[Any, str]] = {}
        info = filesystem.object_info(*self._client(), uri)
        self.size = int(info["size"])
        self.identity = filesystem.identity_of(info)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        check_ranges(self.uri, self.size, ranges)
        requests = coalesce(ranges, max_gap=MAX_GAP, max_request=MAX_REQUEST)
        began = time.perf_counter()
        answers = self._fetch(requests) if requests else []
        self.stats.add(
            requests=len(requests),
            bytes_asked=sum(stop - start for start, stop in ranges),
            bytes_moved=sum(map(len, answers)),
            seconds=time.perf_counter() - began,
        )
        return assemble(ranges, requests, answers)

    def _fetch(self, requests: Sequence[Range]) -> list[bytes]:
        fs, path = self._client()
        starts, stops = [start for start, _ in requests], [stop for _, stop in requests]
        # Exceptions would come back in the list as if they were data, were it not for on_error.
        options: dict[str, Any] = {"on_error": "raise"}
        if fs.async_impl:
            options["batch_size"] = filesystem.concurrency(fs)
        with filesystem.storage_errors(self.uri):
            answers: list[bytes] = fs.cat_ranges([path] * len(requests), starts, stops, **options)
        self._check_answers(requests, answers)
        return answers

    def _check_answers(self, requests: Sequence[Range], answers: Sequence[Any]) -> None:
        if len(answers) != len(requests):
            raise ShortReadError(f"{self.uri}: {len(answers)} answers to {len(requests)} requests")
        for (start, stop), answer in zip(requests, answers, strict=True):
            if isinstance(answer, Exception):
                raise filesystem.translated(self.uri, answer) from answer
            if len(answer) != stop - start:
                raise ShortReadError(
                    f"{self.uri}: {len(answer)} bytes for range {start}-{stop}, needed {stop - start}; "
                    f"the store or a proxy before it does not honour ranges, or the object changed"
                )

    def _client(self) -> tuple[Any, str]:
        key = os.getpid(), threading.get_ident()
        if key not in self._clients:
            self._clients[key] = filesystem.open_filesystem(self.uri, self.storage_options)
        return self._clients[key]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "stats": ObjectStats()}

    def __repr__(self) -> str:
        # Without the options: they hold secrets.
        return f"FsspecObject({self.uri!r})"


def open_object(
    uri: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    mmap: bool = True,
    cache: bool | None = None,
) -> RangeReader:
    """The bytes of the object under a URI or path.

    Args:
        uri: a path, file://, or anything fsspec opens.
        storage_options: fsspec's own, for all but local files.
        mmap: map local files; else they are read through fsspec like any other store.
        cache: put a ChunkCache over what is remote; by default over objects small enough to stay in it. The shuffled
            samples of a larger one do not meet a chunk again in time, and 64 KiB chunks moved 37 times their bytes.

    Raises:
        ObjectNotFoundError, MissingDriverError, StorageError: each names the URI.
    """
    uri = os.fspath(uri)
    path = filesystem.local_path(uri)
    if path is not None:
        return LocalFile(path) if mmap else FsspecObject(f"file://{os.path.abspath(path)}")
    opener = OPENERS.get(filesystem.protocols(uri)[0], FsspecObject)
    reader = opener(uri, storage_options)
    return ChunkCache(reader) if cache or (cache is None and reader.size <= STORE.largest) else reader


# protocol -> what opens its URIs, where FsspecObject is not good enough
OPENERS: dict[str, Callable[[str, Mapping[str, Any] | None], RangeReader]] = {}
