"""A question to a store about an object, asked with the care of a read: again while that helps, within a deadline.

Drivers wait long for a store that takes connections and never answers: s3fs 15 s each of its tries, the others minutes;
and gcsfs half a minute for one that takes none.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from binidx.storage import filesystem
from binidx.storage.pending import PendingRead
from binidx.storage.retries import passes, retried
from binidx.storage.scheduler import scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.transports import has_coroutines

Told = TypeVar("Told")


def ask_store(
    fs: Any,
    uri: str,
    question: Callable[[], Coroutine[Any, Any, Told]],
    settings: ReadSettings,
    *,
    in_flight: int,
    tries: int = 0,
) -> Told:
    """What a coroutine of an asynchronous filesystem returns; it counts as one request.

    Args:
        tries: how often it may fail, where that is less than `retries` allow.

    Raises:
        StorageError: what was tried and what came of it.
        CancelledReadError: the scope of the caller was cancelled.
    """

    async def fetch(_start: int, _stop: int) -> Told:
        return await question()

    asked = PendingRead(
        uri,
        fetch,
        [(0, 0)],
        deadline_seconds=settings.deadline_seconds,
        hedge=settings.hedge,
        tries=tries,
        opening=True,
    )
    told: Told = scheduler(fs.loop, in_flight).run(asked)[0]
    return told


def object_info(
    fs: Any, path: str, uri: str, settings: ReadSettings, *, in_flight: int, tries: int = 0
) -> dict[str, Any]:
    """What the store says of an object now, never from a listing remembered earlier.

    Raises:
        ObjectNotFoundError: nothing there, or a directory.
        StorageError: the store does not tell the size, or another failure.
    """
    if not has_coroutines(fs, uri):
        ask = functools.partial(filesystem.object_info, fs, path, uri)
        return retried(uri, ask, deadline_seconds=settings.deadline_seconds)
    fs.invalidate_cache()
    on_gcs = "GCSFileSystem" in (each.__name__ for each in type(fs).__mro__)
    ask_it = functools.partial(_info_on_gcs, fs) if on_gcs else fs._info
    told = ask_store(fs, uri, lambda: ask_it(path), settings, in_flight=in_flight, tries=tries)
    return filesystem.checked_info(told, uri)


async def _info_on_gcs(fs: Any, path: str) -> dict[str, Any]:
    """As the driver's: what is refused, or not there, it looks for again in its own ways, by listing."""
    try:
        return await object_on_gcs(fs, path)
    except Exception as error:
        if passes(error):
            raise
    info: dict[str, Any] = await fs._info(path)
    return info


async def object_on_gcs(fs: Any, path: str) -> dict[str, Any]:
    """By one request: the driver asks six times within half a minute, also where nobody listens."""
    bucket, key, generation = fs.split_path(path)
    if not key:
        raise FileNotFoundError(path)
    request = inspect.unwrap(type(fs)._request)
    *_, told = await request(fs, "GET", "b/{}/o/{}", bucket, key, generation=generation)
    info: dict[str, Any] = fs._process_object(bucket, json.loads(told))
    return info
