"""An object of any fsspec filesystem, read by few concurrent range requests."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from binidx.errors import ObjectChangedError, ObjectNotFoundError, StorageError
from binidx.storage.interfaces import Range
from binidx.storage.ranges import assemble, check_ranges, coalesce
from binidx.storage.requests.cancellation import current_scope
from binidx.storage.requests.retries import Fetch, PendingRead, retried
from binidx.storage.requests.scheduler import scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.stats import ObjectStats
from binidx.storage.stores import filesystem
from binidx.storage.stores.head import fetch_object_info
from binidx.storage.stores.pinned import PinnedObject, cat_ranges, is_pinned, suggests_change
from binidx.storage.stores.response_check import check_length
from binidx.storage.stores.transports import fetch_of, has_coroutines

# A request costs 0.6 ms of CPU in s3fs and 0.06 ms without it. At 100 MB/s, which is what a connection carries, 64 KiB
# and 8 KiB pass in that time: up to there a gap is cheaper.
MAX_GAP = 64 << 10
MAX_GAP_WITHOUT_DRIVER = 8 << 10

# At 25 ms to the first byte and 100 MB/s a connection is 77 % busy with 8 MiB parts, 29 % with 1 MiB.
MAX_REQUEST = 8 << 20


@dataclass
class Client:
    """What a process, or one of its threads, reads with."""

    fs: Any
    path: str
    fetch: Fetch | None = None
    """None: until it is asked for first."""


@dataclass(frozen=True)
class Begun:
    """A read that is on its way: `result` waits, and gives what `read` does; `outcome` is there once it is over."""

    outcome: Future[list[bytes]]
    result: Callable[[], list[memoryview]]


def max_gap_of(uri: str, settings: ReadSettings) -> int:
    """Bytes that are fetched in vain rather than a second request."""
    if settings.max_gap is not None:
        return settings.max_gap
    return MAX_GAP_WITHOUT_DRIVER if filesystem.goes_direct(uri, settings) else MAX_GAP


class RemoteObject:
    """An object of any fsspec filesystem: one read is a few coalesced requests, sent at once and again if need be.

    Args:
        uri: with a protocol; chains such as simplecache::s3://bucket/key work.
        storage_options: fsspec's own, and ours under the key "binidx": `ReadSettings`.
        info: what the store has just told of it, if it was asked: `look_up`.

    Raises:
        MissingDriverError, ObjectNotFoundError, StorageError: see `open_filesystem` and `object_info`.
        ShortReadError: on read, responses do not belong to their range, again and again: `response_check`.
        ObjectChangedError: on read, the object is not the one that was opened, as far as the store can tell: `pinned`.
        CancelledReadError: on read, its scope was cancelled: `cancel`.
        StorageError: on read, what was tried and what came of it: `retries`.

    The size and `identity` (ETag, generation or time) are those at opening, also in a pickle. Clients are made on first
    use in each process (and thread, where the filesystem is not asynchronous), so one made before a fork is never used
    after it: an inherited boto3 client returned wrong bytes without an error. Pickles without its clients, and needs no
    request when it is unpickled.
    """

    def __init__(
        self, uri: str, storage_options: Mapping[str, Any] | None = None, *, info: Mapping[str, Any] | None = None
    ) -> None:
        self.uri = uri
        self.storage_options = dict(storage_options or {})
        self.settings = ReadSettings.of(storage_options)
        self.stats = ObjectStats(filesystem.protocols(uri)[-1])
        self._clients: dict[tuple[int, int], Client] = {}
        info = info or self._info()
        self.size = int(info["size"])
        self.identity = filesystem.identity_from_info(info)

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        begun = self.begin(ranges)
        if begun is None:
            return self._one_by_one(ranges)
        with begun as pending:
            return pending.result()

    def begin(self, ranges: Sequence[Range]) -> contextlib.AbstractContextManager[Begun] | None:
        return self._begun(ranges) if has_coroutines(self._client().fs, self.uri) else None

    def check_unchanged(self) -> None:
        if not is_pinned(self.uri, self.identity):
            opened = PinnedObject(self.uri, self._client().path, self.identity)
            opened.check(filesystem.identity_from_info(self._info()))

    @contextlib.contextmanager
    def _begun(self, ranges: Sequence[Range]) -> Iterator[Begun]:
        requests = self._planned(ranges)
        client, settings = self._client(), self.settings
        opened = PinnedObject(self.uri, client.path, self.identity)
        client.fetch = fetch = client.fetch or fetch_of(client.fs, opened, fast=settings.fast is not False)
        read = PendingRead(self.uri, fetch, requests, deadline_seconds=settings.deadline_seconds, hedge=settings.hedge)
        began = time.monotonic()
        if not requests:
            read.end()
        try:
            with scheduler(client.fs.loop, self._in_flight()).sending(read) if requests else contextlib.nullcontext():
                yield Begun(read.outcome, functools.partial(self._come, opened, read, ranges))
        finally:
            self.stats.add(requests=read.sent, retries=read.retries, hedges=read.hedges)
            if read.over and read.outcome.exception() is None:
                self._count(ranges, read.answers, read.ended - began)

    def _come(self, opened: PinnedObject, read: PendingRead, ranges: Sequence[Range]) -> list[memoryview]:
        with self._change_noticed(opened):
            return assemble(ranges, read.ranges, read.outcome.result())

    def _planned(self, ranges: Sequence[Range]) -> list[Range]:
        check_ranges(self.uri, self.size, ranges)
        return coalesce(ranges, max_gap=self._max_gap(), max_request=MAX_REQUEST)

    def _count(self, ranges: Sequence[Range], answers: Sequence[bytes], seconds: float) -> None:
        self.stats.add(
            bytes_asked=sum(stop - start for start, stop in ranges),
            bytes_moved=sum(map(len, answers)),
            seconds=seconds,
        )

    def _max_gap(self) -> int:
        return max_gap_of(self.uri, self.settings)

    def _one_by_one(self, ranges: Sequence[Range]) -> list[memoryview]:
        """In this thread: all that a filesystem without coroutines can do."""
        requests, began = self._planned(ranges), time.monotonic()
        opened = PinnedObject(self.uri, self._client().path, self.identity)
        with self._change_noticed(opened):
            answers = self._asked(opened, requests) if requests else []
        self._count(ranges, answers, time.monotonic() - began)
        return assemble(ranges, requests, answers)

    def _asked(self, opened: PinnedObject, requests: Sequence[Range]) -> list[bytes]:
        scope = current_scope()

        def ask() -> list[bytes]:
            if scope:
                scope.check()
            self.stats.add(requests=len(requests))
            answers = cat_ranges(self._client().fs, opened, requests)
            return [check_length(self.uri, *each) for each in zip(requests, answers, strict=True)]

        return retried(self.uri, ask, deadline_seconds=self.settings.deadline_seconds)

    @contextlib.contextmanager
    def _change_noticed(self, opened: PinnedObject) -> Iterator[None]:
        """What fails in the block because the object is another says so."""
        try:
            yield
        except StorageError as error:
            if suggests_change(error):
                self._look_again(opened, error)
            raise

    def _look_again(self, opened: PinnedObject, error: StorageError) -> None:
        """ObjectChangedError or ObjectNotFoundError if that is what made a read fail."""
        try:
            opened.check(filesystem.identity_from_info(self._info(tries=1)))
        except (ObjectChangedError, ObjectNotFoundError) as found:
            raise found from error
        except StorageError:
            return  # the first error says more

    def _info(self, *, tries: int = 0) -> dict[str, Any]:
        """What the store says of the object now, asked with the same care as for its bytes."""
        client = self._client()
        return fetch_object_info(
            client.fs, client.path, self.uri, self.settings, in_flight=self._in_flight(), tries=tries
        )

    def _in_flight(self) -> int:
        return filesystem.max_in_flight(self.uri, self.storage_options, self.settings)

    def _client(self) -> Client:
        # fsspec gives all threads of a process the same asynchronous filesystem, and each its own of the others.
        thread = threading.get_ident()
        found = self._clients.get((os.getpid(), 0)) or self._clients.get((os.getpid(), thread))
        if found is None:
            fs, path = filesystem.open_filesystem(self.uri, self.storage_options, reading=self._in_flight())
            found = self._clients.setdefault((os.getpid(), 0 if type(fs).async_impl else thread), Client(fs, path))
        return found

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}, "stats": ObjectStats(self.stats.store)}

    def __repr__(self) -> str:
        # Without the options: they hold secrets.
        return f"FsspecObject({self.uri!r})"
