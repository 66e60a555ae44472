"""A question to a store about an object, asked with the care of a read: again while that helps, within a deadline.

Drivers wait long for a store that takes connections and never answers: s3fs 15 s each of its tries, the others minutes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from binidx.storage import filesystem
from binidx.storage.pending import PendingRead
from binidx.storage.retries import retried
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
    told = ask_store(fs, uri, lambda: fs._info(path), settings, in_flight=in_flight, tries=tries)
    return filesystem.checked_info(told, uri)
