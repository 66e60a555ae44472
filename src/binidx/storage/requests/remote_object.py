"""Objects of stores: find, list and read them by few requests with retries, a deadline and cancellation.

Drivers wait 15 s to minutes for a store that accepts connections and never responds, and half a minute for one that
accepts none. They also send more requests: they list for a folder of that name, or send a GET as well. One request
suffices to see whether an object exists.

Where listing is forbidden S3 responds 403 for an object that does not exist, so `find_object` takes a store that
refuses for one that has no such object.

`list_objects` asks for many objects of a folder: one request for a thousand, where HEAD requests would be a thousand.

    names, sorted                   p000.bin p000.idx ... p499.idx    p500.bin ... p999.idx
    lists, at the same time         after p000.bi, up to p500.bi      after p500.bi, up to p999.idx

S3 and GCS list the current objects (S3 since 2020). A list is not one moment: an object that was replaced while the
list was made may be in it in its old version beside new ones. `format.prefix_listing` compares two lists for that.

`RemoteObject` reads ranges of one object, pinned to the version that was opened.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import stat
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from binidx.errors import ObjectChangedError, ObjectNotFoundError, ShortReadError, StorageError, redacted
from binidx.forks import cached_property
from binidx.json_models import MAX_BYTES, JsonFile
from binidx.registries import Registrations
from binidx.storage.interfaces import Bytes, PendingRead, Range, VersionMark
from binidx.storage.location import Location
from binidx.storage.ranges import assemble, check_ranges, coalesce, provides
from binidx.storage.requests.cancellation import current_scope
from binidx.storage.requests.scheduler import ReadRequests, retried, scheduler, send_blocking
from binidx.storage.settings import ReadSettings
from binidx.storage.stats import ObjectStats, note_request, open_requests
from binidx.storage.store_protocols import BlockingStore, ListableStore, ListRequest, ObjectInfo, ReadableStore
from binidx.storage.stores.driver_errors import FalseAbsenceError, hidden_cause, http_status, storage_errors
from binidx.storage.stores.identity import check_unchanged, proves_content
from binidx.storage.stores.local import mark_to_pickle
from binidx.storage.threads import REQUESTS

logger = logging.getLogger(__name__)
Response = TypeVar("Response")
Request = Callable[[], Coroutine[Any, Any, Response]]
PAGE_KEYS = 1000
NAMES_AT_ONCE = 900
"""Names for which one listing is made: fewer than the keys of a page, so one page suffices if nothing else is there."""

REFUSALS = {401, 403, 404, 405, 410}


@dataclass(frozen=True, slots=True)
class Found:
    """An object that exists.

    Attributes:
        info: what the store reported.
        end: the last bytes of the object, if they came along.
    """

    info: ObjectInfo
    end: bytes = b""


def recorded_object(uri: str, identity: Mapping[str, Any] | None) -> Found | None:
    """Return the `Found` that opens an object of a recorded identity without a HEAD request; None if it proves nothing.

    An identity of size and time, or with a weak ETag, does not prove the content.

    Args:
        identity: of the object when it was recorded; None: not known.
    """
    if not identity or not proves_content(identity):
        return None
    return Found(ObjectInfo(uri, int(identity["size"]), dict(identity)))


def find_object(location: Location, *, end_bytes: int = 0, refused_is_absent: bool = True) -> Found | None:
    """Return the object at a location; None if the store reports that there is none, or refuses access to it.

    Args:
        end_bytes: how many of the object's last bytes to fetch, too, where the same request can do that.
        refused_is_absent: False: a refusal is an error.

    Raises:
        StorageError: the store cannot be reached.
    """
    settings, uri, store = location.settings, location.uri, location.store

    async def request() -> Found | None:
        try:
            return Found(*await store.head(uri, tail_bytes=end_bytes, folders=False))
        except Exception as error:
            if _is_absence(error) or (refused_is_absent and _is_refusal(error)):
                return None
            raise

    if not isinstance(store, BlockingStore):
        return request_with_retries(location, request, settings)
    try:
        return Found(head(location, settings))
    except StorageError as error:
        if is_absent(error) and (refused_is_absent or isinstance(error, FileNotFoundError)):
            return None
        raise


def is_absent(error: StorageError) -> bool:
    """Return whether an object could not be opened because there is none, as far as the store reports."""
    return isinstance(error, FileNotFoundError) or _is_refusal(error.__cause__)


def _is_absence(error: BaseException) -> bool:
    return http_status(error) == 404 or (isinstance(error, FileNotFoundError) and hidden_cause(error) is None)


def _is_refusal(error: BaseException | None) -> bool:
    return isinstance(error, PermissionError) or http_status(error) in REFUSALS


def head(location: Location, settings: ReadSettings, *, folders: bool = True) -> ObjectInfo:
    """Return the store's present report of an object, never one from a cached listing.

    Args:
        settings: those of the location, or shorter deadlines.
        folders: if there is no object, look for a folder of this name, so that the error names it as one.

    Raises:
        ObjectNotFoundError: there is no such object, or it is a folder.
        StorageError: the store does not report the size, or another failure.
    """
    uri, store = location.uri, location.store
    if isinstance(store, BlockingStore):
        return retried(location, lambda: store.head_now(uri), settings, opening=True)
    request: Request[tuple[ObjectInfo, bytes]] = partial(store.head, uri, folders=folders)
    return request_with_retries(location, request, settings)[0]


def request_with_retries(location: Location, request: Request[Response], settings: ReadSettings) -> Response:
    """Return the result of a coroutine that sends one request, scheduled and retried like a read.

    Args:
        location: of the object in messages, and of the store.
        request: makes the coroutine, once for each try.
        settings: those of the location, or shorter deadlines.

    Raises:
        StorageError: it failed for good; the message has the history of its tries.
        CancelledReadError: the scope of the caller was cancelled.
    """

    read = ReadRequests(location, lambda _start, _stop: request(), [(0, 0)], settings, opening=True)
    response: Response = scheduler(location.store.max_in_flight).run(read)[0]
    return response


def object_exists(location: Location) -> bool:
    """Return whether there is an object now, without the use of cached listings. A directory is no object."""
    if (path := location.local_path) is not None:
        with storage_errors(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return not stat.S_ISDIR(os.stat(path).st_mode)
        return False
    try:
        head(location, location.settings, folders=False)
    except ObjectNotFoundError:
        return False
    return True


def object_identity(location: Location) -> dict[str, Any]:
    """Return the present identity of an object, in JSON values: `size`, and `etag`, `generation`, `version` or `mtime`.

    Raises:
        ObjectNotFoundError: there is no such object.
    """
    return dict(head(location, location.settings).identity)


SMALL_DOCUMENT = JsonFile(object)


def read_small(location: Location, *, patient: bool = True) -> bytes | None:
    """Return a small object as it is now, by one request; None if there is none.

    Args:
        patient: as in `send_blocking`.

    Raises:
        FormatError: it is larger than any small object.
    """
    uri, path = location.uri, location.local_path

    def read() -> bytes | None:
        try:
            if path is not None:
                SMALL_DOCUMENT.check_size(os.path.getsize(path), uri)
                return Path(path).read_bytes()
            data: bytes = location.store.get(uri, MAX_BYTES)
            SMALL_DOCUMENT.check_size(len(data), uri)
            return data
        except FileNotFoundError as error:
            if hidden_cause(error):
                raise
            return None

    with storage_errors(uri):
        return send_blocking(location, read, patient=patient and path is None)


def list_objects(locations: Sequence[Location], *, most_pages: int) -> dict[str, ObjectInfo] | None:
    """List the objects of a bucket from the first to the last of these names.

    Args:
        locations: names in one bucket. If all are in one folder, only objects of that folder are listed.
        most_pages: most requests, as there may be a million other objects between the names.

    Returns:
        The objects by URI. None if the store does not list in pages, or there are more pages.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    store, uris = locations[0].store, [location.uri for location in locations]
    if not isinstance(store, ListableStore):
        return None
    bucket, key = store.split(uris[0])
    root = uris[0][: len(uris[0]) - len(key)]
    prefix = os.path.commonprefix(uris)[len(root) :]  # noqa: RUF071 (of letters)
    delimiter = "/" if len({uri.rpartition("/")[0] for uri in uris}) == 1 else ""
    stretches = stretches_of([uri[len(root) :] for uri in uris])
    pages_each = most_pages // len(stretches)

    def list_stretch(first: str, stop: str) -> dict[str, ObjectInfo] | None:
        start = locations[0].beside(root + first)
        listed: dict[str, ObjectInfo] = {}
        token = ""
        for _ in range(pages_each):
            page = partial(start.store.list_page, ListRequest(bucket, prefix, delimiter, first, token))
            infos, token = request_with_retries(start, page, start.settings)
            for name, info in infos.items():  # `replace` takes three times as long
                listed[root + name] = ObjectInfo(root + name, info.size, info.identity, info.md5, info.mark)
            if not token or max(infos, default="") > stop:
                return listed
        return None

    lists = REQUESTS.map(lambda stretch: list_stretch(*stretch), stretches)
    return None if None in lists else {name: info for listed in lists if listed for name, info in listed.items()}


