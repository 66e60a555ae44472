"""HEAD requests: what a store reports of an object, with the retries, deadline and cancellation of a read.

Drivers wait 15 s to minutes for a store that accepts connections and never responds, and half a minute for one that
accepts none. They also send more requests: they list for a folder of that name, or send a GET as well. One request
suffices to see whether an object exists.

Where listing is forbidden S3 responds 403 for an object that does not exist, so `find_object` takes a store that
refuses for one that has no such object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from binidx.errors import StorageError
from binidx.storage.interfaces import BlockingStore, ObjectInfo, Store
from binidx.storage.requests.retries import ReadRequests, retried
from binidx.storage.requests.scheduler import scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.stores.driver_errors import http_status
from binidx.storage.stores.identity import is_weak
from binidx.storage.stores.registry import open_store
from binidx.storage.threads import io_loop

Response = TypeVar("Response")
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


def head(
    store: Store, uri: str, settings: ReadSettings, *, tail_bytes: int = 0, folders: bool = True, tries: int = 0
) -> Found:
    """Return what a store reports of an object now, never from a listing that was cached earlier.

    Args:
        folders: if there is no object, look for a folder of this name, and report that.
        tries: how often the request may fail, if less often than `retries` allow.

    Raises:
        ObjectNotFoundError: there is no such object, or it is a folder.
        StorageError: the store does not report the size, or another failure.
    """
    if isinstance(store, BlockingStore):
        look = functools.partial(store.head_now, uri)
        return Found(retried(uri, look, deadline_seconds=settings.deadline_seconds))

    async def request() -> Found:
        return Found(*await store.head(uri, tail_bytes=tail_bytes, folders=folders))  # type: ignore[attr-defined]

    return request_with_retries(store, uri, request, settings, tries=tries)


def request_with_retries(
    store: Store,
    uri: str,
    request: Callable[[], Coroutine[Any, Any, Response]],
    settings: ReadSettings,
    *,
    tries: int = 0,
) -> Response:
    """Return the result of a coroutine that sends one request, scheduled and retried like a read.

    Raises:
        StorageError: it failed for good; the message has the history of its tries.
        CancelledReadError: the scope of the caller was cancelled.
    """

    async def fetch(_start: int, _stop: int) -> Response:
        return await request()

    read = ReadRequests(
        uri,
        fetch,
        [(0, 0)],
        deadline_seconds=settings.deadline_seconds,
        hedge=settings.hedge,
        tries=tries,
        opening=True,
    )
    response: Response = scheduler(io_loop(), store.max_in_flight).run(read)[0]
    return response
