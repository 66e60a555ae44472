"""HEAD and list requests: what a store reports of objects, with the retries, deadline and cancellation of a read.

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
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from binidx.errors import StorageError
from binidx.storage.requests.retries import retried
from binidx.storage.requests.scheduler import ReadRequests, scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.store_protocols import BlockingStore, ListableStore, ListRequest, ObjectInfo, Store
from binidx.storage.stores.driver_errors import http_status
from binidx.storage.stores.identity import is_weak
from binidx.storage.stores.registry import open_store
from binidx.storage.threads import REQUESTS

Response = TypeVar("Response")
PAGE_KEYS = 1000
NAMES_AT_ONCE = 900
"""Names of one list. A page then goes beyond them, if there is nothing else."""

REFUSALS = {401, 403, 404, 405, 410}
LONGEST_SECONDS = 10.0
"""Deadline of `find_object`. Opening an object that must exist then reports a store that cannot be reached."""


@dataclass(frozen=True)
class Found:
    """An object that exists.

    Attributes:
        info: what the store reported.
        end: the last bytes of the object, if they came along.
    """

    info: ObjectInfo
    end: bytes = b""


def recorded_object(uri: str, identity: Mapping[str, Any] | None) -> Found | None:
    """Return what opens an object of a recorded identity without a HEAD request; None if that proves no content."""
    if not identity or not ({"etag", "generation", "version"} & identity.keys()) or is_weak(identity.get("etag")):
        return None
    return Found(ObjectInfo(uri, int(identity["size"]), dict(identity)))


def find_object(uri: str, storage_options: Mapping[str, Any] | None = None, *, end_bytes: int = 0) -> Found | None:
    """Return the object of this URI, or None if the store reports none.

    Args:
        end_bytes: how many of its last bytes to bring along, where the store sends them by the same request.

    Raises:
        StorageError: the store cannot be reached.
    """
    settings = ReadSettings.of(storage_options)
    brief = replace(settings, deadline_seconds=min(settings.deadline_seconds, LONGEST_SECONDS))
    try:
        return head(open_store(uri, storage_options), uri, brief, tail_bytes=end_bytes, folders=False)
    except StorageError as error:
        if is_absent(error):
            return None
        raise


def is_absent(error: StorageError) -> bool:
    """Return whether an object could not be opened because there is none, as far as the store reports."""
    cause = error.__cause__
    refused = isinstance(cause, PermissionError) or http_status(cause) in REFUSALS
    return refused or isinstance(error, FileNotFoundError)


def head(store: Store, uri: str, settings: ReadSettings, *, tail_bytes: int = 0, folders: bool = True) -> Found:
    """Return what a store reports of an object now, never from a listing that was cached earlier.

    Args:
        folders: if there is no object, look for a folder of this name, and report that.

    Raises:
        ObjectNotFoundError: there is no such object, or it is a folder.
        StorageError: the store does not report the size, or another failure.
    """
    if isinstance(store, BlockingStore):
        return Found(retried(uri, partial(store.head_now, uri), deadline_seconds=settings.deadline_seconds))
    request = partial(store.head, uri, tail_bytes=tail_bytes, folders=folders)  # type: ignore[attr-defined]
    return Found(*request_with_retries(store, uri, request, settings))


def request_with_retries(
    store: Store, uri: str, request: Callable[[], Coroutine[Any, Any, Response]], settings: ReadSettings
) -> Response:
    """Return the result of a coroutine that sends one request, scheduled and retried like a read.

    Raises:
        StorageError: it failed for good; the message has the history of its tries.
        CancelledReadError: the scope of the caller was cancelled.
    """

    async def fetch(_start: int, _stop: int) -> Response:
        return await request()

    read = ReadRequests(uri, fetch, [(0, 0)], settings, opening=True)
    response: Response = scheduler(store.max_in_flight).run(read)[0]
    return response


def list_objects(
    uris: Sequence[str], storage_options: Mapping[str, Any] | None = None, *, most_pages: int
) -> dict[str, ObjectInfo] | None:
    """Return the objects of one folder, or of folders of a bucket, from the first to the last of these names.

    Args:
        uris: in the same bucket. Objects of other folders between them are listed too, unless they are all in one.
        most_pages: requests; there may be a million other objects.

    Returns:
        By URI. None: this store does not list in pages, or there are more of them.

    Raises:
        StorageError: the store refuses, or cannot be reached.
    """
    store, settings = open_store(uris[0], storage_options), ReadSettings.of(storage_options)
    if not isinstance(store, ListableStore):
        return None
    bucket, key = store.split(uris[0])
    root = uris[0][: len(uris[0]) - len(key)]
    prefix = os.path.commonprefix(uris)[len(root) :]  # noqa: RUF071 (of letters)
    delimiter = "/" if len({uri.rpartition("/")[0] for uri in uris}) == 1 else ""
    stretches = stretches_of([uri[len(root) :] for uri in uris])
    pages_each = most_pages // len(stretches)

    def list_stretch(first: str, stop: str) -> dict[str, ObjectInfo] | None:
        found: dict[str, ObjectInfo] = {}
        token = ""
        for _ in range(pages_each):
            page = partial(store.list_page, ListRequest(bucket, prefix, delimiter, first, token))
            infos, token = request_with_retries(store, root + first, page, settings)
            found |= {root + name: replace(info, uri=root + name) for name, info in infos.items()}
            if not token or max(infos, default="") > stop:
                return found
        return None

    lists = REQUESTS.map(lambda stretch: list_stretch(*stretch), stretches)
    return None if None in lists else {name: info for each in lists if each for name, info in each.items()}


def stretches_of(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return (after, up to) of the lists, made at the same time, that cover these names and all between them."""
    names = sorted(names)
    # All but the last letter: less than the name itself, which must be in the page.
    starts = [name[:-1] for name in names[::NAMES_AT_ONCE]]
    return [*pairwise([*starts, names[-1]])]