def list_page(start: Location) -> list[str]:
    """Return the URIs of the first objects of a folder whose names begin so, at most a page; [] if none can be listed.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    if not isinstance(start.store, ListableStore):
        return []
    folder = start.uri[: len(start.uri) - len(start.name)]
    bucket, key = start.store.split(folder + "x")
    request = partial(start.store.list_page, ListRequest(bucket, key[:-1] + start.name, "/", ""))
    infos, _ = request_with_retries(start, request, start.settings)
    return [folder + name.rpartition("/")[2] for name in infos]


def stretches_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (after, up to) of listings, to be made at the same time, that cover these names and all between them."""
    names = sorted(names)
    # All but the last letter: less than the name itself, which must be in the page.
    starts = [name[:-1] for name in names[::NAMES_AT_ONCE]]
    return [*pairwise([*starts, names[-1]])]


# At 25 ms to the first byte and 100 MB/s a connection is 77 % busy with 8 MiB parts, 29 % with 1 MiB.
MAX_REQUEST = 8 << 20

CHANGE_CHECK_SECONDS = 10.0
"""Longest time to find out whether a failed read has its reason in a changed object."""


class RemoteObject:
    """Reader of an object of a store: one read is a few coalesced requests, sent at once and retried if need be.

    Args:
        location: of an object with a scheme.
        info: an earlier report of the store, so that no HEAD request is sent; reads are pinned to this version.

    Raises:
        MissingDriverError, ObjectNotFoundError, StorageError: the object cannot be opened.
        ShortReadError: on read, responses do not belong to their range, again and again: `stores.identity`.
        ObjectChangedError: on read, the object is not the version that was opened, as far as the store reports.
        CancelledReadError: on read, the scope of the read was cancelled: `cancellation`.
        StorageError: on read, requests failed for good; the message has their history.

    The size and `identity` (ETag, generation or time) are those at opening, also in a pickle. The store notices a fork.
    Unpickling sends no request.
    """

    def __init__(self, location: Location, *, info: ObjectInfo | None = None) -> None:
        self.location, self.uri, self.settings = location, location.uri, location.settings
        opened = info or head(location, self.settings)
        if opened.identity.keys() == {"size"} and opened.mark is None:
            warn_of_versions(redacted(location.place))
        has_date = isinstance(opened.mark, int)
        self.info = replace(opened, mark=None) if has_date and not self.settings.check_dates else opened
        self.size, self.identity = self.info.size, self.info.identity
        open_requests(location.place)

    @cached_property
    def stats(self) -> ObjectStats:
        """Counters of this reader in this process."""
        made: ObjectStats = vars(self).setdefault("stats", ObjectStats(self.location.store.prices()))
        return made  # of threads that make them at once, the first

    @property
    def mark(self) -> VersionMark | None:
        """Mark of the version that was opened."""
        return self.info.mark

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
        if not self.location.store.pins(self.info):
            check_unchanged(self.info, head(self.location, self.settings))

    def begin(self, ranges: Sequence[Range]) -> contextlib.AbstractContextManager[PendingRead] | None:
        """Return a context manager that sends the requests of a `read` on entering; None if the store blocks.

        So one thread can wait for many reads.

        Raises:
            ShortReadError: on entering, a range leaves the object.
            CancelledReadError: on entering, the scope of this thread is cancelled. `result` raises other errors.
        """
        store = self.location.store
        return self._begun(store, ranges) if provides(store, ReadableStore) else None

    @contextlib.contextmanager
    def _begun(self, store: ReadableStore, ranges: Sequence[Range]) -> Iterator[PendingRead]:
        requests, info = self._planned(ranges), self.info

        async def fetch(start: int, stop: int) -> Bytes:
            try:
                return await store.fetch(info, (start, stop))
            except Exception as error:
                if not _is_absence(error):
                    raise
            check_unchanged(info, (await store.head(info.uri, folders=True))[0])
            raise FalseAbsenceError("404 for a range of an object that a HEAD request finds")

        read = ReadRequests(self.location, fetch, requests, self.settings)
        began = time.monotonic()
        if not requests:
            read.over, read.ended = True, began
            read.outcome.set_result([])
        try:
            with scheduler(store.max_in_flight).sending(read) if requests else contextlib.nullcontext():
                yield PendingRead(read.outcome, partial(self._result, read, ranges))
        finally:
            self.stats.add(requests=read.sent, retries=read.retries, hedges=read.hedges, refused=read.refused)
            if read.over and read.outcome.exception() is None:
                self._count(ranges, read.responses, read.ended - began)

    def _result(self, read: ReadRequests, ranges: Sequence[Range]) -> list[memoryview]:
        with self._changes_reported():
            return assemble(ranges, read.ranges, read.outcome.result())

    def _planned(self, ranges: Sequence[Range]) -> list[Range]:
        check_ranges(self.uri, self.size, ranges)
        return coalesce(ranges, max_gap=self.location.store.max_gap, max_request=MAX_REQUEST)

    def _count(self, ranges: Sequence[Range], answers: Sequence[Bytes], seconds: float) -> None:
        self.stats.add(
            bytes_asked=sum(stop - start for start, stop in ranges), bytes_moved=sum(map(len, answers)), seconds=seconds
        )

    def _read_blocking(self, ranges: Sequence[Range]) -> list[memoryview]:
        """Read in this thread, as the store has no coroutines."""
        assert isinstance(self.location.store, BlockingStore)
        requests, store, scope, began = self._planned(ranges), self.location.store, current_scope(), time.monotonic()

        def fetch() -> list[bytes]:
            if scope:
                scope.check()
            self.stats.add(requests=len(requests))
            began = time.monotonic()
            answers = store.fetch_now(self.info, requests)
            note_request(self.location.place, time.monotonic() - began, sum(map(len, answers)))
            return answers

        with self._changes_reported():
            answers = retried(self.location, fetch, self.settings) if requests else []
        self._count(ranges, answers, time.monotonic() - began)
        return assemble(ranges, requests, answers)

    @contextlib.contextmanager
    def _changes_reported(self) -> Iterator[None]:
        """Raise ObjectChangedError or ObjectNotFoundError for a failure in the block that a changed object explains."""
        try:
            yield
        except StorageError as error:
            if suggests_change(error):
                try:
                    seconds = min(self.settings.deadline_seconds, CHANGE_CHECK_SECONDS)
                    brief = replace(self.settings, deadline_seconds=seconds, outage_seconds=seconds)
                    check_unchanged(self.info, head(self.location, brief))
                except ObjectNotFoundError as reason:
                    way = self.info.remedy and f"; {self.info.remedy}"
                    raise ObjectNotFoundError(f"{reason}{way}") from error
                except ObjectChangedError as reason:
                    raise reason from error
                except StorageError:
                    pass  # the first error has more details
            raise

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "stats"}
        info = replace(self.info, mark=mark_to_pickle(self.uri, self.info.mark))
        return {**state, "info": info, "registrations": Registrations()}

    def __repr__(self) -> str:
        # Without the options: they hold secrets.
        return f"RemoteObject({redacted(self.uri)}, {self.size:,} bytes)"


@functools.cache
def warn_of_versions(store: str) -> None:
    """Log, once for a store, that it reports neither versions nor dates."""
    logger.warning(
        "%s: sends no ETag, version or Last-Modified; an object that is replaced by one of equal size while it is read "
        "is not noticed",
        store,
    )


def suggests_change(error: StorageError) -> bool:
    """Return whether a read may have failed because the object changed: 404, 412, past the end, too few bytes."""
    cause = error.__cause__
    past_the_end = isinstance(cause, OSError) and cause.errno == errno.EINVAL
    gone_or_short = isinstance(error, (ShortReadError, FileNotFoundError))
    return past_the_end or gone_or_short or http_status(cause) in (404, 412, 416)
