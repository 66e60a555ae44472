"""What the store tells of an object, by one request: of those that may be there and mostly are not, or with their end.

The drivers ask more: s3fs and gcsfs list for a directory of that name, fsspec's http asks once more by GET. Where
listing is forbidden S3 says 403 of what is not there, so a store that refuses to tell is taken to have none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from binidx.errors import StorageError
from binidx.storage import filesystem
from binidx.storage.address import NotDirectError, key_of
from binidx.storage.cause import status_of
from binidx.storage.inquiry import ask_store, look_of, object_info, object_on_gcs
from binidx.storage.response_check import parse_content_range
from binidx.storage.settings import ReadSettings

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
    in_flight = filesystem.in_flight(uri, storage_options or {}, settings)
    fs, path = filesystem.open_filesystem(uri, storage_options or {}, reading=in_flight)
    look, look_once = filesystem.of_its_class(fs, LOOKS), look_of(fs, settings)
    brief = replace(settings, deadline_seconds=min(settings.deadline_seconds, LONGEST_SECONDS))
    try:
        if look is None:
            return Found(object_info(fs, path, uri, brief, in_flight=in_flight))

        async def ask() -> Found:
            if look_once is not None and not end_bytes:
                with contextlib.suppress(NotDirectError):
                    return Found(await look_once(fs, path))
            return await look(fs, path, end_bytes)

        found = ask_store(fs, uri, ask, brief, in_flight=in_flight)
        return Found(filesystem.checked_info(found.info, uri), found.end)
    except StorageError as error:
        if says_no(error):
            return None
        raise


def says_no(error: StorageError) -> bool:
    """Whether a store failed to open an object because there is none, as far as it tells us."""
    cause = error.__cause__
    refused = isinstance(cause, PermissionError) or status_of(cause) in REFUSALS
    return refused or isinstance(error, FileNotFoundError)


async def _ask_s3(fs: Any, path: str, end_bytes: int) -> Found:
    named, marks = key_of(fs, path), ("ETag", "LastModified", "VersionId")
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


Look = Callable[[Any, str, int], Coroutine[Any, Any, Found]]

LOOKS: dict[str, Look] = {"S3FileSystem": _ask_s3, "GCSFileSystem": _ask_gcs, "HTTPFileSystem": _ask_http}
"""class of the filesystem, or a base of it -> how to ask by one request"""
