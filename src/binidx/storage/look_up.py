"""What the store tells of an object, by one request: for those that may be there and mostly are not.

The drivers ask more: s3fs lists for a directory of that name, fsspec's http asks once more by GET. Where listing is
forbidden S3 says 403 of what is not there, so a store that refuses to tell is taken to have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from binidx.errors import StorageError
from binidx.storage import filesystem
from binidx.storage.retries import retried
from binidx.storage.settings import ReadSettings

REFUSALS = {401, 403, 404, 405, 410}

LONGEST_SECONDS = 10.0
"""Whoever cannot be reached by then will be missed by who opens the object that must be there."""


def look_up(uri: str, storage_options: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """What the store tells of the object under this URI, as fsspec's `info` would; None where it tells of none.

    Raises:
        StorageError: the store cannot be reached.
    """
    settings = ReadSettings.of(storage_options)
    # As it is opened to be read, so that both share their connections.
    in_flight = filesystem.in_flight(uri, storage_options or {}, settings)
    fs, path = filesystem.open_filesystem(uri, storage_options or {}, reading=in_flight)
    names = (each.__name__ for each in type(fs).__mro__)
    look = next((LOOKS[name] for name in names if name in LOOKS), filesystem.object_info)

    def ask() -> dict[str, Any]:
        with filesystem.storage_errors(uri):
            return filesystem.checked_info(look(fs, path, uri), uri)

    try:
        return retried(uri, ask, deadline_seconds=min(settings.deadline_seconds, LONGEST_SECONDS))
    except StorageError as error:
        if says_no(error):
            return None
        raise


def says_no(error: StorageError) -> bool:
    """Whether a store failed to open an object because there is none, as far as it tells us."""
    cause = error.__cause__
    refused = isinstance(cause, PermissionError) or filesystem.status_of(cause) in REFUSALS
    return refused or isinstance(error, FileNotFoundError)


def _ask_s3(fs: Any, path: str, uri: str) -> dict[str, Any]:
    bucket, key, _ = fs.split_path(path)
    found = fs.call_s3("head_object", fs.kwargs, Bucket=bucket, Key=key)
    return {"size": found["ContentLength"], **{name: found.get(name) for name in ("ETag", "LastModified", "VersionId")}}


def _ask_http(fs: Any, path: str, uri: str) -> dict[str, Any]:
    from fsspec.asyn import sync

    async def head() -> dict[str, Any]:
        session = await fs.set_session()
        given = {**fs.kwargs, "headers": {**fs.kwargs.get("headers", {}), "Accept-Encoding": "identity"}}
        async with session.head(fs.encode_url(path), **{"allow_redirects": True, **given}) as answer:
            answer.raise_for_status()
            size = answer.headers.get("Content-Length")
            return {"size": None if size is None else int(size), "ETag": answer.headers.get("ETag")}

    found: dict[str, Any] = sync(fs.loop, head)
    return found


LOOKS: dict[str, Callable[[Any, str, str], dict[str, Any]]] = {"S3FileSystem": _ask_s3, "HTTPFileSystem": _ask_http}
"""class of the filesystem, or a base of it -> how to ask by one request"""
