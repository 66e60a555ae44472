"""Reader of an object of any store but mapped local files, by few concurrent range requests."""

from __future__ import annotations

import contextlib
import errno
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from binidx.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError
from binidx.storage.interfaces import Range
from binidx.storage.ranges import assemble, check_ranges, coalesce
from binidx.storage.requests.cancellation import current_scope
from binidx.storage.requests.metadata import head
from binidx.storage.requests.retries import retried
from binidx.storage.requests.scheduler import ReadRequests, scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.stats import ObjectStats
from binidx.storage.store_protocols import BlockingStore, ObjectInfo, ReadableStore
from binidx.storage.stores.driver_errors import http_status
from binidx.storage.stores.identity import check_unchanged
from binidx.storage.stores.registry import open_store, prices_of

# At 25 ms to the first byte and 100 MB/s a connection is 77 % busy with 8 MiB parts, 29 % with 1 MiB.
MAX_REQUEST = 8 << 20

CHANGE_CHECK_SECONDS = 10.0
"""Longest time to find out whether a failed read has its reason in a changed object."""


@dataclass(frozen=True)
class Begun:
    """A read whose requests are sent: `result` waits and returns what `read` does; `outcome` is done once it ends."""

    outcome: Future[list[bytes]]
    result: Callable[[], list[memoryview]]


class RemoteObject:
    """Reader of an object of a store: one read is a few coalesced requests, sent at once and retried if need be.

    Args:
        uri: with a scheme; chains such as simplecache::s3://bucket/key work.
        storage_options: fsspec's own, and ours under the key "binidx": `ReadSettings`.
        info: what the store has just reported, so that no HEAD request is sent; reads are pinned to it.

    Raises:
        MissingDriverError, ObjectNotFoundError, StorageError: the object cannot be opened.
        ShortReadError: on read, responses do not belong to their range, again and again: `stores.identity`.
        ObjectChangedError: on read, the object is not the version that was opened, as far as the store reports.
        CancelledReadError: on read, its scope was cancelled: `cancellation`.
        StorageError: on read, requests failed for good; the message has their history.

    The size and `identity` (ETag, generation or time) are those at opening, also in a pickle. The store notices a fork.
    Unpickling sends no request.
    """

    def __init__(
        self, uri: str, storage_options: Mapping[str, Any] | None = None, *, info: ObjectInfo | None = None
    ) -> None:
        self.uri = uri
        self.storage_options = dict(storage_options or {})
        self.settings = ReadSettings.of(storage_options)
        self.stats = ObjectStats(prices_of(uri))
        self.info = info or head(self.store, uri, self.settings).info
        self.size, self.identity = self.info.size, dict(self.info.identity)

    @functools.cached_property
    def store(self) -> ReadableStore | BlockingStore:
        """Store of the object; opened again after unpickling, at the first read."""
        store: ReadableStore | BlockingStore = open_store(self.uri, self.storage_options)
        return store

    def read(self, ranges: Sequence[Range]) -> list[memoryview]:
        begun = self.begin(ranges)
        if begun is None:
            return self._read_blocking(ranges)
        with begun as read:
            return read.result()

    def check_unchanged(self) -> None:
        """Compare the stored object with the opened one by a HEAD request, unless the responses are pinned to it.

        Raises:
            ObjectChangedError, ObjectNotFoundError: it is another version, or absent.
        """
        if not self.store.pins(self.info):
            check_unchanged(self.info, head(self.store, self.uri, self.settings).info.identity)

    def begin(self, ranges: Sequence[Range]) -> contextlib.AbstractContextManager[Begun] | None:
        """Send the requests of a `read`, so that one thread waits for many reads; None if the store blocks.

        Raises:
            ShortReadError: a range outside the object.
            CancelledReadError: its scope is cancelled already; other errors are raised by the result.
        """
        return self._begun(self.store, ranges) if isinstance(self.store, ReadableStore) else None

    @contextlib.contextmanager
    def _begun(self, store: ReadableStore, ranges: Sequence[Range]) -> Iterator[Begun]:
        requests, info = self._planned(ranges), self.info

        async def fetch(start: int, stop: int) -> bytes:
            return await store.fetch(info, (start, stop))

        read = ReadRequests(self.uri, fetch, requests, self.settings)
        began = time.monotonic()
        if not requests:
            read.end()
        try:
            with scheduler(store.max_in_flight).sending(read) if requests else contextlib.nullcontext():
                yield Begun(read.outcome, functools.partial(self._result, read, ranges))
        finally:
            self.stats.add(requests=read.sent, retries=read.retries, hedges=read.hedges)
            if read.over and read.outcome.exception() is None:
                self._count(ranges, read.answers, read.ended - began)

    def _result(self, read: ReadRequests, ranges: Sequence[Range]) -> list[memoryview]:
        with self._changes_reported():
            return assemble(ranges, read.ranges, read.outcome.result())

    def _planned(self, ranges: Sequence[Range]) -> list[Range]:
        check_ranges(self.uri, self.size, ranges)
        return coalesce(ranges, max_gap=self.store.max_gap, max_request=MAX_REQUEST)

    def _count(self, ranges: Sequence[Range], answers: Sequence[bytes], seconds: float) -> None:
        self.stats.add(
            bytes_asked=sum(stop - start for start, stop in ranges),
            bytes_moved=sum(map(len, answers)),
            seconds=seconds,
        )

    def _read_blocking(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Read in this thread, as the store has no coroutines."""
        assert isinstance(self.store, BlockingStore)
        requests, store, scope, began = self._planned(ranges), self.store, current_scope(), time.monotonic()

        def fetch() -> list[bytes]:
            if scope:
                scope.check()
            self.stats.add(requests=len(requests))
            return store.fetch_now(self.info, requests)

        with self._changes_reported():
            answers = retried(self.uri, fetch, deadline_seconds=self.settings.deadline_seconds) if requests else []
        self._count(ranges, answers, time.monotonic() - began)
        return assemble(ranges, requests, answers)

    @contextlib.contextmanager
    def _changes_reported(self) -> Iterator[None]:
        """Raise ObjectChangedError or ObjectNotFoundError for a failure in the block if that is its reason."""
        try:
            yield
        except StorageError as error:
            if suggests_change(error):
                try:
                    seconds = min(self.settings.deadline_seconds, CHANGE_CHECK_SECONDS)
                    found_now = head(self.store, self.uri, replace(self.settings, deadline_seconds=seconds)).info
                    check_unchanged(self.info, found_now.identity)
                except (ObjectChangedError, ObjectNotFoundError) as found:
                    raise found from error
                except StorageError:
                    pass  # the first error has more details
            raise

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "store"}
        return {**state, "stats": ObjectStats(self.stats.prices)}

    def __repr__(self) -> str:
        # Without the options: they hold secrets.
        return f"FsspecObject({self.uri!r})"


def suggests_change(error: StorageError) -> bool:
    """Return whether a read may have failed because the object changed: 404, 412, past the end, too few bytes."""
    cause = error.__cause__
    past_the_end = isinstance(cause, OSError) and cause.errno == errno.EINVAL
    gone_or_short = isinstance(error, (ShortReadError, FileNotFoundError))
    return past_the_end or gone_or_short or http_status(cause) in (404, 412, 416)
