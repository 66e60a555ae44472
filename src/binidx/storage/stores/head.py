"""A question to a store about an object, asked with the care of a read: again while that helps, within a deadline.

Drivers wait long for a store that takes connections and never answers: s3fs 15 s each of its tries, the others minutes;
and gcsfs half a minute for one that takes none.

Whether an object is there is asked by one request: a HEAD of S3 to a signed URL, an entry of GCS's JSON. The drivers
ask more, and list for a directory of that name, which they do here only for who wants to know.

What the store tells of an object, by one request: of those that may be there and mostly are not, or with their end.

The drivers ask more: s3fs and gcsfs list for a directory of that name, fsspec's http asks once more by GET. Where
listing is forbidden S3 says 403 of what is not there, so a store that refuses to tell is taken to have none.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from binidx.errors import StorageError
from binidx.storage.requests.retries import HTTPStatusError, PendingRead, passes, retried
from binidx.storage.requests.scheduler import scheduler
from binidx.storage.settings import ReadSettings
from binidx.storage.stores import filesystem
from binidx.storage.stores.address import NotDirectError, object_key
from binidx.storage.stores.driver_errors import driver_text, http_status
from binidx.storage.stores.response_check import parse_content_range
from binidx.storage.stores.signed import ask_signed
from binidx.storage.stores.transports import has_coroutines

Told = TypeVar("Told")


def request_with_retries(
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


def fetch_object_info(
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

    return filesystem.checked_info(request_with_retries(fs, uri, told, settings, in_flight=in_flight, tries=tries), uri)


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
        answer = await ask_signed(fs, "head_object", object_key(fs, path), good=(200, 404))
    except (NotDirectError, HTTPStatusError):
        raise
    except Exception as error:
        raise NotDirectError(driver_text(error)) from error
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


REFUSALS = {401, 403, 404, 405, 410}
LONGEST_SECONDS = 10.0
"""Whoever cannot be reached by then will be missed by who opens the object that must be there."""


@dataclass(frozen=True)
class Found:
    """What the store told.

    Attributes:
        info: as fsspec's `info` would.
        end: the last bytes of the object, if they came along.
    """

    info: dict[str, Any]
    end: bytes = b""


def found_of(identity: Mapping[str, Any] | None) -> Found | None:
    """What opens an object of this identity without asking for it, and pins it; None: it does not tell one content."""
    marks = {"ETag": "etag", "generation": "generation", "VersionId": "version"}
    told = {name: identity[mark] for name, mark in marks.items() if mark in identity} if identity else {}
    if not told or str(told.get("ETag", "")).startswith("W/"):
        return None
    return Found({"size": (identity or {})["size"], **told})


def look_up(uri: str, storage_options: Mapping[str, Any] | None = None, *, end_bytes: int = 0) -> Found | None:
    """What there is under this URI; None where the store tells of nothing.

    Args:
        end_bytes: how much of its end to bring along, where the store does that in the same request (S3, HTTP).

    Raises:
        StorageError: the store cannot be reached.
    """
    settings = ReadSettings.of(storage_options)
    # As it is opened to be read, so that both share their connections.
    in_flight = filesystem.max_in_flight(uri, storage_options or {}, settings)
    fs, path = filesystem.open_filesystem(uri, storage_options or {}, reading=in_flight)
    look, look_once = filesystem.of_its_class(fs, LOOKS), look_of(fs, settings)
    brief = replace(settings, deadline_seconds=min(settings.deadline_seconds, LONGEST_SECONDS))
    try:
        if look is None:
            return Found(fetch_object_info(fs, path, uri, brief, in_flight=in_flight))

        async def ask() -> Found:
            if look_once is not None and not end_bytes:
                with contextlib.suppress(NotDirectError):
                    return Found(await look_once(fs, path))
            return await look(fs, path, end_bytes)

        found = request_with_retries(fs, uri, ask, brief, in_flight=in_flight)
        return Found(filesystem.checked_info(found.info, uri), found.end)
    except StorageError as error:
        if says_no(error):
            return None
        raise


def says_no(error: StorageError) -> bool:
    """Whether a store failed to open an object because there is none, as far as it tells us."""
    cause = error.__cause__
    refused = isinstance(cause, PermissionError) or http_status(cause) in REFUSALS
    return refused or isinstance(error, FileNotFoundError)


async def _ask_s3(fs: Any, path: str, end_bytes: int) -> Found:
    named, marks = object_key(fs, path), ("ETag", "LastModified", "VersionId")
    if not end_bytes:
        told = await fs._call_s3("head_object", fs.kwargs, **named)
        return Found({"size": told["ContentLength"], **{name: told.get(name) for name in marks}})
    told = await fs._call_s3("get_object", fs.kwargs, **named, Range=f"bytes=-{end_bytes}")
    size, part_bytes = _sizes(told.get("ContentRange"), told["ContentLength"])
    async with told["Body"] as body:
        end = await body.read() if part_bytes else b""
    return Found({"size": size, **{name: told.get(name) for name in marks}}, end if len(end) == part_bytes else b"")


async def _ask_http(fs: Any, path: str, end_bytes: int) -> Found:
    session = await fs.set_session()
    method, wanted = ("GET", {"Range": f"bytes=-{end_bytes}"}) if end_bytes else ("HEAD", {})
    headers = {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity", **wanted}
    options = {"allow_redirects": True, **fs.kwargs, "headers": headers}
    async with session.request(method, fs.encode_url(path), **options) as answer:
        answer.raise_for_status()
        length = answer.headers.get("Content-Length")
        size, part_bytes = _sizes(answer.headers.get("Content-Range"), None if length is None else int(length))
        end = await answer.read() if part_bytes else b""
        info = {"size": size, "ETag": answer.headers.get("ETag")}
        return Found(info, end if len(end) == part_bytes else b"")


async def _ask_gcs(fs: Any, path: str, end_bytes: int) -> Found:
    """Without the end: what tells the generation brings no bytes."""
    return Found(await object_on_gcs(fs, path))


def _sizes(content_range: str | None, length: int | None) -> tuple[int | None, int]:
    """Bytes of the object, and of its end in this answer: none where all of it is sent, which is not waited for."""
    if (found := parse_content_range(content_range)) is None:
        return length, 0
    (start, stop), size = found
    return size, stop - start if stop == size else 0


LookUp = Callable[[Any, str, int], Coroutine[Any, Any, Found]]
LOOKS: dict[str, LookUp] = {"S3FileSystem": _ask_s3, "GCSFileSystem": _ask_gcs, "HTTPFileSystem": _ask_http}
"""class of the filesystem, or a base of it -> how to ask by one request"""
