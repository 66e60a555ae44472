"""Ranges of the content that was seen at opening: once the object is another, the store itself says so.

    s3://            If-Match: ETag             412 once it was replaced
    http(s)://       If-Match: ETag             412 from a server that heeds it; a weak ETag may not be sent
    gs://            generation=N               404 once it was replaced, or the old bytes where versions are kept
    files, memory    time of the last change    looked at after each read
    the rest         nothing can be sent        a change shows only where it makes an answer short

What the store did not tell at opening cannot be asked for. Chains (simplecache::s3://) read their own copy, unpinned.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from binidx.errors import ObjectChangedError, ShortReadError, StorageError
from binidx.storage import filesystem
from binidx.storage.ranges import Range


@dataclass(frozen=True)
class Opened:
    """An object as it was when it was opened: `path` in its filesystem, `identity` of `filesystem.identity_of`."""

    uri: str
    path: str
    identity: Mapping[str, Any]

    def check(self, now: Mapping[str, Any]) -> None:
        """ObjectChangedError unless it still is."""
        if now != self.identity:
            raise ObjectChangedError(
                f"{self.uri}: changed since it was opened ({_in_words(self.identity)}, now {_in_words(now)}); "
                f"open it again"
            )


Fetch = Callable[[Any, Opened, Sequence[Range]], list[bytes]]


def fetch_pinned(fs: Any, opened: Opened, requests: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, as many requests at once as the filesystem's pool has connections.

    Raises:
        Whatever the filesystem raises. What is returned may be shorter or longer than asked.
    """
    names = (each.__name__ for each in type(fs).__mro__)
    fetch = next((FETCHES[name] for name in names if name in FETCHES), _fetch_any)
    return fetch(fs, opened, requests)


def smells_of_change(error: StorageError) -> bool:
    """Whether a read may have failed because the object is another: 404, 412, past the end, too few bytes."""
    cause = error.__cause__
    past_the_end = isinstance(cause, OSError) and cause.errno == errno.EINVAL
    gone_or_short = isinstance(error, (ShortReadError, FileNotFoundError))
    return past_the_end or gone_or_short or filesystem.status_of(cause) in (404, 412, 416)


def _in_words(identity: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in identity.items())


def _fetch_any(fs: Any, opened: Opened, requests: Sequence[Range], **condition: Any) -> list[bytes]:
    starts, stops = [start for start, _ in requests], [stop for _, stop in requests]
    # Exceptions would come back in the list as if they were data, were it not for on_error.
    options: dict[str, Any] = {"on_error": "raise", **condition}
    if fs.async_impl:
        options["batch_size"] = filesystem.concurrency(fs)
    answers: list[bytes] = fs.cat_ranges([opened.path] * len(requests), starts, stops, **options)
    return answers


def _fetch_s3(fs: Any, opened: Opened, requests: Sequence[Range]) -> list[bytes]:
    if "etag" not in opened.identity:
        return _fetch_any(fs, opened, requests)
    # cat_ranges cannot carry a condition; s3fs' own open files send theirs with this.
    from fsspec.asyn import sync
    from s3fs.core import _inner_fetch

    bucket, key, version = fs.split_path(opened.path)
    condition = {"IfMatch": opened.identity["etag"]}

    def fetch(where: Range) -> Awaitable[bytes]:
        answer: Awaitable[bytes] = _inner_fetch(fs, bucket, key, version, *where, condition)
        return answer

    answers: list[bytes] = sync(fs.loop, _at_once, fetch, requests, filesystem.concurrency(fs))
    return answers


async def _at_once(fetch: Callable[[Range], Awaitable[bytes]], requests: Sequence[Range], count: int) -> list[bytes]:
    """`fetch` of each range, `count` at a time; the first to fail stops the others."""
    answers = [b""] * len(requests)
    left = iter(enumerate(requests))

    async def work() -> None:
        for place, where in left:
            answers[place] = await fetch(where)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(count, len(requests))):
                group.create_task(work())
    except BaseExceptionGroup as failed:
        first = failed.exceptions[0]
        raise first from first.__cause__
    return answers


def _fetch_gcs(fs: Any, opened: Opened, requests: Sequence[Range]) -> list[bytes]:
    generation = opened.identity.get("generation")
    return _fetch_any(fs, opened, requests, **({"generation": generation} if generation else {}))


def _fetch_http(fs: Any, opened: Opened, requests: Sequence[Range]) -> list[bytes]:
    etag = opened.identity.get("etag", "W/")
    if etag.startswith("W/"):
        return _fetch_any(fs, opened, requests)
    return _fetch_any(fs, opened, requests, headers={**fs.kwargs.get("headers", {}), "If-Match": etag})


def _fetch_and_look(fs: Any, opened: Opened, requests: Sequence[Range]) -> list[bytes]:
    """Where asking costs no round trip."""
    answers = _fetch_any(fs, opened, requests)
    opened.check(filesystem.identity_of(fs.info(opened.path)))
    return answers


FETCHES: dict[str, Fetch] = {
    "S3FileSystem": _fetch_s3,
    "GCSFileSystem": _fetch_gcs,
    "HTTPFileSystem": _fetch_http,
    "LocalFileSystem": _fetch_and_look,
    "MemoryFileSystem": _fetch_and_look,
}
"""class of the filesystem, or a base of it -> how ranges of one content are asked for there"""
