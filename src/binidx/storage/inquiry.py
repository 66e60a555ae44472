"""A question to a store about an object, asked with the care of a read: again while that helps, within a deadline.

Drivers wait long for a store that takes connections and never answers: s3fs 15 s each of its tries, the others minutes;
and gcsfs half a minute for one that takes none.

Whether an object is there is asked by one request: a HEAD of S3 to a signed URL, an entry of GCS's JSON. The drivers
ask more, and list for a directory of that name, which they do here only for who wants to know.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from binidx.storage import filesystem
from binidx.storage.address import NotDirectError, key_of
from binidx.storage.cause import text
from binidx.storage.pending import PendingRead
from binidx.storage.retries import HTTPStatusError, passes, retried
from binidx.storage.scheduler import scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.signed import ask_signed
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
    fs: Any, path: str, uri: str, settings: ReadSettings, *, in_flight: int, tries: int = 0, folders: bool = True
) -> dict[str, Any]:
    """What the store says of an object now, never from a listing remembered earlier.

    Args:
        folders: where there is no such object, look for a directory of that name, and say that it is one.

    Raises:
        ObjectNotFoundError: nothing there, or a directory.
        StorageError: the store does not tell the size, or another failure.
    """
    if not has_coroutines(fs, uri):
        ask = functools.partial(filesystem.object_info, fs, path, uri)
        return retried(uri, ask, deadline_seconds=settings.deadline_seconds)
    fs.invalidate_cache()
    look = look_of(fs, settings)

    async def told() -> dict[str, Any]:
        try:
            if look is not None:
                return await look(fs, path)
        except Exception as error:  # the driver looks again in its own ways, and tells it in its own words
            if passes(error) or (isinstance(error, FileNotFoundError) and not folders):
                raise
        info: dict[str, Any] = await fs._info(path)
        return info

    return filesystem.checked_info(ask_store(fs, uri, told, settings, in_flight=in_flight, tries=tries), uri)


Look = Callable[[Any, str], Coroutine[Any, Any, dict[str, Any]]]


def look_of(fs: Any, settings: ReadSettings) -> Look | None:
    """How to ask for one object by one request; None: as the driver does."""
    looks: dict[str, Look] = {"GCSFileSystem": object_on_gcs}
    if settings.fast is not False:
        looks["S3FileSystem"] = object_on_s3
    return filesystem.of_its_class(fs, looks)


async def object_on_s3(fs: Any, path: str) -> dict[str, Any]:
    """By a signed request.

    Raises:
        FileNotFoundError: the store has none.
        NotDirectError: it refuses, cannot be asked so, or is not reached: of which the driver tells in its own words.
            Or it tells no ETag: the time is its mark then, which the driver spells otherwise.
        HTTPStatusError: a status that passes.
    """
    try:
        answer = await ask_signed(fs, "head_object", key_of(fs, path), good=(200, 404))
    except (NotDirectError, HTTPStatusError):
        raise
    except Exception as error:
        raise NotDirectError(text(error)) from error
    if answer.status == 404:
        raise FileNotFoundError(path)
    size, etag, version = map(answer.headers.get, ("Content-Length", "ETag", "x-amz-version-id"))
    if size is None or not etag:
        raise NotDirectError("no size or no ETag")
    return {"size": int(size), "type": "file", "ETag": etag, "VersionId": version}


async def object_on_gcs(fs: Any, path: str) -> dict[str, Any]:
    """By one request: the driver asks six times within half a minute, also where nobody listens."""
    bucket, key, generation = fs.split_path(path)
    if not key:
        raise FileNotFoundError(path)
    request = inspect.unwrap(type(fs)._request)
    *_, told = await request(fs, "GET", "b/{}/o/{}", bucket, key, generation=generation)
    info: dict[str, Any] = fs._process_object(bucket, json.loads(told))
    return info
